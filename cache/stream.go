// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"sync/atomic"
	"time"
)

const (
	// maxStreams that are read ahead at a time; the least recently used one
	// makes room. Data loaders run tens of workers; 256 leave room for several.
	maxStreams = 256
	// maxCandidates that may become streams. It must exceed the number of
	// streams that begin interleaved; the more there are, the likelier a random
	// read falls next to one by chance (maxCandidates × 5 reads of the volume).
	maxCandidates = 96
	// confirmExact and confirmNear are how many reads make a stream: three end
	// to end, or six whose order is disturbed. Chance makes three end to end out
	// of random 128 KiB reads of 160 MiB once in 200, and six near each other
	// about as often; out of 4 KiB reads less than once in 10,000.
	confirmExact, confirmNear = 3, 6
	// confirmStart of them suffice from the start of the volume or of a file,
	// where readers begin.
	confirmStart = 2
	// confirmStride repetitions of a distance make a strided stream.
	confirmStride = 3
	// nearReads is how far, in reads, a read may be from its place in a
	// candidate's order; reorderReads, in a stream. The kernel and readers with
	// several threads keep a handful of requests in flight.
	nearReads, reorderReads = 2, 16
	// judgeReads is after how many reads' worth of progress a stream is judged:
	// when its reads asked for less than half of what they passed, they were
	// random ones that happened to fall near.
	judgeReads = 16
	// maxDoubt is how many reads more make a stream when all that was read
	// ahead lately was in vain.
	maxDoubt = 8
	// turnReads against a stream's direction turn it round.
	turnReads = 4
	// maxStride is the largest distance that is looked for: beyond it reads of
	// unrelated files would pair up.
	maxStride = 64 << 20
	// firstReads of a new stream are read ahead, at least minWindow: a wrong
	// guess costs that much.
	firstReads = 4
	minWindow  = 4 * pageSize
	// strideReads bounds how many reads of a strided stream are read ahead.
	strideReads = 64
)

// direction of a stream.
type direction int8

const (
	forward direction = iota
	backward
	strided
)

// stream is a reader that reads on, as the read-ahead sees it. All but wasted
// belongs to detector.mu.
type stream struct {
	dir    direction
	step   int64 // strided: bytes from read to read
	pos    int64 // where the next read is expected to begin (backward: to end)
	edge   int64 // how far is read ahead, likewise
	size   int64 // bytes of a read, the largest lately
	lo, hi int64 // what its reads have covered
	trend  int64 // bytes by which reads extended that in its direction, less those against it, lately
	window int64 // bytes to be read ahead of pos
	grown  int64 // progress when the window grew last
	moved  int64 // progress: bytes that pos has moved
	used   time.Time
	dead   bool // no longer among the detector's

	asked, passed int64 // lately: bytes that its reads asked for, and that pos has moved

	reads, stalls uint64
	wasted        atomic.Bool // read-ahead data was evicted unread
}

// candidate is reads that may become a stream.
type candidate struct {
	lo, hi  int64 // covers
	last    int64 // where the last one began
	size    int64 // of the largest
	bytes   int64 // sum
	count   int   // reads
	exact   int   // of them end to end with what was before
	trend   int64 // sum of the reads' distances from the middle of what was before
	delta   int64 // of its only read from one before
	repeats int   // of delta, over a chain of candidates
	start   bool  // began where readers begin
	age     uint64
}

// span is a range to be read ahead for a stream.
type span64 struct {
	st     *stream
	lo, hi int64
}

// detector finds streams in the reads of one volume that were not served from
// what was there anyhow.
type detector struct {
	streams    []*stream
	candidates []candidate
	clock      uint64
	doubt      int // reads more than usual that make a stream
}

// find returns the stream that a read which nobody foresaw belongs to, and
// whether the read has just made it.
func (d *detector) find(off, n int64, start bool, now time.Time) (st *stream, fresh bool) {
	for _, st := range d.streams {
		if st.covers(off, n) {
			return st, false
		}
	}
	d.clock++
	c := d.match(off, n, start)
	c.age = d.clock
	if st := c.grownUp(off, n, d.doubt); st != nil {
		d.remove(c)
		d.add(st, now)
		return st, true
	}
	return nil, false
}

// covers is whether a read belongs to st: at its position; or near it or in what
// is read ahead, unless it is so small that it is rather a random one.
func (st *stream) covers(off, n int64) bool {
	slack := reorderReads * max(st.size, n)
	if 4*n < st.size {
		slack = n
	}
	switch st.dir {
	case forward:
		return off >= st.pos-slack && off <= max(st.edge, st.pos)+slack
	case backward:
		return off+n <= st.pos+slack && off+n >= min(st.edge, st.pos)-slack
	}
	k := (off - st.pos) / st.step
	return (off-st.pos)%st.step == 0 && k >= -1 && k <= reorderReads
}

// advance moves st's position to after a read that it covers.
func (st *stream) advance(off, n int64) {
	st.reads++
	st.size = max(n, st.size-st.size/16) // forget a large one in time
	if st.dir == strided {
		if k := (off-st.pos)/st.step + 1; k > 0 {
			st.pos += k * st.step
			st.moved += k * st.size
			st.passed += k * st.size
		}
		st.asked += n
		return
	}
	up, down := max(off+n-st.hi, 0), max(st.lo-off, 0)
	st.lo, st.hi = st.lo-down, st.hi+up
	if st.dir == backward {
		up, down = down, up
	}
	st.trend += up - down - st.trend/8
	if st.trend < -turnReads*st.size {
		st.turn()
		return
	}
	d := max(st.ahead(off, n), 0)
	st.moved += d
	st.passed += d
	st.asked += n
	if st.dir == forward {
		st.pos = max(st.pos, off+n)
	} else {
		st.pos = min(st.pos, off)
	}
}

// lost is whether the reads that st takes for its own leave out most of what
// they pass.
func (st *stream) lost() bool {
	if st.passed < judgeReads*st.size {
		return false
	}
	lost := 2*st.asked < st.passed
	st.asked, st.passed = st.asked/2, st.passed/2
	return lost
}

// ahead is how far a read reaches beyond st's position.
func (st *stream) ahead(off, n int64) int64 {
	if st.dir == forward {
		return off + n - st.pos
	}
	return st.pos - off
}

// turn corrects a stream whose direction was guessed wrong, or changed.
func (st *stream) turn() {
	st.trend = 0
	if st.dir == forward {
		st.dir, st.pos, st.edge = backward, st.lo, st.lo
	} else {
		st.dir, st.pos, st.edge = forward, st.hi, st.hi
	}
}

// match returns the candidate that the read joins: one that it is near to, else
// a new one. The new one takes over the distance to an earlier read, which stays
// as it is: several readers may be at equal distances, and this may be noise.
func (d *detector) match(off, n int64, start bool) *candidate {
	fresh := candidate{lo: off, hi: off + n, last: off, size: n, bytes: n, count: 1, exact: 1, start: start}
	nearest := int64(maxStride + 1)
	for i := range d.candidates {
		c := &d.candidates[i]
		tolerance := nearReads * max(n, c.size)
		if off >= c.lo-tolerance && off <= c.hi+tolerance && n <= 2*max(c.size, pageSize) && c.size <= 4*n {
			c.join(off, n)
			return c
		}
		switch dist := off - c.last; {
		case dist == c.delta && n <= 2*c.size:
			fresh.delta, fresh.repeats = dist, c.repeats+1
			nearest = 0
		case abs(dist) < nearest:
			fresh.delta, fresh.repeats = dist, 1
			nearest = abs(dist)
		}
	}
	return d.insert(fresh)
}

// join adds a read.
func (c *candidate) join(off, n int64) {
	if off == c.hi || off+n == c.lo || off > c.hi && off-c.hi < pageSize {
		c.exact++
	}
	c.trend += off + n/2 - (c.lo+c.hi)/2
	c.lo, c.hi, c.last = min(c.lo, off), max(c.hi, off+n), off
	c.size = max(c.size, n)
	c.bytes += n
	c.count++
}

// grownUp returns the stream that c has become with its last read, or nil.
func (c *candidate) grownUp(off, n int64, doubt int) *stream {
	dense := 3*c.bytes >= 2*(c.hi-c.lo)
	need := confirmNear
	switch {
	case c.exact == c.count && c.start:
		need = confirmStart
	case c.exact == c.count:
		need = confirmExact
	}
	need += doubt
	window := max(firstReads*c.size, minWindow)
	switch {
	case dense && c.count >= need && c.trend > 0:
		return &stream{dir: forward, pos: c.hi, edge: c.hi, lo: c.lo, hi: c.hi, size: c.size, window: window}
	case dense && c.count >= need && c.trend < 0:
		return &stream{dir: backward, pos: c.lo, edge: c.lo, lo: c.lo, hi: c.hi, size: c.size, window: window}
	case c.count == 1 && c.repeats >= confirmStride+doubt:
		return &stream{dir: strided, step: c.delta, pos: off + c.delta, edge: off + c.delta, size: n, window: window}
	}
	return nil
}

func (d *detector) insert(c candidate) *candidate {
	if len(d.candidates) < maxCandidates {
		d.candidates = append(d.candidates, c)
		return &d.candidates[len(d.candidates)-1]
	}
	oldest := &d.candidates[0]
	for i := range d.candidates {
		if d.candidates[i].age < oldest.age {
			oldest = &d.candidates[i]
		}
	}
	*oldest = c
	return oldest
}

func (d *detector) remove(c *candidate) {
	last := len(d.candidates) - 1
	*c = d.candidates[last]
	d.candidates = d.candidates[:last]
}

// drop forgets a stream.
func (d *detector) drop(st *stream) {
	for i, s := range d.streams {
		if s == st {
			d.streams[i] = d.streams[len(d.streams)-1]
			d.streams = d.streams[:len(d.streams)-1]
			st.dead = true
			return
		}
	}
}

func (d *detector) add(st *stream, now time.Time) {
	st.used = now
	if len(d.streams) < maxStreams {
		d.streams = append(d.streams, st)
		return
	}
	oldest := 0
	for i, s := range d.streams {
		if s.used.Before(d.streams[oldest].used) {
			oldest = i
		}
	}
	d.streams[oldest].dead = true
	d.streams[oldest] = st
}

// next appends what is to be read ahead for st now: what its window lacks, once
// that is worth a transfer of chunk bytes, within [0, end).
func (st *stream) next(want []span64, chunk, end int64) []span64 {
	switch st.dir {
	case forward:
		st.edge = max(st.edge, st.pos)
		hi := min(st.pos+st.window, end)
		if hi-st.edge >= chunk || hi == end && hi > st.edge {
			want = append(want, span64{st, st.edge, hi})
			st.edge = hi
		}
	case backward:
		st.edge = min(st.edge, st.pos)
		lo := max(st.pos-st.window, 0)
		if st.edge-lo >= chunk || lo == 0 && lo < st.edge {
			want = append(want, span64{st, lo, st.edge})
			st.edge = lo
		}
	case strided:
		if (st.edge-st.pos)/st.step < 0 {
			st.edge = st.pos
		}
		reads := min(max(st.window/st.size, 1), strideReads)
		for (st.edge-st.pos)/st.step < reads && st.edge >= 0 && st.edge+st.size <= end {
			want = append(want, span64{st, st.edge, st.edge + st.size})
			st.edge += st.step
		}
	}
	return want
}

func abs(x int64) int64 { return max(x, -x) }
