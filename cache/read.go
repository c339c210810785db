// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"runtime"
	"time"

	"rblk/volume"
)

// Read returns a view of exactly n bytes at off. Beyond the volume's end:
// volume.ErrRange. The view pins its frames until Release. A cancelled ctx
// detaches the caller only; the transfer goes on. n may be larger than a frame
// and is bounded by MaxIO.
func (v *Volume) Read(ctx context.Context, off int64, n int) (*View, error) {
	if err := v.inRange(off, int64(n)); err != nil {
		return nil, err
	}
	blocks := blocksOf(off, n)
	if err := v.gate.enter(ctx, blocks); err != nil {
		return nil, err
	}
	w := newView(v, off, n)
	w.reserved = blocks
	p := plan{w: w}
	p.pin()
	if !p.lacking {
		if p.foreseen {
			v.ahead.touched(p.touched, off, n, false)
		}
		w.build()
		return w, nil
	}
	v.stalls.Add(1)
	if err := v.fill(ctx, &p); err != nil {
		w.abandon()
		if errors.Is(err, volume.ErrStale) || errors.Is(err, volume.ErrIO) {
			return v.readExact(ctx, off, n)
		}
		return nil, err
	}
	w.build()
	return w, nil
}

// readExact reads exactly what was asked for into frames of its own. A page of a
// dataset holds several small files; when one of them cannot be read any more,
// the page as a whole cannot, but its other files must.
func (v *Volume) readExact(ctx context.Context, off int64, n int) (*View, error) {
	b, err := v.NewBuffer(ctx, n)
	if err != nil {
		return nil, err
	}
	var ops []*volume.Op
	for _, mem := range b.slices {
		for len(mem) > 0 {
			m := min(len(mem), v.maxTransfer)
			b.users.Add(1) // the memory is the network's until the end
			ops = append(ops, &volume.Op{
				Kind: volume.OpRead, Lane: volume.LaneDemand, Offset: off, Mem: mem[:m:m], Done: func(*volume.Op) { b.done(0) },
			})
			mem, off = mem[m:], off+int64(m)
		}
	}
	v.fetched.Add(uint64(n))
	v.src.Submit(ops)
	v.gate.pause()
	for _, op := range ops {
		if e := v.src.Await(ctx, op); e != nil && err == nil {
			err = e
		}
	}
	if e := v.gate.resume(); e != nil {
		err = e
	}
	if err != nil {
		b.Release()
		return nil, err
	}
	w := newView(v, off, n)
	w.private = b
	w.slices = append(w.slices, b.slices...)
	return w, nil
}

// abandon is Release of a view that its caller never got.
func (w *View) abandon() { w.Release() }

// plan is a Read under way.
type plan struct {
	w        *View
	lacking  bool      // some pages are not valid
	claims   []segment // pages to fetch, marked pending in our name
	foreseen bool      // some pages had been read ahead and not been read
	stalls   bool      // and some of them are still under way
	touched  *stream   // whose read-ahead pages were read for the first time
}

// segment is pages of a block.
type segment struct {
	b    *block
	mask uint16
}

// pin fills w.blocks, counts, and claims what nobody fetches yet.
func (p *plan) pin() {
	w := p.w
	v := w.v
	for i := range int(w.reserved) {
		num, lo, hi := w.part(i)
		need := pagesOf(lo, hi)
		s := v.shardOf(num)
		s.mu.Lock()
		b := v.pinned(s, num, hi)
		w.blocks = append(w.blocks, b)
		s.served += uint64(hi - lo)
		if b.marked {
			b.marked, p.touched, p.foreseen = false, b.stream, true
		}
		if got := need & b.ahead; got != 0 {
			p.touched, p.foreseen = b.stream, true
			b.ahead &^= got
			n := bits.OnesCount16(got)
			s.ahead -= int64(n)
			s.aheadUsed += uint64(n) * pageSize
			v.ahead.unread.Add(-int64(n))
			v.ahead.record.add(n, 0)
			if got&b.pending != 0 {
				p.stalls = true
			}
		}
		if lack := need &^ b.valid; lack != 0 {
			s.misses++
			p.lacking = true
			p.claim(b, lack&^b.pending)
		} else {
			s.hits++
		}
		b.touch(need, lo, hi)
		s.mu.Unlock()
	}
}

// touch counts a re-read. Pages read for the first time, and a reader that goes
// on where it left off inside a page, are no sign of popularity. The shard's mu
// is held.
func (b *block) touch(need uint16, lo, hi int) {
	if need&^b.read == 0 && lo != b.lastEnd && b.live {
		b.shard.queue.Touch(&b.node)
	}
	b.read |= need
	b.lastEnd = hi
}

// claim marks pages as ours to fetch. The shard's mu is held.
func (p *plan) claim(b *block, mask uint16) {
	if mask == 0 {
		return
	}
	b.pending |= mask
	p.claims = append(p.claims, segment{b, mask})
}

// fill makes every page of the view valid.
func (v *Volume) fill(ctx context.Context, p *plan) error {
	for first := true; ; first = false {
		if len(p.claims) > 0 {
			if err := v.fetch(ctx, p, first); err != nil {
				return err
			}
		} else if first {
			v.observe(p)
		}
		if err := p.join(ctx); err != nil {
			return err
		}
		if len(p.claims) == 0 {
			return nil
		}
	}
}

// observe tells the read-ahead about a read that was not served at once.
func (v *Volume) observe(p *plan) {
	if p.foreseen {
		v.ahead.touched(p.touched, p.w.off, p.w.n, p.stalls)
	} else {
		v.ahead.missed(p.w.off, p.w.n)
	}
}

// fetch reads the claimed pages: it submits them, tells the read-ahead, so that
// its transfers are behind ours, and waits.
func (v *Volume) fetch(ctx context.Context, p *plan, first bool) error {
	if p.claims = v.fromTier(p.claims); len(p.claims) == 0 {
		if first {
			v.observe(p)
		}
		return nil
	}
	flights, err := v.prepare(p.claims, volume.LaneDemand)
	if err != nil {
		v.unclaim(p.claims, err, true)
		p.claims = nil
		return err
	}
	p.claims = p.claims[:0]
	for _, f := range flights {
		f.lease = p.w
	}
	p.w.users.Add(int32(len(flights)))
	v.submit(flights)
	if first {
		v.observe(p)
	}
	v.gate.pause()
	for _, f := range flights {
		if e := v.src.Await(ctx, &f.op); e != nil && err == nil {
			err = e
			if ctx.Err() != nil {
				break // the transfers go on without us
			}
		}
	}
	if e := v.gate.resume(); e != nil {
		return e
	}
	return err
}

// join waits for the pages that others fetch. When such a fetch has failed or
// was none of a demand read, it claims the pages; it never waits with claims in
// hand, for others may wait for those.
func (p *plan) join(ctx context.Context) error {
	w := p.w
	for i, b := range w.blocks {
		_, lo, hi := w.part(i)
		need := pagesOf(lo, hi)
		b.shard.mu.Lock()
		for need&^b.valid != 0 {
			if free := need &^ (b.valid | b.pending); free != 0 {
				p.claim(b, free)
			}
			if len(p.claims) > 0 {
				break
			}
			if b.wake == nil {
				b.wake = &wakeup{ch: make(chan struct{})}
			}
			wake := b.wake
			b.shard.mu.Unlock()
			if err := p.wait(ctx, wake, need); err != nil {
				return err
			}
			b.shard.mu.Lock()
		}
		b.shard.mu.Unlock()
	}
	return nil
}

func (p *plan) wait(ctx context.Context, wake *wakeup, need uint16) error {
	gate := &p.w.v.gate
	gate.pause()
	var err error
	select {
	case <-wake.ch:
		if wake.failed&need != 0 {
			err = wake.err
		}
	case <-ctx.Done():
		err = ctx.Err()
	}
	if e := gate.resume(); e != nil {
		return e
	}
	return err
}

// flight is one transfer from the volume into frames. It pins its blocks.
type flight struct {
	op       volume.Op
	v        *Volume
	lease    *View // demand: whose reservation covers the blocks
	reserved int64 // read-ahead: its own
	segs     []segment
	segs1    [1]segment
	pumped   bool      // by a prefetch
	began    time.Time // read-ahead
	sent     int64     // bytes that had been delivered then
}

// prepare takes frames for the claimed pages and cuts them into flights, as few
// as the neighbourhood of frames and the Source's MaxTransfer allow.
func (v *Volume) prepare(claims []segment, lane volume.Lane) ([]*flight, error) {
	pages := 0
	for _, c := range claims {
		pages += bits.OnesCount16(c.mask)
	}
	var runs8 [8]run
	runs, err := v.take(runs8[:0], pages)
	if err != nil {
		return nil, err
	}
	var flights []*flight
	var f *flight
	for _, c := range claims {
		v.grown(c)
		for m := c.mask; m != 0; m &= m - 1 {
			i := bits.TrailingZeros16(m)
			pg := runs[0].first
			c.b.pages[i] = pg
			if !f.extend(c.b, i, v.pool.mem(pg, 1)) {
				f = v.newFlight(c.b, i, pg, lane)
				flights = append(flights, f)
			}
			if runs[0].first, runs[0].n = pg+1, runs[0].n-1; runs[0].n == 0 {
				runs = runs[1:]
			}
		}
	}
	for _, f := range flights {
		last := f.segs[len(f.segs)-1]
		end := min(last.b.num*blockSize+int64(last.b.limit), f.op.Offset+int64(len(f.op.Mem)))
		f.op.Mem = f.op.Mem[:end-f.op.Offset]
	}
	return flights, nil
}

// grown tells the eviction queue that the block of c takes more frames.
func (v *Volume) grown(c segment) {
	s := c.b.shard
	s.mu.Lock()
	s.queue.Grow(&c.b.node, int32(bits.OnesCount16(c.mask)))
	s.mu.Unlock()
}

func (v *Volume) newFlight(b *block, i int, pg page, lane volume.Lane) *flight {
	f := &flight{v: v}
	b.refs.Add(1)
	f.segs = append(f.segs1[:0], segment{b, 1 << i})
	rest := v.pool.rest(pg)
	f.op = volume.Op{
		Kind: volume.OpRead, Lane: lane, Offset: b.num*blockSize + int64(i)*pageSize,
		Mem: rest[:pageSize:min(len(rest), v.maxTransfer)], Done: f.complete,
	}
	return f
}

// extend adds page i of b to f when it follows in the volume and mem in memory.
func (f *flight) extend(b *block, i int, mem []byte) bool {
	if f == nil {
		return false
	}
	m := f.op.Mem
	next := b.num*blockSize + int64(i)*pageSize
	if f.op.Offset+int64(len(m)) != next || len(m)+pageSize > cap(m) || &m[:len(m)+1][len(m)] != &mem[0] {
		return false
	}
	f.op.Mem = m[:len(m)+pageSize]
	if last := &f.segs[len(f.segs)-1]; last.b == b {
		last.mask |= 1 << i
	} else {
		b.refs.Add(1)
		f.segs = append(f.segs, segment{b, 1 << i})
	}
	return true
}

func (v *Volume) submit(flights []*flight) {
	var ops4 [4]*volume.Op
	ops := ops4[:0]
	for _, f := range flights {
		ops = append(ops, &f.op)
		v.fetched.Add(uint64(len(f.op.Mem)))
	}
	v.inFlight.Add(int64(len(flights)))
	v.src.Submit(ops)
}

// complete is the Op's Done.
func (f *flight) complete(op *volume.Op) {
	v := f.v
	v.inFlight.Add(-1)
	for _, g := range f.segs {
		v.decide(g, op.Err, f.lease != nil)
		if v.tier != nil && op.Err == nil {
			v.keeper.keep(g.b.num) // now that its pages are valid
		}
	}
	for _, g := range f.segs {
		v.unpin(g.b)
	}
	v.trim()
	if f.lease != nil {
		f.lease.done(0)
	} else {
		v.ahead.landed(f)
		v.gate.give(f.reserved)
	}
}

// decide ends the pending state of pages: valid, or gone with err. The error is
// for those who wait, if the fetch was somebody's demand; after a failed
// read-ahead they try themselves.
func (v *Volume) decide(g segment, err error, demand bool) {
	b := g.b
	b.shard.mu.Lock()
	defer b.shard.mu.Unlock()
	b.pending &^= g.mask
	if err == nil {
		b.valid |= g.mask
	} else {
		b.shard.queue.Grow(&b.node, -int32(bits.OnesCount16(g.mask)))
		v.pool.release(&b.pages, g.mask)
		v.unread(b, g.mask)
		if b.valid|b.pending == 0 {
			v.detach(b)
		}
	}
	if wake := b.wake; wake != nil {
		b.wake = nil
		if err != nil && demand {
			wake.failed, wake.err = g.mask, err
		}
		close(wake.ch)
	}
}

// unclaim gives claims up that were never submitted.
func (v *Volume) unclaim(claims []segment, err error, demand bool) {
	for _, c := range claims {
		s := c.b.shard
		s.mu.Lock()
		s.queue.Grow(&c.b.node, int32(bits.OnesCount16(c.mask))) // decide takes it off again
		s.mu.Unlock()
		v.decide(c, err, demand)
	}
}

// errNoFrames is a fault of the machine, not of the volume.
var errNoFrames = errors.New("no memory for the cache; lower cache= or raise the memlock limit")

// take gets frames for n pages: free ones, new ones, or those of blocks that
// are evicted for them. The caller's reservation guarantees that they exist.
func (v *Volume) take(runs []run, n int) ([]run, error) {
	if over := v.pool.used.Load() + int64(n) - v.target.Load(); over > 0 {
		v.evict(over)
	}
	for {
		if runs, n = v.pool.alloc(runs, n); n == 0 {
			return runs, nil
		}
		if v.grow() {
			continue
		}
		if v.evict(int64(n)) > 0 {
			continue
		}
		if v.pool.mapped() < v.gate.limit.Load()*blockSize {
			v.pool.releaseRuns(runs)
			return nil, fmt.Errorf("%w: %w", volume.ErrIO, errNoFrames)
		}
		// Frames that were unpinned are on their way back in other goroutines.
		runtime.Gosched()
	}
}
