// SPDX-License-Identifier: Apache-2.0

package dataset

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/cespare/xxhash/v2"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"
)

// ErrCorrupt: bytes that are no manifest, or one that breaks its own rules.
var ErrCorrupt = errors.New("corrupt manifest")

// ErrTooLarge: a manifest beyond the caller's limit.
var ErrTooLarge = errors.New("manifest too large")

const (
	fileMagic   = "RBLKDSET"
	fileVersion = 1

	nodeSize  = 92
	entrySize = 12

	maxName    = 255
	maxSymlink = 4095
)

var le = binary.LittleEndian

// Encode returns the manifest's encoding.
func (m *Manifest) Encode() []byte {
	b := make([]byte, 0, 128+len(m.nodes)*nodeSize+len(m.entries)*entrySize+len(m.names)+len(m.links)+len(m.xattrs))
	b = append(b, fileMagic...)
	b = le.AppendUint32(b, fileVersion)
	b = le.AppendUint64(b, m.generation)
	b = le.AppendUint64(b, m.size)
	b = le.AppendUint16(b, uint16(len(m.layout)))
	b = append(b, m.layout...)
	b = le.AppendUint64(b, uint64(len(m.nodes)))
	for i := range m.nodes {
		b = m.nodes[i].encode(b)
	}
	b = le.AppendUint64(b, uint64(len(m.entries)))
	for _, e := range m.entries {
		b = le.AppendUint32(b, e.name.off)
		b = le.AppendUint32(b, e.name.n)
		b = le.AppendUint32(b, uint32(e.node))
	}
	for _, heap := range [][]byte{m.names, m.links, m.xattrs} {
		b = le.AppendUint64(b, uint64(len(heap)))
		b = append(b, heap...)
	}
	return le.AppendUint64(b, xxhash.Sum64(b))
}

func (n *node) encode(b []byte) []byte {
	a := &n.attr
	for _, v := range [...]uint32{a.Mode, a.Nlink, a.UID, a.GID} {
		b = le.AppendUint32(b, v)
	}
	for _, v := range [...]uint64{a.Size, a.Offset, uint64(a.MtimeSec), a.Blocks} {
		b = le.AppendUint64(b, v)
	}
	b = le.AppendUint32(b, a.MtimeNsec)
	for _, v := range [...]uint32{n.first, n.count, uint32(n.parent), n.link.off, n.link.n, n.xattr.off, n.xattr.n} {
		b = le.AppendUint32(b, v)
	}
	return append(b, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0) // room for what a later version adds
}

func (n *node) decode(b []byte) {
	a := &n.attr
	a.Mode, a.Nlink, a.UID, a.GID = le.Uint32(b), le.Uint32(b[4:]), le.Uint32(b[8:]), le.Uint32(b[12:])
	a.Size, a.Offset, a.MtimeSec, a.Blocks = le.Uint64(b[16:]), le.Uint64(b[24:]), int64(le.Uint64(b[32:])), le.Uint64(b[40:])
	a.MtimeNsec = le.Uint32(b[48:])
	n.first, n.count, n.parent = le.Uint32(b[52:]), le.Uint32(b[56:]), NodeID(le.Uint32(b[60:]))
	n.link = span{le.Uint32(b[64:]), le.Uint32(b[68:])}
	n.xattr = span{le.Uint32(b[72:]), le.Uint32(b[76:])}
}

// reader cuts an encoding into pieces; a cut beyond the end marks it bad.
type reader struct {
	b   []byte
	bad bool
}

func (r *reader) take(n uint64) []byte {
	if r.bad || n > uint64(len(r.b)) {
		r.bad = true
		return nil
	}
	p := r.b[:n]
	r.b = r.b[n:]
	return p
}

func (r *reader) u64() uint64 {
	if p := r.take(8); p != nil {
		return le.Uint64(p)
	}
	return 0
}

// array takes a length-prefixed array of elements of size bytes.
func (r *reader) array(size uint64) (n int, p []byte) {
	count := r.u64()
	if count > math.MaxUint32 {
		r.bad = true
		return 0, nil
	}
	p = r.take(count * size)
	if r.bad {
		return 0, nil
	}
	return int(count), p
}

// Decode reads an encoding and checks everything about it. b may be reused
// afterwards. Errors match ErrCorrupt.
func Decode(b []byte) (*Manifest, error) {
	if len(b) < len(fileMagic)+4+8 || string(b[:len(fileMagic)]) != fileMagic {
		return nil, fmt.Errorf("%w: not a manifest", ErrCorrupt)
	}
	if v := le.Uint32(b[len(fileMagic):]); v != fileVersion {
		return nil, fmt.Errorf("%w: version %d, this build reads %d", ErrCorrupt, v, fileVersion)
	}
	body := b[:len(b)-8]
	if xxhash.Sum64(body) != le.Uint64(b[len(b)-8:]) {
		return nil, fmt.Errorf("%w: checksum", ErrCorrupt)
	}
	r := &reader{b: body[len(fileMagic)+4:]}
	m := &Manifest{generation: r.u64(), size: r.u64()}
	if p := r.take(2); p != nil {
		m.layout = string(r.take(uint64(le.Uint16(p))))
	}
	n, p := r.array(nodeSize)
	m.nodes = make([]node, n)
	for i := range m.nodes {
		m.nodes[i].decode(p[i*nodeSize:])
	}
	n, p = r.array(entrySize)
	m.entries = make([]entry, n)
	for i := range m.entries {
		e := p[i*entrySize:]
		m.entries[i] = entry{span{le.Uint32(e), le.Uint32(e[4:])}, NodeID(le.Uint32(e[8:]))}
	}
	for _, heap := range []*[]byte{&m.names, &m.links, &m.xattrs} {
		_, p := r.array(1)
		*heap = bytes.Clone(p)
	}
	if r.bad || len(r.b) != 0 {
		return nil, fmt.Errorf("%w: lengths", ErrCorrupt)
	}
	if err := m.validate(); err != nil {
		return nil, err
	}
	m.seal(b)
	return m, nil
}

// in tells whether s lies in a heap of n bytes.
func (s span) in(n int) bool { return uint64(s.off)+uint64(s.n) <= uint64(n) }

// validate checks that no accessor can fail or run for ever: every span lies in
// its heap, names are names and sorted, directories form one tree below the
// root, and files lie in the volume.
func (m *Manifest) validate() error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", ErrCorrupt, fmt.Sprintf(format, args...))
	}
	if len(m.nodes) < 2 || m.size > math.MaxInt64 || m.nodes[Root].parent != Root || m.nodes[Root].attr.Mode&unix.S_IFMT != unix.S_IFDIR {
		return bad("no root")
	}
	seen := make([]bool, len(m.nodes)) // directories that have their one entry
	seen[Root] = true
	used := 0
	for i := 1; i < len(m.nodes); i++ {
		n := &m.nodes[i]
		if !n.xattr.in(len(m.xattrs)) || !xattrsOK(m.xattrs[n.xattr.off:n.xattr.off+n.xattr.n]) {
			return bad("node %d: attributes", i)
		}
		a := &n.attr
		if a.MtimeNsec >= 1e9 {
			return bad("node %d: time", i)
		}
		switch a.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			if a.Size > m.size || a.Offset > m.size-a.Size || n.count != 0 {
				return bad("node %d: outside the volume", i)
			}
		case unix.S_IFLNK:
			if !n.link.in(len(m.links)) || n.link.n == 0 || n.link.n > maxSymlink || n.count != 0 ||
				bytes.IndexByte(m.links[n.link.off:n.link.off+n.link.n], 0) >= 0 {
				return bad("node %d: symlink", i)
			}
		case unix.S_IFDIR:
			if uint64(n.first)+uint64(n.count) > uint64(len(m.entries)) {
				return bad("node %d: entries", i)
			}
			if err := m.validateDir(NodeID(i), seen); err != nil {
				return err
			}
			used += int(n.count)
		default:
			return bad("node %d: type %o", i, a.Mode)
		}
	}
	if used != len(m.entries) {
		return bad("%d entries used of %d", used, len(m.entries))
	}
	return m.validateTree(seen)
}

// validateDir checks one directory's entries and that each subdirectory has
// this one parent.
func (m *Manifest) validateDir(dir NodeID, seen []bool) error {
	d := &m.nodes[dir]
	var last []byte
	for i, e := range m.entries[d.first : d.first+d.count] {
		if !e.name.in(len(m.names)) || e.node == 0 || int(e.node) >= len(m.nodes) {
			return fmt.Errorf("%w: node %d entry %d", ErrCorrupt, dir, i)
		}
		name := m.name(e.name)
		if !nameOK(name) || i > 0 && bytes.Compare(last, name) >= 0 {
			return fmt.Errorf("%w: node %d entry %d: name %q", ErrCorrupt, dir, i, name)
		}
		last = name
		c := &m.nodes[e.node]
		if c.attr.Mode&unix.S_IFMT == unix.S_IFDIR {
			if seen[e.node] || c.parent != dir {
				return fmt.Errorf("%w: directory %d has two parents", ErrCorrupt, e.node)
			}
			seen[e.node] = true
		}
	}
	return nil
}

// validateTree checks that every directory is below the root: each has one
// parent, so it is enough that walking up ends.
func (m *Manifest) validateTree(seen []bool) error {
	done := make([]bool, len(m.nodes))
	done[Root] = true
	var path []NodeID
	for i := 1; i < len(m.nodes); i++ {
		if m.nodes[i].attr.Mode&unix.S_IFMT != unix.S_IFDIR {
			continue
		}
		path = path[:0]
		for n := NodeID(i); !done[n]; n = m.nodes[n].parent {
			if !seen[n] || len(path) > len(m.nodes) {
				return fmt.Errorf("%w: directory %d is not below the root", ErrCorrupt, i)
			}
			path = append(path, n)
		}
		for _, n := range path {
			done[n] = true
		}
	}
	return nil
}

func nameOK(name []byte) bool {
	return len(name) > 0 && len(name) <= maxName && bytes.IndexByte(name, '/') < 0 && bytes.IndexByte(name, 0) < 0 &&
		string(name) != "." && string(name) != ".."
}

func xattrsOK(b []byte) bool {
	for len(b) > 0 {
		var ok bool
		if _, _, b, ok = cutXattr(b); !ok {
			return false
		}
	}
	return true
}

// Compress packs an encoding for the wire (zstd).
func Compress(b []byte) ([]byte, error) {
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	if err != nil {
		return nil, err
	}
	defer enc.Close()
	return enc.EncodeAll(b, nil), nil
}

// Decompress unpacks it; the result has at most limit bytes, else ErrTooLarge.
func Decompress(b []byte, limit int64) ([]byte, error) {
	dec, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(uint64(limit)))
	if err != nil {
		return nil, err
	}
	defer dec.Close()
	out, err := dec.DecodeAll(b, nil)
	if errors.Is(err, zstd.ErrDecoderSizeExceeded) || int64(len(out)) > limit {
		return nil, fmt.Errorf("%w: more than %d bytes", ErrTooLarge, limit)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return out, nil
}
