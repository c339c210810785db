// SPDX-License-Identifier: Apache-2.0

package faulty

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"rblk/rdma"
)

// held is a request that the layer has taken and the provider below has not.
type held struct {
	wr     rdma.WorkRequest
	judged bool        // the rules have been asked
	action Action      // of the rule that acts on it
	ended  rdma.Status // a rule ended the connection at it, so
	late   bool        // of HoldLate
}

// Conn is a connection with faults.
type Conn struct {
	inner  rdma.Conn
	p      *Provider
	pd     rdma.ProtectionDomain // below the layer
	number int
	kick   chan struct{} // one token: look again

	mu     sync.Mutex
	queue  []held            // guarded by mu
	gate   *Gate             // guarded by mu: what queue[0] waits for
	frozen *Gate             // guarded by mu: completions wait for it
	stash  []rdma.Completion // guarded by mu: taken from below while frozen
	tail   []rdma.Completion // guarded by mu: made here, reported behind the last of below
	broken bool              // guarded by mu: a rule has ended the connection
	closed bool              // guarded by mu
	// outlives: a late WRITE keeps the connection below after Close. Guarded by mu.
	outlives bool
	copies   []*lateBytes // guarded by mu: until the end of inner
}

var _ rdma.Conn = (*Conn)(nil)

// Number says which of the provider's connections this is, from 1.
func (c *Conn) Number() int { return c.number }

func (c *Conn) Done() <-chan struct{} { return c.inner.Done() }
func (c *Conn) Err() error            { return c.inner.Err() }
func (c *Conn) Disconnect()           { c.inner.Disconnect() }

func (c *Conn) Info() rdma.ConnInfo {
	info := c.inner.Info()
	info.Device = &device{info.Device, c.p}
	return info
}

func (c *Conn) PostRecv(rrs []rdma.RecvRequest) (int, error) { return c.inner.PostRecv(rrs) }

// Post passes requests on, up to the first that a rule acts on; that one and
// what follows it are the layer's.
func (c *Conn) Post(wrs []rdma.WorkRequest) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.queue) == 0 && !c.broken && c.p.quiet() {
		return c.inner.Post(wrs)
	}
	defer c.pass()
	taken := 0
	for taken < len(wrs) {
		if c.broken || len(c.queue) > 0 {
			n, err := c.enqueue(wrs[taken:])
			return taken + n, err
		}
		run, acted := c.run(wrs[taken:])
		n, err := c.inner.Post(wrs[taken : taken+run])
		taken += n
		if n < run {
			// What a rule has acted on is not taken either: rare enough.
			c.p.unmatch(c.number, wrs[taken:taken+run-n])
			return taken, err
		}
		if acted != nil {
			c.act(acted)
			taken++
		}
	}
	return taken, nil
}

// run counts the requests that no rule acts on, and brings the first that one
// has acted on. Caller holds mu.
func (c *Conn) run(wrs []rdma.WorkRequest) (n int, acted *held) {
	for i := range wrs {
		if a, ok := c.p.match(OnPost, c.number, &wrs[i]); ok {
			return i, &held{wr: clone(wrs[i]), action: a, judged: true}
		}
	}
	return len(wrs), nil
}

// act is for a request behind which nothing waits. Caller holds mu.
func (c *Conn) act(h *held) {
	if c.apply(h); c.broken {
		c.tail = append(c.tail, rdma.Completion{ID: h.wr.ID, Op: h.wr.Op, Status: h.ended})
		return
	}
	c.queue = append(c.queue, *h)
}

// enqueue takes requests behind one that waits. Caller holds mu.
func (c *Conn) enqueue(wrs []rdma.WorkRequest) (int, error) {
	depth := c.inner.Info().SendDepth
	for i := range wrs {
		if err := c.inner.Err(); err != nil || c.broken {
			return i, err
		}
		if len(c.queue) >= depth {
			return i, nil
		}
		c.queue = append(c.queue, held{wr: clone(wrs[i])})
	}
	return len(wrs), nil
}

func clone(wr rdma.WorkRequest) rdma.WorkRequest {
	wr.Local = slices.Clone(wr.Local)
	return wr
}

// judge applies the rules to a request and tells whether it must wait. Caller
// holds mu.
func (c *Conn) judge(h *held) (wait bool) {
	if h.judged {
		return false
	}
	h.judged = true
	a, ok := c.p.match(OnPost, c.number, &h.wr)
	if !ok {
		return false
	}
	h.action = a
	return c.apply(h)
}

// apply does what the rule for h says, and tells whether it must wait. Caller
// holds mu.
func (c *Conn) apply(h *held) (wait bool) {
	switch a := h.action; a.kind {
	case doHold, doHoldLate:
		if a.kind == doHoldLate && h.wr.Op == rdma.OpWrite {
			h.late = c.copyOut(&h.wr)
		}
		return c.waitAt(a.gate)
	case doDelay:
		g := new(Gate)
		time.AfterFunc(a.delay, g.Open)
		return c.waitAt(g)
	case doFreeze:
		c.frozen = a.gate
		return c.waitAt(a.gate)
	case doWrongKey:
		h.wr.Remote.RKey ^= 0x00ffff00
	case doCut, doFail:
		h.ended = rdma.StatusFlushed
		if a.kind == doFail {
			h.ended = a.status
		}
		c.broken = true
		c.inner.Disconnect()
	}
	return false
}

// waitAt makes the queue wait for g, unless it is open. Caller holds mu.
func (c *Conn) waitAt(g *Gate) bool {
	if g.passes(c.resume) {
		c.frozen = nil
		return false
	}
	c.gate = g
	return true
}

// resume passes on what the gate held back.
func (c *Conn) resume() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pass()
	c.wake()
}

// wake makes a waiter look again. Caller holds mu.
func (c *Conn) wake() {
	select {
	case c.kick <- struct{}{}:
	default:
	}
}

// pass gives the queue to the provider below, as far as gates, rules and the
// send queue allow. Caller holds mu.
func (c *Conn) pass() {
	if c.gate != nil && !c.gate.isOpen() || c.closed {
		return
	}
	c.gate = nil
	for len(c.queue) > 0 {
		h := &c.queue[0]
		if c.judge(h) {
			return
		}
		if c.broken || c.inner.Err() != nil {
			c.flush()
			return
		}
		n, err := c.inner.Post([]rdma.WorkRequest{h.wr})
		switch {
		case n == 1:
			c.queue = c.queue[1:]
		case err != nil: // it was malformed, or the connection has just died
			c.inner.Disconnect()
			c.flush()
			return
		default:
			return // full: the next completion makes room
		}
	}
}

// flush reports what is queued as flushed, the first as what ended it. Caller
// holds mu.
func (c *Conn) flush() {
	for i := range c.queue {
		h := &c.queue[i]
		s := rdma.StatusFlushed
		if h.ended != rdma.StatusOK {
			s = h.ended
		}
		c.tail = append(c.tail, rdma.Completion{ID: h.wr.ID, Op: h.wr.Op, Status: s})
	}
	c.queue, c.gate = nil, nil
}

// deliver hands out what came from below, or what the layer made, unless the
// connection is frozen. n and err are what below said last. Caller holds mu.
func (c *Conn) deliver(wc []rdma.Completion, n int, err error) (int, error) {
	if c.closed {
		return 0, net.ErrClosed
	}
	c.stash = append(c.stash, wc[:n]...)
	if c.frozen != nil {
		if !c.frozen.isOpen() {
			return 0, nil
		}
		c.frozen = nil
	}
	if n > 0 {
		c.pass()
	}
	if len(c.stash) == 0 && errors.Is(err, rdma.ErrBroken) {
		c.flush()
		c.stash, c.tail = c.tail, nil
	}
	if len(c.stash) > 0 {
		n = copy(wc, c.stash)
		c.stash = c.stash[n:]
		return n, nil
	}
	return 0, err
}

func (c *Conn) Poll(wc []rdma.Completion) (int, error) {
	n, err := c.inner.Poll(wc)
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.deliver(wc, n, err)
}

func (c *Conn) Wait(ctx context.Context, wc []rdma.Completion) (int, error) {
	for {
		c.mu.Lock()
		n, err := c.deliver(wc, 0, nil)
		frozen := c.frozen != nil
		c.mu.Unlock()
		if n > 0 || err != nil {
			return n, err
		}
		if frozen {
			select {
			case <-c.kick:
			case <-ctx.Done():
				return 0, ctx.Err()
			}
			continue
		}
		n, err = c.inner.Wait(ctx, wc)
		c.mu.Lock()
		n, err = c.deliver(wc, n, err)
		c.mu.Unlock()
		if n > 0 || err != nil {
			return n, err
		}
	}
}

// Close closes the connection below, unless a late WRITE still needs it.
func (c *Conn) Close() error {
	c.mu.Lock()
	if !c.closed {
		c.closed = true
		c.outlives = slices.ContainsFunc(c.queue, func(h held) bool { return h.late })
		if c.outlives {
			c.p.late.Add(1)
			go c.outlive(c.gate, c.queue)
		}
		c.queue = nil
		c.p.forget(c)
	}
	outlives := c.outlives
	c.wake()
	c.mu.Unlock()
	if outlives {
		return nil
	}
	return c.end()
}

// end closes the connection below.
func (c *Conn) end() error {
	err := c.inner.Close()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, l := range c.copies {
		l.drop()
	}
	c.copies = nil
	return err
}

// outlive sends late WRITEs when their gate opens, and closes.
func (c *Conn) outlive(g *Gate, queue []held) {
	defer c.p.late.Done()
	opened := make(chan struct{})
	if !g.passes(func() { close(opened) }) {
		<-opened
	}
	for _, h := range queue {
		if !h.late {
			continue
		}
		h.wr.Flags |= rdma.WRSignaled
		if n, _ := c.inner.Post([]rdma.WorkRequest{h.wr}); n == 1 {
			c.lastCompletion(h.wr.ID)
		}
	}
	_ = c.end()
}

// lastCompletion waits for a late WRITE's end.
func (c *Conn) lastCompletion(id uint64) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	var wc [1]rdma.Completion
	for {
		n, err := c.inner.Wait(ctx, wc[:])
		if err != nil || n == 1 && wc[0].ID == id {
			return
		}
	}
}

// lateBytes is a private copy of a request's bytes.
type lateBytes struct {
	mem []byte
	mr  rdma.MemoryRegion
}

// copyOut makes wr read from a copy of its bytes, which lives as long as the
// connection below. On failure wr stays as it is. Caller holds mu.
func (c *Conn) copyOut(wr *rdma.WorkRequest) bool {
	n := 0
	for _, s := range wr.Local {
		n += int(s.Length)
	}
	mem, err := unix.Mmap(-1, 0, max(n, 1), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		return false
	}
	at := mem
	for _, s := range wr.Local {
		at = at[copy(at, unsafe.Slice(*(**byte)(unsafe.Pointer(&s.Addr)), s.Length)):]
	}
	mr, err := c.pd.Register(mem, 0)
	if err != nil {
		_ = unix.Munmap(mem)
		return false
	}
	wr.Local = []rdma.Segment{rdma.Seg(mr, 0, uint32(n))}
	wr.Flags &^= rdma.WRInline
	c.copies = append(c.copies, &lateBytes{mem: mem, mr: mr})
	return true
}

func (l *lateBytes) drop() {
	_ = l.mr.Deregister()
	_ = unix.Munmap(l.mem)
}
