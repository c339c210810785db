// SPDX-License-Identifier: Apache-2.0

package target

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"rblk/internal/size"
	"rblk/rdma"
	"rblk/wire"
)

// extentSize is the unit of residency: large enough that its grant is worth a
// message, small enough that a random read does not waste the store.
const extentSize = 1 << 20

// slabFrames is how many frames change exports together. A slab is the unit of
// registration: 16 MiB keeps the number of regions low.
const slabFrames = 16

// pool is the target's memory for staged extents, dealt to exports in slabs.
// A frame belongs to one export at a time, and is registered in that export's
// domains alone, so that no key reaches another export's bytes.
type pool struct {
	mem    []byte
	filled func(n int, start time.Time) // told of every read of a store; set once

	mu      sync.Mutex
	free    []*slab         // guarded by mu
	total   int             // set once: slabs
	stagers map[*stager]int // guarded by mu: exports and how many slabs each holds
}

// slab is a run of frames.
type slab struct {
	mem     []byte
	owner   *stager
	regions map[*domain]rdma.MemoryRegion // guarded by owner.mu
	frames  []*frame
	freed   int  // guarded by owner.mu: free frames, while giving
	giving  bool // guarded by owner.mu: on its way back to the pool
}

// frame holds one extent.
type frame struct {
	slab *slab
	mem  []byte
	ext  *extent // guarded by owner.mu: what it holds
}

const slabSize = slabFrames * extentSize

// slabsOf is how many slabs n bytes of frames are; with fewer than two, one
// export could lock the other out.
func slabsOf(n int64) int { return max(2, int((n+slabSize-1)/slabSize)) }

// newPool maps and pins n bytes of frames.
func newPool(n int64, filled func(n int, start time.Time)) (*pool, error) {
	slabs := slabsOf(n)
	mem, err := unix.Mmap(-1, 0, slabs*slabSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("frames: map %s: %w", size.Format(n), err)
	}
	unix.Madvise(mem, unix.MADV_HUGEPAGE) // fewer translations for the adapter; only a wish
	if err := pin(mem); err != nil {
		unix.Munmap(mem)
		return nil, fmt.Errorf("frames: %w, or use a smaller --frames", err)
	}
	p := &pool{mem: mem, filled: filled, total: slabs, stagers: map[*stager]int{}}
	for i := range slabs {
		s := &slab{mem: mem[i*slabSize : (i+1)*slabSize : (i+1)*slabSize], regions: map[*domain]rdma.MemoryRegion{}}
		for j := range slabFrames {
			s.frames = append(s.frames, &frame{slab: s, mem: s.mem[j*extentSize : (j+1)*extentSize : (j+1)*extentSize]})
		}
		p.free = append(p.free, s)
	}
	return p, nil
}

func (p *pool) close() { unix.Munmap(p.mem) }

// fairLocked is how many slabs an export may hold while others want some.
func (p *pool) fairLocked() int { return max(1, p.total/max(1, len(p.stagers))) }

// take gives a free slab to st, or nil. Who has its share leaves free slabs to
// those who wait for theirs.
func (p *pool) take(st *stager) *slab {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.free) == 0 {
		return nil
	}
	fair := p.fairLocked()
	if p.stagers[st] >= fair {
		for other, n := range p.stagers {
			if other != st && n < fair && other.waiting.Load() > 0 {
				return nil
			}
		}
	}
	s := p.free[len(p.free)-1]
	p.free = p.free[:len(p.free)-1]
	s.owner = st
	p.stagers[st]++
	return s
}

// richer finds the export that should give a slab to st: the one that holds
// most above its fair share, when st holds less than its own. One that holds
// nothing gets one from whoever has most, so that everybody progresses. Nil
// when nobody should give.
func (p *pool) richer(st *stager) *stager {
	p.mu.Lock()
	defer p.mu.Unlock()
	fair := p.fairLocked()
	if p.stagers[st] >= fair {
		return nil
	}
	enough := fair
	if p.stagers[st] == 0 {
		enough = 0
	}
	var rich *stager
	for other, n := range p.stagers {
		if other != st && n > enough && (rich == nil || n > p.stagers[rich]) {
			rich = other
		}
	}
	return rich
}

// giveBack takes a slab whose frames are all free, and whose regions are gone.
func (p *pool) giveBack(s *slab, from *stager) {
	clear(s.mem) // nothing of one export is ever seen by another
	p.mu.Lock()
	s.owner = nil
	p.free = append(p.free, s)
	p.stagers[from]--
	others := make([]*stager, 0, len(p.stagers))
	for st := range p.stagers {
		others = append(others, st)
	}
	p.mu.Unlock()
	for _, st := range others {
		st.wake()
	}
}

// store is what a staged export reads its extents from.
type store interface {
	// fill reads [off, off+len(buf)) of the volume into buf, which holds old
	// bytes, and returns the ranges that could not be read: sorted, without
	// overlap, in volume offsets. What it does not name is right to the last
	// byte.
	fill(ctx context.Context, off int64, buf []byte) []badRange
	// size of the volume now.
	size() int64
}

// badRange is a part of an extent that has no right bytes, and why.
type badRange struct {
	off, n int64
	status wire.Status
}

type extentState uint8

const (
	stateWaiting  extentState = iota // for a frame
	stateFilling                     // the store is being read
	stateResident                    // and granted, while it has holds
	stateRevoking                    // asked back from its holders; not granted to anybody else
)

// extent is an extent that has a frame or is getting one.
type extent struct {
	index int64
	ready chan struct{} // closed when filling has ended
	gone  chan struct{} // closed when the frame is free again

	repairs chan struct{} // holds a token while bad ranges are read again

	// guarded by stager.mu
	state extentState
	frame *frame // nil while waiting and filling
	n     int64  // bytes: extentSize, less at the volume's end
	bad   []badRange
	pins  int // grants, and MAPs at work
	holds map[*grant]struct{}
	place *list.Element // in stager.idle (no pins) or stager.held
}

// stager is one export's resident extents.
type stager struct {
	pool  *pool
	store store
	log   *slog.Logger

	waiting atomic.Int32 // length of queue, for other exports' eyes

	mu      sync.Mutex
	extents map[int64]*extent // guarded by mu
	free    []*frame          // guarded by mu
	queue   *list.List        // guarded by mu: who waits for a frame, first come first served
	idle    *list.List        // guarded by mu: resident and not held, coldest first
	held    *list.List        // guarded by mu: pinned, longest held first
	changed chan struct{}     // guarded by mu: closed and replaced when frames may be free
	slabs   map[*slab]bool    // guarded by mu
	closed  bool              // guarded by mu
}

func newStager(p *pool, s store, log *slog.Logger) *stager {
	st := &stager{
		pool: p, store: s, log: log, extents: map[int64]*extent{}, idle: list.New(), held: list.New(), queue: list.New(),
		changed: make(chan struct{}), slabs: map[*slab]bool{},
	}
	p.mu.Lock()
	p.stagers[st] = 0
	p.mu.Unlock()
	return st
}

// wake lets those who wait for a frame look again.
func (st *stager) wake() {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.wakeLocked()
}

func (st *stager) wakeLocked() {
	if st.queue.Len() == 0 {
		return
	}
	close(st.changed)
	st.changed = make(chan struct{})
}

var (
	errStagerClosed = errors.New("export closed")
	errBeyond       = errors.New("beyond the end")
	errNoFrame      = errors.New("no frame is free now")
	errSlabLeaves   = errors.New("the frame's slab goes to another export")
)

// acquire returns the extent, resident and pinned; the caller ends the pin with
// release. It waits for the store, and, when wait is set, for frames that
// others hold: else errNoFrame. fresh: it was read just now.
func (st *stager) acquire(ctx context.Context, index int64, wait bool) (e *extent, fresh bool, err error) {
	for {
		st.mu.Lock()
		if st.closed {
			st.mu.Unlock()
			return nil, false, errStagerClosed
		}
		e := st.extents[index]
		if e == nil {
			e, err = st.addLocked(index)
			st.mu.Unlock()
			if err == nil {
				err = st.load(ctx, e, wait)
			}
			if errors.Is(err, errSlabLeaves) {
				continue
			}
			return e, true, err
		}
		until := e.ready
		switch {
		case !wait && (e.state == stateRevoking || e.state == stateWaiting):
			st.mu.Unlock()
			return nil, false, errNoFrame
		case e.state == stateRevoking:
			until = e.gone
		default:
			st.pinLocked(e)
		}
		st.mu.Unlock()
		select {
		case <-until:
		case <-ctx.Done():
			if until == e.ready {
				st.release(e)
			}
			return nil, false, ctx.Err()
		}
		if until == e.gone {
			continue
		}
		st.mu.Lock()
		ok := e.frame != nil
		st.mu.Unlock()
		if ok {
			return e, false, nil
		}
		st.release(e) // its fill was given up: try ourselves
	}
}

// addLocked makes an extent that waits for a frame. Caller holds mu.
func (st *stager) addLocked(index int64) (*extent, error) {
	e := &extent{
		index: index, n: min(extentSize, st.store.size()-index*extentSize),
		ready: make(chan struct{}), gone: make(chan struct{}), repairs: make(chan struct{}, 1), pins: 1, holds: map[*grant]struct{}{},
	}
	if e.n <= 0 {
		return nil, errBeyond
	}
	st.extents[index] = e
	return e, nil
}

// load finds a frame for e and fills it. A fill that was given up leaves no
// extent behind.
func (st *stager) load(ctx context.Context, e *extent, wait bool) error {
	f, err := st.takeFrame(ctx, wait)
	var bad []badRange
	if err == nil {
		st.mu.Lock()
		e.state = stateFilling
		n := e.n
		st.mu.Unlock()
		bad = st.fill(ctx, e.index*extentSize, f.mem[:n])
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	if err == nil && f.slab.giving {
		err = errSlabLeaves
		st.returnLocked(f)
	}
	if err != nil {
		delete(st.extents, e.index)
		e.pins--
		close(e.ready)
		close(e.gone)
		return err
	}
	e.frame, e.bad, e.state = f, bad, stateResident
	f.ext = e
	e.place = st.held.PushBack(e)
	close(e.ready)
	return nil
}

// fill is store.fill, timed.
func (st *stager) fill(ctx context.Context, off int64, buf []byte) []badRange {
	defer st.pool.filled(len(buf), time.Now())
	return st.store.fill(ctx, off, buf)
}

// refresh reads what is missing in a pinned extent: ranges that failed for a
// reason that may have passed, and what the volume has grown by. Nobody has been
// granted those.
func (st *stager) refresh(ctx context.Context, e *extent) {
	select {
	case e.repairs <- struct{}{}:
		defer func() { <-e.repairs }()
	case <-ctx.Done():
		return
	}
	base := e.index * extentSize
	n, old := st.contents(e)
	if now := min(extentSize, st.store.size()-base); now > n {
		old = append(slices.Clone(old), badRange{base + n, now - n, wire.StatusAgain})
		n = now
	}
	var bad []badRange
	for _, b := range old {
		if b.status == wire.StatusStale {
			bad = append(bad, b)
			continue
		}
		bad = append(bad, st.fill(ctx, b.off, e.frame.mem[b.off-base:][:b.n])...)
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	e.n, e.bad = n, bad
}

// contents of a pinned extent: how many bytes, and which of them are not right.
func (st *stager) contents(e *extent) (n int64, bad []badRange) {
	st.mu.Lock()
	defer st.mu.Unlock()
	return e.n, e.bad
}

// lacks tells whether refresh could bring more.
func (st *stager) lacks(e *extent) bool {
	n, bad := st.contents(e)
	return n < min(extentSize, st.store.size()-e.index*extentSize) ||
		slices.ContainsFunc(bad, func(b badRange) bool { return b.status != wire.StatusStale })
}

// pinLocked adds a pin. Caller holds mu.
func (st *stager) pinLocked(e *extent) {
	e.pins++
	if e.place == nil {
		return // filling
	}
	if e.pins == 1 {
		st.idle.Remove(e.place)
		e.place = st.held.PushBack(e)
		return
	}
	st.held.MoveToBack(e.place)
}

// release ends a pin.
func (st *stager) release(e *extent) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.unpinLocked(e)
}

func (st *stager) unpinLocked(e *extent) {
	e.pins--
	if e.pins > 0 || e.frame == nil {
		return
	}
	st.held.Remove(e.place)
	if e.state == stateRevoking || st.closed {
		e.place = nil
		st.dropLocked(e)
		return
	}
	e.place = st.idle.PushBack(e)
	st.wakeLocked()
}

// dropLocked frees an extent's frame. Nobody pins it. Caller holds mu, which may
// be given up meanwhile.
func (st *stager) dropLocked(e *extent) {
	f := e.frame
	delete(st.extents, e.index)
	e.frame = nil
	f.ext = nil
	close(e.gone)
	st.returnLocked(f)
}

// returnLocked takes a frame that holds nothing. Caller holds mu, which may be
// given up meanwhile.
func (st *stager) returnLocked(f *frame) {
	if f.slab.giving {
		f.slab.freed++
		if f.slab.freed == slabFrames {
			st.partLocked(f.slab)
		}
		return
	}
	st.free = append(st.free, f)
	st.wakeLocked()
}

// partLocked gives a slab, all free, back to the pool. Caller holds mu, which
// is given up meanwhile.
func (st *stager) partLocked(s *slab) {
	delete(st.slabs, s)
	regions := s.regions
	s.regions = map[*domain]rdma.MemoryRegion{}
	s.giving, s.freed = false, 0
	st.mu.Unlock()
	for _, r := range regions {
		r.Deregister()
	}
	st.pool.giveBack(s, st)
	st.mu.Lock()
}

// takeFrame finds a frame: a free one, one of a free slab, the coldest idle
// extent's; with wait also one that a richer export gives up, or one that
// holders give back. Those who wait are served in the order they came.
func (st *stager) takeFrame(ctx context.Context, wait bool) (*frame, error) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.queue.Len() == 0 && !st.closed {
		if f := st.freeLocked(); f != nil {
			return f, nil
		}
	}
	if !wait {
		return nil, errNoFrame
	}
	turn := st.queue.PushBack(nil)
	st.waiting.Add(1)
	defer func() {
		st.queue.Remove(turn)
		st.waiting.Add(-1)
		st.wakeLocked() // the next one's turn
	}()
	for {
		if st.closed {
			return nil, errStagerClosed
		}
		if st.queue.Front() == turn {
			if f := st.freeLocked(); f != nil {
				return f, nil
			}
		}
		if err := st.waitLocked(ctx, st.queue.Front() == turn); err != nil {
			return nil, err
		}
	}
}

// waitLocked waits until something has changed; the first in the queue asks for
// frames. Caller holds mu, which is given up meanwhile.
func (st *stager) waitLocked(ctx context.Context, first bool) error {
	changed := st.changed
	st.mu.Unlock()
	defer st.mu.Lock()
	if first {
		if rich := st.pool.richer(st); rich != nil {
			rich.giveSlab()
		} else {
			st.revokeSome()
		}
	}
	select {
	case <-changed:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (st *stager) freeLocked() *frame {
	if n := len(st.free); n > 0 {
		f := st.free[n-1]
		st.free = st.free[:n-1]
		return f
	}
	if s := st.pool.take(st); s != nil {
		st.slabs[s] = true
		st.free = append(st.free, s.frames[1:]...)
		return s.frames[0]
	}
	if front := st.idle.Front(); front != nil {
		e := front.Value.(*extent)
		st.idle.Remove(front)
		e.place = nil
		st.dropLocked(e)
		return st.freeLocked()
	}
	return nil
}

// revokeBatch is how many grants are asked back at once: what one round trip
// should bring.
const revokeBatch = 8

// revokeSome asks holders for the extents that were granted longest ago, unless
// enough are on their way.
func (st *stager) revokeSome() {
	st.mu.Lock()
	var ask []*grant
	coming := 0
	for p := st.held.Front(); p != nil && coming < revokeBatch; p = p.Next() {
		e := p.Value.(*extent)
		if e.state != stateRevoking && len(e.holds) > 0 {
			ask = append(ask, e.wantBackLocked()...)
		}
		if e.state == stateRevoking {
			coming++
		}
	}
	st.mu.Unlock()
	revoke(ask)
}

// wantBackLocked lets nobody else have the extent, and returns the grants to be
// asked back now. A grant whose holder has not been told of it is asked back
// right after it was: else the REVOKE would overtake the MAPPED, and the holder
// would use what it has already given back. Caller holds mu.
func (e *extent) wantBackLocked() []*grant {
	e.state = stateRevoking
	var ask []*grant
	for g := range e.holds {
		if g.told {
			ask = append(ask, g)
		}
	}
	return ask
}

// giveSlab starts to give one slab back to the pool.
func (st *stager) giveSlab() {
	st.mu.Lock()
	var s *slab
	for c := range st.slabs {
		if c.giving {
			st.mu.Unlock()
			return // one is on its way already
		}
		s = c
	}
	if s == nil {
		st.mu.Unlock()
		return
	}
	s.giving = true
	kept := st.free[:0]
	for _, f := range st.free {
		if f.slab == s {
			s.freed++
		} else {
			kept = append(kept, f)
		}
	}
	st.free = kept
	var ask []*grant
	for _, f := range s.frames {
		e := f.ext
		switch {
		case e == nil:
		case e.pins == 0:
			st.idle.Remove(e.place)
			e.place = nil
			f.ext, e.frame = nil, nil
			delete(st.extents, e.index)
			close(e.gone)
			s.freed++ // the last one parts below, not in the midst of this loop
		case e.state != stateRevoking:
			ask = append(ask, e.wantBackLocked()...)
		}
	}
	if s.freed == slabFrames {
		st.partLocked(s)
	}
	st.mu.Unlock()
	revoke(ask)
}

// region is the registration of a frame's slab in a domain, made once.
func (st *stager) region(f *frame, d *domain) (rdma.MemoryRegion, error) {
	st.mu.Lock()
	defer st.mu.Unlock()
	if r := f.slab.regions[d]; r != nil {
		return r, nil
	}
	r, err := d.pd.Register(f.slab.mem, rdma.AccessRemoteRead|rdma.AccessRelaxedOrdering)
	if err != nil {
		return nil, err
	}
	f.slab.regions[d] = r
	return r, nil
}

// counts adds the stager's extents to st.
func (st *stager) counts(fs *wire.FramesStatus) {
	st.mu.Lock()
	defer st.mu.Unlock()
	fs.Free += len(st.free)
	for _, e := range st.extents {
		switch {
		case e.frame == nil:
			fs.Filling++
		case e.state == stateRevoking:
			fs.Revoking++
		case len(e.holds) > 0:
			fs.Granted++
		default:
			fs.Resident++
		}
	}
}

// close frees everything. No session of the export is left.
func (st *stager) close() {
	st.mu.Lock()
	st.closed = true
	st.wakeLocked()
	for st.idle.Len() > 0 {
		e := st.idle.Remove(st.idle.Front()).(*extent)
		e.place = nil
		st.dropLocked(e)
	}
	slabs := st.slabs
	st.slabs = map[*slab]bool{}
	st.free = nil
	st.mu.Unlock()
	for s := range slabs {
		for _, r := range s.regions {
			r.Deregister()
		}
		s.regions = map[*domain]rdma.MemoryRegion{}
		st.pool.giveBack(s, st)
	}
	st.pool.mu.Lock()
	delete(st.pool.stagers, st)
	st.pool.mu.Unlock()
}

// oDirectory opens a directory for openat2 beneath it.
func oDirectory(dir string) (*os.File, error) {
	return os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY, 0)
}
