// SPDX-License-Identifier: Apache-2.0

package rdmatest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"rblk/rdma"
)

// regionSize is the memory of each side of a link.
const regionSize = 1 << 20

// rig is one test's providers and everything made of them. Its methods end the
// test on failure.
type rig struct {
	*testing.T
	pair   Pair
	manual bool
	ctx    context.Context // bounds the whole test
	cancel context.CancelFunc

	mu      sync.Mutex
	cleanup []func() // last first
}

func newRig(t *testing.T, p Pair, manual bool) *rig {
	if p.Patience == 0 {
		p.Patience = 30 * time.Second
	}
	if p.RequestLife == 0 {
		p.RequestLife = 10 * time.Second
	}
	if p.Dial == nil {
		p.Dial = net.Addr.String
	}
	r := &rig{T: t, pair: p, manual: manual}
	r.ctx, r.cancel = context.WithTimeout(context.Background(), 4*p.Patience)
	r.later(func() {
		r.closes("active provider", p.Active.Close)
		r.closes("active provider, again", p.Active.Close)
		r.closes("passive provider", p.Passive.Close)
	})
	return r
}

func (r *rig) later(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cleanup = append(r.cleanup, f)
}

func (r *rig) tearDown() {
	defer r.cancel()
	for {
		r.mu.Lock()
		n := len(r.cleanup) - 1
		if n < 0 {
			r.mu.Unlock()
			return
		}
		f := r.cleanup[n]
		r.cleanup = r.cleanup[:n]
		r.mu.Unlock()
		f()
	}
}

// closes calls f, which must succeed and must end in time.
func (r *rig) closes(what string, f func() error) {
	r.Helper()
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		if err != nil {
			r.Errorf("close %s: %v", what, err)
		}
	case <-time.After(r.pair.Patience):
		buf := make([]byte, 1<<20)
		r.Errorf("close %s: hangs\n%s", what, buf[:runtime.Stack(buf, true)])
		r.FailNow()
	}
}

// must ends the test when err is not nil.
func (r *rig) must(err error, what ...any) {
	r.Helper()
	if err != nil {
		r.Fatalf("%s: %v", fmt.Sprint(what...), err)
	}
}

// memory maps n bytes outside the Go heap, until the end of the test.
func (r *rig) memory(n int) []byte {
	r.Helper()
	mem, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	r.must(err, "mmap")
	r.later(func() { r.closes("mapping", func() error { return unix.Munmap(mem) }) })
	return mem
}

func device(r *rig, p rdma.Provider) rdma.Device {
	r.Helper()
	devs, err := p.Devices()
	r.must(err, "devices")
	if len(devs) == 0 {
		r.Fatal("no device")
	}
	return devs[0]
}

func (r *rig) domain(d rdma.Device) rdma.ProtectionDomain {
	r.Helper()
	pd, err := d.NewDomain()
	r.must(err, "domain")
	r.later(func() {
		r.closes("domain", pd.Close)
		r.closes("domain, again", pd.Close)
	})
	return pd
}

func (r *rig) register(pd rdma.ProtectionDomain, mem []byte, a rdma.Access) rdma.MemoryRegion {
	r.Helper()
	mr, err := pd.Register(mem, a)
	r.must(err, "register")
	r.later(func() {
		r.closes("region", mr.Deregister)
		r.closes("region, again", mr.Deregister)
	})
	return mr
}

const allAccess = rdma.AccessLocalWrite | rdma.AccessRemoteRead | rdma.AccessRemoteWrite

// side is one end of a link.
type side struct {
	*rig
	name string
	conn rdma.Conn
	pd   rdma.ProtectionDomain
	mr   rdma.MemoryRegion // regionSize bytes, all access
	mem  []byte

	// A served side is in Wait all the time; its completions come here.
	served   bool
	incoming chan rdma.Completion
}

// link is a connection between two sides: a connects to b.
type link struct {
	*rig
	a, b *side
}

type linkOptions struct {
	active, passive rdma.ConnOptions
	unserved        bool // nobody is in the passive side's Wait
	receives        int  // of 64 bytes, from the end of each side's memory, posted before the connection stands
}

// recvSize is the size of the receives that linkOptions posts.
const recvSize = 64

// recvAt is the place of the ith receive.
func recvAt(mr rdma.MemoryRegion, i int) rdma.RecvRequest {
	return rdma.RecvRequest{ID: uint64(i), Local: []rdma.Segment{rdma.Seg(mr, regionSize-uint64(i+1)*recvSize, recvSize)}}
}

func (r *rig) newSide(name string, pd rdma.ProtectionDomain) *side {
	s := &side{rig: r, name: name, pd: pd}
	s.mem = r.memory(regionSize)
	s.mr = r.register(pd, s.mem, allAccess)
	return s
}

func (r *rig) listen() rdma.Listener {
	r.Helper()
	l, err := r.pair.Passive.Listen(r.ctx, r.pair.Listen)
	r.must(err, "listen")
	r.later(func() {
		r.closes("listener", l.Close)
		r.closes("listener, again", l.Close)
	})
	return l
}

// connect makes a link with new domains and memory.
func (r *rig) connect(o linkOptions) *link {
	r.Helper()
	l := r.listen()
	req, route := make(chan rdma.ConnRequest, 1), r.resolve(l)
	go func() {
		q, _ := l.Accept(r.ctx)
		req <- q
	}()
	lk := &link{rig: r, a: r.newSide("active", r.domain(route.Device()))}
	type result struct {
		c   rdma.Conn
		err error
	}
	dialed := make(chan result, 1)
	ao := o.active
	r.shape(&ao, lk.a, o.receives)
	go func() {
		c, err := route.Connect(r.ctx, lk.a.pd, ao, []byte("hello"))
		dialed <- result{c, err}
	}()
	q := <-req
	if q == nil {
		r.Fatal("no connection request")
	}
	lk.b = r.newSide("passive", r.domain(q.Device()))
	po := o.passive
	r.shape(&po, lk.b, o.receives)
	bc, err := q.Accept(r.ctx, lk.b.pd, po, []byte("welcome"))
	r.must(err, "accept")
	lk.b.adopt(bc, !o.unserved)
	d := <-dialed
	r.must(d.err, "connect")
	lk.a.adopt(d.c, false)
	return lk
}

func (r *rig) shape(o *rdma.ConnOptions, s *side, receives int) {
	o.ManualProgress = r.manual
	for i := range receives {
		o.Receives = append(o.Receives, recvAt(s.mr, i))
	}
	if o.RecvDepth == 0 {
		o.RecvDepth = max(64, receives)
	}
}

func (r *rig) resolve(l rdma.Listener) rdma.Route {
	r.Helper()
	route, err := r.pair.Active.Resolve(r.ctx, r.pair.Dial(l.Addr()))
	r.must(err, "resolve")
	r.later(func() { r.closes("route", route.Close) })
	return route
}

// adopt makes c the side's connection and, when serve is set, keeps a goroutine
// in Wait until the connection's end.
func (s *side) adopt(c rdma.Conn, serve bool) {
	s.conn = c
	s.served = serve
	var wg sync.WaitGroup
	if serve {
		s.incoming = make(chan rdma.Completion, 1<<16)
		wg.Go(s.serve)
	}
	s.later(func() {
		s.closes(s.name+" connection", c.Close)
		s.closes(s.name+" connection, again", c.Close)
		wg.Wait()
	})
}

func (s *side) serve() {
	defer close(s.incoming)
	wc := make([]rdma.Completion, 16)
	for {
		n, err := s.conn.Wait(context.Background(), wc)
		for _, c := range wc[:n] {
			s.incoming <- c
		}
		if err != nil {
			return
		}
	}
}

// next waits for one completion.
func (s *side) next() rdma.Completion {
	s.Helper()
	if s.served {
		select {
		case c, ok := <-s.incoming:
			if !ok {
				s.Fatalf("%s: no completion: %v", s.name, s.conn.Err())
			}
			return c
		case <-time.After(s.pair.Patience):
			s.Fatalf("%s: no completion in time", s.name)
		}
	}
	ctx, cancel := context.WithTimeout(s.ctx, s.pair.Patience)
	defer cancel()
	var wc [1]rdma.Completion
	n, err := s.conn.Wait(ctx, wc[:])
	if n != 1 {
		s.Fatalf("%s: no completion: %v", s.name, err)
	}
	return wc[0]
}

// expect waits for one completion, which must be a success with that id.
func (s *side) expect(id uint64) rdma.Completion {
	s.Helper()
	c := s.next()
	if c.ID != id || c.Status != rdma.StatusOK {
		s.Fatalf("%s: completion %d %v, want %d ok", s.name, c.ID, c.Status, id)
	}
	return c
}

// rest takes completions until the connection reports its end.
func (s *side) rest() []rdma.Completion {
	s.Helper()
	var all []rdma.Completion
	if s.served {
		for {
			select {
			case c, ok := <-s.incoming:
				if !ok {
					return all
				}
				all = append(all, c)
			case <-time.After(s.pair.Patience):
				s.Fatalf("%s: the connection does not end", s.name)
			}
		}
	}
	ctx, cancel := context.WithTimeout(s.ctx, s.pair.Patience)
	defer cancel()
	wc := make([]rdma.Completion, 8)
	for {
		n, err := s.conn.Wait(ctx, wc)
		all = append(all, wc[:n]...)
		if errors.Is(err, rdma.ErrBroken) {
			return all
		}
		if err != nil {
			s.Fatalf("%s: wait for the end: %v", s.name, err)
		}
	}
}

// dies waits for the connection's end.
func (s *side) dies() error {
	s.Helper()
	// With manual progress somebody has to look.
	if s.manual && !s.served {
		s.rest()
	}
	select {
	case <-s.conn.Done():
	case <-time.After(s.pair.Patience):
		s.Fatalf("%s: the connection lives on", s.name)
	}
	err := s.conn.Err()
	if !errors.Is(err, rdma.ErrBroken) {
		s.Fatalf("%s: error %v does not match ErrBroken", s.name, err)
	}
	return err
}

// post posts all of wrs, which must fit.
func (s *side) post(wrs ...rdma.WorkRequest) {
	s.Helper()
	n, err := s.conn.Post(wrs)
	if n != len(wrs) || err != nil {
		s.Fatalf("%s: posted %d of %d: %v", s.name, n, len(wrs), err)
	}
}

// postAll posts wrs, taking completions when the queue is full, and hands them
// to got.
func (s *side) postAll(wrs []rdma.WorkRequest, got func(rdma.Completion)) {
	s.Helper()
	for len(wrs) > 0 {
		n, err := s.conn.Post(wrs)
		s.must(err, s.name, ": post")
		wrs = wrs[n:]
		if len(wrs) > 0 {
			got(s.next())
		}
	}
}

// at is the remote address of byte off of s.
func (s *side) at(off uint64) rdma.RemoteAddr {
	return rdma.RemoteAddr{Addr: s.mr.Addr() + off, RKey: s.mr.RKey()}
}

// seg is n bytes of s at off.
func (s *side) seg(off uint64, n int) []rdma.Segment {
	return []rdma.Segment{rdma.Seg(s.mr, off, uint32(n))}
}

func (s *side) readWR(id uint64, from *side, remote, local uint64, n int) rdma.WorkRequest {
	return rdma.WorkRequest{ID: id, Op: rdma.OpRead, Flags: rdma.WRSignaled, Local: s.seg(local, n), Remote: from.at(remote)}
}

func (s *side) writeWR(id uint64, to *side, remote, local uint64, n int) rdma.WorkRequest {
	return rdma.WorkRequest{ID: id, Op: rdma.OpWrite, Flags: rdma.WRSignaled, Local: s.seg(local, n), Remote: to.at(remote)}
}

func (s *side) sendWR(id uint64, local uint64, n int) rdma.WorkRequest {
	return rdma.WorkRequest{ID: id, Op: rdma.OpSend, Flags: rdma.WRSignaled, Local: s.seg(local, n)}
}

// read brings n bytes from b to a and checks them.
func (l *link) read(remote, local uint64, n int) {
	l.Helper()
	fill(l.b.mem[remote:remote+uint64(n)], remote+uint64(n))
	l.a.post(l.a.readWR(1, l.b, remote, local, n))
	c := l.a.expect(1)
	if c.Op != rdma.OpRead || c.Length != uint32(n) {
		l.Fatalf("completion %v of %d bytes, want read of %d", c.Op, c.Length, n)
	}
	l.same(l.a.mem[local:local+uint64(n)], l.b.mem[remote:remote+uint64(n)])
}

// write takes n bytes from a to b and checks them.
func (l *link) write(remote, local uint64, n int) {
	l.Helper()
	fill(l.a.mem[local:local+uint64(n)], local+uint64(n)+7)
	// The READ of a byte behind it proves placement on every device.
	w := l.a.writeWR(1, l.b, remote, local, n)
	l.a.post(w, l.a.readWR(2, l.b, remote, regionSize-1, min(n, 1)))
	if c := l.a.expect(1); c.Op != rdma.OpWrite {
		l.Fatalf("completion %v, want write", c.Op)
	}
	l.a.expect(2)
	l.same(l.b.mem[remote:remote+uint64(n)], l.a.mem[local:local+uint64(n)])
}

func (l *link) same(got, want []byte) {
	l.Helper()
	if bytes.Equal(got, want) {
		return
	}
	for i := range got {
		if got[i] != want[i] {
			l.Fatalf("byte %d of %d: %#x, want %#x", i, len(got), got[i], want[i])
		}
	}
}

// fill writes a pattern that differs between seeds.
func fill(b []byte, seed uint64) {
	x := seed*0x9e3779b97f4a7c15 + 1
	for i := range b {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		b[i] = byte(x)
	}
}
