// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"

	"rblk/volume"
)

// Buffer is leased registered memory to write from.
type Buffer struct {
	v        *Volume
	n        int
	runs     []run
	slices   [][]byte
	reserved int64
	users    atomic.Int32 // the holder and writes under way
	held     atomic.Bool
}

// NewBuffer leases n bytes of registered memory to be filled and written with
// WriteBuffer; it waits while the budget is exhausted.
func (v *Volume) NewBuffer(ctx context.Context, n int) (*Buffer, error) {
	if n < 0 || n > MaxIO {
		return nil, volume.ErrRange
	}
	b := &Buffer{v: v, n: n, reserved: blocksOf(0, n)}
	if err := v.gate.enter(ctx, b.reserved); err != nil {
		return nil, err
	}
	b.users.Store(1)
	b.held.Store(true)
	runs, err := v.take(nil, (n+pageSize-1)/pageSize)
	if err != nil {
		v.gate.give(b.reserved + hand)
		return nil, err
	}
	b.runs = runs
	for _, r := range runs {
		mem := v.pool.mem(r.first, r.n)
		mem = mem[:min(n, len(mem)):len(mem)]
		n -= len(mem)
		b.slices = append(b.slices, mem[:len(mem):len(mem)])
	}
	return b, nil
}

// Slices are the writable bytes in order; valid until Release.
func (b *Buffer) Slices() [][]byte { return b.slices }

// Len is the number of bytes.
func (b *Buffer) Len() int { return b.n }

// Release ends the lease. Memory that a write under way reads from stays until
// that has ended.
func (b *Buffer) Release() {
	if !b.held.Swap(false) {
		panic("cache: Buffer released twice")
	}
	b.done(hand)
}

func (b *Buffer) done(hands int64) {
	if b.users.Add(-1) == 0 {
		b.v.pool.releaseRuns(b.runs)
		hands += b.reserved
	}
	if hands != 0 {
		b.v.gate.give(hands)
	}
}

// write is one Write under way. What it does to cached blocks happens in the
// completion of its last Op, so that it happens even when nobody waits.
type write struct {
	v     *Volume
	off   int64
	buf   *Buffer
	ops   []volume.Op
	left  atomic.Int32
	wipes uint64 // v.wipes when it began

	mu  sync.Mutex
	err error

	marked int64 // blocks
	done   chan struct{}
}

// Write returns when [off, off+len(p)) is acknowledged by the target (and
// durable, with fua). p is not kept.
func (v *Volume) Write(ctx context.Context, off int64, p []byte, fua bool) error {
	if err := v.writable(off, int64(len(p))); err != nil {
		return err
	}
	b, err := v.NewBuffer(ctx, len(p))
	if err != nil {
		return err
	}
	defer b.Release()
	for _, s := range b.slices {
		p = p[copy(s, p):]
	}
	return v.WriteBuffer(ctx, off, b, fua)
}

// WriteBuffer is Write from a Buffer, without a copy where alignment allows.
// The caller still owns b afterwards and releases it.
func (v *Volume) WriteBuffer(ctx context.Context, off int64, b *Buffer, fua bool) error {
	if err := v.writable(off, int64(b.n)); err != nil {
		return err
	}
	if b.n == 0 {
		return nil
	}
	geo := v.src.Geometry()
	w := &write{v: v, off: off, buf: b, done: make(chan struct{})}
	w.cut(fua && geo.CanFUA)
	w.begin()
	ops := make([]*volume.Op, len(w.ops))
	for i := range w.ops {
		ops[i] = &w.ops[i]
	}
	v.src.Submit(ops)
	v.gate.pause() // the buffer's hand: Close may end a write that is stuck
	err := w.wait(ctx)
	if e := v.gate.resume(); e != nil {
		return e
	}
	if err != nil {
		return err
	}
	v.written.Add(uint64(b.n))
	if fua && !geo.CanFUA && geo.CanFlush {
		return v.Flush(ctx)
	}
	return nil
}

// cut makes the Ops.
func (w *write) cut(fua bool) {
	off := w.off
	for _, s := range w.buf.slices {
		for len(s) > 0 {
			n := min(len(s), w.v.maxTransfer)
			w.ops = append(w.ops, volume.Op{
				Kind: volume.OpWrite, Lane: volume.LaneWrite, FUA: fua, Offset: off, Mem: s[:n], Done: w.complete,
			})
			s = s[n:]
			off += int64(n)
		}
	}
	w.left.Store(int32(len(w.ops)))
}

// begin marks the blocks of w.
func (w *write) begin() {
	v := w.v
	w.buf.users.Add(1)
	w.wipes = v.wipes.Load()
	w.marked = blocksOf(w.off, w.buf.n)
	for num := w.off / blockSize; num < w.off/blockSize+w.marked; num++ {
		s := v.shardOf(num)
		s.mu.Lock()
		m := s.writing[num]
		if m == nil {
			m = &mark{}
			s.writing[num] = m
		}
		m.writes++
		m.met = m.met || m.writes > 1
		s.mu.Unlock()
	}
}

// wait drives the Ops to their end.
func (w *write) wait(ctx context.Context) error {
	for i := range w.ops {
		if err := w.v.src.Await(ctx, &w.ops[i]); err != nil && ctx.Err() != nil {
			return ctx.Err()
		}
	}
	select {
	case <-w.done:
		return w.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// complete is the Done of each Op.
func (w *write) complete(op *volume.Op) {
	if op.Err != nil {
		w.mu.Lock()
		if w.err == nil {
			w.err = op.Err
		}
		w.mu.Unlock()
	}
	if w.left.Add(-1) > 0 {
		return
	}
	// Cached blocks first, then the answer: whoever reads after the answer sees
	// what was written.
	rest := slices.Clone(w.buf.slices)
	for num := w.off / blockSize; num < w.off/blockSize+w.marked; num++ {
		rest = w.settle(num, rest)
	}
	w.buf.done(0)
	close(w.done)
}

// settle brings block num up to date with the write and returns the bytes for
// the blocks after it.
//
// An idle block is overwritten. One that is in use (a view shows it; a transfer
// that may have begun before the write fills it) is detached: its users began
// before the write was acknowledged and may see what was before, and whoever
// comes later fetches anew. That also solves the race of a write with a
// read-ahead: the read-ahead's block is in use as long as it is under way, and
// idle, so overwritten here, afterwards.
func (w *write) settle(num int64, rest [][]byte) [][]byte {
	v, s := w.v, w.v.shardOf(num)
	start := num * blockSize
	lo := int(max(w.off-start, 0))
	hi := int(min(w.off+int64(w.buf.n)-start, blockSize))

	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.writing[num]
	if m.writes--; m.writes == 0 {
		delete(s.writing, num)
	}
	b := s.blocks[num]
	if b != nil && (w.err != nil || m.met || !b.idle() || w.wipes != v.wipes.Load()) {
		v.detach(b)
		b = nil
	}
	for at := lo; at < hi; {
		n := min(pageSize-at%pageSize, hi-at, len(rest[0]))
		if b != nil && b.valid&(1<<(at/pageSize)) != 0 {
			copy(v.pool.mem(b.pages[at/pageSize], 1)[at%pageSize:], rest[0][:n])
		}
		at += n
		if rest[0] = rest[0][n:]; len(rest[0]) == 0 {
			rest = rest[1:]
		}
	}
	return rest
}

// Flush: every Write that returned before the call is durable as the export
// states it.
func (v *Volume) Flush(ctx context.Context) error {
	if v.gate.closed.Load() {
		return volume.ErrClosed
	}
	return v.src.Flush(ctx)
}

// Zero makes the range read as zeros.
func (v *Volume) Zero(ctx context.Context, off, n int64) error {
	return v.wipe(ctx, off, n, v.src.Geometry().CanZero, v.src.Zero)
}

// Discard gives the range up; it reads as zeros afterwards.
func (v *Volume) Discard(ctx context.Context, off, n int64) error {
	return v.wipe(ctx, off, n, v.src.Geometry().CanDiscard, v.src.Discard)
}

// wipe detaches the range's blocks once the Source has done it: also after an
// error, when nobody knows how far it came. A write that overlaps in time
// forgets its blocks instead of updating them (v.wipes), for nobody knows which
// came first. It goes on when ctx ends, as writes do.
func (v *Volume) wipe(ctx context.Context, off, n int64, can bool, do func(context.Context, int64, int64) error) error {
	if err := v.writable(off, n); err != nil {
		return err
	}
	if !can {
		return volume.ErrUnsupported
	}
	if n == 0 {
		return nil
	}
	if err := v.gate.enter(ctx, 0); err != nil {
		return err
	}
	v.gate.reserve(1) // so that Close waits for the end, without a hand
	v.gate.pause()
	done := make(chan error, 1)
	v.wiping.Add(1)
	go func() {
		v.wipes.Add(1)
		err := do(context.WithoutCancel(ctx), off, n)
		v.wipes.Add(1)
		first, last := off/blockSize, (off+n-1)/blockSize
		v.drop(true, func(num int64) bool { return first <= num && num <= last })
		v.wiping.Add(-1)
		done <- err
		v.gate.give(1)
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}
