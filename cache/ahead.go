// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"math/bits"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"rblk/volume"
)

const (
	// aheadShare of the cache may hold what is read ahead and not yet read: the
	// rest stays for what is read again.
	aheadShare = 4
	// activeFor is how long a stream that nobody reads counts for that share.
	activeFor = 200 * time.Millisecond
	// floorWindow may always be reached: below it the bandwidth-delay product
	// of a near target is noise. 4 MiB keep four large requests of a front end
	// ahead.
	floorWindow = 4 << 20
	// maxChunk is what is claimed and submitted at a time: several large
	// transfers, few enough frames to be found quickly.
	maxChunk = 4 << 20
)

// readahead decides what to fetch before it is asked for, for one volume.
type readahead struct {
	v      *Volume
	mode   Readahead
	unread atomic.Int64 // pages read ahead, under way or not yet read
	issued atomic.Uint64
	path   path
	record record

	mu  sync.Mutex
	det detector

	files    Files              // nil: no hint
	expected map[int64]struct{} // starts of files that are next in order
	order    int                // how often they were read next, lately

	pump pump
}

func (r *readahead) init(v *Volume, mode Readahead) {
	r.v, r.mode = v, mode
	r.pump.init(v)
}

// off is whether nothing is to be read ahead.
func (r *readahead) off() bool { return r.mode == ReadaheadOff || r.v.target.Load() == 0 }

// touched: a read met pages that were read ahead for st, for the first time;
// stalled, when they were still under way.
func (r *readahead) touched(st *stream, off int64, n int, stalled bool) {
	if r.off() {
		return
	}
	var want8 [8]span64
	want := want8[:0]
	r.mu.Lock()
	if st != nil {
		want = r.progress(want, st, off, int64(n), stalled)
	}
	want = r.opened(want, off, int64(n))
	r.mu.Unlock()
	r.issue(want)
}

// missed: a read found pages that nobody had foreseen.
func (r *readahead) missed(off int64, n int) {
	if r.off() {
		return
	}
	var want8 [8]span64
	want := want8[:0]
	r.mu.Lock()
	r.det.doubt = r.record.doubt()
	if st, fresh := r.det.find(off, int64(n), off == 0, time.Now()); st != nil {
		if fresh {
			want = r.extend(want, st)
		} else {
			want = r.progress(want, st, off, int64(n), true)
		}
	}
	want = r.opened(want, off, int64(n))
	r.mu.Unlock()
	r.issue(want)
}

// progress moves st on and adapts its window. r.mu is held.
func (r *readahead) progress(want []span64, st *stream, off, n int64, stalled bool) []span64 {
	if st.dead || !st.covers(off, n) {
		return want // somebody else reads what was meant for st's reader
	}
	st.advance(off, n)
	st.used = time.Now()
	if st.lost() {
		r.det.drop(st)
		return want
	}
	if st.wasted.Swap(false) {
		st.window = max(st.window/2, minWindow)
		st.grown = st.moved
	} else if stalled {
		st.stalls++
		// Once in half a window: the reader waits for each transfer of the same
		// window, but that is one lesson.
		if st.moved-st.grown >= st.window/2 || st.grown == 0 {
			st.window = min(2*st.window, r.limit(st))
			st.grown = st.moved
		}
	}
	return r.extend(want, st)
}

// extend appends what st's window lacks. r.mu is held.
func (r *readahead) extend(want []span64, st *stream) []span64 {
	st.window = min(st.window, r.limit(st))
	// A transfer goes out when the window lacks one of full size, or half of a
	// small window: the reader never reaches the edge of either.
	chunk := min(st.window/2, int64(r.v.maxTransfer))
	return st.next(want, chunk, r.v.size.Load())
}

// limit is the largest window of a stream now: what the user set, its part of
// the budget, and twice what the path holds, for more only waits in queues.
func (r *readahead) limit(st *stream) int64 {
	limit := max(r.path.product()*2+2*int64(r.v.maxTransfer), floorWindow, firstReads*st.size)
	if r.mode > 0 {
		limit = min(limit, int64(r.mode))
	}
	active, now := int64(0), time.Now()
	for _, s := range r.det.streams {
		if now.Sub(s.used) < activeFor {
			active++
		}
	}
	// An even part is guaranteed; what the others leave may be used too, but
	// half of it at a time, so that it is there for whoever comes next.
	share := r.budget() * pageSize / max(active, 1)
	free := (r.budget() - r.unread.Load()) * pageSize
	return max(min(limit, max(share, st.window+free/2)), pageSize)
}

// budget is how many pages may be unread.
func (r *readahead) budget() int64 { return max(r.v.target.Load()/aheadShare, slabPages) }

// active is the number of streams that are read ahead.
func (r *readahead) active() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return int64(len(r.det.streams))
}

// issue starts to fetch what is missing in the spans. It never waits: what the
// gate does not let in is left to the reader.
func (r *readahead) issue(want []span64) {
	for _, w := range want {
		for lo := w.lo; lo < w.hi; {
			hi := min(w.hi, lo+int64(maxChunk))
			if !r.v.fetchAhead(w.st, lo, hi, true) {
				return
			}
			lo = hi
		}
	}
}

// fetchAhead fetches what is missing in [lo, hi), at most maxChunk bytes, on the
// read-ahead lane, and reports false when there is no room for it. With marked,
// the pages count as read ahead, else the pump asked for them.
func (v *Volume) fetchAhead(st *stream, lo, hi int64, marked bool) bool {
	lo, hi = lo/pageSize*pageSize, min((hi+pageSize-1)/pageSize*pageSize, v.size.Load())
	if lo >= hi {
		return true
	}
	blocks := blocksOf(lo, int(hi-lo))
	if v.gate.closed.Load() || !v.gate.try(blocks, MaxIO/blockSize) {
		return false
	}
	return v.fetchReserved(st, lo, hi, blocks, marked)
}

// fetchReserved is fetchAhead of whole pages with a reservation in hand, which
// it hands over to the transfers.
func (v *Volume) fetchReserved(st *stream, lo, hi, blocks int64, marked bool) bool {
	claims := v.claimAhead(st, lo, hi, marked)
	if len(claims) == 0 {
		v.gate.give(blocks)
		return true
	}
	if v.tier.hasAny(claims) {
		// From the disk in a goroutine of its own: the reader must not wait for
		// it. It takes a hand over from the caller, who has one.
		v.gate.reserve(hand)
		v.work.Add(1)
		go func() {
			defer v.work.Done()
			v.send(v.fromTier(slices.Clone(claims)), claims, blocks, marked)
			v.gate.give(hand)
		}()
		return true
	}
	return v.send(claims, claims, blocks, marked)
}

// send fetches what is left of the claims from the target, and gives up the pins
// of all of them and the reservation of blocks.
func (v *Volume) send(claims, pinned []segment, blocks int64, marked bool) bool {
	flights, err := v.prepare(claims, volume.LaneReadahead)
	if err != nil {
		v.unclaim(claims, err, false)
	}
	reserved := int64(0)
	for _, f := range flights {
		f.reserved, f.began, f.sent = int64(len(f.segs)), time.Now(), v.ahead.path.delivered.Load()
		reserved += f.reserved
		if f.pumped = !marked; marked {
			v.ahead.issued.Add(uint64(len(f.op.Mem)))
		} else {
			v.ahead.pump.under.Add(int64(len(f.op.Mem)))
		}
	}
	v.gate.reserve(reserved)
	v.gate.give(blocks)
	for _, c := range pinned {
		v.unpin(c.b)
	}
	v.trim()
	if err != nil {
		return false
	}
	v.submit(flights)
	return true
}

// claimAhead claims and pins what is missing in [lo, hi).
func (v *Volume) claimAhead(st *stream, lo, hi int64, marked bool) []segment {
	var claims []segment
	for num := lo / blockSize; num*blockSize < hi; num++ {
		start := num * blockSize
		from, to := int(max(lo-start, 0)), int(min(hi-start, blockSize))
		s := v.shardOf(num)
		s.mu.Lock()
		b := v.pinned(s, num, to)
		lack := pagesOf(from, to) &^ (b.valid | b.pending)
		if marked {
			b.stream = st
			b.marked = lack == 0 // the reader shall tell when it comes by
			b.ahead |= lack
			s.ahead += int64(bits.OnesCount16(lack))
			v.ahead.unread.Add(int64(bits.OnesCount16(lack)))
		}
		b.pending |= lack
		s.mu.Unlock()
		if lack == 0 {
			v.unpin(b)
			continue
		}
		claims = append(claims, segment{b, lack})
	}
	return claims
}

// record is how read-ahead fared lately, in pages.
type record struct{ used, wasted atomic.Int64 }

// recordSpan is how many pages are lately: 32 MiB, several windows of several
// streams.
const recordSpan = 8 << 10

func (r *record) add(used, wasted int) {
	u, w := r.used.Add(int64(used)), r.wasted.Add(int64(wasted))
	if u+w > recordSpan {
		r.used.Add(-u / 2)
		r.wasted.Add(-w / 2)
	}
}

// doubt is maxDoubt times the share that was in vain, once that is worth a
// doubt: an end that was overrun is none.
func (r *record) doubt() int {
	u, w := r.used.Load(), r.wasted.Load()
	if w < recordSpan/32 {
		return 0
	}
	return int(maxDoubt * w / (u + w))
}

// landed takes the measure of a transfer that was read ahead.
func (r *readahead) landed(f *flight) {
	if f.op.Err == nil {
		r.path.sample(int64(len(f.op.Mem)), f.sent, f.began)
	}
	if f.pumped {
		r.pump.landed(int64(len(f.op.Mem)))
	}
}

// path measures the bandwidth-delay product of the way to the volume, as BBR
// (Cardwell et al., 2016) does: the highest rate of delivery and the shortest
// time of a transfer, each over the last one or two of pathSpan.
type path struct {
	delivered atomic.Int64 // bytes, ever

	mu      sync.Mutex
	now     epoch // of samples
	before  epoch
	changed time.Time
}

// pathSpan is how long a measure is believed: long against any delay, short
// against a reader's patience when the path changes.
const pathSpan = 5 * time.Second

type epoch struct {
	rate  float64 // bytes a second
	delay time.Duration
}

// sample adds a transfer of n bytes that began when sent bytes had been
// delivered.
func (p *path) sample(n, sent int64, began time.Time) {
	delivered := p.delivered.Add(n)
	now := time.Now()
	took := max(now.Sub(began), time.Microsecond)
	rate := float64(delivered-sent) / took.Seconds()
	p.mu.Lock()
	defer p.mu.Unlock()
	if now.Sub(p.changed) > pathSpan {
		p.before, p.now, p.changed = p.now, epoch{}, now
	}
	p.now.rate = max(p.now.rate, rate)
	if p.now.delay == 0 || took < p.now.delay {
		p.now.delay = took
	}
}

// product is bandwidth × delay in bytes.
func (p *path) product() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	rate, delay := max(p.now.rate, p.before.rate), p.now.delay
	if delay == 0 || p.before.delay != 0 && p.before.delay < delay {
		delay = p.before.delay
	}
	return int64(rate * delay.Seconds())
}
