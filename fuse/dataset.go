// SPDX-License-Identifier: Apache-2.0

package fuse

import (
	"context"
	"syscall"
	"time"

	gofuse "github.com/hanwen/go-fuse/v2/fuse"

	"rblk/cache"
	"rblk/dataset"
)

// datasetTree is one generation of a dataset: the manifest's inodes, and their
// bytes in the volume. It holds nothing per inode.
type datasetTree struct {
	readOnly
	manifest *dataset.Manifest
	volume   *cache.Volume
	self     *planted
}

func (t *datasetTree) attrLifetime() time.Duration  { return forever }
func (t *datasetTree) entryLifetime() time.Duration { return forever }

func (t *datasetTree) attr(n uint32, out *gofuse.Attr) bool {
	a, ok := t.manifest.Attr(dataset.NodeID(n))
	if !ok {
		return false
	}
	*out = gofuse.Attr{
		Size:   a.Size,
		Blocks: a.Blocks,
		Mode:   a.Mode,
		Nlink:  a.Nlink,
		Owner:  gofuse.Owner{Uid: a.UID, Gid: a.GID},
		Atime:  uint64(a.MtimeSec), Atimensec: a.MtimeNsec,
		Mtime: uint64(a.MtimeSec), Mtimensec: a.MtimeNsec,
		Ctime: uint64(a.MtimeSec), Ctimensec: a.MtimeNsec,
	}
	return true
}

func (t *datasetTree) lookup(_ context.Context, dir uint32, name string) (ref, error) {
	n, ok := t.manifest.Lookup(dataset.NodeID(dir), name)
	if !ok {
		return ref{}, syscall.ENOENT
	}
	return ref{t.self, uint32(n)}, nil
}

func (t *datasetTree) list(context.Context, uint32) error { return nil }

func (t *datasetTree) entry(dir uint32, i int) (string, ref, bool) {
	if i >= t.manifest.NumEntries(dataset.NodeID(dir)) {
		return "", ref{}, false
	}
	name, n := t.manifest.Entry(dataset.NodeID(dir), i)
	return name, ref{t.self, uint32(n)}, true
}

func (t *datasetTree) parent(dir uint32) uint32 {
	return uint32(t.manifest.Parent(dataset.NodeID(dir)))
}

func (t *datasetTree) readlink(n uint32) (string, error) {
	s, ok := t.manifest.Readlink(dataset.NodeID(n))
	if !ok {
		return "", syscall.EINVAL
	}
	return s, nil
}

func (t *datasetTree) xattr(n uint32, name string) ([]byte, error) {
	v, ok := t.manifest.Xattr(dataset.NodeID(n), name)
	if !ok {
		return nil, syscall.ENODATA
	}
	return v, nil
}

func (t *datasetTree) xattrs(n uint32) []string { return t.manifest.ListXattr(dataset.NodeID(n)) }

// open lets the kernel keep its pages across opens: the bytes of an inode never
// change.
func (t *datasetTree) open(_ context.Context, _ uint32, flags uint32) (uint32, error) {
	if flags&syscall.O_ACCMODE != syscall.O_RDONLY || flags&syscall.O_TRUNC != 0 {
		return 0, syscall.EROFS // a mount of all exports may be writable elsewhere
	}
	return gofuse.FOPEN_KEEP_CACHE | gofuse.FOPEN_CACHE_DIR | gofuse.FOPEN_NOFLUSH, nil
}

func (t *datasetTree) read(ctx context.Context, n uint32, off uint64, size uint32) (reply, error) {
	a, ok := t.manifest.Attr(dataset.NodeID(n))
	if !ok {
		return nil, syscall.ESTALE
	}
	if off >= a.Size || size == 0 {
		return nil, nil
	}
	return lease(t.volume.Read(ctx, int64(a.Offset+off), int(min(uint64(size), a.Size-off))))
}

func (t *datasetTree) statfs(out *gofuse.StatfsOut) {
	sizeStatfs(out, t.manifest.VolumeSize())
	out.Files = uint64(t.manifest.NumNodes())
}

// lease makes a reply of a view. A nil view in the interface would not be nil.
func lease(v *cache.View, err error) (reply, error) {
	if err != nil {
		return nil, err
	}
	return v, nil
}
