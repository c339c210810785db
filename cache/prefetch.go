// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"sync"
	"sync/atomic"
)

const (
	// pumpDepth is how much of prefetched ranges is under way at a time: enough
	// for a fast link (10 GB/s × 1 ms), little against the cache.
	pumpDepth = 10 << 20
	// maxRanges that wait to be prefetched; the oldest go first when there are
	// more, for a hint is no promise.
	maxRanges = 1 << 16
)

// pump fetches prefetched ranges piece by piece, as the reader of none.
type pump struct {
	v     *Volume
	under atomic.Int64 // bytes under way

	mu      sync.Mutex
	ranges  [][2]int64
	running bool
	signal  chan struct{}
}

func (p *pump) init(v *Volume) { p.v, p.signal = v, make(chan struct{}, 1) }

// prefetch queues a range. The pump's goroutine lives while there are any.
func (r *readahead) prefetch(off, n int64) {
	p := &r.pump
	if n == 0 || r.v.target.Load() == 0 {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.ranges) == maxRanges {
		p.ranges = p.ranges[1:]
	}
	p.ranges = append(p.ranges, [2]int64{off, off + n})
	if !p.running {
		p.running = true
		p.v.work.Add(1)
		go p.run()
	}
}

// landed tells the pump that a transfer of n bytes has ended.
func (p *pump) landed(n int64) {
	p.under.Add(-n)
	select {
	case p.signal <- struct{}{}:
	default:
	}
}

// take cuts the next piece off the first range.
func (p *pump) take() (lo, hi int64, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.ranges) == 0 {
		p.running = false
		return 0, 0, false
	}
	r := &p.ranges[0]
	lo = r[0]
	hi = min(r[1], (lo/maxChunk+1)*maxChunk)
	if r[0] = hi; hi == r[1] {
		p.ranges = p.ranges[1:]
	}
	return lo, hi, true
}

func (p *pump) run() {
	v := p.v
	defer v.work.Done()
	for {
		lo, hi, ok := p.take()
		if !ok {
			return
		}
		for p.under.Load() >= pumpDepth {
			select {
			case <-p.signal:
			case <-v.quit:
				return
			}
		}
		lo, hi = lo/pageSize*pageSize, min((hi+pageSize-1)/pageSize*pageSize, v.size.Load())
		if lo >= hi {
			continue
		}
		blocks := blocksOf(lo, int(hi-lo))
		if v.gate.enter(context.Background(), blocks) != nil { // it ends with Close
			return
		}
		v.fetchReserved(nil, lo, hi, blocks, false)
		v.gate.give(hand)
	}
}

// stop lets no goroutine begin from now on.
func (p *pump) stop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.running = true
}
