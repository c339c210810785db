// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"rblk/rdma"
	"rblk/volume"
	"rblk/wire"
)

// epoch is one set of connections of the session.
type epoch struct {
	v           *Volume
	reply       *wire.SessionReply
	limits      wire.Limits
	confirmRead bool
	table       *table

	conns   []*conn
	lanes   [volume.NumLanes][]*conn
	ctx     context.Context
	cancel  context.CancelFunc
	minders sync.WaitGroup

	mu      sync.Mutex
	err     error           // guarded by mu: why it ended
	dead    chan struct{}   // closed when it has
	ended   chan struct{}   // closed when its connections are gone, too
	closing bool            // guarded by mu: no user may enter
	users   sync.WaitGroup  // those inside begin
	wanted  map[int64]*want // guarded by mu: extents asked for
	pending []*want         // guarded by mu: not yet sent
	again   time.Duration   // guarded by mu: the next delay of retry
}

// want is an extent that operations wait for.
type want struct {
	off int64
	ops []*op
}

// laneConns says which connections serve which lane, of n. Connection 0 carries
// the messages.
func laneConns(n int) (lanes [volume.NumLanes][]int) {
	switch n {
	case 1:
		return [volume.NumLanes][]int{{0}, {0}, {0}}
	case 2:
		return [volume.NumLanes][]int{{1}, {0}, {0}}
	case 3:
		return [volume.NumLanes][]int{{1}, {2}, {0}}
	}
	lanes = [volume.NumLanes][]int{{1}, {2}, {3}}
	for i := 4; i < n; i++ {
		lane := (i - 4) % int(volume.NumLanes)
		lanes[lane] = append(lanes[lane], i)
	}
	return lanes
}

// defaultConnections: one for messages and one a lane.
const defaultConnections = 4

// connectTime bounds the making of an epoch's connections: tokens live 10 s.
const connectTime = 10 * time.Second

// newEpoch makes the connections of a reply that came from the control address
// addr.
func newEpoch(ctx context.Context, v *Volume, reply *wire.SessionReply, addr string) (*epoch, error) {
	e := &epoch{v: v, reply: reply, limits: reply.Limits, confirmRead: reply.Export.Confirm != "completion",
		table: newTable(max(8, reply.Limits.MaxGrants*3/4)), dead: make(chan struct{}), ended: make(chan struct{}), wanted: map[int64]*want{}}
	if err := checkLimits(&e.limits); err != nil {
		return nil, err
	}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	cctx, cancel := context.WithTimeout(ctx, connectTime)
	defer cancel()
	if err := checkTokens(reply.Tokens); err != nil {
		return nil, err
	}
	e.conns = make([]*conn, len(reply.Tokens))
	errs := make([]error, len(reply.Tokens))
	var wg sync.WaitGroup
	for i, t := range reply.Tokens {
		wg.Go(func() { errs[i] = e.connect(cctx, t, addr) })
	}
	wg.Wait()
	if i := firstError(errs); i >= 0 {
		e.close()
		return nil, errs[i]
	}
	for lane, idx := range laneConns(len(e.conns)) {
		for _, i := range idx {
			e.lanes[lane] = append(e.lanes[lane], e.conns[i])
		}
	}
	e.conns[0].always = true
	for _, c := range e.lanes[volume.LaneReadahead] {
		c.always = true
	}
	for _, c := range e.conns {
		e.minders.Add(1)
		go func() {
			defer e.minders.Done()
			c.mind(e.ctx)
		}()
	}
	return e, nil
}

func firstError(errs []error) int {
	for i, err := range errs {
		if err != nil {
			return i
		}
	}
	return -1
}

// checkLimits refuses numbers that no target would mean.
func checkLimits(l *wire.Limits) error {
	const hour = int64(time.Hour / time.Millisecond)
	ok := l.MaxMessage >= 1024 && l.MaxMessage <= wire.MaxMessage
	for _, r := range []struct{ n, low, high int64 }{
		{int64(l.Credits), 2, 1024}, {int64(l.TargetCredits), 1, 1024}, {int64(l.SendDepth), 2, 1 << 16}, {int64(l.ReadDepth), 1, 1 << 16},
		{int64(l.MaxGrants), 1, 1 << 30}, {l.KeepaliveMS, 1, hour}, {l.DeadMS, 1, hour},
	} {
		ok = ok && r.n >= r.low && r.n <= r.high
	}
	if !ok {
		return fmt.Errorf("the target's limits make no sense: %+v", *l)
	}
	return nil
}

// checkTokens wants one token for each connection from 0 on.
func checkTokens(ts []wire.Token) error {
	seen := make([]bool, len(ts))
	for _, t := range ts {
		b, err := hex.DecodeString(t.Secret)
		if err != nil || len(b) != 32 || t.Connection < 0 || t.Connection >= len(ts) || seen[t.Connection] {
			return errors.New("the target's connect tokens make no sense")
		}
		seen[t.Connection] = true
	}
	return nil
}

// way is a data address and who leads there.
type way struct {
	p    rdma.Provider
	addr string
}

// ways of this side to the target, best first.
func (e *epoch) ways(control string) []way {
	var ws []way
	for _, p := range e.v.providers {
		for _, d := range e.reply.Data {
			if d.Provider == p.Name() && (e.v.transport == "auto" || e.v.transport == p.Name()) {
				ws = append(ws, way{p, dataAddr(d.Addr, control)})
			}
		}
	}
	return ws
}

// connect makes connection t over the first data address that works. Each gets
// an equal share of the time that is left, so that a dead one leaves some to
// those behind it.
func (e *epoch) connect(ctx context.Context, t wire.Token, control string) error {
	var token [32]byte
	hex.Decode(token[:], []byte(t.Secret))
	ws := e.ways(control)
	if len(ws) == 0 {
		return fmt.Errorf("no transport in common: this side has %s, the target offers %v", e.v.transportNames(), e.reply.Data)
	}
	var errs []error
	for i, w := range ws {
		deadline, _ := ctx.Deadline()
		wctx, cancel := context.WithTimeout(ctx, time.Until(deadline)/time.Duration(len(ws)-i))
		c, err := e.dial(wctx, w.p, w.addr, t.Connection, token)
		cancel()
		if err == nil {
			e.conns[t.Connection] = c
			return nil
		}
		errs = append(errs, fmt.Errorf("data connection to %s over %s: %w", w.addr, w.p.Name(), err))
		var rejected *rdma.RejectError
		if errors.As(err, &rejected) {
			break // the token is used up
		}
	}
	return joined(errs)
}

// dataAddr completes an address whose host is that of the control connection.
func dataAddr(addr, control string) string {
	h, port, err := net.SplitHostPort(addr)
	if err != nil || h != "" {
		return addr
	}
	host, _, err := net.SplitHostPort(control)
	if err != nil {
		host = "127.0.0.1" // control over a Unix socket
	}
	return net.JoinHostPort(host, port)
}

func (e *epoch) dial(ctx context.Context, p rdma.Provider, addr string, index int, token [32]byte) (*conn, error) {
	route, err := p.Resolve(ctx, addr)
	if err != nil {
		return nil, err
	}
	defer route.Close()
	dom, err := e.v.domainOn(route.Device())
	if err != nil {
		return nil, err
	}
	c, err := newConn(e, index, dom, &e.limits)
	if err != nil {
		return nil, err
	}
	if err := c.connect(ctx, route, token); err != nil {
		c.close()
		return nil, err
	}
	return c, nil
}

// fail ends the epoch: its connections are broken, the volume reconnects.
func (e *epoch) fail(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.err != nil {
		return
	}
	if err == nil {
		err = rdma.ErrDisconnected
	}
	e.err = err
	close(e.dead)
}

// cause is why the epoch ended.
func (e *epoch) cause() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.err
}

// close destroys the connections. When it returns, no buffer of theirs is the
// network's, and no goroutine acts on their completions.
func (e *epoch) close() {
	e.fail(net.ErrClosed)
	e.mu.Lock()
	e.closing = true
	e.mu.Unlock()
	e.users.Wait()
	e.cancel()
	e.minders.Wait()
	for _, c := range e.conns {
		if c != nil {
			c.close()
		}
	}
}

// connFor chooses the connection of a lane with least under way.
func (e *epoch) connFor(l volume.Lane) *conn {
	best := e.lanes[l][0]
	for _, c := range e.lanes[l][1:] {
		if c.load.Load() < best.load.Load() {
			best = c
		}
	}
	return best
}

// enter keeps close from returning until leave; false when it has begun.
func (e *epoch) enter() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closing {
		return false
	}
	e.users.Add(1)
	return true
}

// begin starts operations, which may be parked for grants. On an epoch that is
// being closed it does nothing: the next one begins what is unfinished.
func (e *epoch) begin(xs []*op) {
	if !e.enter() {
		return
	}
	defer e.users.Done()
	for _, x := range xs {
		if x.kind == kindRead || x.kind == kindWrite {
			x.parts.Add(1) // the operation itself, until it is split
			e.split(x)
		} else {
			e.sendOp(x)
		}
	}
	e.sendWants()
}

// split posts parts of x as far as there are grants. Until all are posted the
// operation counts as a part of its own, so that it cannot end early.
func (e *epoch) split(x *op) {
	c := x.conn.Load()
	if c == nil {
		c = e.connFor(x.lane)
		x.conn.Store(c)
	}
	wr := rdma.OpRead
	if x.kind == kindWrite {
		wr = rdma.OpWrite
	}
	var few [8]part
	ps := few[:0]
	for x.at < x.n {
		g := e.table.take(x.off + x.at)
		if g == nil {
			break
		}
		off := x.off + x.at
		n := min(x.n-x.at, g.off+g.n-off, maxPart)
		ps = append(ps, part{op: x, grant: g, off: off, mem: x.mem[x.at : x.at+n : x.at+n], wr: wr})
		x.at += n
	}
	whole := x.at == x.n
	if len(ps) > 0 {
		x.parts.Add(int32(len(ps)))
		x.begun = true
		if x.posted.Add(int32(len(ps))) == int32(len(ps)) {
			x.stir() // who waits can lead c now
		}
		c.submit(ps)
	}
	if !whole {
		e.want(x)
		return
	}
	e.partEnd(x)
}

// maxPart bounds one work request, so that one transfer does not hold a lane up
// for long and several are in flight for a large one.
const maxPart = 1 << 20

// partDone ends a part that has succeeded.
func (e *epoch) partDone(p *part) {
	rs, id := e.table.put(p.grant)
	for _, r := range rs {
		e.revoked(r)
	}
	if id != 0 {
		e.unmap([]uint64{id})
	}
	p.op.posted.Add(-1)
	e.partEnd(p.op)
}

// partEnd ends the operation with its last part.
func (e *epoch) partEnd(x *op) {
	if x.parts.Add(-1) > 0 {
		return
	}
	var err error
	if f := x.failure.Load(); f != nil {
		err = *f
	}
	e.v.complete(x, err)
}

// want parks x until its next byte is granted. The extents of its rest that are
// not granted either are asked for in the same go.
func (e *epoch) want(x *op) {
	off := x.off + x.at
	w := e.ask(off, x)
	for off = nextExtent(w.off, e.extent()); off < x.off+x.n; off = nextExtent(off, e.extent()) {
		if !e.table.covers(off) {
			e.ask(off, nil)
		}
	}
}

func nextExtent(off, extent int64) int64 { return (off/extent + 1) * extent }

// ask wants the extent of off; x, if any, goes on when it is answered.
func (e *epoch) ask(off int64, x *op) *want {
	e.mu.Lock()
	defer e.mu.Unlock()
	key := off / e.extent()
	w := e.wanted[key]
	if w == nil {
		w = &want{off: off}
		e.wanted[key] = w
		e.pending = append(e.pending, w)
	}
	if x != nil {
		w.ops = append(w.ops, x)
	}
	return w
}

// extent is the unit of what is asked for: the target's, but never so small that
// one operation would ask for thousands.
func (e *epoch) extent() int64 { return max(64<<10, e.reply.Export.ExtentSize) }

// sendWants asks for what is wanted, many ranges in one MAP.
func (e *epoch) sendWants() {
	for {
		e.mu.Lock()
		n := min(len(e.pending), wire.MaxRanges)
		ws := append([]*want(nil), e.pending[:n]...)
		e.pending = append(e.pending[:0], e.pending[n:]...)
		e.mu.Unlock()
		if n == 0 {
			return
		}
		e.sendMap(ws)
	}
}

func (e *epoch) sendMap(ws []*want) {
	m := &wire.Map{Intent: wire.IntentRead}
	if e.v.access != wire.AccessRead {
		m.Intent = wire.IntentWrite
	}
	size := e.v.Geometry().Size
	for _, w := range ws {
		end := min(nextExtent(w.off, e.extent()), size)
		m.Ranges = append(m.Ranges, wire.Range{Offset: uint64(w.off), Length: uint64(max(1, end-w.off))})
	}
	e.conns[0].ask(wire.TypeMap, m.Append, func(h wire.Header, body []byte) {
		var got wire.Mapped
		if err := got.Parse(body); err != nil || h.Type != wire.TypeMapped {
			e.fail(fmt.Errorf("unreadable answer to MAP: %w", errors.Join(err, wire.ErrMalformed)))
			return
		}
		e.mapped(ws, got.Grants)
	})
}

// maxVolume keeps the sum of an offset and a length within 63 bits.
const maxVolume = 1 << 61

// mapped goes on with the operations that waited for grants.
func (e *epoch) mapped(ws []*want, gs []wire.Grant) {
	for i := range gs {
		if g := &gs[i]; g.Length == 0 || g.Offset > maxVolume || g.Length > maxVolume {
			e.fail(fmt.Errorf("grant of %d bytes at %d: %w", g.Length, g.Offset, wire.ErrMalformed))
			return
		}
	}
	if ids := e.table.add(gs); len(ids) > 0 {
		e.unmap(ids)
	}
	var ready, again []*op
	e.mu.Lock()
	for _, w := range ws {
		delete(e.wanted, w.off/e.extent())
	}
	e.mu.Unlock()
	for _, w := range ws {
		if _, known := statusAt(gs, w.off); !known {
			e.fail(fmt.Errorf("MAP of %d was answered with nothing about it: %w", w.off, wire.ErrMalformed))
			return
		}
		for _, x := range w.ops {
			switch st, known := statusAt(gs, x.off+x.at); {
			case known && passing(st):
				again = append(again, x)
			case known && st != wire.StatusOK:
				x.fail(statusError(st))
				e.partEnd(x)
			default:
				ready = append(ready, x)
			}
		}
	}
	for _, x := range ready {
		e.split(x)
	}
	if len(again) > 0 {
		e.retry(again)
	} else {
		e.mu.Lock()
		e.again = 0
		e.mu.Unlock()
	}
	e.sendWants()
}

// statusAt is what an answer says about one byte.
func statusAt(gs []wire.Grant, off int64) (wire.Status, bool) {
	for i := range gs {
		if g := &gs[i]; uint64(off) >= g.Offset && uint64(off)-g.Offset < g.Length {
			return g.Status, true
		}
	}
	return 0, false
}

// When the target has no frame to give, the grants that are given back now help
// it; so the first wait is about as long as that and a read of its store take.
// If it goes on, asking often does not help.
const (
	firstAgain = 5 * time.Millisecond
	maxAgain   = 100 * time.Millisecond
)

// retry splits operations further, after a while. It is called by the leader of
// connection 0.
func (e *epoch) retry(xs []*op) {
	if ids := e.table.shed(len(xs) + 8); len(ids) > 0 {
		e.unmap(ids)
	}
	e.mu.Lock()
	e.again = min(max(2*e.again, firstAgain), maxAgain)
	wait := e.again
	e.mu.Unlock()
	e.minders.Go(func() {
		select {
		case <-time.After(wait):
		case <-e.ctx.Done():
			return
		}
		for _, x := range xs {
			e.split(x)
		}
		e.sendWants()
	})
}

// unmap gives grants back.
func (e *epoch) unmap(ids []uint64) {
	for len(ids) > 0 {
		n := min(len(ids), wire.MaxIDs)
		m := &wire.IDs{IDs: ids[:n]}
		ids = ids[n:]
		e.conns[0].ask(wire.TypeUnmap, m.Append, func(wire.Header, []byte) {})
	}
}

// revoke carries a REVOKE out.
func (e *epoch) revoke(r *revocation) {
	if e.table.revoke(r) {
		e.revoked(r)
	}
}

func (e *epoch) revoked(r *revocation) {
	m := &wire.IDs{IDs: r.ids}
	e.conns[0].enqueue(message{seq: r.seq, encode: func(b []byte) []byte {
		return m.Append(b, wire.Header{Type: wire.TypeRevoked, Seq: r.seq})
	}})
}

// sendOp sends ZERO, DISCARD or FLUSH.
func (e *epoch) sendOp(x *op) {
	x.parts.Add(1)
	x.begun = true
	answer := func(h wire.Header, _ []byte) {
		switch {
		case passing(h.Status):
			e.fail(fmt.Errorf("%v was answered: %v", x.kind, h.Status)) // asked again when re-opened
			return
		case h.Status != wire.StatusOK:
			x.fail(statusError(h.Status))
		}
		e.partEnd(x)
	}
	m := &wire.Ranges{Ranges: []wire.Range{{Offset: uint64(x.off), Length: uint64(x.n)}}}
	switch x.kind {
	case kindFlush:
		e.conns[0].ask(wire.TypeFlush, wire.AppendEmpty, answer)
	case kindZero:
		e.conns[0].ask(wire.TypeZero, m.Append, answer)
	case kindDiscard:
		e.conns[0].ask(wire.TypeDiscard, m.Append, answer)
	}
}
