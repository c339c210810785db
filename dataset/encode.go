// SPDX-License-Identifier: Apache-2.0

package dataset

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"

	"github.com/cespare/xxhash/v2"
	"github.com/klauspost/compress/zstd"
)

// ErrCorrupt: bytes that are no manifest, or one that breaks its own rules.
var ErrCorrupt = errors.New("corrupt manifest")

// ErrTooLarge: a manifest beyond the caller's limit.
var ErrTooLarge = errors.New("manifest too large")

const (
	fileMagic   = "RBLKDSET"
	fileVersion = 1

	nodeSize  = 72
	entrySize = 12

	maxName       = 255     // NAME_MAX
	maxSymlink    = 4095    // PATH_MAX less its NUL
	maxXattrValue = 1 << 16 // XATTR_SIZE_MAX
	maxLayout     = 64      // bytes of a layout id
)

var le = binary.LittleEndian

// encoder writes little-endian in large pieces, and sums up what it wrote. The
// first error of the writer stays.
type encoder struct {
	w   io.Writer
	b   []byte
	sum xxhash.Digest
	err error
}

// encoderPiece is the most that an encoder holds back.
const encoderPiece = 64 << 10

func newEncoder(w io.Writer) *encoder {
	e := &encoder{w: w, b: make([]byte, 0, encoderPiece)}
	e.sum.Reset()
	return e
}

func (e *encoder) flush() {
	if e.err == nil {
		e.sum.Write(e.b)
		_, e.err = e.w.Write(e.b)
	}
	e.b = e.b[:0]
}

// room makes sure that n bytes can be appended to e.b.
func (e *encoder) room(n int) {
	if len(e.b)+n > cap(e.b) {
		e.flush()
	}
}

func (e *encoder) u16(v uint16) { e.room(2); e.b = le.AppendUint16(e.b, v) }
func (e *encoder) u32(v uint32) { e.room(4); e.b = le.AppendUint32(e.b, v) }
func (e *encoder) u64(v uint64) { e.room(8); e.b = le.AppendUint64(e.b, v) }
func (e *encoder) span(s span)  { e.u32(s.off); e.u32(s.n) }

func (e *encoder) str(s string) {
	for len(s) > 0 {
		e.room(1)
		n := min(len(s), cap(e.b)-len(e.b))
		e.b = append(e.b, s[:n]...)
		s = s[n:]
	}
}

// finish writes the sum of all before it.
func (e *encoder) finish() error {
	e.flush()
	e.u64(e.sum.Sum64())
	e.flush()
	return e.err
}

// EncodedSize is the length of the manifest's encoding.
func (m *Manifest) EncodedSize() int64 {
	return int64(len(fileMagic)) + 4 + 8 + 8 + 2 + int64(len(m.layout)) + 5*8 + 8 +
		int64(len(m.nodes))*nodeSize + int64(len(m.entries))*entrySize +
		int64(len(m.names)) + int64(len(m.links)) + int64(len(m.xattrs))
}

// Encode returns the manifest's encoding.
func (m *Manifest) Encode() []byte {
	var b bytes.Buffer
	b.Grow(int(m.EncodedSize()))
	m.write(newEncoder(&b)) // a Buffer does not fail
	return b.Bytes()
}

// write encodes the manifest, sum and all.
func (m *Manifest) write(e *encoder) error {
	e.str(fileMagic)
	e.u32(fileVersion)
	e.u64(m.generation)
	e.u64(m.size)
	e.u16(uint16(len(m.layout)))
	e.str(m.layout)
	e.u64(uint64(len(m.nodes)))
	for i := range m.nodes {
		e.room(nodeSize)
		e.b = m.nodes[i].encode(e.b)
	}
	e.u64(uint64(len(m.entries)))
	for _, x := range m.entries {
		e.span(x.name)
		e.u32(uint32(x.node))
	}
	for _, heap := range []string{m.names, m.links} {
		e.u64(uint64(len(heap)))
		e.str(heap)
	}
	e.u64(uint64(len(m.xattrs)))
	for b := m.xattrs; len(b) > 0; {
		e.room(1)
		n := min(len(b), cap(e.b)-len(e.b))
		e.b = append(e.b, b[:n]...)
		b = b[n:]
	}
	return e.finish()
}

func (n *node) encode(b []byte) []byte {
	for _, v := range [...]uint64{n.size, n.offset, n.blocks, uint64(n.mtimeSec)} {
		b = le.AppendUint64(b, v)
	}
	for _, v := range [...]uint32{
		n.mtimeNsec, n.mode, n.nlink, n.uid, n.gid, n.list.off, n.list.n, uint32(n.parent), n.xattr.off, n.xattr.n,
	} {
		b = le.AppendUint32(b, v)
	}
	return b
}

func (n *node) decode(b []byte) {
	u := func(at int) uint32 { return le.Uint32(b[at:]) }
	*n = node{
		size: le.Uint64(b), offset: le.Uint64(b[8:]), blocks: le.Uint64(b[16:]), mtimeSec: int64(le.Uint64(b[24:])),
		mtimeNsec: u(32), mode: u(36), nlink: u(40), uid: u(44), gid: u(48),
		list: span{u(52), u(56)}, parent: NodeID(u(60)), xattr: span{u(64), u(68)},
	}
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

func (r *reader) u32() uint32 {
	if p := r.take(4); p != nil {
		return le.Uint32(p)
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
	for _, heap := range []*string{&m.names, &m.links} {
		_, p := r.array(1)
		*heap = string(p)
	}
	_, p = r.array(1)
	m.xattrs = bytes.Clone(p)
	if r.bad || len(r.b) != 0 {
		return nil, fmt.Errorf("%w: lengths", ErrCorrupt)
	}
	if err := m.validate(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	m.seal()
	return m, nil
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
