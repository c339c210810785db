// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"fmt"
	"math/bits"
	"testing"
	"time"

	"go.uber.org/goleak"

	"rblk/cache/cachetest"
	"rblk/volume"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// open makes a cache whose freed frames are poisoned, and checks its invariants
// and its leftovers when the test ends.
func open(t testing.TB, src *cachetest.Source, opts Options) *Volume {
	t.Helper()
	v, err := New(src, opts)
	if err != nil {
		t.Fatal(err)
	}
	v.pool.poison = true
	t.Cleanup(func() {
		quiesce(t, v)
		if err := v.check(); err != nil {
			t.Error(err)
		}
		if err := v.Close(); err != nil {
			t.Error(err)
		}
		if c := src.Counters(); c.Arenas != 0 || c.InFlight != 0 {
			t.Errorf("left at the source: %+v", c)
		}
	})
	return v
}

// quiesce waits until no transfer is under way.
func quiesce(t testing.TB, v *Volume) {
	t.Helper()
	eventually(t, "the cache is idle", func() bool { return v.gate.state.Load() == 0 && v.inFlight.Load() == 0 })
}

func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !f(); {
		if time.Now().After(end) {
			t.Fatalf("not within a minute: %s", what)
		}
		time.Sleep(100 * time.Microsecond)
	}
}

// check proves what must hold of a cache that nobody uses: index, queues,
// frames and references agree.
func (v *Volume) check() error {
	owner := map[page]*block{}
	unread := int64(0)
	for i := range v.shards {
		s := &v.shards[i]
		s.mu.Lock()
		defer s.mu.Unlock()
		if err := s.check(v, owner); err != nil {
			return fmt.Errorf("shard %d: %w", i, err)
		}
		unread += s.ahead
	}
	p := &v.pool
	p.mu.Lock()
	defer p.mu.Unlock()
	if used := p.used.Load(); used != int64(len(owner)) {
		return fmt.Errorf("%d frames used, %d in the index", used, len(owner))
	}
	if used := p.used.Load(); used > v.target.Load() {
		return fmt.Errorf("%d frames used, size is %d", used, v.target.Load())
	}
	if got := v.ahead.unread.Load(); got != unread {
		return fmt.Errorf("%d pages unread, shards say %d", got, unread)
	}
	return p.check(owner)
}

func (s *shard) check(v *Volume, owner map[page]*block) error {
	weight, ahead := int64(0), int64(0)
	for num, b := range s.blocks {
		switch {
		case b.num != num || b.shard != s || !b.live || v.shardOf(num) != s:
			return fmt.Errorf("block %d: identity", num)
		case b.refs.Load() != 1:
			return fmt.Errorf("block %d: %d references", num, b.refs.Load())
		case b.pending != 0 || b.ahead&^b.valid != 0 || b.valid == 0:
			return fmt.Errorf("block %d: valid %x pending %x ahead %x", num, b.valid, b.pending, b.ahead)
		case !b.node.Queued() || b.node.Weight() != int64(bits.OnesCount16(b.valid)):
			return fmt.Errorf("block %d: weight %d of %x", num, b.node.Weight(), b.valid)
		}
		for i, pg := range b.pages {
			if (pg != 0) != (b.valid&(1<<i) != 0) {
				return fmt.Errorf("block %d: page %d: frame %d, valid %x", num, i, pg, b.valid)
			}
			if pg != 0 {
				if o := owner[pg]; o != nil {
					return fmt.Errorf("frame %d in blocks %d and %d", pg, o.num, num)
				}
				owner[pg] = b
			}
		}
		weight += b.node.Weight()
		ahead += int64(bits.OnesCount16(b.ahead))
	}
	if s.queue.Len() != len(s.blocks) || s.queue.Weight() != weight {
		return fmt.Errorf("queue of %d weighing %d, index of %d weighing %d", s.queue.Len(), s.queue.Weight(), len(s.blocks), weight)
	}
	if s.ahead != ahead || len(s.writing) != 0 {
		return fmt.Errorf("ahead %d, counted %d; %d blocks under write", s.ahead, ahead, len(s.writing))
	}
	return nil
}

func (p *pool) check(owner map[page]*block) error {
	whole := 0
	for slab, free := range p.free {
		if free == allPages {
			whole++
		}
		if free != 0 && free != allPages && !p.listed[slab] {
			return fmt.Errorf("slab %d: free %x and not listed", slab, free)
		}
		for i := range slabPages {
			pg := page(slab*slabPages+i) + 1
			if (owner[pg] == nil) != (free&(1<<i) != 0) {
				return fmt.Errorf("frame %d: owner %v, free %x", pg, owner[pg] != nil, free)
			}
		}
	}
	if whole != p.whole {
		return fmt.Errorf("%d whole slabs, counted %d", p.whole, whole)
	}
	return nil
}

func dataset(g *volume.Geometry) {
	g.Kind, g.ReadOnly, g.Layout, g.Generation = volume.KindDataset, true, "layout-1", 1
}
