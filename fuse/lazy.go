// SPDX-License-Identifier: Apache-2.0

package fuse

import (
	"context"
	"errors"
	"sync/atomic"
	"syscall"
	"time"

	gofuse "github.com/hanwen/go-fuse/v2/fuse"
)

// lazyTree is an export that is opened when something in it is first asked for.
// Until then it is an empty directory with made-up attributes.
type lazyTree struct {
	start  func(ctx context.Context) (tree, error) // opens the export
	eager  bool                                    // asking for attributes is a use
	born   time.Time
	turn   chan struct{} // held by whoever opens
	opened atomic.Pointer[tree]
}

func newLazyTree(start func(ctx context.Context) (tree, error), eager bool) *lazyTree {
	return &lazyTree{start: start, eager: eager, born: time.Now(), turn: make(chan struct{}, 1)}
}

// prepare opens the export if its attributes are worth that. When it cannot be
// opened, made-up ones must do.
func (t *lazyTree) prepare(ctx context.Context) error {
	if !t.eager {
		return nil
	}
	if _, err := t.use(ctx); errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}

// use opens the export if need be. One caller at a time tries; a caller that
// gives up leaves the next one to try.
func (t *lazyTree) use(ctx context.Context) (tree, error) {
	if p := t.opened.Load(); p != nil {
		return *p, nil
	}
	select {
	case t.turn <- struct{}{}:
		defer func() { <-t.turn }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if p := t.opened.Load(); p != nil {
		return *p, nil
	}
	opened, err := t.start(ctx)
	if err != nil {
		return nil, err
	}
	t.opened.Store(&opened)
	return opened, nil
}

// peek is the opened export, or nil.
func (t *lazyTree) peek() tree {
	if p := t.opened.Load(); p != nil {
		return *p
	}
	return nil
}

func (t *lazyTree) attr(n uint32, out *gofuse.Attr) bool {
	if in := t.peek(); in != nil {
		return in.attr(n, out)
	}
	*out = directoryAttr(t.born)
	return n == rootIndex
}

// Made-up attributes are not for keeping.
func (t *lazyTree) attrLifetime() time.Duration {
	if in := t.peek(); in != nil {
		return in.attrLifetime()
	}
	return 0
}

func (t *lazyTree) entryLifetime() time.Duration {
	if in := t.peek(); in != nil {
		return in.entryLifetime()
	}
	return 0
}

func (t *lazyTree) lookup(ctx context.Context, dir uint32, name string) (ref, error) {
	in, err := t.use(ctx)
	if err != nil {
		return ref{}, err
	}
	return in.lookup(ctx, dir, name)
}

func (t *lazyTree) list(ctx context.Context, dir uint32) error {
	in, err := t.use(ctx)
	if err != nil {
		return err
	}
	return in.list(ctx, dir)
}

func (t *lazyTree) entry(dir uint32, i int) (string, ref, bool) {
	if in := t.peek(); in != nil {
		return in.entry(dir, i)
	}
	return "", ref{}, false
}

func (t *lazyTree) parent(dir uint32) uint32 {
	if in := t.peek(); in != nil {
		return in.parent(dir)
	}
	return rootIndex
}

func (t *lazyTree) readlink(n uint32) (string, error) {
	if in := t.peek(); in != nil {
		return in.readlink(n)
	}
	return "", syscall.EINVAL
}

func (t *lazyTree) xattr(n uint32, name string) ([]byte, error) {
	if in := t.peek(); in != nil {
		return in.xattr(n, name)
	}
	return nil, syscall.ENODATA
}

func (t *lazyTree) xattrs(n uint32) []string {
	if in := t.peek(); in != nil {
		return in.xattrs(n)
	}
	return nil
}

func (t *lazyTree) open(ctx context.Context, n uint32, flags uint32) (uint32, error) {
	in, err := t.use(ctx)
	if err != nil {
		return 0, err
	}
	return in.open(ctx, n, flags)
}

func (t *lazyTree) read(ctx context.Context, n uint32, off uint64, size uint32) (reply, error) {
	in, err := t.use(ctx)
	if err != nil {
		return nil, err
	}
	return in.read(ctx, n, off, size)
}

func (t *lazyTree) write(ctx context.Context, n uint32, off uint64, data []byte) (int, error) {
	in, err := t.use(ctx)
	if err != nil {
		return 0, err
	}
	return in.write(ctx, n, off, data)
}

func (t *lazyTree) setattr(ctx context.Context, n uint32, set *gofuse.SetAttrIn) error {
	in, err := t.use(ctx)
	if err != nil {
		return err
	}
	return in.setattr(ctx, n, set)
}

func (t *lazyTree) sync(ctx context.Context, n uint32) error {
	if in := t.peek(); in != nil {
		return in.sync(ctx, n)
	}
	return nil
}

func (t *lazyTree) fallocate(ctx context.Context, n uint32, mode uint32, off, length uint64) error {
	in, err := t.use(ctx)
	if err != nil {
		return err
	}
	return in.fallocate(ctx, n, mode, off, length)
}

func (t *lazyTree) statfs(out *gofuse.StatfsOut) {
	if in := t.peek(); in != nil {
		in.statfs(out)
		return
	}
	sizeStatfs(out, 0)
}
