// SPDX-License-Identifier: Apache-2.0

package fuse

import (
	"errors"
	"log/slog"
	"sync"

	"golang.org/x/sys/unix"
)

// note is one invalidation: of the name in the directory node, or, with an
// empty name, of the inode's attributes and pages.
type note struct {
	node uint64
	name string
}

// notifier sends invalidations to the kernel, in order, from a goroutine of its
// own: the kernel may hold one back until a request that is under way has been
// answered, so no request may wait for it.
type notifier struct {
	dev  device
	log  *slog.Logger
	wake chan struct{}
	done sync.WaitGroup

	mu     sync.Mutex
	queue  []note // guarded by mu
	closed bool   // guarded by mu
}

func newNotifier(dev device, log *slog.Logger) *notifier {
	n := &notifier{dev: dev, log: log, wake: make(chan struct{}, 1)}
	n.done.Go(n.run)
	return n
}

// inode drops the attributes and pages of node.
func (n *notifier) inode(node uint64) { n.add(note{node: node}) }

// entries drops names in the directory dir, and then its listing.
func (n *notifier) entries(dir uint64, names ...string) {
	notes := make([]note, 0, len(names)+1)
	for _, name := range names {
		notes = append(notes, note{dir, name})
	}
	n.add(append(notes, note{node: dir})...)
}

func (n *notifier) add(notes ...note) {
	n.mu.Lock()
	if !n.closed {
		n.queue = append(n.queue, notes...)
	}
	n.mu.Unlock()
	n.signal()
}

func (n *notifier) signal() {
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// close drops what is still queued and waits for the goroutine.
func (n *notifier) close() {
	n.mu.Lock()
	n.closed, n.queue = true, nil
	n.mu.Unlock()
	n.signal()
	n.done.Wait()
}

func (n *notifier) run() {
	for range n.wake {
		for {
			n.mu.Lock()
			queue, closed := n.queue, n.closed
			n.queue = nil
			n.mu.Unlock()
			if closed {
				return
			}
			if len(queue) == 0 {
				break
			}
			for _, x := range queue {
				n.send(x)
			}
		}
	}
}

func (n *notifier) send(x note) {
	var err error
	if x.name == "" {
		err = n.dev.invalidateInode(x.node, 0, 0)
	} else {
		err = n.dev.invalidateEntry(x.node, x.name)
	}
	if err != nil && !errors.Is(err, unix.ENODEV) {
		n.log.Warn("the kernel refused an invalidation", "node", x.node, "name", x.name, "err", err)
	}
}
