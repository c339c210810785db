// SPDX-License-Identifier: Apache-2.0

package dataset

import (
	"bytes"
	"fmt"
	"math"
	"strings"

	"golang.org/x/sys/unix"
)

// validate checks a decoded manifest, which may be a hostile peer's, so that no
// accessor can fail, run for ever, or tell the kernel nonsense:
//
//   - the root is a directory, and all directories form one tree below it;
//   - a directory's names are names (1 to 255 bytes, no slash, no NUL, neither
//     . nor ..), sorted bytewise, each once;
//   - every node has a name, and every entry belongs to one directory;
//   - regular files lie inside the volume, whose size fits an int64;
//   - symlinks have 1 to 4095 bytes, without NUL;
//   - attributes are well-formed, sorted, each once;
//   - fields that a type of node does not use are zero.
//
// It takes time and memory linear in the manifest's length.
func (m *Manifest) validate() error {
	if !layoutOK(m.layout) {
		return fmt.Errorf("layout id %q", m.layout)
	}
	if m.size > math.MaxInt64 {
		return fmt.Errorf("volume of %d bytes", m.size)
	}
	if len(m.nodes) <= int(Root) || m.nodes[0] != (node{}) || !m.nodes[Root].is(unix.S_IFDIR) || m.nodes[Root].parent != Root {
		return fmt.Errorf("no root")
	}
	named := make([]bool, len(m.nodes))
	named[Root] = true
	used := uint64(0)
	for i := 1; i < len(m.nodes); i++ {
		if err := m.validateNode(NodeID(i), named); err != nil {
			return err
		}
		if m.nodes[i].is(unix.S_IFDIR) {
			used += uint64(m.nodes[i].list.n)
		}
	}
	if used != uint64(len(m.entries)) {
		return fmt.Errorf("%d entries, of which directories use %d", len(m.entries), used)
	}
	for i, ok := range named {
		if !ok && i > 0 {
			return fmt.Errorf("node %d has no name", i)
		}
	}
	return m.validateTree()
}

// validateNode checks one node, and marks those that it names.
func (m *Manifest) validateNode(id NodeID, named []bool) error {
	n := &m.nodes[id]
	if !n.xattr.in(len(m.xattrs)) || !xattrsOK(m.xattrs[n.xattr.off:][:n.xattr.n]) {
		return fmt.Errorf("node %d: attributes", id)
	}
	if n.mtimeNsec >= 1e9 {
		return fmt.Errorf("node %d: %d nanoseconds", id, n.mtimeNsec)
	}
	if n.mode&^(unix.S_IFMT|0o7777) != 0 || !n.is(unix.S_IFREG) && n.offset != 0 || !n.is(unix.S_IFDIR) && n.parent != 0 {
		return fmt.Errorf("node %d: mode %o", id, n.mode)
	}
	switch n.mode & unix.S_IFMT {
	case unix.S_IFREG:
		if n.size > m.size || n.offset > m.size-n.size || n.list != (span{}) {
			return fmt.Errorf("node %d: outside the volume", id)
		}
	case unix.S_IFLNK:
		if !n.list.in(len(m.links)) || n.list.n == 0 || n.list.n > maxSymlink ||
			strings.IndexByte(m.links[n.list.off:][:n.list.n], 0) >= 0 {
			return fmt.Errorf("node %d: symlink", id)
		}
	case unix.S_IFDIR:
		return m.validateDir(id, named)
	default:
		return fmt.Errorf("node %d: mode %o", id, n.mode)
	}
	return nil
}

// validateDir checks one directory's entries, and that each subdirectory has
// this one parent and name.
func (m *Manifest) validateDir(dir NodeID, named []bool) error {
	d := &m.nodes[dir]
	if !d.list.in(len(m.entries)) {
		return fmt.Errorf("directory %d: entries", dir)
	}
	last := ""
	for i, e := range m.entries[d.list.off:][:d.list.n] {
		if !e.name.in(len(m.names)) || m.get(e.node) == nil {
			return fmt.Errorf("directory %d, entry %d", dir, i)
		}
		name := m.name(e)
		if !nameOK(name) || name <= last {
			return fmt.Errorf("directory %d, entry %d: name %q", dir, i, name)
		}
		last = name
		if c := &m.nodes[e.node]; c.is(unix.S_IFDIR) && (named[e.node] || c.parent != dir) {
			return fmt.Errorf("directory %d has two parents", e.node)
		}
		named[e.node] = true
	}
	return nil
}

// validateTree checks that every directory is below the root. Each has the
// parent that names it, so it is enough that walking up ends there.
func (m *Manifest) validateTree() error {
	const (
		unknown = iota
		onPath
		below
	)
	state := make([]uint8, len(m.nodes))
	state[Root] = below
	var path []NodeID
	for i := range m.nodes {
		if !m.nodes[i].is(unix.S_IFDIR) {
			continue
		}
		path = path[:0]
		n := NodeID(i)
		for ; state[n] == unknown; n = m.nodes[n].parent {
			state[n] = onPath
			path = append(path, n)
		}
		if state[n] == onPath {
			return fmt.Errorf("directory %d is not below the root", i)
		}
		for _, n := range path {
			state[n] = below
		}
	}
	return nil
}

// in tells whether s lies in an array of n elements.
func (s span) in(n int) bool { return uint64(s.off)+uint64(s.n) <= uint64(n) }

func nameOK(name string) bool {
	return len(name) > 0 && len(name) <= maxName && name != "." && name != ".." && !strings.ContainsAny(name, "/\x00")
}

// layoutOK: an id is a cache key, and part of log lines.
func layoutOK(id string) bool {
	return len(id) > 0 && len(id) <= maxLayout && strings.IndexFunc(id, func(r rune) bool {
		return (r < '0' || r > '9') && (r < 'a' || r > 'z')
	}) < 0
}

func xattrsOK(b []byte) bool {
	var last []byte
	for len(b) > 0 {
		name, value, rest, ok := cutXattr(b)
		if !ok || len(value) > maxXattrValue || bytes.IndexByte(name, 0) >= 0 || bytes.Compare(name, last) <= 0 {
			return false
		}
		last, b = name, rest
	}
	return true
}
