// SPDX-License-Identifier: Apache-2.0

package fuse

import (
	"context"
	"syscall"
	"time"

	gofuse "github.com/hanwen/go-fuse/v2/fuse"
)

// fileSystem answers requests from a forest of trees. It finds the tree, asks
// it, and turns the answer into the kernel's form; it holds nothing per inode
// and nothing per open file.
type fileSystem struct {
	gofuse.RawFileSystem // ENOSYS for all that is not here
	forest

	// noOpen: no file needs OPEN, so the kernel is told to leave it out, which
	// saves two round trips a file. Set once.
	noOpen bool
	// private: only the mounting user and root may enter the top directory.
	// The kernel checks that, and caches below it cannot leak past it. Set once.
	private bool
}

var _ operations = (*fileSystem)(nil)

func newFileSystem() *fileSystem {
	return &fileSystem{RawFileSystem: gofuse.NewDefaultRawFileSystem()}
}

func (fs *fileSystem) String() string { return "rblk" }

// attrOf is the attributes of r with its inode number.
func attrOf(r ref, out *gofuse.Attr) bool {
	if !r.tree.attr(r.n, out) {
		return false
	}
	out.Ino = r.node()
	return true
}

func (fs *fileSystem) Lookup(cancel <-chan struct{}, in *gofuse.InHeader, name string, out *gofuse.EntryOut) gofuse.Status {
	for {
		dir, ok := fs.find(in.NodeId)
		if !ok {
			return gofuse.Status(syscall.ESTALE)
		}
		child, err := dir.tree.lookup(canceled(cancel), dir.n, name)
		if errnoOf(err) == syscall.ENOENT {
			// NodeID 0 with a lifetime: the kernel remembers that there is no such name.
			out.SetEntryTimeout(dir.tree.entryLifetime())
			return gofuse.OK
		}
		if err != nil {
			return status(err)
		}
		if fs.present(child, dir.tree.entryLifetime(), out) {
			return gofuse.OK
		}
		// The tree was replaced and ended meanwhile: look in the new one.
	}
}

// present hands an inode to the kernel, and counts it.
func (fs *fileSystem) present(r ref, entry time.Duration, out *gofuse.EntryOut) bool {
	if !r.tree.hold() {
		return false
	}
	if !attrOf(r, &out.Attr) {
		r.tree.lookups.Add(-1)
		return false
	}
	out.NodeId = r.node()
	out.SetEntryTimeout(entry)
	out.SetAttrTimeout(r.tree.attrLifetime())
	return true
}

func (fs *fileSystem) Forget(node, n uint64) { fs.forget(node, n) }

func (fs *fileSystem) GetAttr(cancel <-chan struct{}, in *gofuse.GetAttrIn, out *gofuse.AttrOut) gofuse.Status {
	r, ok := fs.find(in.NodeId)
	if !ok {
		return gofuse.Status(syscall.ESTALE)
	}
	if lazy, ok := r.tree.tree.(*lazyTree); ok {
		if err := lazy.prepare(canceled(cancel)); err != nil {
			return status(err)
		}
	}
	return fs.attrReply(r, in.NodeId, out)
}

// attrReply fills out for an inode that the kernel calls node.
func (fs *fileSystem) attrReply(r ref, node uint64, out *gofuse.AttrOut) gofuse.Status {
	if !r.tree.attr(r.n, &out.Attr) {
		return gofuse.Status(syscall.ESTALE)
	}
	out.Ino = node
	if fs.private && node == gofuse.FUSE_ROOT_ID {
		out.Owner = owner()
		out.Mode &^= 0o077
	}
	out.SetTimeout(r.tree.attrLifetime())
	return gofuse.OK
}

func (fs *fileSystem) SetAttr(cancel <-chan struct{}, in *gofuse.SetAttrIn, out *gofuse.AttrOut) gofuse.Status {
	r, ok := fs.find(in.NodeId)
	if !ok {
		return gofuse.Status(syscall.ESTALE)
	}
	if err := r.tree.setattr(canceled(cancel), r.n, in); err != nil {
		return status(err)
	}
	return fs.attrReply(r, in.NodeId, out)
}

func (fs *fileSystem) Readlink(_ <-chan struct{}, in *gofuse.InHeader) ([]byte, gofuse.Status) {
	r, ok := fs.find(in.NodeId)
	if !ok {
		return nil, gofuse.Status(syscall.ESTALE)
	}
	target, err := r.tree.readlink(r.n)
	return []byte(target), status(err)
}

func (fs *fileSystem) GetXAttr(_ <-chan struct{}, in *gofuse.InHeader, name string, dest []byte) (uint32, gofuse.Status) {
	r, ok := fs.find(in.NodeId)
	if !ok {
		return 0, gofuse.Status(syscall.ESTALE)
	}
	v, err := r.tree.xattr(r.n, name)
	if err != nil {
		return 0, status(err)
	}
	if len(v) > len(dest) {
		return uint32(len(v)), gofuse.ERANGE
	}
	return uint32(copy(dest, v)), gofuse.OK
}

func (fs *fileSystem) ListXAttr(_ <-chan struct{}, in *gofuse.InHeader, dest []byte) (uint32, gofuse.Status) {
	r, ok := fs.find(in.NodeId)
	if !ok {
		return 0, gofuse.Status(syscall.ESTALE)
	}
	var list []byte
	for _, name := range r.tree.xattrs(r.n) {
		list = append(append(list, name...), 0)
	}
	if len(list) > len(dest) {
		return uint32(len(list)), gofuse.ERANGE
	}
	return uint32(copy(dest, list)), gofuse.OK
}

func (fs *fileSystem) Open(cancel <-chan struct{}, in *gofuse.OpenIn, out *gofuse.OpenOut) gofuse.Status {
	if fs.noOpen {
		return gofuse.ENOSYS
	}
	r, ok := fs.find(in.NodeId)
	if !ok {
		return gofuse.Status(syscall.ESTALE)
	}
	flags, err := r.tree.open(canceled(cancel), r.n, in.Flags)
	out.OpenFlags = flags
	return status(err)
}

func (fs *fileSystem) OpenDir(cancel <-chan struct{}, in *gofuse.OpenIn, out *gofuse.OpenOut) gofuse.Status {
	return fs.Open(cancel, in, out)
}

// read is FUSE_READ; the loop answers it from the leased memory.
func (fs *fileSystem) read(ctx context.Context, in *gofuse.ReadIn) (reply, gofuse.Status) {
	r, ok := fs.find(in.NodeId)
	if !ok {
		return nil, gofuse.Status(syscall.ESTALE)
	}
	data, err := r.tree.read(ctx, r.n, in.Offset, in.Size)
	return data, status(err)
}

// write is FUSE_WRITE.
func (fs *fileSystem) write(ctx context.Context, in *gofuse.WriteIn, data []byte) (uint32, gofuse.Status) {
	r, ok := fs.find(in.NodeId)
	if !ok {
		return 0, gofuse.Status(syscall.ESTALE)
	}
	n, err := r.tree.write(ctx, r.n, in.Offset, data)
	return uint32(n), status(err)
}

func (fs *fileSystem) Fsync(cancel <-chan struct{}, in *gofuse.FsyncIn) gofuse.Status {
	r, ok := fs.find(in.NodeId)
	if !ok {
		return gofuse.Status(syscall.ESTALE)
	}
	return status(r.tree.sync(canceled(cancel), r.n))
}

func (fs *fileSystem) FsyncDir(<-chan struct{}, *gofuse.FsyncIn) gofuse.Status { return gofuse.OK }

// Flush comes with every close(2) and means nothing here: writes went through.
func (fs *fileSystem) Flush(<-chan struct{}, *gofuse.FlushIn) gofuse.Status { return gofuse.ENOSYS }

func (fs *fileSystem) Fallocate(cancel <-chan struct{}, in *gofuse.FallocateIn) gofuse.Status {
	r, ok := fs.find(in.NodeId)
	if !ok {
		return gofuse.Status(syscall.ESTALE)
	}
	return status(r.tree.fallocate(canceled(cancel), r.n, in.Mode, in.Offset, in.Length))
}

func (fs *fileSystem) StatFs(_ <-chan struct{}, in *gofuse.InHeader, out *gofuse.StatfsOut) gofuse.Status {
	r, ok := fs.find(in.NodeId)
	if !ok {
		return gofuse.Status(syscall.ESTALE)
	}
	r.tree.statfs(out)
	return gofuse.OK
}

func (fs *fileSystem) Ioctl(<-chan struct{}, *gofuse.IoctlIn, []byte, *gofuse.IoctlOut, []byte) gofuse.Status {
	return gofuse.Status(syscall.ENOTTY)
}

// The tree of names cannot be changed from here.

func (fs *fileSystem) Mknod(<-chan struct{}, *gofuse.MknodIn, string, *gofuse.EntryOut) gofuse.Status {
	return gofuse.EPERM
}

func (fs *fileSystem) Mkdir(<-chan struct{}, *gofuse.MkdirIn, string, *gofuse.EntryOut) gofuse.Status {
	return gofuse.EPERM
}

func (fs *fileSystem) Unlink(<-chan struct{}, *gofuse.InHeader, string) gofuse.Status {
	return gofuse.EPERM
}

func (fs *fileSystem) Rmdir(<-chan struct{}, *gofuse.InHeader, string) gofuse.Status {
	return gofuse.EPERM
}

func (fs *fileSystem) Rename(<-chan struct{}, *gofuse.RenameIn, string, string) gofuse.Status {
	return gofuse.EPERM
}

func (fs *fileSystem) Link(<-chan struct{}, *gofuse.LinkIn, string, *gofuse.EntryOut) gofuse.Status {
	return gofuse.EPERM
}

func (fs *fileSystem) Symlink(<-chan struct{}, *gofuse.InHeader, string, string, *gofuse.EntryOut) gofuse.Status {
	return gofuse.EPERM
}

func (fs *fileSystem) Create(<-chan struct{}, *gofuse.CreateIn, string, *gofuse.CreateOut) gofuse.Status {
	return gofuse.EPERM
}
