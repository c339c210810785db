// SPDX-License-Identifier: Apache-2.0

package faulty

import (
	"sync"
	"time"

	"rblk/rdma"
)

// Event is when a rule is looked at.
type Event uint8

const (
	OnPost    Event = iota // a work request is posted
	OnConnect              // a Route connects
	OnRequest              // a Listener is about to hand out a connection request
)

// Rule is one fault: what it waits for and what it does. It must not be changed
// after Add.
type Rule struct {
	On Event

	// What must hold for a rule to match; a zero field asks for nothing.
	Op       rdma.Opcode                  // OnPost: of this kind
	Conn     int                          // OnPost: the provider's nth connection, from 1
	Match    func(*rdma.WorkRequest) bool // OnPost
	Skip     int                          // let so many matches pass first
	SkipByte uint64                       // OnPost: let so many bytes of matches pass first
	Times    int                          // act so often, then rest; 0: for ever

	Do Action

	// guarded by Provider.mu
	passed int
	bytes  uint64
	acted  int
}

// Action is what a rule does; the constructors below make them.
type Action struct {
	kind   kind
	gate   *Gate
	delay  time.Duration
	status rdma.Status
	err    error
	reason []byte
}

type kind uint8

const (
	doHold kind = iota + 1
	doHoldLate
	doDelay
	doCut
	doFail
	doWrongKey
	doFreeze
	doRefuse
	doReject
	doIgnore
)

// Hold keeps the request, and with it all that is posted behind it, until the
// gate opens.
func Hold(g *Gate) Action { return Action{kind: doHold, gate: g} }

// HoldLate is Hold for a WRITE that the network still has when its connection
// is long closed: Close takes effect for the caller only, and when the gate
// opens the WRITE goes out with the bytes that it was posted with. Its
// connection at the peer is whatever the peer has made of it. Open the gate
// before closing the domain.
func HoldLate(g *Gate) Action { return Action{kind: doHoldLate, gate: g} }

// Delay is Hold for a time.
func Delay(d time.Duration) Action { return Action{kind: doDelay, delay: d} }

// Cut breaks the connection before the request goes out; the request is
// flushed.
func Cut() Action { return Action{kind: doCut} }

// Fail ends the request with a status, and breaks the connection as that does:
// what is behind it is flushed.
func Fail(s rdma.Status) Action { return Action{kind: doFail, status: s} }

// WrongKey spoils the request's rkey, so that the peer refuses it.
func WrongKey() Action { return Action{kind: doWrongKey} }

// Freeze stops the connection as a frozen peer does: it stays up, takes
// requests, and nothing more is heard until the gate opens.
func Freeze(g *Gate) Action { return Action{kind: doFreeze, gate: g} }

// Refuse makes a Connect fail with err, before anything is sent.
func Refuse(err error) Action { return Action{kind: doRefuse, err: err} }

// Reject makes the listener reject the request; its application never sees it.
func Reject(reason string) Action { return Action{kind: doReject, reason: []byte(reason)} }

// Ignore makes the listener leave the request alone.
func Ignore() Action { return Action{kind: doIgnore} }

// Gate holds back what waits at it until it is opened, for good. The zero value
// is a closed gate.
type Gate struct {
	mu      sync.Mutex
	open    bool
	waiting []func()
}

// Open lets everything through. Opening twice is harmless.
func (g *Gate) Open() {
	g.mu.Lock()
	waiting := g.waiting
	g.open, g.waiting = true, nil
	g.mu.Unlock()
	for _, f := range waiting {
		f()
	}
}

// Held tells how many wait now.
func (g *Gate) Held() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.waiting)
}

// passes tells whether the gate is open; else f is called when it opens.
func (g *Gate) passes(f func()) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.open {
		g.waiting = append(g.waiting, f)
	}
	return g.open
}

// isOpen tells whether the gate is open.
func (g *Gate) isOpen() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.open
}

// concerns tells whether the occasion is one that r counts. Caller holds
// Provider.mu.
func (r *Rule) concerns(on Event, conn int, wr *rdma.WorkRequest) bool {
	if r.On != on || r.Times > 0 && r.acted >= r.Times {
		return false
	}
	return on != OnPost || (r.Op == rdma.OpInvalid || r.Op == wr.Op) && (r.Conn == 0 || r.Conn == conn) && (r.Match == nil || r.Match(wr))
}

// matches tells whether r acts on this occasion, and counts. Caller holds
// Provider.mu.
func (r *Rule) matches(on Event, conn int, wr *rdma.WorkRequest) bool {
	if !r.concerns(on, conn, wr) {
		return false
	}
	r.passed++
	r.bytes += length(wr)
	if r.passed <= r.Skip || r.SkipByte > 0 && r.bytes <= r.SkipByte {
		return false
	}
	r.acted++
	return true
}

// forget takes back what matches counted for a request that nothing acted on
// and that was not taken. Caller holds Provider.mu.
func (r *Rule) forget(conn int, wr *rdma.WorkRequest) {
	if r.concerns(OnPost, conn, wr) {
		r.passed--
		r.bytes -= length(wr)
	}
}

func length(wr *rdma.WorkRequest) (n uint64) {
	if wr != nil {
		for _, s := range wr.Local {
			n += uint64(s.Length)
		}
	}
	return n
}
