// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"rblk/rdma"
	"rblk/wire"
)

// sconn is one data connection of a session.
type sconn struct {
	s     *session
	index int
	epoch uint64 // of the session, that the token was for
	conn  rdma.Conn
	dom   *domain
	mem   []byte // message slots: receives, then sends
	mr    rdma.MemoryRegion
	recvs int
	log   *slog.Logger

	free     chan int       // send slots
	handlers sync.WaitGroup // goroutines that answer requests
	gone     chan struct{}  // closed when the queue pair is destroyed and nothing of it runs

	heard   atomic.Int64 // monotonic nanoseconds since the server's start
	pending atomic.Int64 // requests of the initiator that are not answered

	mu      sync.Mutex
	seq     uint64              // guarded by mu: of our requests
	revokes map[uint64]struct{} // guarded by mu: ours, unanswered
	backlog [][]uint64          // guarded by mu: revocations that wait for credit
}

const (
	recvTag = 0
	sendTag = 1 << 32
)

// slots of messages on a connection: a peer never finds no receive posted, and
// an answer never waits for its own completion.
func slots(l *wire.Limits) (recvs, sends int) {
	n := l.Credits + l.TargetCredits
	return n, 2 * n
}

// reject refuses a data connection, as far as the transport has room to say why.
// That it cannot be told is no news: the peer is gone.
func reject(req rdma.ConnRequest, why string) {
	_ = req.Reject([]byte(why[:min(len(why), rdma.MaxRejectReason)]))
}

// accept makes the connection of a request whose token was taken.
func (s *session) accept(ctx context.Context, req rdma.ConnRequest, index int, epoch uint64) error {
	dom, err := s.exp.domain(req.Device(), s.access != wire.AccessRead)
	if err != nil {
		reject(req, err.Error())
		return err
	}
	l := &s.srv.limits
	recvs, sends := slots(l)
	mem, err := unix.Mmap(-1, 0, (recvs+sends)*l.MaxMessage, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		reject(req, "target is out of memory")
		return err
	}
	c := &sconn{s: s, index: index, epoch: epoch, dom: dom, mem: mem, recvs: recvs, free: make(chan int, sends), gone: make(chan struct{}), revokes: map[uint64]struct{}{},
		log: s.log.With("connection", index, "remote", req.RemoteAddr().String())}
	for i := range sends {
		c.free <- i
	}
	if c.mr, err = dom.pd.Register(mem, rdma.AccessLocalWrite); err != nil {
		unix.Munmap(mem)
		reject(req, "target cannot register memory")
		return err
	}
	if err := c.connect(ctx, req); err != nil {
		c.release()
		return err
	}
	return nil
}

// connect accepts the request and starts the connection's goroutine.
func (c *sconn) connect(ctx context.Context, req rdma.ConnRequest) error {
	s, l := c.s, &c.s.srv.limits
	opts := rdma.ConnOptions{SendDepth: 2 * cap(c.free), RecvDepth: c.recvs, ReadDepth: l.ReadDepth}
	for i := range c.recvs {
		opts.Receives = append(opts.Receives, rdma.RecvRequest{ID: recvTag | uint64(i), Local: []rdma.Segment{c.slot(i)}})
	}
	s.mu.Lock()
	dev := -1
	if s.open && s.epoch == c.epoch {
		dev = s.deviceLocked(req.Device())
	}
	s.mu.Unlock()
	if dev < 0 {
		reject(req, wire.RejectLimit)
		return errors.New("session ended, or too many devices")
	}
	reply := wire.Accepted{Version: wire.ProtocolVersion, Device: uint8(dev), Connection: uint16(c.index),
		Credits: uint16(l.Credits), TargetCredits: uint16(l.TargetCredits), MaxMessage: uint32(l.MaxMessage)}
	var err error
	if c.conn, err = req.Accept(ctx, c.dom.pd, opts, reply.Append(nil)); err != nil {
		return err
	}
	c.hear()
	s.mu.Lock()
	// Meanwhile another epoch may have begun, in which this connection has no
	// business.
	if !s.open || s.epoch != c.epoch || s.conns[c.index] != nil {
		s.mu.Unlock()
		c.conn.Close()
		return errors.New("session ended meanwhile")
	}
	s.conns[c.index] = c
	work, ctx := s.work, s.ctx
	work.Add(1)
	s.mu.Unlock()
	c.log.Debug("connection up", "device", req.Device().Info().Name)
	go func() {
		defer work.Done()
		c.run(ctx)
	}()
	return nil
}

// slot is message slot i as a segment.
func (c *sconn) slot(i int) rdma.Segment {
	n := c.s.srv.limits.MaxMessage
	return rdma.Seg(c.mr, uint64(i*n), uint32(n))
}

func (c *sconn) bytes(i int) []byte {
	n := c.s.srv.limits.MaxMessage
	return c.mem[i*n : (i+1)*n : (i+1)*n]
}

func (c *sconn) release() {
	c.mr.Deregister()
	unix.Munmap(c.mem)
}

// kill breaks the connection; run does the rest.
func (c *sconn) kill() { c.conn.Disconnect() }

func (c *sconn) hear() { c.heard.Store(int64(time.Since(c.s.srv.start))) }

// run serves messages until the connection is dead, then takes it apart.
func (c *sconn) run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	err := c.serve(ctx)
	c.conn.Disconnect()
	cancel() // handlers that wait for frames need not any more
	c.handlers.Wait()
	c.conn.Close()
	c.release()
	c.s.lost(c)
	close(c.gone)
	c.log.Debug("connection down", "err", err)
}

// lost forgets a destroyed connection. With the last one goes everything that
// could reach the session's frames.
func (s *session) lost(c *sconn) {
	s.mu.Lock()
	if s.conns[c.index] == c {
		delete(s.conns, c.index)
	}
	s.seen = time.Now()
	unreachable := s.unreachableLocked()
	s.mu.Unlock()
	for _, g := range unreachable {
		g.end()
	}
}

// serve is the message loop.
func (c *sconn) serve(ctx context.Context) error {
	wc := make([]rdma.Completion, 32)
	for {
		n, err := c.conn.Wait(ctx, wc)
		if err != nil {
			return err
		}
		for i := range wc[:n] {
			if err := c.complete(ctx, &wc[i]); err != nil {
				if errors.Is(err, errProtocol) {
					c.log.Warn("peer breaks the protocol: connection ended", "err", err)
					c.s.srv.metrics.protocolErrors.Inc()
				}
				return err
			}
		}
	}
}

// errProtocol: the peer sent what it must not.
var errProtocol = errors.New("protocol violation")

func (c *sconn) complete(ctx context.Context, wc *rdma.Completion) error {
	op := rdma.OpRecv
	if wc.ID&sendTag != 0 {
		op = rdma.OpSend
	}
	c.s.srv.metrics.ops.WithLabelValues(op.String(), wc.Status.String()).Inc()
	if wc.Status != rdma.StatusOK {
		return wc.Status.Err()
	}
	if wc.ID&sendTag != 0 {
		c.free <- int(wc.ID &^ sendTag)
		return nil
	}
	c.hear()
	slot := int(wc.ID)
	h, body, err := wire.ParseHeader(c.bytes(slot)[:wc.Length])
	if err == nil {
		err = c.message(ctx, h, body)
	}
	if err != nil {
		if dead := c.conn.Err(); dead != nil {
			return dead
		}
		return fmt.Errorf("%w: %w", errProtocol, err)
	}
	// The message has been taken in: its slot may be used again.
	_, err = c.conn.PostRecv([]rdma.RecvRequest{{ID: recvTag | uint64(slot), Local: []rdma.Segment{c.slot(slot)}}})
	return err
}

// message dispatches one message. What can wait for the store runs on a
// goroutine of its own; the number of those is bounded by the credits.
func (c *sconn) message(ctx context.Context, h wire.Header, body []byte) error {
	switch h.Type {
	case wire.TypeRevoked:
		return c.revoked(h, body)
	case wire.TypeMap, wire.TypeUnmap, wire.TypeCommit, wire.TypeFlush, wire.TypeDiscard, wire.TypeZero, wire.TypeKeepalive, wire.TypeDrop:
	default:
		return fmt.Errorf("message of type %d", h.Type)
	}
	if c.pending.Add(1) > int64(c.s.srv.limits.Credits) {
		return fmt.Errorf("more than %d requests unanswered", c.s.srv.limits.Credits)
	}
	return c.request(ctx, h, body)
}

// request carries out a request of the initiator. An error ends the connection.
func (c *sconn) request(ctx context.Context, h wire.Header, body []byte) error {
	if c.index != 0 && (h.Type == wire.TypeMap || h.Type == wire.TypeUnmap) {
		return fmt.Errorf("MAP or UNMAP on connection %d", c.index)
	}
	switch h.Type {
	case wire.TypeKeepalive:
		if err := wire.ParseEmpty(body); err != nil {
			return err
		}
		return c.done(h.Seq, wire.StatusOK)
	case wire.TypeUnmap:
		var ids wire.IDs
		if err := ids.Parse(body); err != nil {
			return err
		}
		c.s.give(ids.IDs)
		return c.done(h.Seq, wire.StatusOK)
	case wire.TypeDrop:
		var d wire.Drop
		if err := d.Parse(body); err != nil {
			return err
		}
		c.async(h, func() wire.Status { return c.s.drop(int(d.Connection), c) })
	case wire.TypeMap:
		m := &wire.Map{}
		if err := m.Parse(body); err != nil {
			return err
		}
		c.handlers.Go(func() { c.mapped(ctx, h.Seq, m) })
	case wire.TypeFlush:
		if err := wire.ParseEmpty(body); err != nil {
			return err
		}
		c.async(h, func() wire.Status { return c.s.exp.content.flush(ctx) })
	default:
		return c.ranged(ctx, h, body)
	}
	return nil
}

// ranged carries out COMMIT, DISCARD and ZERO.
func (c *sconn) ranged(ctx context.Context, h wire.Header, body []byte) error {
	r := &wire.Ranges{}
	if err := r.Parse(body); err != nil {
		return err
	}
	if h.Type != wire.TypeCommit && len(r.Ranges) != 1 {
		return fmt.Errorf("%d ranges where one belongs", len(r.Ranges))
	}
	c.async(h, func() wire.Status {
		switch {
		case c.s.access == wire.AccessRead:
			return wire.StatusReadOnly
		case h.Type == wire.TypeCommit:
			return wire.StatusUnsupported // no export here needs it
		}
		return c.s.exp.content.zero(ctx, r.Ranges[0])
	})
	return nil
}

// async answers a request with f's status. What may wait for the store runs so;
// the credits bound how many.
func (c *sconn) async(h wire.Header, f func() wire.Status) {
	start := time.Now()
	c.handlers.Go(func() {
		st := f()
		c.s.srv.metrics.answered(h.Type, start)
		_ = c.done(h.Seq, st) // an error has ended the connection
	})
}

// mapped answers a MAP.
func (c *sconn) mapped(ctx context.Context, seq uint64, m *wire.Map) {
	start := time.Now()
	var parts [][]wire.Grant
	if c.s.access == wire.AccessRead && m.Intent != wire.IntentRead {
		for _, r := range m.Ranges {
			parts = append(parts, refuse(r, wire.StatusReadOnly))
		}
	} else {
		parts = c.stage(ctx, m)
	}
	var all wire.Mapped
	var spare []uint64
	for i := range parts {
		room := min(wire.MaxGrants-len(all.Grants)-(len(parts)-1-i), len(parts[i]))
		all.Grants = append(all.Grants, parts[i][:room]...)
		for _, g := range parts[i][room:] {
			spare = append(spare, g.ID) // no room in the answer: asked for again
		}
	}
	c.s.give(spare)
	c.s.srv.metrics.answered(wire.TypeMap, start)
	if err := c.answer(func(b []byte) []byte { return all.Append(b, wire.Header{Type: wire.TypeMapped, Seq: seq}) }); err != nil {
		for _, g := range all.Grants {
			c.s.give([]uint64{g.ID})
		}
		return
	}
	c.s.tell(all.Grants)
}

// stage gets grants for the ranges of a MAP, side by side. A MAP that waits for
// frames must hold none itself, else two could wait for each other: so the
// first round does not wait, and only when it got nothing at all one range
// does. The initiator asks again for what is answered with StatusAgain.
func (c *sconn) stage(ctx context.Context, m *wire.Map) [][]wire.Grant {
	parts := make([][]wire.Grant, len(m.Ranges))
	var wg sync.WaitGroup
	for i, r := range m.Ranges {
		if i == len(m.Ranges)-1 {
			parts[i] = c.s.exp.content.mapRange(ctx, c.s, r, m.Intent, false)
			break
		}
		wg.Go(func() { parts[i] = c.s.exp.content.mapRange(ctx, c.s, r, m.Intent, false) })
	}
	wg.Wait()
	for _, p := range parts {
		if slices.ContainsFunc(p, func(g wire.Grant) bool { return g.Status != wire.StatusAgain }) {
			return parts
		}
	}
	if len(parts) > 0 {
		parts[0] = c.s.exp.content.mapRange(ctx, c.s, m.Ranges[0], m.Intent, true)
	}
	return parts
}

// done answers with a Done.
func (c *sconn) done(seq uint64, st wire.Status) error {
	d := wire.Done{Verifier: c.s.srv.verifier}
	return c.answer(func(b []byte) []byte { return d.Append(b, wire.Header{Type: wire.TypeDone, Seq: seq, Status: st}) })
}

// answer sends the answer to a request. From here on the request is not
// unanswered any more: the peer may have the answer, and send the next request,
// before we know that it was sent.
func (c *sconn) answer(encode func([]byte) []byte) error {
	c.pending.Add(-1)
	return c.send(encode)
}

// send encodes a message into a send slot and posts it. It never blocks: there
// are slots for twice what a peer can be owed, so one that leaves none free does
// not take its messages. A connection that cannot send is ended.
func (c *sconn) send(encode func([]byte) []byte) (err error) {
	defer func() {
		if err != nil && c.conn.Err() == nil {
			c.log.Warn("cannot send: connection ended", "err", err)
			c.kill()
		}
	}()
	var i int
	select {
	case i = <-c.free:
	default:
		return fmt.Errorf("%w: peer takes no messages", errProtocol)
	}
	b := encode(c.bytes(c.recvs + i)[:0])
	seg := rdma.Seg(c.mr, uint64((c.recvs+i)*c.s.srv.limits.MaxMessage), uint32(len(b)))
	n, err := c.conn.Post([]rdma.WorkRequest{{ID: sendTag | uint64(i), Op: rdma.OpSend, Flags: rdma.WRSignaled | rdma.WRSolicited, Local: []rdma.Segment{seg}}})
	if err == nil && n == 0 {
		err = errors.New("send queue is full") // it has two places for each slot
	}
	return err
}

// sendRevoke asks for grants back, as far as the credits allow; the rest waits.
func (c *sconn) sendRevoke(ids []uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for len(ids) > 0 {
		n := min(len(ids), wire.MaxIDs)
		c.backlog = append(c.backlog, ids[:n])
		ids = ids[n:]
	}
	c.pushRevokes()
}

// pushRevokes sends what the credits allow. Caller holds mu.
func (c *sconn) pushRevokes() {
	for len(c.backlog) > 0 && len(c.revokes) < c.s.srv.limits.TargetCredits {
		m := wire.IDs{IDs: c.backlog[0]}
		c.backlog = c.backlog[1:]
		c.seq++
		c.revokes[c.seq] = struct{}{}
		seq := c.seq
		err := c.send(func(b []byte) []byte { return m.Append(b, wire.Header{Type: wire.TypeRevoke, Seq: seq}) })
		if err != nil {
			return // the connection is dead; the deadline of the REVOKE does the rest
		}
	}
}

// revoked takes the answer to a REVOKE.
func (c *sconn) revoked(h wire.Header, body []byte) error {
	var ids wire.IDs
	if err := ids.Parse(body); err != nil {
		return err
	}
	c.mu.Lock()
	_, asked := c.revokes[h.Seq]
	delete(c.revokes, h.Seq)
	c.mu.Unlock()
	if !asked {
		return fmt.Errorf("answer to REVOKE %d, which was not sent", h.Seq)
	}
	c.s.give(ids.IDs)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pushRevokes()
	return nil
}

// drop destroys another connection of the session and waits until it is gone.
func (s *session) drop(index int, asking *sconn) wire.Status {
	s.mu.Lock()
	c := s.conns[index]
	s.mu.Unlock()
	if c == nil {
		return wire.StatusOK
	}
	if c == asking {
		return wire.StatusProtocol
	}
	c.kill()
	select {
	case <-c.gone:
		return wire.StatusOK
	case <-asking.conn.Done():
		return wire.StatusAgain // nobody hears it; two that drop each other must not wait for ever
	}
}
