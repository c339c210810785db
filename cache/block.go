// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"sync"
	"sync/atomic"

	"rblk/internal/s3fifo"
)

const (
	// blockSize is what the index, eviction and pins know as one: 16 pages,
	// each of which may or may not be there.
	blockSize = slabPages * pageSize
	// extentBlocks neighbouring blocks live in one shard, so that they are
	// evicted together and their slabs, side by side, serve the next stream.
	extentBlocks = 16
	// shardBytes of cache make it worth another shard, up to maxShards: beyond
	// that two readers on a machine of today seldom meet.
	shardBytes = 16 << 20
	maxShards  = 64
)

// block is a cached piece of the volume. It lives while anybody refers to it:
// the index (until it is evicted or detached), views, and transfers under way.
// Detaching takes it out of the index at once, whoever still uses it.
type block struct {
	num   int64 // offset / blockSize
	limit int   // bytes of it inside the volume when it was made
	shard *shard
	refs  atomic.Int32

	// The rest is protected by shard.mu, but for the pages of valid bits while
	// pinned (they do not change) and of pending bits (the transfer's own).
	node    s3fifo.Node[block]
	valid   uint16 // pages that hold the volume's bytes
	pending uint16 // pages that a transfer fills
	ahead   uint16 // valid or pending pages that were read ahead and not yet read
	read    uint16 // pages that were read since they came
	lastEnd int    // where the last read ended
	live    bool   // in the index
	pages   [slabPages]page
	wake    *wakeup // of those who wait for pending pages
	stream  *stream // that reads ahead pages belong to
	marked  bool    // its reader's next read here shall be told to it
}

// wakeup tells waiters that some pending pages are decided. failed and err are
// set before ch is closed.
type wakeup struct {
	ch     chan struct{}
	failed uint16
	err    error
}

// shard is a part of the index with its own lock and eviction queues.
type shard struct {
	mu      sync.Mutex
	blocks  map[int64]*block
	queue   *s3fifo.Queue[block]
	ahead   int64           // pages of ahead bits of live blocks
	writing map[int64]*mark // blocks under write
	counters
	_ [64]byte // keeps the next shard's lock off this cache line
}

// counters are kept per shard: no line that all readers write.
type counters struct {
	hits, misses, evictions, served, aheadUsed, aheadWasted uint64
}

// mark counts the writes under way on a block. Once two met, the cache cannot
// tell whose bytes were last, and forgets the block's after either.
type mark struct {
	writes int
	met    bool
}

func (v *Volume) shardOf(num int64) *shard {
	// Fibonacci hashing: neighbouring extents and strides spread evenly.
	return &v.shards[uint64(num/extentBlocks)*0x9e3779b97f4a7c15>>32&uint64(len(v.shards)-1)]
}

// pinned returns the block num, pinned, making it when it is missing or when
// it was made for a smaller volume than one that holds need bytes of it. s.mu is held.
func (v *Volume) pinned(s *shard, num int64, need int) *block {
	b := s.blocks[num]
	if b != nil && b.limit >= need {
		b.refs.Add(1)
		return b
	}
	if b != nil {
		v.detach(b)
	}
	b = &block{num: num, shard: s, live: true}
	b.limit = int(min(blockSize, max(v.size.Load()-num*blockSize, int64(need))))
	b.refs.Store(2) // the index and the caller
	b.node.Value, b.node.Key = b, num
	s.blocks[num] = b
	s.queue.Insert(&b.node, 0)
	return b
}

// unpin gives up one reference.
func (v *Volume) unpin(b *block) {
	switch n := b.refs.Add(-1); {
	case n == 0:
		v.pool.release(&b.pages, allPages)
	case n < 0:
		panic("cache: block released twice")
	}
}

// detach takes b out of the index. Its shard's mu is held.
func (v *Volume) detach(b *block) {
	if !b.live {
		return
	}
	b.live = false
	s := b.shard
	delete(s.blocks, b.num)
	s.queue.Remove(&b.node)
	v.waste(b)
	v.unpin(b)
}

// idle is whether only the index refers to b. Its shard's mu is held, so that
// nobody can begin to.
func (b *block) idle() bool { return b.refs.Load() == 1 }

// pagesOf is the pages that hold [lo, hi) of a block.
func pagesOf(lo, hi int) uint16 {
	first, last := lo/pageSize, (hi-1)/pageSize
	return span(first, last-first+1)
}
