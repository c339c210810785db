// SPDX-License-Identifier: Apache-2.0

package cache

import "math/bits"

// trim evicts what is above the size, when views or transfers that pinned it
// have ended.
func (v *Volume) trim() {
	if over := v.pool.used.Load() - v.target.Load(); over > 0 {
		v.evict(over)
	}
}

// evict frees about want pages of blocks that nobody uses and returns how many
// it freed. It goes round the shards and spares those that hold less than their
// part, unless nothing else is left.
func (v *Volume) evict(want int64) int64 {
	n := int64(len(v.shards))
	freed := int64(0)
	for round := range 2 {
		for i := int64(0); i < n && freed < want; i++ {
			s := &v.shards[v.turn.Add(1)&uint64(n-1)]
			freed += v.evictFrom(s, want-freed, round == 0, v.pool.used.Load()/n)
		}
		if freed >= want {
			break
		}
	}
	return freed
}

// evictFrom evicts up to want pages from s; with spare, only while it holds at
// least average pages.
func (v *Volume) evictFrom(s *shard, want int64, spare bool, average int64) (freed int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for freed < want && (!spare || s.queue.Weight() >= average) {
		n := s.queue.Victim(s.ahead, (*block).idle)
		if n == nil {
			break
		}
		freed += n.Weight()
		s.evictions++
		v.detach(n.Value)
	}
	return freed
}

// unread forgets that pages of b were read ahead: they will not be read. The
// shard's mu is held.
func (v *Volume) unread(b *block, mask uint16) int {
	gone := bits.OnesCount16(b.ahead & mask)
	if gone == 0 {
		return 0
	}
	b.ahead &^= mask
	b.shard.aheadWasted += uint64(gone) * pageSize
	v.ahead.unread.Add(-int64(gone))
	v.ahead.record.add(0, gone)
	if b.live {
		b.shard.ahead -= int64(gone)
	}
	return gone
}

// waste is called when b leaves the index: what was read ahead in it was in
// vain, which its stream shall know. The shard's mu is held; b.live is off.
func (v *Volume) waste(b *block) {
	b.shard.ahead -= int64(bits.OnesCount16(b.ahead))
	if v.unread(b, allPages) > 0 && b.stream != nil {
		b.stream.wasted.Store(true)
	}
}

// drop detaches the idle blocks of the index that want selects; with force, all
// of them.
func (v *Volume) drop(force bool, want func(num int64) bool) {
	for i := range v.shards {
		s := &v.shards[i]
		s.mu.Lock()
		for num, b := range s.blocks {
			if (force || b.idle()) && want(num) {
				v.detach(b)
			}
		}
		s.mu.Unlock()
	}
}
