// SPDX-License-Identifier: Apache-2.0

package rdma

import "fmt"

// Opcode says what a work request does.
type Opcode uint8

const (
	OpInvalid Opcode = iota
	// OpRead brings remote memory into local segments. One-sided.
	OpRead
	// OpWrite puts local segments into remote memory. One-sided.
	OpWrite
	// OpSend delivers local segments to the peer's next receive.
	OpSend
	// OpRecv appears in completions only.
	OpRecv
	// OpWriteImm is OpWrite that also consumes a receive of the peer and
	// delivers Imm there. Needs CapImmediate.
	OpWriteImm
)

var opNames = [...]string{"invalid", "read", "write", "send", "recv", "write_imm"}

// String is the metric label of op.
func (op Opcode) String() string {
	if int(op) < len(opNames) {
		return opNames[op]
	}
	return fmt.Sprintf("opcode(%d)", uint8(op))
}

// WRFlags modify a work request.
type WRFlags uint8

const (
	// WRSignaled: success is reported by a completion. Failure always is.
	WRSignaled WRFlags = 1 << iota
	// WRFence: start only when all READs posted before have completed.
	WRFence
	// WRInline: the bytes are copied at Post and the buffer is free at once. At
	// most ConnInfo.Inline bytes. SEND and WRITE only.
	WRInline
	// WRSolicited: the peer's completion channel should wake for this SEND.
	WRSolicited
)

// WorkRequest is one entry of the send queue (ibv_send_wr).
type WorkRequest struct {
	ID     uint64 // wr_id, handed back in the completion
	Op     Opcode
	Flags  WRFlags
	Imm    uint32
	Local  []Segment // at most ConnInfo.Segments; may be empty (length 0)
	Remote RemoteAddr
}

// RemoteAddr is where a READ or WRITE begins in the peer's memory.
type RemoteAddr struct {
	Addr uint64
	RKey uint32
}

// RecvRequest is one entry of a receive queue (ibv_recv_wr). Segments need
// AccessLocalWrite.
type RecvRequest struct {
	ID    uint64
	Local []Segment
}

// Completion reports the end of one request (ibv_wc). When Status is not
// StatusOK only ID, Status and VendorErr mean anything.
type Completion struct {
	ID        uint64
	Op        Opcode
	Status    Status
	HasImm    bool
	Imm       uint32
	Length    uint32 // bytes received (OpRecv) or read (OpRead)
	VendorErr uint32
}

// Status is how a request ended (ibv_wc_status; IBTA 11.6.2).
type Status uint8

const (
	StatusOK Status = iota
	StatusLocalLength
	StatusLocalProtection
	StatusFlushed
	StatusRemoteAccess
	StatusRemoteInvalidRequest
	StatusRemoteOperation
	StatusRetryExceeded
	StatusRNRRetryExceeded
	StatusGeneral
)

var statusNames = [...]string{
	"ok", "local length error", "local protection error", "flushed", "remote access error",
	"remote invalid request", "remote operation error", "transport retries exceeded",
	"receiver-not-ready retries exceeded", "general error",
}

func (s Status) String() string {
	if int(s) < len(statusNames) {
		return statusNames[s]
	}
	return fmt.Sprintf("status(%d)", uint8(s))
}

// Err is nil for StatusOK, else a *StatusError.
func (s Status) Err() error {
	if s == StatusOK {
		return nil
	}
	return &StatusError{Status: s}
}
