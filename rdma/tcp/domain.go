// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"time"
	"unsafe"

	"rblk/rdma"
)

// domain is a protection domain. Lock order: conn.mu, then domain.mu.
type domain struct {
	p *provider

	mu      sync.RWMutex
	regions map[uint32]*region // guarded by mu: by key
	conns   map[*conn]struct{} // guarded by mu
	queues  int                // guarded by mu: shared receive queues
	closed  bool               // guarded by mu
}

func (d *domain) Device() rdma.Device { return &d.p.dev }

func (d *domain) Register(mem []byte, access rdma.Access) (rdma.MemoryRegion, error) {
	if len(mem) == 0 {
		return nil, fmt.Errorf("tcp: register: %w: empty memory", rdma.ErrInvalid)
	}
	if access&rdma.AccessRemoteWrite != 0 && access&rdma.AccessLocalWrite == 0 {
		return nil, fmt.Errorf("tcp: register: %w: remote write needs local write", rdma.ErrInvalid)
	}
	r := &region{dom: d, mem: mem, addr: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem)))), access: access}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, fmt.Errorf("tcp: register: %w: domain is closed", rdma.ErrInvalid)
	}
	for {
		// Random keys: one that has ended does not come back soon, and none
		// tells of another.
		r.key = rand.Uint32()
		if _, taken := d.regions[r.key]; r.key != 0 && !taken {
			break
		}
	}
	d.regions[r.key] = r
	d.p.regions.Add(1)
	return r, nil
}

func (d *domain) NewSharedReceiveQueue(depth int) (rdma.SharedReceiveQueue, error) {
	if depth <= 0 || depth > maxQueue {
		return nil, fmt.Errorf("tcp: shared receive queue of %d: %w (1 to %d)", depth, rdma.ErrTooLarge, maxQueue)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil, fmt.Errorf("tcp: shared receive queue: %w: domain is closed", rdma.ErrInvalid)
	}
	d.queues++
	return &sharedQueue{dom: d, q: newRecvQueue(depth), users: map[*conn]struct{}{}}, nil
}

func (d *domain) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.regions) != 0 || len(d.conns) != 0 || d.queues != 0 {
		return fmt.Errorf("tcp: domain: %w", rdma.ErrBusy)
	}
	if !d.closed {
		d.closed = true
		d.p.domains.Add(-1)
	}
	return nil
}

// local finds the bytes of a segment; write says whether they will be written.
func (d *domain) local(s rdma.Segment, write bool) ([]byte, *region, error) {
	d.mu.RLock()
	r := d.regions[s.LKey]
	d.mu.RUnlock()
	if r == nil || !r.holds(s.Addr, uint64(s.Length)) || write && r.access&rdma.AccessLocalWrite == 0 {
		return nil, nil, fmt.Errorf("tcp: %w: segment %#x+%d with lkey %#x", rdma.ErrInvalid, s.Addr, s.Length, s.LKey)
	}
	off := s.Addr - r.addr
	return r.mem[off : off+uint64(s.Length) : off+uint64(s.Length)], r, nil
}

// remote finds the bytes that a peer asks for; nil when it may not have them.
func (d *domain) remote(addr uint64, n uint32, key uint32, need rdma.Access) ([]byte, *region) {
	d.mu.RLock()
	r := d.regions[key]
	d.mu.RUnlock()
	if r == nil || r.access&need == 0 || !r.holds(addr, uint64(n)) {
		return nil, nil
	}
	off := addr - r.addr
	return r.mem[off : off+uint64(n) : off+uint64(n)], r
}

// region is a memory region; its one key serves as lkey and rkey.
type region struct {
	dom    *domain
	mem    []byte
	addr   uint64
	key    uint32
	access rdma.Access
}

func (r *region) Bytes() []byte       { return r.mem }
func (r *region) Addr() uint64        { return r.addr }
func (r *region) Len() uint64         { return uint64(len(r.mem)) }
func (r *region) LKey() uint32        { return r.key }
func (r *region) RKey() uint32        { return r.key }
func (r *region) Access() rdma.Access { return r.access }

// holds tells whether [addr, addr+n) lies inside, without overflow.
func (r *region) holds(addr, n uint64) bool {
	return addr >= r.addr && addr-r.addr <= r.Len() && n <= r.Len()-(addr-r.addr)
}

// Deregister takes the keys away first; then every connection of the domain is
// asked whether it still touches the memory, and waited for. A connection finds
// a region and notes its use under one lock, so none can slip between.
func (r *region) Deregister() error {
	d := r.dom
	d.mu.Lock()
	if d.regions[r.key] != r {
		d.mu.Unlock()
		return nil
	}
	delete(d.regions, r.key)
	conns := make([]*conn, 0, len(d.conns))
	for c := range d.conns {
		conns = append(conns, c)
	}
	d.mu.Unlock()
	deadline := time.Now().Add(deregisterGrace)
	for _, c := range conns {
		c.leave(r, deadline)
	}
	d.p.regions.Add(-1)
	return nil
}

// recv is a posted receive. Its segments are checked when it is posted, and
// found anew when a message comes: the region may have ended meanwhile.
type recv struct {
	id    uint64
	local []rdma.Segment

	// by resolve
	length  int
	segs    [][]byte
	regions []*region
}

// resolve finds the memory of e.
func (e *recv) resolve(d *domain) error {
	e.length, e.segs, e.regions = 0, e.segs[:0], e.regions[:0]
	for _, s := range e.local {
		b, r, err := d.local(s, true)
		if err != nil {
			return err
		}
		e.length += len(b)
		e.segs, e.regions = append(e.segs, b), append(e.regions, r)
	}
	return nil
}

// recvQueue is a ring of posted receives.
type recvQueue struct {
	ring []recv
	head uint64
	tail uint64
}

func newRecvQueue(depth int) recvQueue { return recvQueue{ring: make([]recv, depth)} }

func (q *recvQueue) full() bool  { return q.tail-q.head == uint64(len(q.ring)) }
func (q *recvQueue) empty() bool { return q.tail == q.head }

// add checks and appends a request; the queue must not be full.
func (q *recvQueue) add(d *domain, rr *rdma.RecvRequest) error {
	if len(rr.Local) > maxSegments {
		return fmt.Errorf("tcp: %w: %d segments", rdma.ErrInvalid, len(rr.Local))
	}
	e := &q.ring[q.tail%uint64(len(q.ring))]
	for _, s := range rr.Local {
		if _, _, err := d.local(s, true); err != nil {
			return err
		}
	}
	e.id, e.local = rr.ID, append(e.local[:0], rr.Local...)
	q.tail++
	return nil
}

// take moves the oldest receive into e, whose slices are reused.
func (q *recvQueue) take(e *recv) {
	src := &q.ring[q.head%uint64(len(q.ring))]
	*e, *src = *src, *e
	q.head++
}

func touches(rs []*region, r *region) bool {
	for _, x := range rs {
		if x == r {
			return true
		}
	}
	return false
}

// sharedQueue is a shared receive queue. Lock order: conn.mu, mu, domain.mu.
type sharedQueue struct {
	dom *domain

	mu     sync.Mutex
	q      recvQueue          // guarded by mu
	users  map[*conn]struct{} // guarded by mu
	closed bool               // guarded by mu
}

func (s *sharedQueue) PostRecv(rrs []rdma.RecvRequest) (int, error) {
	s.mu.Lock()
	n := 0
	var err error
	if s.closed {
		err = fmt.Errorf("tcp: shared receive queue: %w", rdma.ErrInvalid)
	}
	for n < len(rrs) && err == nil && !s.q.full() {
		if err = s.q.add(s.dom, &rrs[n]); err == nil {
			n++
		}
	}
	users := make([]*conn, 0, len(s.users))
	for c := range s.users {
		users = append(users, c)
	}
	s.mu.Unlock()
	for _, c := range users {
		c.mu.Lock()
		c.cond.Broadcast() // one may be waiting for a receive
		c.mu.Unlock()
	}
	return n, err
}

// take moves the oldest receive into e; false when there is none.
func (s *sharedQueue) take(e *recv) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.q.empty() {
		return false
	}
	s.q.take(e)
	return true
}

func (s *sharedQueue) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.users) != 0 {
		return fmt.Errorf("tcp: shared receive queue: %w", rdma.ErrBusy)
	}
	if !s.closed {
		s.closed = true
		s.dom.mu.Lock()
		s.dom.queues--
		s.dom.mu.Unlock()
	}
	return nil
}
