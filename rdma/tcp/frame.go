// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"encoding/binary"
	"fmt"

	"rblk/rdma"
)

// headerSize is the length of a frame's header. Little-endian:
//
//	0 u8 type   1 u8 flags   2 u8 status   3 u8 0   4 u32 length
//	8 u64 address   16 u32 rkey   20 u32 immediate   24 u64 number of the request
const headerSize = 32

// frameType is what a frame is.
type frameType uint8

const (
	frameReadReq  frameType = 1 // length bytes at address, please
	frameWrite    frameType = 2 // length bytes follow, for address
	frameSend     frameType = 3 // length bytes follow, for the next receive
	frameReadResp frameType = 4 // length bytes follow
	frameAck      frameType = 5
	frameNak      frameType = 6 // the connection ends behind it
)

const (
	flagAck = 1 << 0 // WRITE, SEND: answer when done
	flagImm = 1 << 1 // WRITE: immediate data, which takes a receive
)

// flags are those that a frame of type t may carry.
func (t frameType) flags() uint8 {
	switch t {
	case frameWrite:
		return flagAck | flagImm
	case frameSend:
		return flagAck
	}
	return 0
}

type header struct {
	typ    frameType
	flags  uint8
	status rdma.Status // NAK
	length uint32
	addr   uint64
	rkey   uint32
	imm    uint32
	seq    uint64
}

var le = binary.LittleEndian

func (h *header) put(b *[headerSize]byte) {
	b[0], b[1], b[2], b[3] = byte(h.typ), h.flags, byte(h.status), 0
	le.PutUint32(b[4:], h.length)
	le.PutUint64(b[8:], h.addr)
	le.PutUint32(b[16:], h.rkey)
	le.PutUint32(b[20:], h.imm)
	le.PutUint64(b[24:], h.seq)
}

// parseHeader decodes and checks a header; the error matches rdma.ErrProtocol.
// It is strict: a field that a type does not use is zero, so that a later
// version can give it a meaning.
func parseHeader(b []byte) (header, error) {
	h := header{
		typ: frameType(b[0]), flags: b[1], status: rdma.Status(b[2]),
		length: le.Uint32(b[4:]), addr: le.Uint64(b[8:]), rkey: le.Uint32(b[16:]), imm: le.Uint32(b[20:]), seq: le.Uint64(b[24:]),
	}
	switch {
	case h.typ < frameReadReq || h.typ > frameNak, b[3] != 0, h.length > maxMessage,
		h.typ == frameNak && (h.status == rdma.StatusOK || h.status > rdma.StatusGeneral),
		h.typ != frameNak && h.status != rdma.StatusOK,
		(h.typ == frameAck || h.typ == frameNak) && h.length != 0,
		h.flags&^h.typ.flags() != 0,
		h.imm != 0 && h.flags&flagImm == 0,
		h.typ != frameReadReq && h.typ != frameWrite && (h.addr != 0 || h.rkey != 0):
		return h, fmt.Errorf("%w: frame %x", rdma.ErrProtocol, b[:headerSize])
	}
	return h, nil
}
