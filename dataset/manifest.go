// SPDX-License-Identifier: Apache-2.0

package dataset

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
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

// node is one inode: fixed size, no pointers.
type node struct {
	attr   Attr
	first  uint32 // directory: its first entry
	count  uint32 // directory: its entries
	parent NodeID // directory: its parent
	link   span   // symlink: its target, in links
	xattr  span   // its attributes, in xattrs
}

// span is a piece of a heap.
type span struct{ off, n uint32 }

// entry is one name in a directory.
type entry struct {
	name span // in names
	node NodeID
}

// Manifest is immutable once built; all methods are safe for concurrent use and
// do not allocate, except where they return new slices or strings.
type Manifest struct {
	generation uint64
	size       uint64 // of the volume
	layout     string
	nodes      []node // nodes[0] is unused
	entries    []entry
	names      []byte
	links      []byte
	xattrs     []byte
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
	if n == 0 || int(n) >= len(m.nodes) {
		return nil
	}
	return &m.nodes[n]
}

// Attr of a node; ok is false for an unknown one.
func (m *Manifest) Attr(n NodeID) (a Attr, ok bool) {
	r := m.get(n)
	if r == nil {
		return Attr{}, false
	}
	return r.attr, true
}

// Lookup finds name in directory dir.
func (m *Manifest) Lookup(dir NodeID, name string) (NodeID, bool) {
	d := m.get(dir)
	if d == nil {
		return 0, false
	}
	es := m.entries[d.first : d.first+d.count]
	i := sort.Search(len(es), func(i int) bool { return string(m.name(es[i].name)) >= name })
	if i == len(es) || string(m.name(es[i].name)) != name {
		return 0, false
	}
	return es[i].node, true
}

func (m *Manifest) name(s span) []byte { return m.names[s.off : s.off+s.n] }

// Parent of a directory; the root is its own.
func (m *Manifest) Parent(dir NodeID) NodeID {
	if d := m.get(dir); d != nil {
		return d.parent
	}
	return 0
}

// NumEntries of a directory, without . and ..
func (m *Manifest) NumEntries(dir NodeID) int {
	if d := m.get(dir); d != nil {
		return int(d.count)
	}
	return 0
}

// Entry i of a directory, in name order (bytewise).
func (m *Manifest) Entry(dir NodeID, i int) (name string, n NodeID) {
	d := m.get(dir)
	if d == nil || i < 0 || i >= int(d.count) {
		return "", 0
	}
	e := m.entries[int(d.first)+i]
	return string(m.name(e.name)), e.node
}

// Readlink is a symlink's target.
func (m *Manifest) Readlink(n NodeID) (string, bool) {
	r := m.get(n)
	if r == nil || r.attr.Mode&unix.S_IFMT != unix.S_IFLNK {
		return "", false
	}
	return string(m.links[r.link.off : r.link.off+r.link.n]), true
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
	b := m.xattrs[r.xattr.off : r.xattr.off+r.xattr.n]
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

// Order lists the regular files as they lie in the volume.
func (m *Manifest) Order() []NodeID {
	order := make([]NodeID, 0, m.files)
	for i := range m.nodes {
		if i > 0 && m.nodes[i].attr.Mode&unix.S_IFMT == unix.S_IFREG {
			order = append(order, NodeID(i))
		}
	}
	sort.Slice(order, func(i, j int) bool {
		a, b := &m.nodes[order[i]].attr, &m.nodes[order[j]].attr
		if a.Offset != b.Offset {
			return a.Offset < b.Offset
		}
		return order[i] < order[j]
	})
	return order
}

// seal computes what is derived from the arrays.
func (m *Manifest) seal(encoded []byte) {
	m.files = 0
	for i := range m.nodes {
		if m.nodes[i].attr.Mode&unix.S_IFMT == unix.S_IFREG {
			m.files++
		}
	}
	sum := sha256.Sum256(encoded)
	m.digest = hex.EncodeToString(sum[:16])
}
