// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"sync/atomic"
	"time"

	"rblk/rdma"
	"rblk/volume"
)

// kind of an operation: those of volume.Op, and those that travel as messages.
type kind uint8

const (
	kindRead kind = iota
	kindWrite
	kindZero
	kindDiscard
	kindFlush
)

func (k kind) String() string { return [...]string{"read", "write", "zero", "discard", "flush"}[k] }

// op is an operation under way. It lives in volume.Op.Source, or by itself.
type op struct {
	vol    *volume.Op // nil for messages
	kind   kind
	off, n int64
	mem    []byte
	arena  *arena // held, while set
	lane   volume.Lane
	fua    bool
	start  time.Time

	// guarded by Volume.mu
	next, prev *op // in Volume.active
	blockers   int // overlapping operations that must end first
	followers  []*op

	// of the present attempt; touched by one goroutine at a time: who starts
	// the operation, then who holds opState.mu of its parts
	at      int64        // how far it has been split into parts
	parts   atomic.Int32 // parts under way, plus one while it is being split
	failure atomic.Pointer[error]
	tries   int  // attempts that ended in a refusal by the target's adapter
	begun   bool // a request of it may have reached the target

	conn     atomic.Pointer[conn] // the connection of its parts
	posted   atomic.Int32         // parts queued or in flight there
	done     atomic.Bool
	awaiting atomic.Bool
	released atomic.Bool   // nobody touches it any more: it may serve again
	wake     chan struct{} // one token for the awaiting goroutine
	finish   func(error)   // of messages
}

func newOp() *op { return &op{wake: make(chan struct{}, 1)} }

// opFor is the op in o.Source, or a new one.
func opFor(o *volume.Op) *op {
	x, _ := o.Source.(*op)
	if x == nil || !x.released.Load() {
		x = newOp()
		o.Source = x
	}
	select {
	case <-x.wake:
	default:
	}
	x.released.Store(false)
	x.done.Store(false)
	x.awaiting.Store(false)
	x.vol, x.off, x.n, x.mem, x.lane = o, o.Offset, int64(len(o.Mem)), o.Mem, o.Lane
	x.fua = o.FUA
	x.kind = kindRead
	if o.Kind == volume.OpWrite {
		x.kind = kindWrite
	}
	x.followers, x.blockers, x.tries, x.begun = x.followers[:0], 0, 0, false
	return x
}

// overlaps tells whether two operations touch a byte in common.
func (x *op) overlaps(y *op) bool { return x.off < y.off+y.n && y.off < x.off+x.n }

// changes tells whether the operation changes the volume.
func (x *op) changes() bool {
	return x.kind == kindWrite || x.kind == kindZero || x.kind == kindDiscard
}

// reset makes the operation ready for another attempt.
func (x *op) reset() {
	x.at = 0
	x.parts.Store(0)
	x.posted.Store(0)
	x.begun = false
	x.failure.Store(nil)
	x.conn.Store(nil)
}

// stir wakes who waits for the operation, to look at it again.
func (x *op) stir() {
	if !x.awaiting.Load() {
		return
	}
	select {
	case x.wake <- struct{}{}:
	default:
	}
}

// fail notes the first failure of the attempt.
func (x *op) fail(err error) { x.failure.CompareAndSwap(nil, &err) }

// part is a piece of an operation that one work request moves.
type part struct {
	op    *op
	grant *grant
	off   int64 // in the volume
	mem   []byte
	wr    rdma.Opcode
	waits int // what must come before it ends: its completion, and a COMMIT's answer
}
