// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"math/bits"
	"sync"

	"rblk/volume"
)

// keeperQueue is how many blocks may wait to be written to the tier: the frames
// of 4 GiB. The blocks themselves wait in the cache, unpinned; those that are
// evicted before the disk comes to them are not kept this time.
const keeperQueue = 1 << 16

// keeper writes what was fetched to the tier, one block after the other.
type keeper struct {
	mu      sync.Mutex
	queue   []int64
	changed sync.Cond
	busy    bool
	stopped bool
}

// keep queues a block whose pages have come. It never blocks.
func (k *keeper) keep(num int64) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if n := len(k.queue); n == keeperQueue || k.stopped || n > 0 && k.queue[n-1] == num {
		return
	}
	k.queue = append(k.queue, num)
	k.changed.Broadcast()
}

// next waits for a block; ok is false once the keeper is stopped.
func (k *keeper) next() (num int64, ok bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.busy = false
	k.changed.Broadcast()
	for len(k.queue) == 0 && !k.stopped {
		k.changed.Wait()
	}
	if k.stopped {
		return 0, false
	}
	num = k.queue[0]
	k.queue = k.queue[1:]
	k.busy = true
	return num, true
}

// finish writes what is queued and ends the keeper.
func (k *keeper) finish() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for len(k.queue) > 0 || k.busy {
		k.changed.Wait()
	}
	k.stopped = true
	k.changed.Broadcast()
}

// keepOn is the keeper's goroutine.
func (v *Volume) keepOn() {
	defer v.work.Done()
	for {
		num, ok := v.keeper.next()
		if !ok {
			return
		}
		if v.gate.enter(context.Background(), 1) == nil {
			v.keepBlock(num)
			v.gate.give(hand + 1)
		}
	}
}

// keepBlock writes the pages of a cached block that the tier lacks. Pages that
// reach beyond the volume's end wait until it has grown over them.
func (v *Volume) keepBlock(num int64) {
	s := v.shardOf(num)
	s.mu.Lock()
	b := s.blocks[num]
	if b == nil {
		s.mu.Unlock()
		return
	}
	b.refs.Add(1)
	mask := b.valid & span(0, b.limit/pageSize)
	s.mu.Unlock()
	if mask &^= v.tier.has(num, mask); mask != 0 {
		v.tier.write(num, mask, func(i int) []byte { return v.pool.mem(b.pages[i], 1) })
	}
	v.unpin(b)
	v.trim()
}

// fromTier fills what it can of the claims from the tier, and returns the rest.
// The caller has a hand on and the blocks pinned.
func (v *Volume) fromTier(claims []segment) []segment {
	if v.tier == nil {
		return claims
	}
	rest := claims[:0]
	for _, c := range claims {
		if have := v.tier.has(c.b.num, c.mask); have != 0 {
			c.mask &^= v.fillFromTier(segment{c.b, have})
		}
		if c.mask != 0 {
			rest = append(rest, c)
		}
	}
	return rest
}

// fillFromTier returns the pages that it could make valid; the others are as
// they were.
func (v *Volume) fillFromTier(c segment) uint16 {
	runs, err := v.take(nil, bits.OnesCount16(c.mask))
	if err != nil {
		return 0
	}
	v.place(c, runs)
	got := v.tier.read(c.b.num, c.mask, func(i int) []byte { return v.pool.mem(c.b.pages[i], 1) })
	if lost := c.mask &^ got; lost != 0 {
		s := c.b.shard
		s.mu.Lock()
		s.queue.Grow(&c.b.node, -int32(bits.OnesCount16(lost)))
		v.pool.release(&c.b.pages, lost)
		s.mu.Unlock()
	}
	if got != 0 {
		v.decide(segment{c.b, got}, nil, true)
	}
	return got
}

// place gives the pages of c the frames of runs.
func (v *Volume) place(c segment, runs []run) {
	v.grown(c)
	for m := c.mask; m != 0; m &= m - 1 {
		c.b.pages[bits.TrailingZeros16(m)] = runs[0].first
		if runs[0].first, runs[0].n = runs[0].first+1, runs[0].n-1; runs[0].n == 0 {
			runs = runs[1:]
		}
	}
}

// openKeeper opens the tier of Options, for a volume whose ranges never change.
func (v *Volume) openKeeper(geo volume.Geometry, opts Options) error {
	v.keeper.changed.L = &v.keeper.mu
	if opts.Dir == "" || geo.Layout == "" || !geo.ReadOnly {
		return nil
	}
	limit := opts.DiskSize
	if limit == 0 {
		limit = DefaultDiskSize
	}
	t, err := openTier(opts.Dir, geo.Layout, limit, v.log)
	if err != nil {
		return err
	}
	v.tier = t
	v.work.Add(1)
	go v.keepOn()
	return nil
}
