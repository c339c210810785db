// SPDX-License-Identifier: Apache-2.0

package fuse

import (
	"syscall"

	gofuse "github.com/hanwen/go-fuse/v2/fuse"
)

// Directory listings: entries 0 and 1 are "." and "..", entry i of the tree
// has offset i+2. An offset names the place behind an entry, as the kernel
// hands it back.
const firstEntry = 2

// dots are the names of the entries before firstEntry.
var dots = [firstEntry]string{".", ".."}

func (fs *fileSystem) ReadDir(cancel <-chan struct{}, in *gofuse.ReadIn, out *gofuse.DirEntryList) gofuse.Status {
	return fs.readdir(cancel, in, func(e gofuse.DirEntry, _ ref, _ *planted) bool {
		return out.AddDirEntry(e)
	})
}

// ReadDirPlus hands every child to the kernel with its attributes, as if it had
// been looked up. A child with NodeID 0 has only its name told.
func (fs *fileSystem) ReadDirPlus(cancel <-chan struct{}, in *gofuse.ReadIn, out *gofuse.DirEntryList) gofuse.Status {
	return fs.readdir(cancel, in, func(e gofuse.DirEntry, child ref, dir *planted) bool {
		slot := out.AddDirLookupEntry(e)
		if slot == nil {
			return false
		}
		if child.tree != nil && !fs.present(child, dir.entryLifetime(), slot) {
			*slot = gofuse.EntryOut{}
		}
		return true
	})
}

// readdir gives add the entries from in.Offset on, until it takes no more. The
// dots come without a child.
func (fs *fileSystem) readdir(cancel <-chan struct{}, in *gofuse.ReadIn, add func(e gofuse.DirEntry, child ref, dir *planted) bool) gofuse.Status {
	dir, ok := fs.find(in.NodeId)
	if !ok {
		return gofuse.Status(syscall.ESTALE)
	}
	if in.Offset == 0 {
		if err := dir.tree.list(canceled(cancel), dir.n); err != nil {
			return status(err)
		}
	}
	for i := int(in.Offset); ; i++ {
		e := gofuse.DirEntry{Off: uint64(i) + 1}
		var child ref
		if i < firstEntry {
			e.Name, e.Mode, e.Ino = dots[i], syscall.S_IFDIR, in.NodeId
			if i == 1 {
				e.Ino = fs.up(dir)
			}
		} else {
			if e.Name, child, ok = dir.tree.entry(dir.n, i-firstEntry); !ok {
				return gofuse.OK
			}
			var a gofuse.Attr
			if !attrOf(child, &a) {
				continue
			}
			e.Mode, e.Ino = a.Mode, a.Ino
		}
		if !add(e, child, dir.tree) {
			return gofuse.OK
		}
	}
}

// up is the inode number of the directory above dir. Above the top of a tree is
// the top of the mount, which has a number of its own.
func (fs *fileSystem) up(dir ref) uint64 {
	above := ref{dir.tree, dir.tree.parent(dir.n)}
	if dir.n == rootIndex || above.n == rootIndex && above.tree == fs.root.Load() {
		return gofuse.FUSE_ROOT_ID
	}
	return above.node()
}
