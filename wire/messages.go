// SPDX-License-Identifier: Apache-2.0

package wire

import "fmt"

// Type is a binary message's kind.
type Type uint8

// Requests of the initiator; each is answered by exactly one Mapped or Done
// with the same Seq. MAP, UNMAP and REVOKED travel on connection 0 alone, in
// order.
const (
	TypeMap       Type = 1 // → Mapped
	TypeUnmap     Type = 2 // → Done
	TypeCommit    Type = 3 // → Done
	TypeFlush     Type = 4 // → Done
	TypeDiscard   Type = 5 // → Done
	TypeZero      Type = 6 // → Done
	TypeKeepalive Type = 7 // → Done; both directions
	TypeDrop      Type = 8 // → Done

	// Request of the target, on connection 0, answered by Revoked.
	TypeRevoke Type = 16

	// Answers.
	TypeMapped  Type = 32
	TypeDone    Type = 33
	TypeRevoked Type = 34
)

var typeNames = map[Type]string{
	TypeMap: "MAP", TypeUnmap: "UNMAP", TypeCommit: "COMMIT", TypeFlush: "FLUSH", TypeDiscard: "DISCARD", TypeZero: "ZERO",
	TypeKeepalive: "KEEPALIVE", TypeDrop: "DROP", TypeRevoke: "REVOKE", TypeMapped: "MAPPED", TypeDone: "DONE", TypeRevoked: "REVOKED",
}

// String is the name that docs/protocol.md uses.
func (t Type) String() string {
	if s, ok := typeNames[t]; ok {
		return s
	}
	return fmt.Sprintf("message type %d", uint8(t))
}

func (t Type) known() bool { return t >= TypeMap && t <= TypeDrop || t == TypeRevoke || t.answer() }

func (t Type) answer() bool { return t >= TypeMapped && t <= TypeRevoked }

// Limits of messages. A message that breaks one is malformed and ends its
// connection.
const (
	HeaderSize = 32
	MaxMessage = 8192 // bytes, header and all
	MaxRanges  = 128  // in one MAP, COMMIT
	MaxGrants  = 128  // in one Mapped: at most as many as the MAP asked for
	MaxIDs     = 512  // grant ids in one UNMAP, REVOKE, Revoked
	MaxDevices = 4    // devices of a target that one session spans
)

// Header begins every message. Little-endian:
//
//	0  u16 magic 0x6b72   2 u8 version   3 u8 type   4 u32 length, header and all
//	8  u64 seq: of the request, session-wide per direction, from 1; an answer repeats it
//	16 u64 acked: reserved, 0
//	24 u16 status (answers)   26 u16 flags   28 u32 reserved, 0
type Header struct {
	Type   Type
	Length uint32
	Seq    uint64
	Acked  uint64
	Status Status
	Flags  uint16
}

// FlagFUA on COMMIT: durable before the answer.
const FlagFUA uint16 = 1

// Intent of a MAP.
type Intent uint8

const (
	IntentRead      Intent = 1
	IntentWrite     Intent = 2
	IntentOverwrite Intent = 3 // the whole extent will be written; nothing is read
)

// Range is [Offset, Offset+Length) of the volume.
type Range struct {
	Offset, Length uint64
}

// Map asks for grants that cover the ranges. A grant may cover more than asked:
// at least the whole extent, for memory exports the whole region.
type Map struct {
	Intent Intent
	Ranges []Range
}

// Grant promises that [Offset, Offset+Length) of the volume lies at Addr of the
// target until the grant is released, revoked or its session ends. RKeys[i] is
// the key on the target's device i (the device index of a connection is in its
// acceptance). A Status other than StatusOK grants nothing; Offset and Length
// then say for which range.
type Grant struct {
	ID     uint64 // never reused within a session
	Offset uint64
	Length uint64
	Addr   uint64
	Status Status
	RKeys  []uint32 // 1…MaxDevices
}

// Mapped answers MAP: one or more grants per range asked, in order.
type Mapped struct {
	Grants []Grant
}

// IDs is the body of UNMAP, REVOKE and REVOKED: grant ids. Unknown ids are
// ignored (the grant may have died meanwhile).
type IDs struct {
	IDs []uint64
}

// Ranges is the body of COMMIT; DISCARD and ZERO carry exactly one.
type Ranges struct {
	Ranges []Range
}

// Drop asks the target to destroy another connection of the session.
type Drop struct {
	Connection uint32
}

// Done answers everything else. Verifier changes whenever unflushed writes may
// have been lost.
type Done struct {
	Verifier [16]byte
}

// Status is a result on the wire. Numbers are final.
type Status uint16

const (
	StatusOK          Status = 0
	StatusProtocol    Status = 1 // malformed or out of order; the connection ends
	StatusRange       Status = 2
	StatusReadOnly    Status = 3
	StatusStale       Status = 4
	StatusIO          Status = 5
	StatusNoSpace     Status = 6
	StatusUnsupported Status = 7
	StatusFenced      Status = 8
	StatusInstance    Status = 9
	StatusQuota       Status = 10 // too many grants: give some back
	StatusAgain       Status = 11 // no frame free now, ask again
	StatusNotGranted  Status = 12
	StatusDraining    Status = 13
)

var statusNames = [...]string{
	"ok", "protocol error", "range outside the volume", "read-only", "changed since the scan", "input/output error", "no space left",
	"unsupported", "fenced", "instance changed", "too many grants", "no frame free", "not granted", "draining",
}

// String says what s means, in lower case, for logs and errors.
func (s Status) String() string {
	if int(s) < len(statusNames) {
		return statusNames[s]
	}
	return fmt.Sprintf("status %d", uint16(s))
}

// Connect is the private data of a data connection's request (40 bytes):
//
//	0 "rblk"   4 u8 version   5 u8 flags, 0   6 u16 connection index   8 [32] token
type Connect struct {
	Version    uint8
	Connection uint16
	Token      [32]byte
}

// Accepted is the private data of the acceptance (16 bytes):
//
//	0 "rblk"   4 u8 version   5 u8 device index   6 u16 connection index
//	8 u16 credits   10 u16 target credits   12 u32 max message
type Accepted struct {
	Version       uint8
	Device        uint8
	Connection    uint16
	Credits       uint16
	TargetCredits uint16
	MaxMessage    uint32
}

// Reasons for which a target rejects a data connection; the reject carries the
// text.
const (
	RejectToken    = "connect token unknown, used or expired"
	RejectVersion  = "protocol version differs"
	RejectDraining = "target is draining"
	RejectLimit    = "too many connections"
)
