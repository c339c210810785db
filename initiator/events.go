// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"slices"
	"sync"

	"rblk/volume"
)

// events is a queue in which an event replaces an older one of its kind that
// nobody has taken, so that it stays short however slow its reader is.
type events struct {
	out  chan volume.Event
	more chan struct{}
	done chan struct{}
	wg   sync.WaitGroup

	mu    sync.Mutex
	queue []volume.Event // guarded by mu
}

func newEvents() *events {
	e := &events{out: make(chan volume.Event), more: make(chan struct{}, 1), done: make(chan struct{})}
	e.wg.Go(e.run)
	return e
}

func (e *events) put(ev volume.Event) {
	e.mu.Lock()
	e.queue = slices.DeleteFunc(e.queue, func(old volume.Event) bool { return old.Kind == ev.Kind })
	e.queue = append(e.queue, ev)
	e.mu.Unlock()
	select {
	case e.more <- struct{}{}:
	default:
	}
}

func (e *events) run() {
	defer close(e.out)
	for {
		e.mu.Lock()
		var ev volume.Event
		any := len(e.queue) > 0
		if any {
			ev = e.queue[0]
			e.queue = e.queue[1:]
		}
		e.mu.Unlock()
		if !any {
			select {
			case <-e.more:
				continue
			case <-e.done:
				return
			}
		}
		select {
		case e.out <- ev:
		case <-e.done:
			return
		}
	}
}

func (e *events) close() {
	close(e.done)
	e.wg.Wait()
}
