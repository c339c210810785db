// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Errors of the decoders. Each ends the connection it came on.
var (
	// ErrShort: fewer bytes than the message says, or than its kind needs.
	ErrShort = errors.New("message too short")
	// ErrVersion: another protocol version.
	ErrVersion = errors.New("protocol version differs")
	// ErrLimit: a count or length beyond its limit.
	ErrLimit = errors.New("message beyond a limit")
	// ErrMalformed: everything else.
	ErrMalformed = errors.New("malformed message")
)

const (
	magic        = 0x6b72
	connectMagic = "rblk"

	rangeSize = 16
	grantSize = 40 // without keys
)

var le = binary.LittleEndian

// begin appends a header whose length is set by finish.
func begin(dst []byte, h Header) []byte {
	dst = le.AppendUint16(dst, magic)
	dst = append(dst, ProtocolVersion, byte(h.Type))
	dst = le.AppendUint32(dst, 0)
	dst = le.AppendUint64(dst, h.Seq)
	dst = le.AppendUint64(dst, h.Acked)
	dst = le.AppendUint16(dst, uint16(h.Status))
	dst = le.AppendUint16(dst, h.Flags)
	return le.AppendUint32(dst, 0)
}

// finish sets the length of the message that begins at start.
func finish(b []byte, start int) []byte {
	le.PutUint32(b[start+4:], uint32(len(b)-start))
	return b
}

// ParseHeader decodes the header of msg, which is one whole message, and
// returns its body. Errors: ErrShort, ErrVersion, ErrLimit, ErrMalformed.
func ParseHeader(msg []byte) (Header, []byte, error) {
	if len(msg) < HeaderSize {
		return Header{}, nil, fmt.Errorf("%w: %d bytes of header", ErrShort, len(msg))
	}
	if m := le.Uint16(msg); m != magic {
		return Header{}, nil, fmt.Errorf("%w: magic %#x", ErrMalformed, m)
	}
	if v := msg[2]; v != ProtocolVersion {
		return Header{}, nil, fmt.Errorf("%w: peer speaks %d, this side %d", ErrVersion, v, ProtocolVersion)
	}
	h := Header{
		Type:   Type(msg[3]),
		Length: le.Uint32(msg[4:]),
		Seq:    le.Uint64(msg[8:]),
		Acked:  le.Uint64(msg[16:]),
		Status: Status(le.Uint16(msg[24:])),
		Flags:  le.Uint16(msg[26:]),
	}
	switch {
	case h.Length > MaxMessage:
		return Header{}, nil, fmt.Errorf("%w: %d bytes", ErrLimit, h.Length)
	case uint64(h.Length) > uint64(len(msg)):
		return Header{}, nil, fmt.Errorf("%w: %d of %d bytes", ErrShort, len(msg), h.Length)
	case int(h.Length) != len(msg):
		return Header{}, nil, fmt.Errorf("%w: %d bytes behind the message", ErrMalformed, len(msg)-int(h.Length))
	case !h.Type.known():
		return Header{}, nil, fmt.Errorf("%w: %v", ErrMalformed, h.Type)
	case le.Uint32(msg[28:]) != 0 || h.Seq == 0:
		return Header{}, nil, fmt.Errorf("%w: reserved field or sequence number of %v", ErrMalformed, h.Type)
	case h.Flags != 0 && (h.Type != TypeCommit || h.Flags != FlagFUA):
		return Header{}, nil, fmt.Errorf("%w: flags %#x of %v", ErrMalformed, h.Flags, h.Type)
	case h.Status != StatusOK && !h.Type.answer():
		return Header{}, nil, fmt.Errorf("%w: status of %v, a request", ErrMalformed, h.Type)
	}
	return h, msg[HeaderSize:], nil
}

// count reads a 32-bit count and checks that exactly that many elements of
// size bytes follow.
func count(body []byte, size, limit int) (int, []byte, error) {
	if len(body) < 4 {
		return 0, nil, ErrShort
	}
	n := le.Uint32(body)
	if n > uint32(limit) {
		return 0, nil, fmt.Errorf("%w: %d elements, at most %d", ErrLimit, n, limit)
	}
	body = body[4:]
	if size > 0 && len(body) != int(n)*size {
		return 0, nil, fmt.Errorf("%w: %d elements in %d bytes", ErrMalformed, n, len(body))
	}
	return int(n), body, nil
}

func appendRanges(dst []byte, rs []Range) []byte {
	dst = le.AppendUint32(dst, uint32(len(rs)))
	for _, r := range rs {
		dst = le.AppendUint64(dst, r.Offset)
		dst = le.AppendUint64(dst, r.Length)
	}
	return dst
}

func parseRanges(into []Range, body []byte) ([]Range, error) {
	n, body, err := count(body, rangeSize, MaxRanges)
	if err != nil {
		return into, err
	}
	for i := range n {
		r := Range{le.Uint64(body[i*rangeSize:]), le.Uint64(body[i*rangeSize+8:])}
		if r.Length == 0 || r.Offset+r.Length < r.Offset {
			return into, fmt.Errorf("%w: range %d+%d", ErrMalformed, r.Offset, r.Length)
		}
		into = append(into, r)
	}
	return into, nil
}

// Append encodes m behind h, whose Type must be TypeMap.
func (m *Map) Append(dst []byte, h Header) []byte {
	start := len(dst)
	dst = append(begin(dst, h), byte(m.Intent), 0, 0, 0)
	return finish(appendRanges(dst, m.Ranges), start)
}

// Parse decodes a MAP's body, reusing m's slices.
func (m *Map) Parse(body []byte) error {
	if len(body) < 4 {
		return ErrShort
	}
	m.Intent = Intent(body[0])
	if m.Intent < IntentRead || m.Intent > IntentOverwrite || body[1]|body[2]|body[3] != 0 {
		return fmt.Errorf("%w: intent %d", ErrMalformed, body[0])
	}
	var err error
	m.Ranges, err = parseRanges(m.Ranges[:0], body[4:])
	return err
}

// Append encodes m behind h, whose Type must be TypeMapped.
func (m *Mapped) Append(dst []byte, h Header) []byte {
	start := len(dst)
	dst = le.AppendUint32(begin(dst, h), uint32(len(m.Grants)))
	for i := range m.Grants {
		g := &m.Grants[i]
		dst = le.AppendUint64(dst, g.ID)
		dst = le.AppendUint64(dst, g.Offset)
		dst = le.AppendUint64(dst, g.Length)
		dst = le.AppendUint64(dst, g.Addr)
		dst = le.AppendUint16(dst, uint16(g.Status))
		dst = append(dst, byte(len(g.RKeys)), 0, 0, 0, 0, 0)
		for _, k := range g.RKeys {
			dst = le.AppendUint32(dst, k)
		}
	}
	return finish(dst, start)
}

// Size is the length of the encoded message.
func (m *Mapped) Size() int {
	n := HeaderSize + 4
	for i := range m.Grants {
		n += grantSize + 4*len(m.Grants[i].RKeys)
	}
	return n
}

// Parse decodes a MAPPED's body, reusing m.Grants. The keys are freshly
// allocated, all at once: whoever keeps a Grant keeps its keys.
func (m *Mapped) Parse(body []byte) error {
	n, body, err := count(body, 0, MaxGrants)
	if err != nil {
		return err
	}
	m.Grants = m.Grants[:0]
	left := (len(body) - n*grantSize) / 4
	if left < 0 || left > n*MaxDevices {
		return fmt.Errorf("%w: %d grants in %d bytes", ErrMalformed, n, len(body))
	}
	all := make([]uint32, 0, left)
	for range n {
		if len(body) < grantSize {
			return ErrShort
		}
		g := Grant{
			ID: le.Uint64(body), Offset: le.Uint64(body[8:]), Length: le.Uint64(body[16:]),
			Addr: le.Uint64(body[24:]), Status: Status(le.Uint16(body[32:])),
		}
		keys := int(body[34])
		if body[35]|body[36]|body[37]|body[38]|body[39] != 0 || keys > MaxDevices || (keys == 0) != (g.Status != StatusOK) {
			return fmt.Errorf("%w: grant", ErrMalformed)
		}
		if g.Length == 0 || g.Offset+g.Length < g.Offset || g.Addr+g.Length < g.Addr {
			return fmt.Errorf("%w: grant range", ErrMalformed)
		}
		body = body[grantSize:]
		if len(body) < 4*keys {
			return ErrShort
		}
		if keys > 0 {
			first := len(all)
			for i := range keys {
				all = append(all, le.Uint32(body[4*i:]))
			}
			g.RKeys = all[first:len(all):len(all)]
		}
		body = body[4*keys:]
		m.Grants = append(m.Grants, g)
	}
	if len(body) != 0 {
		return fmt.Errorf("%w: %d bytes behind the grants", ErrMalformed, len(body))
	}
	return nil
}

// Append encodes m behind h: TypeUnmap, TypeRevoke or TypeRevoked.
func (m *IDs) Append(dst []byte, h Header) []byte {
	start := len(dst)
	dst = le.AppendUint32(begin(dst, h), uint32(len(m.IDs)))
	for _, id := range m.IDs {
		dst = le.AppendUint64(dst, id)
	}
	return finish(dst, start)
}

// Parse decodes the body, reusing m's slice.
func (m *IDs) Parse(body []byte) error {
	n, body, err := count(body, 8, MaxIDs)
	if err != nil {
		return err
	}
	m.IDs = m.IDs[:0]
	for i := range n {
		m.IDs = append(m.IDs, le.Uint64(body[8*i:]))
	}
	return nil
}

// Append encodes m behind h: TypeCommit, TypeDiscard or TypeZero.
func (m *Ranges) Append(dst []byte, h Header) []byte {
	start := len(dst)
	return finish(appendRanges(begin(dst, h), m.Ranges), start)
}

// Parse decodes the body, reusing m's slice.
func (m *Ranges) Parse(body []byte) (err error) {
	m.Ranges, err = parseRanges(m.Ranges[:0], body)
	return err
}

// Append encodes m behind h, whose Type must be TypeDrop.
func (m *Drop) Append(dst []byte, h Header) []byte {
	start := len(dst)
	return finish(le.AppendUint32(begin(dst, h), m.Connection), start)
}

// Parse decodes a DROP's body.
func (m *Drop) Parse(body []byte) error {
	if len(body) != 4 {
		return fmt.Errorf("%w: DROP of %d bytes", ErrMalformed, len(body))
	}
	m.Connection = le.Uint32(body)
	return nil
}

// Append encodes m behind h, whose Type must be TypeDone.
func (m *Done) Append(dst []byte, h Header) []byte {
	start := len(dst)
	return finish(append(begin(dst, h), m.Verifier[:]...), start)
}

// Parse decodes a DONE's body.
func (m *Done) Parse(body []byte) error {
	if len(body) != len(m.Verifier) {
		return fmt.Errorf("%w: DONE of %d bytes", ErrMalformed, len(body))
	}
	copy(m.Verifier[:], body)
	return nil
}

// AppendEmpty encodes a message that is a header alone: FLUSH, KEEPALIVE.
func AppendEmpty(dst []byte, h Header) []byte {
	start := len(dst)
	return finish(begin(dst, h), start)
}

// ParseEmpty checks that a body is empty.
func ParseEmpty(body []byte) error {
	if len(body) != 0 {
		return fmt.Errorf("%w: %d bytes where none belong", ErrMalformed, len(body))
	}
	return nil
}

// ConnectSize and AcceptedSize are the lengths of the private data.
const (
	ConnectSize  = 40
	AcceptedSize = 16
)

// Append encodes c.
func (c *Connect) Append(dst []byte) []byte {
	dst = append(dst, connectMagic...)
	dst = append(dst, c.Version, 0)
	dst = le.AppendUint16(dst, c.Connection)
	return append(dst, c.Token[:]...)
}

// Parse decodes private data; zeros behind it are padding of the transport.
func (c *Connect) Parse(b []byte) error {
	b, err := private(b, ConnectSize)
	if err != nil {
		return err
	}
	c.Version = b[4]
	if c.Version != ProtocolVersion {
		return fmt.Errorf("%w: peer speaks %d, this side %d", ErrVersion, c.Version, ProtocolVersion)
	}
	if b[5] != 0 {
		return fmt.Errorf("%w: flags %#x", ErrMalformed, b[5])
	}
	c.Connection = le.Uint16(b[6:])
	copy(c.Token[:], b[8:])
	return nil
}

// Append encodes a.
func (a *Accepted) Append(dst []byte) []byte {
	dst = append(dst, connectMagic...)
	dst = append(dst, a.Version, a.Device)
	dst = le.AppendUint16(dst, a.Connection)
	dst = le.AppendUint16(dst, a.Credits)
	dst = le.AppendUint16(dst, a.TargetCredits)
	return le.AppendUint32(dst, a.MaxMessage)
}

// Parse decodes private data; zeros behind it are padding of the transport.
func (a *Accepted) Parse(b []byte) error {
	b, err := private(b, AcceptedSize)
	if err != nil {
		return err
	}
	*a = Accepted{
		Version: b[4], Device: b[5], Connection: le.Uint16(b[6:]),
		Credits: le.Uint16(b[8:]), TargetCredits: le.Uint16(b[10:]), MaxMessage: le.Uint32(b[12:]),
	}
	if a.Version != ProtocolVersion {
		return fmt.Errorf("%w: peer speaks %d, this side %d", ErrVersion, a.Version, ProtocolVersion)
	}
	if a.Device >= MaxDevices || a.Credits == 0 || a.MaxMessage < HeaderSize || a.MaxMessage > MaxMessage {
		return fmt.Errorf("%w: acceptance", ErrMalformed)
	}
	return nil
}

func private(b []byte, size int) ([]byte, error) {
	if len(b) < size {
		return nil, fmt.Errorf("%w: %d bytes of private data", ErrShort, len(b))
	}
	if string(b[:4]) != connectMagic {
		return nil, fmt.Errorf("%w: private data", ErrMalformed)
	}
	for _, c := range b[size:] {
		if c != 0 {
			return nil, fmt.Errorf("%w: bytes behind the private data", ErrMalformed)
		}
	}
	return b[:size], nil
}
