// SPDX-License-Identifier: Apache-2.0

package fuse

import (
	"context"
	"math"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	gofuse "github.com/hanwen/go-fuse/v2/fuse"
)

// rootIndex is the inode index of every tree's top directory; it is also the
// kernel's NodeID of the mount's top directory (in tree 0, which is no tree:
// it stands for the tree that is current).
const rootIndex = 1

// forever is the lifetime of what only a notification makes invalid.
const forever = math.MaxInt32 * time.Second

// tree is a set of inodes that never change their identity: one generation of a
// dataset, a volume, or the list of exports. Inodes are named by index.
//
// Methods return errors as the errno table understands them: a sentinel of
// package volume, a context's error, or a syscall.Errno.
type tree interface {
	// attr fills in everything but the inode number.
	attr(n uint32, out *gofuse.Attr) bool
	// attrLifetime and entryLifetime say for how long the kernel may keep the
	// attributes of this tree's inodes, and the names in its directories.
	attrLifetime() time.Duration
	entryLifetime() time.Duration

	lookup(ctx context.Context, dir uint32, name string) (ref, error)
	// list prepares a directory for a listing from its beginning.
	list(ctx context.Context, dir uint32) error
	// entry is entry i of a directory; false beyond the last.
	entry(dir uint32, i int) (name string, child ref, ok bool)
	parent(dir uint32) uint32

	readlink(n uint32) (string, error)
	xattr(n uint32, name string) ([]byte, error)
	xattrs(n uint32) []string

	// open returns FOPEN_* flags.
	open(ctx context.Context, n uint32, flags uint32) (uint32, error)
	// read returns at most size bytes at off, nil at the end of the file.
	read(ctx context.Context, n uint32, off uint64, size uint32) (reply, error)
	// write returns how many bytes were taken; fewer than len(data) only at
	// the end of a volume.
	write(ctx context.Context, n uint32, off uint64, data []byte) (int, error)
	setattr(ctx context.Context, n uint32, in *gofuse.SetAttrIn) error
	sync(ctx context.Context, n uint32) error
	fallocate(ctx context.Context, n uint32, mode uint32, off, length uint64) error
	statfs(out *gofuse.StatfsOut)
}

// readOnly is what a tree without writable files does.
type readOnly struct{}

func (readOnly) write(context.Context, uint32, uint64, []byte) (int, error) {
	return 0, syscall.EROFS
}
func (readOnly) setattr(context.Context, uint32, *gofuse.SetAttrIn) error { return syscall.EROFS }
func (readOnly) sync(context.Context, uint32) error                       { return nil }
func (readOnly) fallocate(context.Context, uint32, uint32, uint64, uint64) error {
	return syscall.EROFS
}

// noXattrs is what a tree without symlinks and extended attributes does.
type noXattrs struct{}

func (noXattrs) readlink(uint32) (string, error)      { return "", syscall.EINVAL }
func (noXattrs) xattr(uint32, string) ([]byte, error) { return nil, syscall.ENODATA }
func (noXattrs) xattrs(uint32) []string               { return nil }

// planted is a tree with its number in this mount and the kernel's references
// to it.
type planted struct {
	tree
	number uint32
	// lookups counts the inodes that the kernel was told of minus those that it
	// forgot; gone once the tree has ended.
	lookups atomic.Int64
	retired atomic.Bool // replaced: to end when lookups is 0
}

// gone is far below zero, so that additions in a race do not bring it back.
const gone = math.MinInt64 / 2

// ref names an inode of a mount.
type ref struct {
	tree *planted
	n    uint32
}

// node is the kernel's name of an inode, and its inode number: the tree's
// number and the index.
func (r ref) node() uint64 { return uint64(r.tree.number)<<32 | uint64(r.n) }

// hold counts one more reference of the kernel; false when the tree has ended.
func (p *planted) hold() bool {
	if p.lookups.Add(1) > 0 {
		return true
	}
	p.lookups.Add(-1)
	return false
}

// forest is the trees of a mount. Each has a number that is never used again.
type forest struct {
	mu    sync.Mutex
	last  uint32                              // guarded by mu
	trees atomic.Pointer[map[uint32]*planted] // replaced under mu; read without
	root  atomic.Pointer[planted]             // what the mount's top directory shows
}

// plant adds the tree that grow makes; grow gets what the tree will be known as.
func (f *forest) plant(grow func(*planted) tree) *planted {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.last++
	p := &planted{number: f.last}
	p.tree = grow(p)
	f.replaceLocked(func(m map[uint32]*planted) { m[p.number] = p })
	return p
}

// find is the inode that the kernel names node.
func (f *forest) find(node uint64) (ref, bool) {
	if node == gofuse.FUSE_ROOT_ID {
		return ref{f.root.Load(), rootIndex}, true
	}
	if m := f.trees.Load(); m != nil {
		if p := (*m)[uint32(node>>32)]; p != nil {
			return ref{p, uint32(node)}, true
		}
	}
	return ref{}, false
}

// forget takes back n references to the tree of node.
func (f *forest) forget(node, n uint64) {
	if r, ok := f.find(node); ok && node != gofuse.FUSE_ROOT_ID {
		r.tree.lookups.Add(-int64(n))
		f.end(r.tree)
	}
}

// retire says that p is not reachable by name any more.
func (f *forest) retire(p *planted) {
	p.retired.Store(true)
	f.end(p)
}

// end removes p when nothing refers to it.
func (f *forest) end(p *planted) {
	if !p.retired.Load() || !p.lookups.CompareAndSwap(0, gone) {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.replaceLocked(func(m map[uint32]*planted) { delete(m, p.number) })
}

func (f *forest) replaceLocked(change func(map[uint32]*planted)) {
	m := make(map[uint32]*planted)
	if old := f.trees.Load(); old != nil {
		for k, v := range *old {
			m[k] = v
		}
	}
	change(m)
	f.trees.Store(&m)
}

// count is the number of trees.
func (f *forest) count() int { return len(*f.trees.Load()) }
