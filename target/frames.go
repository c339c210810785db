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
	mem []byte

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

// newPool maps and pins n bytes of frames.
func newPool(n int64) (*pool, error) {
	const slabSize = slabFrames * extentSize
	slabs := max(2, int((n+slabSize-1)/slabSize))
	mem, err := unix.Mmap(-1, 0, slabs*slabSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("frames: map %s: %w", size.Format(n), err)
	}
	unix.Madvise(mem, unix.MADV_HUGEPAGE) // fewer translations for the adapter; only a wish
	if err := pin(mem); err != nil {
		unix.Munmap(mem)
		return nil, fmt.Errorf("frames: %w, or use a smaller --frames", err)
	}
	p := &pool{mem: mem, total: slabs, stagers: map[*stager]int{}}
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

// take gives a free slab to st, or nil.
func (p *pool) take(st *stager) *slab {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.free) == 0 {
		return nil
	}
	s := p.free[len(p.free)-1]
	p.free = p.free[:len(p.free)-1]
	s.owner = st
	p.stagers[st]++
	return s
}

// richer finds the export that holds most above its fair share, when st holds
// less than its own; nil when nobody should give.
func (p *pool) richer(st *stager) *stager {
	p.mu.Lock()
	defer p.mu.Unlock()
	fair := max(1, p.total/max(1, len(p.stagers)))
	if p.stagers[st] >= fair {
		return nil
	}
	var rich *stager
	for other, n := range p.stagers {
		if other != st && n > fair && (rich == nil || n > p.stagers[rich]) {
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
	stateFilling extentState = iota
	stateResident
	stateRevoking // granted or pinned, and asked back
)

// extent is an extent that has a frame or is getting one.
type extent struct {
	index int64
	n     int64         // bytes: extentSize, less at the volume's end
	ready chan struct{} // closed when filling has ended
	gone  chan struct{} // closed when the frame is free again

	// guarded by stager.mu
	state extentState
	frame *frame
	bad   []badRange
	pins  int // grants and fills under way
	holds map[*grant]struct{}
	place *list.Element // in stager.idle (no pins) or stager.held
}

// stager is one export's resident extents.
type stager struct {
	pool  *pool
	store store
	log   *slog.Logger

	mu      sync.Mutex
	extents map[int64]*extent // guarded by mu
	free    []*frame          // guarded by mu
	idle    *list.List        // guarded by mu: resident and not held, coldest first
	held    *list.List        // guarded by mu: pinned, longest held first
	changed chan struct{}     // guarded by mu: closed and replaced when frames may be free
	slabs   map[*slab]bool    // guarded by mu
	closed  bool              // guarded by mu
}

func newStager(p *pool, s store, log *slog.Logger) *stager {
	st := &stager{
		pool: p, store: s, log: log, extents: map[int64]*extent{}, idle: list.New(), held: list.New(),
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
	close(st.changed)
	st.changed = make(chan struct{})
}

var errStagerClosed = errors.New("export closed")

// acquire returns the extent, resident and pinned; the caller ends the pin with
// release. It waits for frames and for fills of others.
func (st *stager) acquire(ctx context.Context, index int64) (*extent, error) {
	for {
		st.mu.Lock()
		if st.closed {
			st.mu.Unlock()
			return nil, errStagerClosed
		}
		e := st.extents[index]
		if e == nil {
			e = &extent{
				index: index, n: min(extentSize, st.store.size()-index*extentSize),
				ready: make(chan struct{}), gone: make(chan struct{}), pins: 1, holds: map[*grant]struct{}{},
			}
			if e.n <= 0 {
				st.mu.Unlock()
				return nil, errors.New("beyond the end")
			}
			st.extents[index] = e
			st.mu.Unlock()
			return e, st.load(ctx, e)
		}
		wait := e.ready
		if e.state == stateRevoking {
			wait = e.gone
		} else {
			st.pinLocked(e)
		}
		st.mu.Unlock()
		select {
		case <-wait:
		case <-ctx.Done():
			if wait == e.ready {
				st.release(e)
			}
			return nil, ctx.Err()
		}
		if wait == e.gone {
			continue
		}
		st.mu.Lock()
		ok := e.frame != nil && e.state != stateFilling
		st.mu.Unlock()
		if ok {
			return e, nil
		}
		st.release(e) // its fill was given up; try ourselves
	}
}

// load finds a frame for e and fills it. A fill that was given up leaves no
// extent behind.
func (st *stager) load(ctx context.Context, e *extent) error {
	f, err := st.takeFrame(ctx)
	if err != nil {
		st.mu.Lock()
		delete(st.extents, e.index)
		e.pins--
		close(e.ready)
		close(e.gone)
		st.mu.Unlock()
		return err
	}
	bad := st.store.fill(ctx, e.index*extentSize, f.mem[:e.n])
	st.mu.Lock()
	defer st.mu.Unlock()
	e.frame, e.bad, e.state = f, bad, stateResident
	f.ext = e
	e.place = st.held.PushBack(e)
	close(e.ready)
	// A fill that was cut short, or met a failure that may pass, serves those
	// who asked for it and is not kept.
	passing := slices.ContainsFunc(bad, func(b badRange) bool { return b.status != wire.StatusStale })
	if f.slab.giving || passing {
		e.state = stateRevoking
	}
	return nil
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

// dropLocked frees an extent's frame. Nobody pins it. Caller holds mu.
func (st *stager) dropLocked(e *extent) {
	f := e.frame
	delete(st.extents, e.index)
	e.frame = nil
	f.ext = nil
	close(e.gone)
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
// extent's, one that a richer export gives up, or one that holders give back.
func (st *stager) takeFrame(ctx context.Context) (*frame, error) {
	for {
		st.mu.Lock()
		if st.closed {
			st.mu.Unlock()
			return nil, errStagerClosed
		}
		if f := st.freeLocked(); f != nil {
			st.mu.Unlock()
			return f, nil
		}
		changed := st.changed
		st.mu.Unlock()
		if rich := st.pool.richer(st); rich != nil {
			rich.giveSlab()
		} else {
			st.revokeSome()
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
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
		if e.state == stateRevoking {
			coming++
			continue
		}
		if len(e.holds) == 0 || len(e.holds) != e.pins {
			continue // being granted right now
		}
		e.state = stateRevoking
		coming++
		ask = append(ask, e.toldLocked()...)
	}
	st.mu.Unlock()
	revoke(ask)
}

// toldLocked are the grants of e that their holders know of; the others are
// revoked once they do (session.told). Caller holds mu.
func (e *extent) toldLocked() []*grant {
	var gs []*grant
	for g := range e.holds {
		if g.told {
			gs = append(gs, g)
		}
	}
	return gs
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
			s.freed++
		default:
			e.state = stateRevoking
			ask = append(ask, e.toldLocked()...)
		}
	}
	if s.freed == slabFrames {
		st.partLocked(s)
	}
	st.mu.Unlock()
	revoke(ask)
}

// key is the region key of a frame's slab in a domain; it registers once.
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
