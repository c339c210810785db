// SPDX-License-Identifier: Apache-2.0

package fuse

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	gofuse "github.com/hanwen/go-fuse/v2/fuse"
)

// Directory is the exports of a target, for a mount that shows them all.
type Directory interface {
	// List is the exports that there are.
	List(ctx context.Context) ([]Listed, error)
	// Open opens an export, which the mount takes over. It is called on first
	// use, and again after it failed.
	Open(ctx context.Context, name string) (*Export, error)
}

// Listed is an export in a list.
type Listed struct {
	Name string
	// Dataset: its top directory has attributes of its own, so that asking for
	// them is a use.
	Dataset bool
}

const (
	// listLifetime is how long a list of exports is taken for current.
	listLifetime = 5 * time.Second
	// listPatience is how long an answer is waited for when an older list can
	// be shown instead.
	listPatience = 2 * time.Second
)

// exportsTree is the top directory of a mount of all exports: one directory for
// each, opened when something in it is asked for.
type exportsTree struct {
	readOnly
	noXattrs
	dir   Directory
	born  time.Time
	log   *slog.Logger
	plant func(e Listed, place *atomic.Pointer[planted]) // sows a lazyTree
	turn  chan struct{}                                  // held by whoever fetches the list

	mu      sync.Mutex
	names   []string                            // guarded by mu: sorted
	known   map[string]*atomic.Pointer[planted] // guarded by mu: where each name leads; never shrinks
	fetched time.Time                           // guarded by mu
}

func (t *exportsTree) attrLifetime() time.Duration  { return forever }
func (t *exportsTree) entryLifetime() time.Duration { return listLifetime }

func (t *exportsTree) attr(n uint32, out *gofuse.Attr) bool {
	*out = directoryAttr(t.born)
	return n == rootIndex
}

func (t *exportsTree) lookup(ctx context.Context, _ uint32, name string) (ref, error) {
	if r, ok := t.find(name); ok {
		return r, nil
	}
	if err := t.refresh(ctx); err != nil {
		return ref{}, err
	}
	if r, ok := t.find(name); ok {
		return r, nil
	}
	return ref{}, syscall.ENOENT
}

func (t *exportsTree) list(ctx context.Context, _ uint32) error { return t.refresh(ctx) }
func (t *exportsTree) parent(uint32) uint32                     { return rootIndex }

func (t *exportsTree) entry(_ uint32, i int) (string, ref, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if i >= len(t.names) {
		return "", ref{}, false
	}
	return t.names[i], ref{t.known[t.names[i]].Load(), rootIndex}, true
}

func (t *exportsTree) open(context.Context, uint32, uint32) (uint32, error) { return 0, nil }

func (t *exportsTree) read(context.Context, uint32, uint64, uint32) (reply, error) {
	return nil, syscall.EISDIR
}

func (t *exportsTree) statfs(out *gofuse.StatfsOut) { sizeStatfs(out, 0) }

// find is the directory of an export that the list has.
func (t *exportsTree) find(name string) (ref, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, ok := slices.BinarySearch(t.names, name); !ok {
		return ref{}, false
	}
	return ref{t.known[name].Load(), rootIndex}, true
}

// refresh fetches the list unless it is young. When that fails an older list
// stays.
func (t *exportsTree) refresh(ctx context.Context) error {
	select {
	case t.turn <- struct{}{}:
		defer func() { <-t.turn }()
	case <-ctx.Done():
		return ctx.Err()
	}
	t.mu.Lock()
	fetched := t.fetched
	t.mu.Unlock()
	if !fetched.IsZero() {
		if time.Since(fetched) < listLifetime {
			return nil
		}
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, listPatience)
		defer cancel()
	}
	list, err := t.dir.List(ctx)
	if err != nil {
		if fetched.IsZero() || errors.Is(err, context.Canceled) {
			return err
		}
		t.log.Warn("the list of exports could not be fetched; an older one is shown", "err", err)
		return nil
	}
	t.update(list)
	return nil
}

func (t *exportsTree) update(list []Listed) {
	t.mu.Lock()
	defer t.mu.Unlock()
	names := make([]string, 0, len(list))
	for _, e := range list {
		names = append(names, e.Name)
		if t.known[e.Name] == nil {
			place := new(atomic.Pointer[planted])
			t.plant(e, place)
			t.known[e.Name] = place
		}
	}
	slices.Sort(names)
	t.names, t.fetched = slices.Compact(names), time.Now()
}
