// SPDX-License-Identifier: Apache-2.0

// Package cachetest is a volume in memory for tests of whatever sits above
// volume.Source: with delays, a bandwidth, failures, gates and counters, and
// with the disorder that the contract of volume.Source allows.
package cachetest

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"rblk/volume"
)

// Options of a Source. The zero value is a writable memory volume that
// completes every Op inside Submit.
type Options struct {
	// Geometry, where set, overrides what NewSource fills in: export "test",
	// KindMemory, BlockSize 1, ExtentSize 1 MiB, Instance "i1", every
	// capability. Size always comes from NewSource.
	Geometry func(*volume.Geometry)

	MaxTransfer int           // 0: 1 MiB
	Latency     time.Duration // of every Op
	Jitter      time.Duration // a random extra in [0, Jitter)
	Bandwidth   int64         // bytes a second; the demand lane goes first; 0: no bound
	FailRate    float64       // share of Ops that fail with FailErr, in [0, 1]
	FailErr     error         // nil: volume.ErrIO
	Seed        uint64
}

// Counters count what a Source did since NewSource.
type Counters struct {
	Reads, Writes                [volume.NumLanes]int64 // Ops
	ReadBytes                    int64
	ReadaheadBytes               int64 // part of ReadBytes that LaneReadahead carried
	WriteBytes                   int64
	Flushes, Zeroes, Discards    int64
	FUA                          int64 // writes with FUA
	InFlight, MaxInFlight        int64 // Ops
	InFlightBytes, MaxInFlightBy int64
	Arenas                       int64 // open
	ArenaBytes                   int64 // open
}

// Source is a volume in memory. It panics where its user breaks the contract
// of volume.Source: memory outside its arenas, too large an Op, two reads into
// the same memory, a misaligned write.
type Source struct {
	opts   Options
	data   []byte
	events chan volume.Event

	mu       sync.Mutex
	rng      *rand.Rand
	geo      volume.Geometry
	fault    func(*volume.Op) error
	held     bool
	closed   bool
	pending  []*pending // in order of submission
	ending   int        // Ops that have left pending and are being Done
	linkFree time.Time
	arenas   []*arena
	count    Counters
	idle     sync.Cond
}

// pending is an Op under way.
type pending struct {
	op    *volume.Op
	deps  int        // overlapping writes before it
	after []*pending // those that wait for it
	begun bool
	early bool // a read takes its bytes at the start instead of at the end
	err   error
	timer *time.Timer
	done  chan struct{}
}

var _ volume.Source = (*Source)(nil)

// NewSource makes a volume of size zero bytes.
func NewSource(size int64, opts Options) *Source {
	if opts.MaxTransfer == 0 {
		opts.MaxTransfer = 1 << 20
	}
	if opts.FailErr == nil {
		opts.FailErr = volume.ErrIO
	}
	s := &Source{
		opts:   opts,
		data:   make([]byte, size),
		events: make(chan volume.Event, 8), // one of each kind and some
		rng:    rand.New(rand.NewPCG(opts.Seed, 1)),
		geo: volume.Geometry{
			Export: "test", Kind: volume.KindMemory, BlockSize: 1, ExtentSize: 1 << 20, Instance: "i1",
			CanFlush: true, CanFUA: true, CanDiscard: true, CanZero: true, CanMultiConn: true,
		},
	}
	s.idle.L = &s.mu
	if opts.Geometry != nil {
		opts.Geometry(&s.geo)
	}
	s.geo.Size = size
	return s
}

// Fill gives the volume reproducible bytes that differ from block to block.
func (s *Source) Fill(seed uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	Pattern(s.data, seed)
}

// Pattern fills p as Source.Fill fills a volume.
func Pattern(p []byte, seed uint64) {
	x := seed*0x9e3779b97f4a7c15 + 1
	for len(p) > 0 {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		var word [8]byte
		binary.LittleEndian.PutUint64(word[:], x)
		p = p[copy(p, word[:]):]
	}
}

// Peek copies the volume's bytes at off, past any cache.
func (s *Source) Peek(off int64, p []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	copy(p, s.data[off:])
}

// Poke changes the volume's bytes at off behind everybody's back.
func (s *Source) Poke(off int64, p []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	copy(s.data[off:], p)
}

// SetFault decides from now on whether an Op fails, beside FailRate. It is
// called when the Op starts, and must not block.
func (s *Source) SetFault(f func(*volume.Op) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault = f
}

// SetFailRate changes Options.FailRate.
func (s *Source) SetFailRate(rate float64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.opts.FailRate = rate
}

// Hold keeps every Op that has not started from starting, until Resume.
func (s *Source) Hold() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held = true
}

// Resume ends Hold.
func (s *Source) Resume() {
	s.mu.Lock()
	s.held = false
	ready := s.startable()
	s.mu.Unlock()
	s.begin(ready)
}

// Waiting is the number of Ops under way.
func (s *Source) Waiting() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.pending)
}

// Counters is a snapshot.
func (s *Source) Counters() Counters {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.count
}

// Emit sends an event with the present geometry.
func (s *Source) Emit(e volume.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.emit(e)
}

// emit drops the oldest event when nobody reads. s.mu is held.
func (s *Source) emit(e volume.Event) {
	if s.closed {
		return
	}
	e.Geometry = s.geo
	for {
		select {
		case s.events <- e:
			return
		default:
		}
		select {
		case <-s.events:
		default:
		}
	}
}

// Resize changes the volume's size and tells so.
func (s *Source) Resize(size int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	grown := make([]byte, size)
	copy(grown, s.data)
	s.data, s.geo.Size = grown, size
	s.emit(volume.Event{Kind: volume.EventResized})
}

// LoseContent zeroes the volume under a new instance: Ops fail from now on.
func (s *Source) LoseContent(instance string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.data)
	s.geo.Instance = instance
	s.fault = func(*volume.Op) error { return volume.ErrInstanceChanged }
	s.emit(volume.Event{Kind: volume.EventInstance, State: volume.StateFailed, Err: volume.ErrInstanceChanged})
}

// Geometry implements volume.Source.
func (s *Source) Geometry() volume.Geometry {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.geo
}

// MaxTransfer implements volume.Source.
func (s *Source) MaxTransfer() int { return s.opts.MaxTransfer }

// Events implements volume.Source.
func (s *Source) Events() <-chan volume.Event { return s.events }

// Submit implements volume.Source.
func (s *Source) Submit(ops []*volume.Op) {
	s.mu.Lock()
	var ready, refused []*pending
	for _, op := range ops {
		p := &pending{op: op, done: make(chan struct{})}
		op.Source, op.Err = p, nil
		if err := s.check(op); err != nil {
			p.err = err
			refused = append(refused, p)
			continue
		}
		s.admit(p)
		if p.deps == 0 && !s.held {
			p.begun = true
			ready = append(ready, p)
		}
	}
	s.mu.Unlock()
	for _, p := range refused {
		p.finish()
	}
	s.begin(ready)
}

// check refuses what a Source refuses and panics at what a user must not do.
// s.mu is held.
func (s *Source) check(op *volume.Op) error {
	if s.closed {
		return volume.ErrClosed
	}
	if len(op.Mem) == 0 || len(op.Mem) > s.opts.MaxTransfer {
		panic(fmt.Sprintf("cachetest: Op of %d bytes, MaxTransfer %d", len(op.Mem), s.opts.MaxTransfer))
	}
	if !slices.ContainsFunc(s.arenas, func(a *arena) bool { return within(op.Mem, a.mem) }) {
		panic("cachetest: Op memory outside every arena")
	}
	end := op.Offset + int64(len(op.Mem))
	if op.Offset < 0 || end > s.geo.Size {
		return volume.ErrRange
	}
	if op.Kind == volume.OpWrite {
		if s.geo.ReadOnly {
			return volume.ErrReadOnly
		}
		if op.Offset%s.geo.BlockSize != 0 || end%s.geo.BlockSize != 0 {
			return fmt.Errorf("%w: write of [%d, %d)", volume.ErrRange, op.Offset, end)
		}
		if op.FUA && !s.geo.CanFUA {
			panic("cachetest: FUA on a volume without it")
		}
	}
	return nil
}

// admit queues p behind the writes that it overlaps. s.mu is held.
func (s *Source) admit(p *pending) {
	for _, q := range s.pending {
		if q.op.Kind == volume.OpRead && p.op.Kind == volume.OpRead && within(p.op.Mem[:1], q.op.Mem) {
			panic("cachetest: two reads into the same memory")
		}
		if q.op.Kind == volume.OpWrite && overlap(p.op, q.op) {
			q.after = append(q.after, p)
			p.deps++
		}
	}
	s.pending = append(s.pending, p)
	n, c := int64(len(p.op.Mem)), &s.count
	if p.op.Kind == volume.OpRead {
		c.Reads[p.op.Lane]++
		c.ReadBytes += n
		if p.op.Lane == volume.LaneReadahead {
			c.ReadaheadBytes += n
		}
	} else {
		c.Writes[p.op.Lane]++
		c.WriteBytes += n
		if p.op.FUA {
			c.FUA++
		}
	}
	c.InFlight++
	c.InFlightBytes += n
	c.MaxInFlight = max(c.MaxInFlight, c.InFlight)
	c.MaxInFlightBy = max(c.MaxInFlightBy, c.InFlightBytes)
}

// startable marks as begun, and returns, what may start. s.mu is held.
func (s *Source) startable() []*pending {
	var ready []*pending
	for _, p := range s.pending {
		if !p.begun && p.deps == 0 && (!s.held || s.closed) {
			p.begun = true
			ready = append(ready, p)
		}
	}
	return ready
}

// begin starts Ops and whatever becomes startable by those that end at once.
func (s *Source) begin(ready []*pending) {
	for len(ready) > 0 {
		p := ready[0]
		ready = ready[1:]
		if s.start(p) {
			ready = append(ready, s.complete(p)...)
		}
	}
}

// start schedules the end of p, or reports true when p ends at once.
func (s *Source) start(p *pending) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p.err = s.verdict(p.op); p.err == nil {
		p.early = s.opts.Jitter > 0 && s.rng.IntN(2) == 0
		s.apply(p, false)
	} else if p.op.Kind == volume.OpWrite && s.rng.IntN(2) == 0 {
		s.apply(p, false) // a failed write may be torn
	}
	wait := s.delay(p.op)
	if wait == 0 {
		return true
	}
	p.timer = time.AfterFunc(wait, func() { s.begin(s.complete(p)) })
	return false
}

// verdict is whether op fails. s.mu is held.
func (s *Source) verdict(op *volume.Op) error {
	if s.closed {
		return volume.ErrClosed
	}
	if s.fault != nil {
		if err := s.fault(op); err != nil {
			return err
		}
	}
	if s.opts.FailRate > 0 && s.rng.Float64() < s.opts.FailRate {
		return s.opts.FailErr
	}
	return nil
}

// delay is how long op takes. s.mu is held.
func (s *Source) delay(op *volume.Op) time.Duration {
	wait := s.opts.Latency
	if s.opts.Jitter > 0 {
		wait += time.Duration(s.rng.Int64N(int64(s.opts.Jitter)))
	}
	if s.opts.Bandwidth > 0 {
		now := time.Now()
		took := time.Duration(int64(len(op.Mem)) * int64(time.Second) / s.opts.Bandwidth)
		if s.linkFree.Before(now) {
			s.linkFree = now
		}
		s.linkFree = s.linkFree.Add(took)
		if op.Lane == volume.LaneDemand {
			wait += took // passes the others by, who come later for it
		} else {
			wait += s.linkFree.Sub(now)
		}
	}
	return wait
}

// apply moves bytes: half of them when the Op starts and half when it ends, so
// that whoever looks in between sees a torn write. s.mu is held.
func (s *Source) apply(p *pending, end bool) {
	op := p.op
	if op.Offset+int64(len(op.Mem)) > int64(len(s.data)) {
		p.err = volume.ErrRange // shrunk meanwhile
		return
	}
	vol := s.data[op.Offset:][:len(op.Mem)]
	half := len(vol) / 2
	switch {
	case op.Kind == volume.OpRead && p.early != end:
		copy(op.Mem, vol)
	case op.Kind == volume.OpWrite && !end:
		copy(vol[:half], op.Mem)
	case op.Kind == volume.OpWrite:
		copy(vol, op.Mem)
	}
}

// complete ends p and returns what may start now.
func (s *Source) complete(p *pending) []*pending {
	s.mu.Lock()
	if p.err == nil {
		if s.closed {
			p.err = volume.ErrClosed
		} else {
			s.apply(p, true)
		}
	}
	s.pending = slices.DeleteFunc(s.pending, func(q *pending) bool { return q == p })
	s.count.InFlight--
	s.count.InFlightBytes -= int64(len(p.op.Mem))
	s.ending++
	s.mu.Unlock()
	p.finish() // the Op and its memory are the submitter's again

	s.mu.Lock()
	defer s.mu.Unlock()
	for _, q := range p.after {
		q.deps--
	}
	if s.ending--; s.ending == 0 && len(s.pending) == 0 {
		s.idle.Broadcast()
	}
	return s.startable()
}

// finish tells the Op's submitter.
func (p *pending) finish() {
	p.op.Err = p.err
	p.op.Done(p.op)
	close(p.done)
}

// Await implements volume.Source.
func (s *Source) Await(ctx context.Context, op *volume.Op) error {
	p := op.Source.(*pending)
	select {
	case <-p.done:
		return p.err
	default:
	}
	select {
	case <-p.done:
		return p.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Flush implements volume.Source.
func (s *Source) Flush(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return volume.ErrClosed
	}
	s.count.Flushes++
	return ctx.Err()
}

// Zero implements volume.Source.
func (s *Source) Zero(ctx context.Context, off, n int64) error {
	return s.wipe(ctx, off, n, &s.count.Zeroes)
}

// Discard implements volume.Source.
func (s *Source) Discard(ctx context.Context, off, n int64) error {
	return s.wipe(ctx, off, n, &s.count.Discards)
}

func (s *Source) wipe(ctx context.Context, off, n int64, count *int64) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return volume.ErrClosed
	case s.geo.ReadOnly:
		return volume.ErrReadOnly
	case off < 0 || n < 0 || off > s.geo.Size-n:
		return volume.ErrRange
	}
	*count++
	clear(s.data[off:][:n])
	return nil
}

// Close implements volume.Source.
func (s *Source) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil
	}
	s.closed, s.held = true, false
	var now []*pending // those whose timer we stopped
	for _, p := range s.pending {
		if p.timer != nil && p.timer.Stop() {
			now = append(now, p)
		}
	}
	now = append(now, s.startable()...)
	s.mu.Unlock()
	for len(now) > 0 {
		p := now[0]
		now = append(now[1:], s.complete(p)...)
	}
	s.mu.Lock()
	for len(s.pending) > 0 || s.ending > 0 {
		s.idle.Wait()
	}
	arenas := slices.Clone(s.arenas)
	close(s.events)
	s.mu.Unlock()
	for _, a := range arenas {
		a.Close()
	}
	return nil
}

// arena is registered memory of a Source.
type arena struct {
	src *Source
	mem []byte
}

// NewArena implements volume.Source.
func (s *Source) NewArena(size int64) (volume.Arena, error) {
	mem, err := unix.Mmap(-1, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("cachetest: map %d bytes: %w", size, err)
	}
	a := &arena{src: s, mem: mem}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.arenas = append(s.arenas, a)
	s.count.Arenas++
	s.count.ArenaBytes += size
	return a, nil
}

// Bytes implements volume.Arena.
func (a *arena) Bytes() []byte { return a.mem }

// Close implements volume.Arena. It panics while an Op uses the arena, where a
// real Source would wait: a cache has no reason to close it then.
func (a *arena) Close() error {
	s := a.src
	s.mu.Lock()
	defer s.mu.Unlock()
	if a.mem == nil {
		return nil
	}
	for _, p := range s.pending {
		if within(p.op.Mem, a.mem) {
			panic("cachetest: arena closed under an Op")
		}
	}
	s.arenas = slices.DeleteFunc(s.arenas, func(b *arena) bool { return a == b })
	s.count.Arenas--
	s.count.ArenaBytes -= int64(len(a.mem))
	mem := a.mem
	a.mem = nil
	return unix.Munmap(mem)
}

// overlap is whether two Ops share bytes of the volume.
func overlap(a, b *volume.Op) bool {
	return a.Offset < b.Offset+int64(len(b.Mem)) && b.Offset < a.Offset+int64(len(a.Mem))
}
