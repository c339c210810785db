// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"rblk/rdma"
	"rblk/wire"
)

// conn is one data connection of an epoch.
type conn struct {
	e      *epoch
	index  int
	device int // index that keys of grants go by
	dom    *domain
	rc     rdma.Conn
	depth  int // parts in flight at most

	// Message slots: receives, then sends; then a byte for each slot of
	// flight, that its confirming READ lands in.
	mem   []byte
	mr    rdma.MemoryRegion
	recvs int
	sends int

	lead   chan struct{} // the right to take completions, when nobody has it
	async  chan struct{} // one token: traffic that nobody may be waiting for
	always bool          // led by its own goroutine all the time
	heard  atomic.Uint64 // counts completions
	load   atomic.Int64  // parts queued and in flight

	mu       sync.Mutex
	queue    []part                               // guarded by mu: parts that wait for a place
	flight   []part                               // guarded by mu: by slot
	free     []int                                // guarded by mu: slots of flight
	sendFree []int                                // guarded by mu: send slots
	outbox   []message                            // guarded by mu: requests that wait for a credit
	asked    map[uint64]func(wire.Header, []byte) // guarded by mu: requests unanswered
	credits  int                                  // guarded by mu: requests that may still be sent
	wrs      []rdma.WorkRequest
	segs     []rdma.Segment

	wc [64]rdma.Completion // the leader's
}

// message is an encoded request and who wants its answer.
type message struct {
	seq    uint64
	typ    wire.Type
	answer func(wire.Header, []byte) // nil: an answer itself, which needs no credit
	encode func([]byte) []byte
}

// urgent requests give something back or keep the connection alive. The last
// credit is theirs, so that others which wait for the target cannot keep them
// from being sent.
func (m *message) urgent() bool { return m.typ == wire.TypeKeepalive || m.typ == wire.TypeUnmap }

// Work request ids: the top bits say what completed.
const (
	idPart = 0
	idRecv = 1 << 62
	idSend = 1 << 63
	idMask = 1<<62 - 1
)

// maxDepth is the most parts in flight on a connection.
const maxDepth = 256

// newConn makes a connection's memory; connect makes the connection.
func newConn(e *epoch, index int, dom *domain, l *wire.Limits) (*conn, error) {
	c := &conn{
		e: e, index: index, dom: dom, recvs: l.Credits + l.TargetCredits, sends: 2 * (l.Credits + l.TargetCredits),
		lead: make(chan struct{}, 1), async: make(chan struct{}, 1), asked: map[uint64]func(wire.Header, []byte){}, credits: l.Credits,
	}
	c.lead <- struct{}{}
	var err error
	if c.mem, err = mapMemory((c.recvs+c.sends)*l.MaxMessage + maxDepth); err != nil {
		return nil, err
	}
	if c.mr, err = dom.pd.Register(c.mem, rdma.AccessLocalWrite); err != nil {
		unix.Munmap(c.mem)
		return nil, err
	}
	for i := range c.sends {
		c.sendFree = append(c.sendFree, i)
	}
	return c, nil
}

// connect presents the token over route.
func (c *conn) connect(ctx context.Context, route rdma.Route, token [32]byte) error {
	l := &c.e.limits
	opts := rdma.ConnOptions{
		SendDepth: min(l.SendDepth, maxDepth) + c.sends, RecvDepth: c.recvs, ReadDepth: l.ReadDepth, ManualProgress: true,
	}
	for i := range c.recvs {
		opts.Receives = append(opts.Receives, rdma.RecvRequest{ID: idRecv | uint64(i), Local: []rdma.Segment{c.slot(i)}})
	}
	hello := wire.Connect{Version: wire.ProtocolVersion, Connection: uint16(c.index), Token: token}
	var err error
	if c.rc, err = route.Connect(ctx, c.dom.pd, opts, hello.Append(nil)); err != nil {
		return err
	}
	info := c.rc.Info()
	var acc wire.Accepted
	if err := acc.Parse(info.PrivateData); err != nil {
		return fmt.Errorf("acceptance of %s: %w", info.RemoteAddr, err)
	}
	if int(acc.Connection) != c.index || int(acc.Credits) != l.Credits || int(acc.MaxMessage) != l.MaxMessage {
		return fmt.Errorf("acceptance of %s does not fit the session", info.RemoteAddr)
	}
	c.device = int(acc.Device)
	// A confirmed write takes two places.
	c.depth = min(max(1, (info.SendDepth-c.sends)/2), maxDepth)
	c.flight = make([]part, c.depth)
	for i := range c.depth {
		c.free = append(c.free, c.depth-1-i)
	}
	c.wrs = make([]rdma.WorkRequest, 0, 64)
	c.segs = make([]rdma.Segment, 0, 64)
	return nil
}

func (c *conn) slot(i int) rdma.Segment {
	n := c.e.limits.MaxMessage
	return rdma.Seg(c.mr, uint64(i*n), uint32(n))
}

func (c *conn) bytes(i int) []byte {
	n := c.e.limits.MaxMessage
	return c.mem[i*n : (i+1)*n : (i+1)*n]
}

// close destroys the queue pair and waits for a leader to leave; afterwards no
// buffer is the network's.
func (c *conn) close() {
	if c.rc != nil {
		c.rc.Disconnect()
		<-c.lead
		c.rc.Close()
	}
	c.mr.Deregister()
	unix.Munmap(c.mem)
}

// submit queues parts and posts what there is room for.
func (c *conn) submit(ps []part) {
	c.load.Add(int64(len(ps)))
	c.mu.Lock()
	c.queue = append(c.queue, ps...)
	err := c.pushAll()
	c.mu.Unlock()
	if err != nil {
		c.e.fail(err)
	}
	if !c.always {
		c.stir()
	}
}

// pushAll posts what there is room for, COMMITs behind the WRITEs that they are
// for. Caller holds mu.
func (c *conn) pushAll() error {
	if err := c.push(); err != nil {
		return err
	}
	return c.pushMessages()
}

// stir lets the connection's goroutine see to it that somebody leads.
func (c *conn) stir() {
	select {
	case c.async <- struct{}{}:
	default:
	}
}

// push posts queued parts. Caller holds mu.
func (c *conn) push() error {
	for len(c.queue) > 0 && len(c.free) > 0 {
		n, places := 0, 0
		c.wrs, c.segs = c.wrs[:0], c.segs[:0]
		for n < len(c.queue) && n < len(c.free) && len(c.wrs)+2 <= cap(c.wrs) {
			if err := c.request(&c.queue[n], c.free[len(c.free)-1-n]); err != nil {
				return err
			}
			n++
		}
		places = len(c.wrs)
		slots := c.free[len(c.free)-n:]
		slices.Reverse(slots)
		for i, slot := range slots {
			c.flight[slot] = c.queue[i]
			c.flight[slot].waits = 1
		}
		c.free = c.free[:len(c.free)-n]
		rest := copy(c.queue, c.queue[n:])
		clear(c.queue[rest:])
		c.queue = c.queue[:rest]
		took, err := c.rc.Post(c.wrs)
		if err != nil {
			return err
		}
		if took < places {
			return fmt.Errorf("send queue took %d of %d requests", took, places)
		}
		if c.e.reply.Export.NeedsCommit {
			c.commitAll(slots)
		}
	}
	return nil
}

// request adds the work requests of a part that goes into slot. Caller holds mu.
func (c *conn) request(p *part, slot int) error {
	r, err := p.op.arena.region(c.dom)
	if err != nil {
		return err
	}
	if c.device >= len(p.grant.keys) {
		return errors.New("grant has no key for this device")
	}
	at := &rdma.RemoteAddr{Addr: p.grant.addr + uint64(p.off-p.grant.off), RKey: p.grant.keys[c.device]}
	c.segs = append(c.segs, rdma.Segment{Addr: r.Addr() + uint64(offsetOf(p.op.arena, p.mem)), Length: uint32(len(p.mem)), LKey: r.LKey()})
	wr := rdma.WorkRequest{ID: idPart | uint64(slot), Op: p.wr, Flags: rdma.WRSignaled, Local: c.segs[len(c.segs)-1:], Remote: *at}
	if p.wr == rdma.OpWrite && c.e.confirmRead {
		// The completion of a READ behind the WRITE says that it is placed.
		wr.Flags = 0
		c.wrs = append(c.wrs, wr)
		c.segs = append(c.segs, rdma.Seg(c.mr, c.mr.Len()-maxDepth+uint64(slot), 1))
		wr = rdma.WorkRequest{ID: wr.ID, Op: rdma.OpRead, Flags: rdma.WRSignaled, Local: c.segs[len(c.segs)-1:], Remote: *at}
	}
	c.wrs = append(c.wrs, wr)
	return nil
}

// ask sends a request; answer is called once, by the leader, or never when the
// epoch ends first.
func (c *conn) ask(t wire.Type, encode func([]byte, wire.Header) []byte, answer func(wire.Header, []byte)) {
	c.enqueue(c.numbered(t, 0, encode, answer))
}

// numbered is a numbered request.
func (c *conn) numbered(t wire.Type, flags uint16, encode func([]byte, wire.Header) []byte, answer func(wire.Header, []byte)) message {
	seq := c.e.v.seq.Add(1)
	return message{seq, t, answer, func(b []byte) []byte { return encode(b, wire.Header{Type: t, Seq: seq, Flags: flags}) }}
}

func (c *conn) enqueue(m message) {
	c.mu.Lock()
	c.outbox = append(c.outbox, m)
	err := c.pushMessages()
	c.mu.Unlock()
	if err != nil {
		c.e.fail(err)
	}
	if !c.always {
		c.stir()
	}
}

// pushMessages posts messages as far as credits and slots go: answers first,
// which never wait for a credit, nor behind requests that do. Caller holds mu.
func (c *conn) pushMessages() error {
	for len(c.sendFree) > 0 {
		i := c.nextMessage()
		if i < 0 {
			return nil
		}
		m := c.outbox[i]
		c.outbox = slices.Delete(c.outbox, i, i+1)
		if m.answer != nil {
			c.credits--
			c.asked[m.seq] = m.answer
		}
		if err := c.sendMessage(m); err != nil {
			return err
		}
	}
	return nil
}

// nextMessage is the index in outbox of what may be sent now, -1 for nothing.
// Caller holds mu.
func (c *conn) nextMessage() int {
	best, rank := -1, 0
	for i := range c.outbox {
		m := &c.outbox[i]
		switch {
		case m.answer == nil:
			return i
		case m.urgent() && c.credits > 0 && rank < 2:
			best, rank = i, 2
		case c.credits > 1 && rank < 1:
			best, rank = i, 1
		}
	}
	return best
}

func (c *conn) sendMessage(m message) error {
	i := c.sendFree[len(c.sendFree)-1]
	c.sendFree = c.sendFree[:len(c.sendFree)-1]
	b := m.encode(c.bytes(c.recvs + i)[:0])
	seg := rdma.Seg(c.mr, uint64((c.recvs+i)*c.e.limits.MaxMessage), uint32(len(b)))
	n, err := c.rc.Post([]rdma.WorkRequest{{ID: idSend | uint64(i), Op: rdma.OpSend, Flags: rdma.WRSignaled | rdma.WRSolicited, Local: []rdma.Segment{seg}}})
	if err == nil && n == 0 {
		err = errors.New("send queue is full")
	}
	return err
}

// leading takes completions until stop tells true, ctx ends or the connection
// dies. The caller holds the right to lead, and gives it back afterwards.
func (c *conn) leading(ctx context.Context, stop func() bool) error {
	for !stop() {
		n, err := c.rc.Wait(ctx, c.wc[:])
		if err != nil {
			if ctx.Err() == nil {
				c.e.fail(err)
			}
			return err
		}
		c.heard.Add(uint64(n))
		c.act(c.wc[:n])
	}
	return nil
}

// act deals with completions.
func (c *conn) act(wcs []rdma.Completion) {
	for i := range wcs {
		wc := &wcs[i]
		if wc.Status != rdma.StatusOK {
			c.broken(wc)
			continue
		}
		switch {
		case wc.ID&idSend != 0:
			c.mu.Lock()
			c.sendFree = append(c.sendFree, int(wc.ID&idMask))
			c.mu.Unlock()
		case wc.ID&idRecv != 0:
			if err := c.received(int(wc.ID&idMask), int(wc.Length)); err != nil {
				c.e.fail(err)
				return
			}
		default:
			c.partStep(int(wc.ID & idMask))
		}
	}
	c.mu.Lock()
	err := c.pushAll()
	c.mu.Unlock()
	if err != nil {
		c.e.fail(err)
	}
}

// partStep notes that one of the things that the part in slot waits for has
// come.
func (c *conn) partStep(slot int) {
	c.mu.Lock()
	c.flight[slot].waits--
	if c.flight[slot].waits > 0 {
		c.mu.Unlock()
		return
	}
	p := c.flight[slot]
	c.flight[slot] = part{}
	c.free = append(c.free, slot)
	c.mu.Unlock()
	c.load.Add(-1)
	c.e.partDone(&p)
}

// broken notes a failed request. The first one tells why the connection is
// dead; all of its operations are replayed.
func (c *conn) broken(wc *rdma.Completion) {
	if wc.Status == rdma.StatusFlushed {
		return
	}
	if wc.ID&(idSend|idRecv) == 0 {
		c.mu.Lock()
		p := c.flight[wc.ID&idMask]
		c.mu.Unlock()
		if p.op != nil {
			p.op.tries++
		}
	}
	c.e.fail(wc.Status.Err())
}

// received takes a message in and posts its slot again.
func (c *conn) received(slot, n int) error {
	h, body, err := wire.ParseHeader(c.bytes(slot)[:n])
	if err == nil {
		err = c.message(h, body)
	}
	if err != nil {
		return fmt.Errorf("target breaks the protocol: %w", err)
	}
	_, err = c.rc.PostRecv([]rdma.RecvRequest{{ID: idRecv | uint64(slot), Local: []rdma.Segment{c.slot(slot)}}})
	return err
}

func (c *conn) message(h wire.Header, body []byte) error {
	switch h.Type {
	case wire.TypeMapped, wire.TypeDone:
		c.mu.Lock()
		answer := c.asked[h.Seq]
		if answer != nil {
			delete(c.asked, h.Seq)
			c.credits++
		}
		c.mu.Unlock()
		if answer == nil {
			return fmt.Errorf("answer to request %d, which was not sent", h.Seq)
		}
		answer(h, body)
		return nil
	case wire.TypeRevoke:
		var ids wire.IDs
		if err := ids.Parse(body); err != nil {
			return err
		}
		c.e.revoke(&revocation{seq: h.Seq, ids: ids.IDs})
		return nil
	case wire.TypeKeepalive:
		c.enqueue(message{seq: h.Seq, encode: func(b []byte) []byte {
			return (&wire.Done{}).Append(b, wire.Header{Type: wire.TypeDone, Seq: h.Seq})
		}})
		return nil
	}
	return fmt.Errorf("message of type %d", h.Type)
}

// idleLead is how long traffic may go without a leader before the connection's
// goroutine steps in. Who waits for an operation leads at once; this is for
// those who do not.
const idleLead = time.Millisecond

// mind keeps the connection alive, and sees to it that it is led.
func (c *conn) mind(ctx context.Context) {
	keepalive := time.Duration(c.e.limits.KeepaliveMS) * time.Millisecond
	tick := time.NewTicker(keepalive)
	defer tick.Stop()
	pulse := &pulse{c: c}
	c.e.minders.Go(func() { c.leadIdle(ctx) })
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.rc.Done():
			c.e.fail(c.rc.Err())
			return
		case <-tick.C:
			pulse.beat()
		}
	}
}

// leadIdle leads where nobody else does.
func (c *conn) leadIdle(ctx context.Context) {
	if c.always {
		<-c.lead
		c.leading(ctx, func() bool { return false })
		c.lead <- struct{}{}
		return
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.async:
			c.stepIn(ctx)
		}
	}
}

// stepIn leads when nobody does, until nothing is under way.
func (c *conn) stepIn(ctx context.Context) {
	timer := time.NewTimer(idleLead)
	defer timer.Stop()
	for c.busy() {
		select {
		case <-timer.C:
		case <-ctx.Done():
			return
		}
		select {
		case <-c.lead:
			c.leading(ctx, func() bool { return !c.busy() })
			c.lead <- struct{}{}
		default: // somebody leads
		}
		if ctx.Err() != nil || c.rc.Err() != nil {
			return
		}
		timer.Reset(idleLead)
	}
}

// busy tells whether a completion is to come.
func (c *conn) busy() bool {
	if c.load.Load() > 0 {
		return true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.asked) > 0 || len(c.sendFree) < c.sends
}

// pulse watches whether the connection lives.
type pulse struct {
	c     *conn
	heard uint64
	since time.Time // of the first keepalive without any completion behind it
}

// beat sends a keepalive, and ends the epoch when nothing has been heard for
// too long.
func (p *pulse) beat() {
	c := p.c
	if heard := c.heard.Load(); heard != p.heard || p.since.IsZero() {
		p.heard, p.since = heard, time.Now()
	} else if dead := time.Duration(c.e.limits.DeadMS) * time.Millisecond; time.Since(p.since) >= dead {
		c.e.fail(fmt.Errorf("nothing heard for %v", dead))
		return
	}
	c.mu.Lock()
	waiting := slices.ContainsFunc(c.outbox, func(m message) bool { return m.typ == wire.TypeKeepalive })
	c.mu.Unlock()
	if !waiting {
		c.ask(wire.TypeKeepalive, wire.AppendEmpty, func(wire.Header, []byte) {})
	}
}
