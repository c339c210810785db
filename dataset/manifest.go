// SPDX-License-Identifier: Apache-2.0

package dataset

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"sort"
	"strings"

	"golang.org/x/sys/unix"
)

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

// node is one inode: 72 bytes, no pointers, so that ten million of them cost
// the garbage collector nothing.
type node struct {
	size, offset, blocks uint64
	mtimeSec             int64
	mtimeNsec            uint32
	mode, nlink          uint32
	uid, gid             uint32
	list                 span   // directory: its entries; symlink: its target in links; else zero
	parent               NodeID // directory: its parent; else 0
	xattr                span   // its attributes in xattrs
}

func (n *node) is(format uint32) bool { return n.mode&unix.S_IFMT == format }

// span is a piece of a heap, or of the entries.
type span struct{ off, n uint32 }

// entry is one name in a directory.
type entry struct {
	name span // in names
	node NodeID
}

// Manifest is immutable once built; all methods are safe for concurrent use.
// Only Xattr, ListXattr and Order allocate. Every method takes any NodeID: of
// one that does not exist, or is of another type, it returns zero values.
type Manifest struct {
	generation uint64
	size       uint64 // of the volume
	layout     string
	nodes      []node // nodes[0] is unused and zero
	entries    []entry
	names      string // heap
	links      string // heap
	xattrs     []byte // heap
	files      int
	digest     string
}

// NumNodes is the highest NodeID.
func (m *Manifest) NumNodes() int { return len(m.nodes) - 1 }

// NumFiles counts regular files.
func (m *Manifest) NumFiles() int { return m.files }

// VolumeSize is the length of the layout in bytes.
func (m *Manifest) VolumeSize() int64 { return int64(m.size) }

// Generation is the version of the tree; it grows.
func (m *Manifest) Generation() uint64 { return m.generation }

// Layout identifies the layout: ranges of one layout never change their bytes.
func (m *Manifest) Layout() string { return m.layout }

// Digest identifies the manifest's content.
func (m *Manifest) Digest() string { return m.digest }

// get is the node's record, nil for an unknown one.
func (m *Manifest) get(n NodeID) *node {
	if n == 0 || int64(n) >= int64(len(m.nodes)) {
		return nil
	}
	return &m.nodes[n]
}

// dir is a directory's record and entries; nil for all else.
func (m *Manifest) dir(n NodeID) (*node, []entry) {
	d := m.get(n)
	if d == nil || !d.is(unix.S_IFDIR) {
		return nil, nil
	}
	return d, m.entries[d.list.off:][:d.list.n]
}

// Attr of a node; ok is false for an unknown one.
func (m *Manifest) Attr(n NodeID) (a Attr, ok bool) {
	r := m.get(n)
	if r == nil {
		return Attr{}, false
	}
	return Attr{
		Mode: r.mode, Nlink: r.nlink, UID: r.uid, GID: r.gid, Size: r.size, Offset: r.offset,
		MtimeSec: r.mtimeSec, MtimeNsec: r.mtimeNsec, Blocks: r.blocks,
	}, true
}

// Lookup finds name in directory dir.
func (m *Manifest) Lookup(dir NodeID, name string) (NodeID, bool) {
	_, es := m.dir(dir)
	i := sort.Search(len(es), func(i int) bool { return m.name(es[i]) >= name })
	if i == len(es) || m.name(es[i]) != name {
		return 0, false
	}
	return es[i].node, true
}

func (m *Manifest) name(e entry) string { return m.names[e.name.off:][:e.name.n] }

// Parent of a directory; the root is its own.
func (m *Manifest) Parent(dir NodeID) NodeID {
	if d, _ := m.dir(dir); d != nil {
		return d.parent
	}
	return 0
}

// NumEntries of a directory, without . and ..
func (m *Manifest) NumEntries(dir NodeID) int {
	_, es := m.dir(dir)
	return len(es)
}

// Entry i of a directory, in name order (bytewise).
func (m *Manifest) Entry(dir NodeID, i int) (name string, n NodeID) {
	_, es := m.dir(dir)
	if i < 0 || i >= len(es) {
		return "", 0
	}
	return m.name(es[i]), es[i].node
}

// Readlink is a symlink's target.
func (m *Manifest) Readlink(n NodeID) (string, bool) {
	r := m.get(n)
	if r == nil || !r.is(unix.S_IFLNK) {
		return "", false
	}
	return m.links[r.list.off:][:r.list.n], true
}

// Xattr returns one extended attribute.
func (m *Manifest) Xattr(n NodeID, name string) (value []byte, ok bool) {
	m.eachXattr(n, func(k, v []byte) bool {
		if string(k) == name {
			value, ok = bytes.Clone(v), true
		}
		return !ok
	})
	if ok && value == nil {
		value = []byte{}
	}
	return value, ok
}

// ListXattr returns the names in order.
func (m *Manifest) ListXattr(n NodeID) []string {
	var names []string
	m.eachXattr(n, func(k, _ []byte) bool {
		names = append(names, string(k))
		return true
	})
	return names
}

// eachXattr calls f for each attribute until it tells false.
func (m *Manifest) eachXattr(n NodeID, f func(name, value []byte) bool) {
	r := m.get(n)
	if r == nil {
		return
	}
	b := m.xattrs[r.xattr.off:][:r.xattr.n]
	for len(b) > 0 {
		k, v, rest, ok := cutXattr(b)
		if !ok || !f(k, v) {
			return
		}
		b = rest
	}
}

// An attribute is u8 length of name, u32 length of value, name, value.
func appendXattr(b []byte, name string, value []byte) []byte {
	b = append(b, byte(len(name)))
	b = le.AppendUint32(b, uint32(len(value)))
	b = append(b, name...)
	return append(b, value...)
}

func cutXattr(b []byte) (name, value, rest []byte, ok bool) {
	if len(b) < 5 {
		return nil, nil, nil, false
	}
	n, v := int(b[0]), int64(le.Uint32(b[1:]))
	b = b[5:]
	if n == 0 || int64(len(b)) < int64(n)+v {
		return nil, nil, nil, false
	}
	return b[:n], b[n : int64(n)+v], b[int64(n)+v:], true
}

// Resolve walks a slash-separated path from the root, without following
// symlinks. Empty components are skipped; "" is the root.
func (m *Manifest) Resolve(path string) (NodeID, bool) {
	n := Root
	for part := range strings.SplitSeq(path, "/") {
		if part == "" {
			continue
		}
		var ok bool
		if n, ok = m.Lookup(n, part); !ok {
			return 0, false
		}
	}
	return n, true
}

// Order lists the regular files as they lie in the volume; empty ones first.
func (m *Manifest) Order() []NodeID {
	order := make([]NodeID, 0, m.files)
	for i := range m.nodes {
		if m.nodes[i].is(unix.S_IFREG) {
			order = append(order, NodeID(i))
		}
	}
	slices.SortFunc(order, func(x, y NodeID) int {
		a, b := &m.nodes[x], &m.nodes[y]
		return cmp.Or(cmp.Compare(a.offset, b.offset), cmp.Compare(a.size, b.size), cmp.Compare(x, y))
	})
	return order
}

// seal computes what is derived from the arrays.
func (m *Manifest) seal() {
	m.files = 0
	for i := range m.nodes {
		if m.nodes[i].is(unix.S_IFREG) {
			m.files++
		}
	}
	h := sha256.New()
	m.write(newEncoder(h))
	m.digest = hex.EncodeToString(h.Sum(nil)[:16])
}
