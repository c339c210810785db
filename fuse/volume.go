// SPDX-License-Identifier: Apache-2.0

package fuse

import (
	"context"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	gofuse "github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"

	"rblk/cache"
)

// fileIndex is the inode of the one file in a volume's directory.
const fileIndex = 2

// statfsBlock is the block size that statfs(2) reports.
const statfsBlock = 4096

// volumeTree is a volume as a directory with one file of its name.
type volumeTree struct {
	noXattrs
	name   string
	volume *cache.Volume
	direct bool // cache=none: the kernel's page cache is passed by
	self   *planted
	blocks *blockWriter
	born   time.Time
	mtime  atomic.Int64 // nanoseconds: the last write through this mount
}

func newVolumeTree(name string, v *cache.Volume, direct bool, p *planted) *volumeTree {
	t := &volumeTree{name: name, volume: v, direct: direct, self: p, blocks: newBlockWriter(), born: time.Now()}
	t.mtime.Store(t.born.UnixNano())
	return t
}

// volumeLifetime is short although changes of size are notified: it is what
// lets a stat(2) notice that the daemon is gone.
const volumeLifetime = time.Second

func (t *volumeTree) attrLifetime() time.Duration  { return volumeLifetime }
func (t *volumeTree) entryLifetime() time.Duration { return volumeLifetime }

func (t *volumeTree) attr(n uint32, out *gofuse.Attr) bool {
	if n == rootIndex {
		*out = directoryAttr(t.born)
		return true
	}
	g := t.volume.Geometry()
	*out = gofuse.Attr{
		Mode: unix.S_IFREG | 0o644, Nlink: 1, Owner: owner(),
		Size: uint64(g.Size), Blocks: (uint64(g.Size) + 511) / 512,
	}
	if g.ReadOnly {
		out.Mode = unix.S_IFREG | 0o444
	}
	when := time.Unix(0, t.mtime.Load())
	out.SetTimes(&when, &when, &when)
	return n == fileIndex
}

// directoryAttr is what is told of a directory that only we know.
func directoryAttr(born time.Time) gofuse.Attr {
	a := gofuse.Attr{Mode: unix.S_IFDIR | 0o555, Nlink: 2, Owner: owner()}
	a.SetTimes(&born, &born, &born)
	return a
}

// owner is whom the files belong to that the target knows no owner of: us. Who
// else may come in is the business of allow_other.
func owner() gofuse.Owner {
	return gofuse.Owner{Uid: uint32(os.Geteuid()), Gid: uint32(os.Getegid())}
}

func (t *volumeTree) lookup(_ context.Context, dir uint32, name string) (ref, error) {
	if dir != rootIndex || name != t.name {
		return ref{}, syscall.ENOENT
	}
	return ref{t.self, fileIndex}, nil
}

func (t *volumeTree) list(context.Context, uint32) error { return nil }
func (t *volumeTree) parent(uint32) uint32               { return rootIndex }

func (t *volumeTree) entry(dir uint32, i int) (string, ref, bool) {
	return t.name, ref{t.self, fileIndex}, dir == rootIndex && i == 0
}

func (t *volumeTree) open(_ context.Context, n uint32, flags uint32) (uint32, error) {
	if n != fileIndex {
		return gofuse.FOPEN_CACHE_DIR | gofuse.FOPEN_KEEP_CACHE, nil
	}
	if flags&syscall.O_ACCMODE != syscall.O_RDONLY && t.volume.Geometry().ReadOnly {
		return 0, syscall.EROFS
	}
	// O_TRUNC is taken as a disk takes it: not at all.
	// Without KEEP_CACHE an open drops the kernel's pages: what is read is at
	// least as fresh as the open.
	open := uint32(gofuse.FOPEN_NOFLUSH | gofuse.FOPEN_PARALLEL_DIRECT_WRITES)
	if t.direct {
		open |= gofuse.FOPEN_DIRECT_IO
	}
	return open, nil
}

func (t *volumeTree) read(ctx context.Context, n uint32, off uint64, size uint32) (reply, error) {
	if n != fileIndex {
		return nil, syscall.EISDIR
	}
	end := uint64(t.volume.Geometry().Size)
	if off >= end || size == 0 {
		return nil, nil
	}
	return lease(t.volume.Read(ctx, int64(off), int(min(uint64(size), end-off))))
}

// write ends at the end of the volume as a disk does: short across it, ENOSPC
// behind it.
func (t *volumeTree) write(ctx context.Context, n uint32, off uint64, data []byte) (int, error) {
	if n != fileIndex {
		return 0, syscall.EISDIR
	}
	end := uint64(t.volume.Geometry().Size)
	if len(data) == 0 {
		return 0, nil
	}
	if off >= end {
		return 0, syscall.ENOSPC
	}
	data = data[:min(uint64(len(data)), end-off)]
	if err := t.blocks.write(ctx, t.volume, int64(off), data); err != nil {
		return 0, err
	}
	t.mtime.Store(time.Now().UnixNano())
	return len(data), nil
}

// setattr refuses what a volume cannot be: of another size, mode or owner.
// Times are taken as given by the last write.
func (t *volumeTree) setattr(_ context.Context, n uint32, in *gofuse.SetAttrIn) error {
	g := t.volume.Geometry()
	if n != fileIndex {
		return syscall.EPERM
	}
	if g.ReadOnly {
		return syscall.EROFS
	}
	if size, ok := in.GetSize(); ok {
		switch {
		case size > uint64(g.Size):
			return syscall.EFBIG
		case size < uint64(g.Size):
			return syscall.EPERM
		}
	}
	if in.Valid&(gofuse.FATTR_MODE|gofuse.FATTR_UID|gofuse.FATTR_GID) != 0 {
		return syscall.EPERM
	}
	if m, ok := in.GetMTime(); ok {
		t.mtime.Store(m.UnixNano())
	}
	return nil
}

func (t *volumeTree) sync(ctx context.Context, n uint32) error {
	if n != fileIndex || t.volume.Geometry().ReadOnly {
		return nil
	}
	return t.volume.Flush(ctx)
}

// fallocate punches and zeroes with whatever the volume can do. Plain
// allocation inside the volume has nothing to do.
func (t *volumeTree) fallocate(ctx context.Context, n uint32, mode uint32, off, length uint64) error {
	g := t.volume.Geometry()
	switch {
	case n != fileIndex:
		return syscall.EISDIR
	case g.ReadOnly:
		return syscall.EROFS
	case length == 0:
		return syscall.EINVAL
	case off+length < off || off+length > uint64(g.Size):
		return syscall.EFBIG
	}
	defer func() { t.mtime.Store(time.Now().UnixNano()) }()
	switch mode {
	case 0, unix.FALLOC_FL_KEEP_SIZE:
		return nil
	case unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE:
		if g.CanDiscard {
			return t.volume.Discard(ctx, int64(off), int64(length))
		}
		fallthrough // a hole is zeros
	case unix.FALLOC_FL_ZERO_RANGE, unix.FALLOC_FL_ZERO_RANGE | unix.FALLOC_FL_KEEP_SIZE:
		if g.CanZero {
			return t.volume.Zero(ctx, int64(off), int64(length))
		}
	}
	return syscall.EOPNOTSUPP
}

func (t *volumeTree) statfs(out *gofuse.StatfsOut) {
	sizeStatfs(out, t.volume.Geometry().Size)
	out.Files = 1
}

// sizeStatfs reports a filesystem of n bytes, all of them taken.
func sizeStatfs(out *gofuse.StatfsOut, n int64) {
	*out = gofuse.StatfsOut{
		Bsize: statfsBlock, Frsize: statfsBlock, NameLen: 255,
		Blocks: (uint64(n) + statfsBlock - 1) / statfsBlock,
	}
}
