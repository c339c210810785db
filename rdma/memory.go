// SPDX-License-Identifier: Apache-2.0

package rdma

// Access says what a memory region may be used for. Local read is always
// allowed. IBTA spec 10.6.3; ibv_reg_mr(3).
type Access uint32

const (
	// AccessLocalWrite: the region may be the target of RECV and the
	// destination of READ. AccessRemoteWrite requires it.
	AccessLocalWrite Access = 1 << iota
	// AccessRemoteRead: peers may READ it.
	AccessRemoteRead
	// AccessRemoteWrite: peers may WRITE it.
	AccessRemoteWrite
	// AccessRelaxedOrdering: the adapter may place bytes in any order. Ignored
	// without CapRelaxedOrdering.
	AccessRelaxedOrdering
)

// ProtectionDomain ties regions to the connections that may use them: a key of
// one domain is refused on a connection of another. Safe for concurrent use.
type ProtectionDomain interface {
	// Device is the device the domain was made on.
	Device() Device

	// Register makes mem usable by the network: it is pinned, and stays where
	// it is. mem must lie outside the Go heap (mmap), must not be empty, and
	// must stay mapped until Deregister returns. It is never punched, truncated
	// or remapped meanwhile. ErrMemlock, naming need and limit, when the
	// memlock limit is too low; ErrTooLarge beyond DeviceInfo.MaxRegion.
	Register(mem []byte, access Access) (MemoryRegion, error)

	// NewSharedReceiveQueue makes a receive queue that several connections of
	// the domain take their receives from. ErrUnsupported without
	// CapSharedReceive.
	NewSharedReceiveQueue(depth int) (SharedReceiveQueue, error)

	// Close frees the domain. ErrBusy while it has regions, shared receive
	// queues or connections. Closing twice is harmless.
	Close() error
}

// MemoryRegion is registered memory. Its keys and address never change.
type MemoryRegion interface {
	// Bytes is the memory as registered.
	Bytes() []byte
	// Addr is the address of byte 0, for local segments and for peers.
	Addr() uint64
	// Len is the length in bytes.
	Len() uint64
	LKey() uint32
	// RKey is what peers present. Keys of ended regions are not soon reused.
	RKey() uint32
	Access() Access

	// Deregister ends the region. When it returns, no peer can reach the
	// memory and the network no longer touches it; peers that still try are
	// refused, which breaks their connection. The owner first takes back what
	// local work requests hold. Deregistering twice is harmless.
	Deregister() error
}

// RemoteRange is memory of the peer that this side has been told of.
type RemoteRange struct {
	Addr   uint64
	Length uint64
	RKey   uint32
}

// Segment is a piece of local registered memory (ibv_sge).
type Segment struct {
	Addr   uint64
	Length uint32
	LKey   uint32
}

// Seg is the segment [off, off+n) of mr. It panics when that lies outside.
func Seg(mr MemoryRegion, off uint64, n uint32) Segment {
	if off > mr.Len() || uint64(n) > mr.Len()-off {
		panic("rdma: segment outside its region")
	}
	return Segment{Addr: mr.Addr() + off, Length: n, LKey: mr.LKey()}
}
