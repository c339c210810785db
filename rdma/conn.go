// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"context"
	"net"
	"time"
)

// ConnOptions shapes a connection. Zero means the default; values above a
// device's limit are clamped to it, and Info tells what was got.
type ConnOptions struct {
	SendDepth int // work requests in the send queue; default 128
	RecvDepth int // receives; default 64; ignored with SharedReceive
	ReadDepth int // READs in flight, both roles, min of both ends is taken; default 16
	Segments  int // segments in one work request; default 4
	Inline    int // bytes a SEND or WRITE may be inlined up to; default 64

	// Receives are posted before the peer can send its first message.
	Receives []RecvRequest

	// SharedReceive, when set, replaces the connection's own receive queue; it
	// must be of the same domain.
	SharedReceive SharedReceiveQueue

	// ManualProgress promises that while anything is expected of the
	// connection some goroutine is in Poll or Wait. A software transport then
	// does its work on that goroutine, which saves a wake-up per completion;
	// until then the peer's requests are not served. An adapter that works by
	// itself ignores it.
	ManualProgress bool

	// Spin is how long Wait polls before it sleeps; default 0 for software
	// transports, 20 µs for adapters; negative: never.
	Spin time.Duration

	// RNRTimeout: how long a message waits for a posted receive of the peer
	// before the connection breaks with StatusRNRRetryExceeded; default: the
	// transport's own retry until the peer is dead.
	RNRTimeout time.Duration
}

// ConnInfo tells what was negotiated.
type ConnInfo struct {
	LocalAddr, RemoteAddr net.Addr
	Device                Device
	PrivateData           []byte // of the peer: its request, or its acceptance
	SendDepth, RecvDepth  int
	ReadDepth             int // READs this side may have in flight; more wait in the send queue
	Segments, Inline      int
	QPNum                 uint32
}

// Conn is a reliably connected queue pair with its own completion queue, which
// is sized so that it cannot overflow.
type Conn interface {
	ReceiveQueue

	// Post takes work requests in order and returns how many it took. It never
	// blocks. n < len(wrs) with a nil error means that the send queue is full:
	// back-pressure; take completions and post the rest. With an error,
	// wrs[n] was refused: ErrInvalid (malformed; the connection is unharmed),
	// or the connection's end (Err). Neither wrs nor its Local slices are kept.
	// A connection reserves one place for a signaled request, so that a queue
	// of unsignaled requests can always be drained. Safe for concurrent use.
	Post(wrs []WorkRequest) (n int, err error)

	// Poll takes completions that are ready, without blocking. It does not
	// allocate. Of Poll and Wait only one call at a time may be under way.
	// When the connection is dead and all that was outstanding has been
	// reported, it returns 0 and Err.
	Poll(wc []Completion) (n int, err error)

	// Wait is Poll that waits for at least one completion. When ctx ends it
	// returns 0 and ctx's error; nothing is lost. After Close: net.ErrClosed.
	Wait(ctx context.Context, wc []Completion) (n int, err error)

	// Disconnect breaks the connection: the peer sees ErrDisconnected, what is
	// outstanding is flushed to Poll and Wait. It does not block.
	Disconnect()

	// Done is closed when the connection is dead, for whatever reason.
	Done() <-chan struct{}

	// Err is why it is dead; nil while it lives. Matches ErrBroken, and the
	// cause: ErrDisconnected, a Status's error, a syscall.Errno.
	Err() error

	// Close destroys the queue pair. When it returns, the network holds no
	// buffer of this connection and neither side's requests of it have any
	// further effect on local memory. Completions not yet taken are gone; Poll
	// and Wait return net.ErrClosed. Closing twice is harmless.
	Close() error

	Info() ConnInfo
}

// ReceiveQueue takes buffers for the peer's SENDs, used in order.
type ReceiveQueue interface {
	// PostRecv behaves as Conn.Post does.
	PostRecv(rrs []RecvRequest) (n int, err error)
}

// SharedReceiveQueue feeds several connections of one domain (IBTA 10.2.9).
// Completions appear on the connection that received. Receives that were
// posted and not used come back, without completions, at Close.
type SharedReceiveQueue interface {
	ReceiveQueue
	// Close: ErrBusy while a connection uses it; twice is harmless.
	Close() error
}
