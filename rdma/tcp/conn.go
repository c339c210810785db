// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"rblk/rdma"
)

// sendEntry is a posted work request. It stays in the ring until the peer has
// answered it or a later one.
type sendEntry struct {
	id      uint64
	op      rdma.Opcode
	flags   rdma.WRFlags
	length  uint32
	segs    [][]byte // READ: where the answer goes; else what is sent
	regions []*region
	inline  []byte // backing of an inlined payload
	out     frame
	status  rdma.Status // why it failed
}

// completion is an entry of the completion queue with what taking it frees.
type completion struct {
	rdma.Completion
	sends uint16 // places in the send queue
	recvs uint16 // places in the receive queue
}

// conn is a queue pair. Its one lock is held for bookkeeping, never over a
// system call.
type conn struct {
	// set once
	dom    *domain
	shared *sharedQueue
	sock   *net.TCPConn
	raw    syscall.RawConn
	info   rdma.ConnInfo
	manual bool
	rnr    time.Duration // of the peer's messages here
	done   chan struct{} // closed when dead
	ready  chan struct{} // one token: completions may be there
	once   sync.Once     // Close

	mu     sync.Mutex
	cond   *sync.Cond // on mu: a receive was posted, a use ended, reader or writer left, death
	err    error      // guarded by mu: why it is dead
	closed bool       // guarded by mu: Close has begun
	// settled: dead, and nothing touches memory any more. Guarded by mu.
	settled bool

	// The send queue; all guarded by mu. Requests are numbered as the ring
	// counts them: the peer counts along. A request ends when it is answered
	// and the writer has let go of it, which it may learn after the answer came:
	// sqHead <= min(sqDone, sqSent), sqDone <= sqGiven, sqSent <= sqGiven <= sqNext <= sqTail.
	sq      []sendEntry
	sqHead  uint64 // oldest not ended
	sqDone  uint64 // oldest not answered
	sqSent  uint64 // oldest not wholly written
	sqGiven uint64 // oldest that no system call has seen: an answer to it is a lie
	sqNext  uint64 // first not handed to the writer
	sqTail  uint64 // next to be posted
	sqUsed  int    // places taken: posted and not yet taken as a completion
	retired int    // places of unsignaled requests that the next send completion frees
	reads   int    // READs handed to the writer and not answered

	rq     recvQueue // guarded by mu
	rqUsed int       // guarded by mu: as sqUsed

	cq     []completion // guarded by mu: a ring
	cqHead uint64       // guarded by mu
	cqTail uint64       // guarded by mu

	out outgoing // guarded by mu, but for its scratch
	in  incoming // the reader's, but for what it says is guarded
}

var _ rdma.Conn = (*conn)(nil)

// tcpUserTimeout is TCP_USER_TIMEOUT of tcp(7), which package syscall lacks.
const tcpUserTimeout = 18

// detectDeath makes the kernel break the connection when the peer's machine is
// silent for userTimeout, with bytes under way or without.
func detectDeath(sock *net.TCPConn, raw syscall.RawConn) error {
	probes := net.KeepAliveConfig{Enable: true, Idle: userTimeout / 2, Interval: userTimeout / 4, Count: 2}
	if err := sock.SetKeepAliveConfig(probes); err != nil {
		return err
	}
	var err error
	ctlErr := raw.Control(func(fd uintptr) {
		err = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpUserTimeout, int(userTimeout.Milliseconds()))
	})
	return errors.Join(err, ctlErr)
}

// newConn takes sock over when it succeeds. The connection does nothing until
// start.
func newConn(sock *net.TCPConn, d *domain, o rdma.ConnOptions, t terms) (*conn, error) {
	raw, err := sock.SyscallConn()
	if err != nil {
		return nil, err
	}
	c := &conn{
		dom: d, sock: sock, raw: raw, manual: o.ManualProgress, rnr: t.rnr,
		done: make(chan struct{}), ready: make(chan struct{}, 1),
		sq: make([]sendEntry, o.SendDepth), rq: newRecvQueue(o.RecvDepth),
		info: rdma.ConnInfo{
			LocalAddr: sock.LocalAddr(), RemoteAddr: sock.RemoteAddr(), Device: d.Device(), PrivateData: t.private,
			SendDepth: o.SendDepth, RecvDepth: o.RecvDepth, ReadDepth: t.reads, Segments: o.Segments, Inline: o.Inline,
		},
	}
	if err := detectDeath(sock, raw); err != nil {
		return nil, err
	}
	c.cond = sync.NewCond(&c.mu)
	depth := o.SendDepth + o.RecvDepth
	if o.SharedReceive != nil {
		s, ok := o.SharedReceive.(*sharedQueue)
		if !ok || s.dom != d {
			return nil, fmt.Errorf("%w: shared receive queue of another domain", rdma.ErrInvalid)
		}
		if len(o.Receives) > 0 {
			return nil, fmt.Errorf("%w: receives of its own beside a shared receive queue", rdma.ErrInvalid)
		}
		c.shared = s
		depth += len(s.q.ring)
	}
	c.cq = make([]completion, depth)
	c.out.init(c, t.reads)
	c.in.init(c)
	for i := range o.Receives {
		if err := c.rq.add(d, &o.Receives[i]); err != nil {
			return nil, err
		}
		c.rqUsed++
	}
	if err := c.join(); err != nil {
		return nil, err
	}
	return c, nil
}

// start begins automatic progress.
func (c *conn) start() {
	if !c.manual {
		c.in.active = true
		go c.run()
	}
}

// join makes the connection known to its parents.
func (c *conn) join() error {
	s := c.shared
	if s != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
	}
	c.dom.mu.Lock()
	defer c.dom.mu.Unlock()
	if c.dom.closed || s != nil && s.closed {
		return fmt.Errorf("%w: domain or shared receive queue is closed", rdma.ErrInvalid)
	}
	if s != nil {
		s.users[c] = struct{}{}
	}
	c.dom.conns[c] = struct{}{}
	c.dom.p.conns.Add(1)
	return nil
}

func (c *conn) Info() rdma.ConnInfo   { return c.info }
func (c *conn) Done() <-chan struct{} { return c.done }

func (c *conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// brokenError is why a connection is dead.
type brokenError struct{ why error }

func (e *brokenError) Error() string   { return "tcp: connection broken: " + e.why.Error() }
func (e *brokenError) Unwrap() []error { return []error{rdma.ErrBroken, e.why} }

// fail marks the connection dead. The first reason counts. Caller holds mu.
func (c *conn) fail(why error) {
	if c.err != nil {
		return
	}
	c.err = &brokenError{why}
	close(c.done)
	if c.out.nak {
		// The NAK must arrive: the writer closes when it is out, or when the
		// peer does not take it.
		c.in.poke()
		c.sock.SetWriteDeadline(time.Now().Add(lingerTime))
	} else {
		c.sock.Close()
	}
	c.settle()
}

// settle flushes what is outstanding once nothing touches memory any more.
// Caller holds mu.
func (c *conn) settle() {
	c.cond.Broadcast()
	if c.err == nil || c.in.active || c.out.writing || c.settled {
		return
	}
	c.settled = true
	if c.out.nakSent {
		c.dom.p.linger(c.sock)
	} else {
		c.sock.Close()
	}
	c.out.drop()
	c.in.region = nil
	c.sqSent = c.sqDone // nothing writes any more
	c.reap()
	for ; c.sqHead != c.sqTail; c.sqHead++ {
		e := c.entry(c.sqHead)
		if e.status == rdma.StatusOK {
			e.status = rdma.StatusFlushed
		}
		c.complete(rdma.Completion{ID: e.id, Op: e.op, Status: e.status}, 1, 0)
		e.drop()
	}
	c.sqDone, c.sqSent, c.sqGiven, c.sqNext = c.sqHead, c.sqHead, c.sqHead, c.sqHead
	c.reads = 0
	var r recv
	if c.in.takeCurrent(&r) {
		c.complete(rdma.Completion{ID: r.id, Op: rdma.OpRecv, Status: rdma.StatusFlushed}, 0, 1)
	}
	for c.shared == nil && !c.rq.empty() {
		c.rq.take(&r)
		c.complete(rdma.Completion{ID: r.id, Op: rdma.OpRecv, Status: rdma.StatusFlushed}, 0, 1)
	}
	c.wake()
}

// complete puts a completion into the queue. Caller holds mu.
func (c *conn) complete(wc rdma.Completion, sends, recvs int) {
	e := &c.cq[c.cqTail%uint64(len(c.cq))]
	*e = completion{wc, uint16(sends), uint16(recvs)}
	c.cqTail++
}

// wake tells a waiter of automatic progress. Caller holds mu.
func (c *conn) wake() {
	select {
	case c.ready <- struct{}{}:
	default:
	}
}

func (e *sendEntry) drop() {
	clear(e.segs)
	e.segs = e.segs[:0]
	clear(e.regions)
	e.regions = e.regions[:0]
	e.status = rdma.StatusOK
}

func (c *conn) entry(n uint64) *sendEntry { return &c.sq[n%uint64(len(c.sq))] }

// Post takes requests and starts them.
func (c *conn) Post(wrs []rdma.WorkRequest) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := 0
	var err error
	for n < len(wrs) {
		if c.err != nil {
			err = c.err
			break
		}
		free := len(c.sq) - c.sqUsed
		if free == 0 || free == 1 && wrs[n].Flags&rdma.WRSignaled == 0 {
			break
		}
		if err = c.post(&wrs[n]); err != nil {
			break
		}
		n++
	}
	c.pump()
	c.out.flush()
	return n, err
}

// post puts one request into the ring. Caller holds mu.
func (c *conn) post(wr *rdma.WorkRequest) error {
	e := c.entry(c.sqTail)
	if len(wr.Local) > c.info.Segments {
		return fmt.Errorf("tcp: post: %w: %d segments, at most %d", rdma.ErrInvalid, len(wr.Local), c.info.Segments)
	}
	h := header{addr: wr.Remote.Addr, rkey: wr.Remote.RKey}
	switch wr.Op {
	case rdma.OpRead:
		h.typ = frameReadReq
	case rdma.OpWrite:
		h.typ = frameWrite
	case rdma.OpWriteImm:
		h.typ, h.flags, h.imm = frameWrite, flagImm, wr.Imm
	case rdma.OpSend:
		h.typ, h.addr, h.rkey = frameSend, 0, 0
	default:
		return fmt.Errorf("tcp: post: %w: %v", rdma.ErrInvalid, wr.Op)
	}
	e.drop()
	total := uint64(0)
	for _, s := range wr.Local {
		b, r, err := c.dom.local(s, wr.Op == rdma.OpRead)
		if err != nil && wr.Flags&rdma.WRInline != 0 && int(s.Length) <= c.info.Inline {
			b, r, err = unregistered(s), nil, nil
		}
		if err != nil {
			e.drop()
			return err
		}
		total += uint64(len(b))
		e.segs, e.regions = append(e.segs, b), append(e.regions, r)
	}
	if total > maxMessage {
		e.drop()
		return fmt.Errorf("tcp: post: %w: %d bytes, at most %d", rdma.ErrInvalid, total, maxMessage)
	}
	if wr.Flags&rdma.WRInline != 0 {
		if err := e.copyInline(c, wr.Op, int(total)); err != nil {
			return err
		}
	}
	if wr.Flags&rdma.WRSignaled != 0 && wr.Op != rdma.OpRead {
		h.flags |= flagAck
	}
	e.id, e.op, e.flags, e.length = wr.ID, wr.Op, wr.Flags, uint32(total)
	h.length, h.seq = e.length, c.sqTail
	payload := e.segs
	if wr.Op == rdma.OpRead {
		payload = nil
	}
	e.out.set(&h, payload, nil)
	e.out.request = true
	c.sqTail++
	c.sqUsed++
	return nil
}

// copyInline moves the payload into the entry.
func (e *sendEntry) copyInline(c *conn, op rdma.Opcode, n int) error {
	if op == rdma.OpRead || n > c.info.Inline {
		e.drop()
		return fmt.Errorf("tcp: post: %w: inline %v of %d bytes, at most %d", rdma.ErrInvalid, op, n, c.info.Inline)
	}
	e.inline = e.inline[:0]
	for _, b := range e.segs {
		e.inline = append(e.inline, b...)
	}
	e.drop()
	e.segs = append(e.segs, e.inline)
	return nil
}

// pump hands requests to the writer as far as the READ depth and fences allow.
// Caller holds mu.
func (c *conn) pump() {
	for ; c.sqNext != c.sqTail; c.sqNext++ {
		e := c.entry(c.sqNext)
		if e.flags&rdma.WRFence != 0 && c.reads > 0 {
			return
		}
		if e.op == rdma.OpRead {
			if c.reads >= max(1, c.info.ReadDepth) {
				return
			}
			c.reads++
		}
		c.out.push(&e.out)
	}
}

// answered notes that every request before number n is done. Caller holds mu.
func (c *conn) answered(n uint64) {
	for ; c.sqDone != n; c.sqDone++ {
		if c.entry(c.sqDone).op == rdma.OpRead {
			c.reads--
		}
	}
	c.reap()
}

// reap ends the requests that are answered and wholly written. Caller holds
// mu.
func (c *conn) reap() {
	end := min(c.sqDone, c.sqSent)
	if c.sqHead >= end {
		return
	}
	for ; c.sqHead != end; c.sqHead++ {
		e := c.entry(c.sqHead)
		c.retired++
		if e.flags&rdma.WRSignaled != 0 {
			c.complete(rdma.Completion{ID: e.id, Op: e.op, Length: e.length}, c.retired, 0)
			c.retired = 0
		}
		e.drop()
	}
	c.cond.Broadcast()
}

// refused notes that request n has failed; what is before it is done. Caller
// holds mu.
func (c *conn) refused(n uint64, s rdma.Status) {
	c.answered(n)
	c.entry(n).status = s
	c.fail(s.Err())
}

// unregistered is the memory of an inlined segment that names no region.
func unregistered(s rdma.Segment) []byte {
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&s.Addr)), s.Length)
}

func (c *conn) PostRecv(rrs []rdma.RecvRequest) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.shared != nil {
		return 0, fmt.Errorf("tcp: post receive: %w: the connection uses a shared queue", rdma.ErrInvalid)
	}
	for n := range rrs {
		if c.err != nil {
			return n, c.err
		}
		if c.rqUsed >= len(c.rq.ring) {
			return n, nil
		}
		if err := c.rq.add(c.dom, &rrs[n]); err != nil {
			return n, err
		}
		c.rqUsed++
		c.cond.Broadcast()
	}
	return len(rrs), nil
}

// take moves completions to wc. Caller holds mu.
func (c *conn) take(wc []rdma.Completion) (int, error) {
	if c.closed {
		return 0, net.ErrClosed
	}
	n := 0
	for n < len(wc) && c.cqHead != c.cqTail {
		e := &c.cq[c.cqHead%uint64(len(c.cq))]
		wc[n] = e.Completion
		c.sqUsed -= int(e.sends)
		if c.shared == nil {
			c.rqUsed -= int(e.recvs)
		}
		c.cqHead++
		n++
	}
	if n > 0 && c.cqHead != c.cqTail {
		c.wake()
	}
	if n > 0 && c.shared != nil {
		c.cond.Broadcast() // a message may be waiting for room
	}
	if n == 0 && c.settled {
		return 0, c.err
	}
	return n, nil
}

func (c *conn) Poll(wc []rdma.Completion) (int, error) {
	c.mu.Lock()
	n, err := c.take(wc)
	if n > 0 || err != nil || !c.manual || c.err != nil {
		c.mu.Unlock()
		return n, err
	}
	c.in.active = true
	c.in.unpoke()
	c.mu.Unlock()
	c.in.step(false)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.in.active = false
	c.settle()
	return c.take(wc)
}

func (c *conn) Wait(ctx context.Context, wc []rdma.Completion) (int, error) {
	if len(wc) == 0 {
		return 0, nil
	}
	if c.manual {
		return c.waitManual(ctx, wc)
	}
	for {
		c.mu.Lock()
		n, err := c.take(wc)
		c.mu.Unlock()
		if n > 0 || err != nil {
			return n, err
		}
		select {
		case <-c.ready:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

// waitManual reads the socket until there is something to take.
func (c *conn) waitManual(ctx context.Context, wc []rdma.Completion) (int, error) {
	for {
		c.mu.Lock()
		n, err := c.take(wc)
		if n > 0 || err != nil {
			c.mu.Unlock()
			return n, err
		}
		if ctx.Err() != nil {
			c.mu.Unlock()
			return 0, ctx.Err()
		}
		if c.err != nil {
			// Dead, and the writer has not left yet.
			c.cond.Wait()
			c.mu.Unlock()
			continue
		}
		c.in.watch(ctx)
		c.in.active = true
		c.mu.Unlock()
		c.in.step(true)
		c.mu.Lock()
		c.in.active = false
		c.in.waiting = nil
		c.settle()
		c.mu.Unlock()
	}
}

// run is the reader of automatic progress.
func (c *conn) run() {
	for c.in.step(true) {
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.in.active = false
	c.settle()
}

func (c *conn) Disconnect() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fail(rdma.ErrDisconnected)
}

func (c *conn) Close() error {
	c.mu.Lock()
	c.closed = true
	c.fail(net.ErrClosed)
	c.in.poke()
	c.wake()
	for !c.settled {
		c.cond.Wait()
	}
	c.mu.Unlock()
	c.once.Do(func() {
		c.in.stopWatch()
		if c.shared != nil {
			c.shared.mu.Lock()
			delete(c.shared.users, c)
			c.shared.mu.Unlock()
		}
		c.dom.mu.Lock()
		delete(c.dom.conns, c)
		c.dom.mu.Unlock()
		c.dom.p.conns.Add(-1)
	})
	return nil
}

// leave returns when the connection no longer touches r. One that still does
// at deadline is broken first.
func (c *conn) leave(r *region, deadline time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.touches(r) {
		return
	}
	timer := time.AfterFunc(time.Until(deadline), func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.fail(errRegionGone)
	})
	defer timer.Stop()
	for c.touches(r) {
		c.cond.Wait()
	}
}

var errRegionGone = errors.New("memory region deregistered while in use")

// touches tells whether anything under way names r. Caller holds mu.
func (c *conn) touches(r *region) bool {
	for i := c.sqHead; i != c.sqTail; i++ {
		if touches(c.entry(i).regions, r) {
			return true
		}
	}
	return c.in.uses(r) || c.out.uses(r)
}
