// SPDX-License-Identifier: Apache-2.0

// Package dataset is the manifest: a directory tree as flat, pointer-free
// arrays, and the layout of its regular files, end to end, in one volume.
package dataset

// NodeID is an inode's index in the manifest. The root is 1, as FUSE has it; 0
// is no node. Hard links share one NodeID.
type NodeID uint32

// Root is the tree's top directory.
const Root NodeID = 1

// Attr is what stat(2) tells of a node.
type Attr struct {
	Mode      uint32 // st_mode: type and permission bits
	Nlink     uint32
	UID, GID  uint32
	Size      uint64
	Offset    uint64 // where a regular file's bytes begin in the volume
	MtimeSec  int64
	MtimeNsec uint32
	Blocks    uint64 // st_blocks of the source, so that sparse files look sparse
}

// Manifest is immutable once built; all methods are safe for concurrent use and
// do not allocate, except where they return new slices.
type Manifest struct{}

// NumNodes is the highest NodeID.
func (m *Manifest) NumNodes() int { panic("not built") }

// NumFiles counts regular files.
func (m *Manifest) NumFiles() int { panic("not built") }

// VolumeSize is the length of the layout in bytes.
func (m *Manifest) VolumeSize() int64 { panic("not built") }

// Generation is the version of the tree; it grows.
func (m *Manifest) Generation() uint64 { panic("not built") }

// Layout identifies the layout: ranges of one layout never change their bytes.
func (m *Manifest) Layout() string { panic("not built") }

// Digest identifies the manifest's content.
func (m *Manifest) Digest() string { panic("not built") }

// Attr of a node; ok is false for an unknown one.
func (m *Manifest) Attr(n NodeID) (a Attr, ok bool) { panic("not built") }

// Lookup finds name in directory dir.
func (m *Manifest) Lookup(dir NodeID, name string) (NodeID, bool) { panic("not built") }

// Parent of a directory; the root is its own.
func (m *Manifest) Parent(dir NodeID) NodeID { panic("not built") }

// NumEntries of a directory, without . and ..
func (m *Manifest) NumEntries(dir NodeID) int { panic("not built") }

// Entry i of a directory, in name order (bytewise).
func (m *Manifest) Entry(dir NodeID, i int) (name string, n NodeID) { panic("not built") }

// Readlink is a symlink's target.
func (m *Manifest) Readlink(n NodeID) (string, bool) { panic("not built") }

// Xattr returns one extended attribute.
func (m *Manifest) Xattr(n NodeID, name string) ([]byte, bool) { panic("not built") }

// ListXattr returns the names in order.
func (m *Manifest) ListXattr(n NodeID) []string { panic("not built") }

// Resolve walks a slash-separated path from the root, without following
// symlinks.
func (m *Manifest) Resolve(path string) (NodeID, bool) { panic("not built") }
