// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"context"
	"net"
)

// MaxPrivateData is the most bytes of private data a connection request or an
// acceptance may carry on every transport: an InfiniBand CM REQ has 92, of
// which rdma_cm keeps 36 for itself (rdma_connect(3)).
const MaxPrivateData = 56

// MaxRejectReason is the most bytes a rejection may carry: the private data of
// an InfiniBand CM REJ (rdma_reject(3)).
const MaxRejectReason = 148

// Provider is a transport. All methods are safe for concurrent use.
type Provider interface {
	// Name is the transport's word in a URI: "verbs" or "tcp".
	Name() string

	// Devices lists the devices that can be used now. The list changes as
	// hardware comes and goes. An empty list is not an error.
	Devices() ([]Device, error)

	// Listen accepts connection requests on addr ("host:port"; port 0 takes a
	// free one; an empty host means every address).
	Listen(ctx context.Context, addr string) (Listener, error)

	// Resolve finds the way to addr: which local device leads there. It
	// returns when the route is known or ctx ends. The caller must end the
	// Route by Connect or Close.
	Resolve(ctx context.Context, addr string) (Route, error)

	// Close releases the provider's devices. ErrBusy while a listener, a
	// route or a domain is alive. Closing twice is harmless.
	Close() error
}

// Device is one adapter (verbs), or the host's TCP stack (tcp).
type Device interface {
	// Info reports identity, limits and capabilities. Limits are final for the
	// device's life; port state is as of the call.
	Info() DeviceInfo

	// NewDomain makes an empty protection domain on the device.
	NewDomain() (ProtectionDomain, error)
}

// DeviceInfo describes a device. A limit of 0 means unlimited.
type DeviceInfo struct {
	Name      string // mlx5_0, rxe0, siw0, tcp
	Transport string // InfiniBand, RoCE, iWARP, TCP
	NUMANode  int    // -1 when unknown

	Caps Capability

	MaxRegion     uint64 // bytes in one memory region (max_mr_size)
	MaxMessage    uint64 // bytes in one work request (max_msg_sz)
	MaxSegments   int    // scatter/gather entries in one work request (max_sge)
	MaxSendQueue  int    // work requests (max_qp_wr)
	MaxRecvQueue  int
	MaxReadDepth  int // READs in flight per connection, both roles (max_qp_rd_atom, max_qp_init_rd_atom)
	MaxInlineData int // bytes of a SEND or WRITE that are copied at Post

	Ports []PortInfo
}

// PortInfo describes one port of a device; `check` prints it.
type PortInfo struct {
	Number    int
	State     string // ACTIVE, DOWN, …
	LinkLayer string // InfiniBand, Ethernet
	MTU       int    // bytes, active
	Rate      string // as the driver words it, e.g. "100 Gb/sec"
	NetDev    string
	GIDs      []GID
}

// GID is one entry of a port's GID table.
type GID struct {
	Index int
	Addr  string // the GID as an IPv6 address
	Type  string // "IB/RoCE v1", "RoCE v2", "" for iWARP
}

// Capability is a set of what a device can do beyond READ, WRITE, SEND, RECV.
type Capability uint32

const (
	// CapImmediate: OpWriteImm works. Software iWARP lacks it; nothing in rblk's protocol needs it.
	CapImmediate Capability = 1 << iota

	// CapRelaxedOrdering: AccessRelaxedOrdering has an effect.
	CapRelaxedOrdering

	// CapPlacedOnCompletion: a WRITE's success means that the bytes are in the
	// peer's memory and visible to every later reader of it, of any connection
	// or CPU. True for tcp, whose completion is the peer's answer after
	// placement. Without it, visibility needs a READ behind the WRITE on the
	// same connection.
	CapPlacedOnCompletion

	// CapSharedReceive: ProtectionDomain.NewSharedReceiveQueue works.
	CapSharedReceive
)

// Listener hands out connection requests. Safe for concurrent use.
type Listener interface {
	// Addr is where it listens, with the port it got.
	Addr() net.Addr

	// Accept waits for the next well-formed request. Peers that send garbage
	// or stall are dropped inside and never seen. After Close it returns
	// net.ErrClosed; when ctx ends, its error.
	Accept(ctx context.Context) (ConnRequest, error)

	// Close stops listening and rejects requests nobody has taken.
	// Established connections live on. Closing twice is harmless.
	Close() error
}

// ConnRequest is a peer that wants to connect. Exactly one of Accept and
// Reject ends it; one that is left alone for 10 s is rejected by the provider.
type ConnRequest interface {
	// PrivateData is what the peer sent, at most MaxPrivateData bytes. Some
	// transports pad it with zeros at the end. The slice lives as long as the
	// request.
	PrivateData() []byte

	RemoteAddr() net.Addr
	LocalAddr() net.Addr

	// Device is the device that the request came in on.
	Device() Device

	// Accept creates the queue pair in pd, which must be of Device, and
	// completes the connection; reply travels to the peer (at most
	// MaxPrivateData bytes). Receives in opts.Receives are posted before the
	// peer can send.
	Accept(ctx context.Context, pd ProtectionDomain, opts ConnOptions, reply []byte) (Conn, error)

	// Reject refuses; the peer's Connect fails with a *RejectError that
	// carries reason (at most MaxRejectReason bytes).
	Reject(reason []byte) error
}

// Route is a resolved way to a peer.
type Route interface {
	// Device is the local device of the route: the domain given to Connect
	// must be of it.
	Device() Device

	// Connect creates the queue pair in pd, sends private (at most
	// MaxPrivateData bytes) and waits for the peer's acceptance, whose reply
	// is in the Conn's Info. It ends the Route whatever its result. A refusal
	// is a *RejectError.
	Connect(ctx context.Context, pd ProtectionDomain, opts ConnOptions, private []byte) (Conn, error)

	// Close gives the route up. After Connect it does nothing.
	Close() error
}
