// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"cmp"
	"slices"
	"sync"

	"rblk/wire"
)

// grant is a range of the volume that the target has promised to keep where it
// is.
type grant struct {
	id      uint64
	off, n  int64
	addr    uint64
	keys    []uint32
	refs    int // guarded by table.mu: parts under way
	used    uint64
	revoked []*revocation // guarded by table.mu: who waits for refs to be 0
	unmap   bool          // guarded by table.mu: to be given back when refs are 0
}

// revocation is a REVOKE that is being carried out.
type revocation struct {
	seq     uint64
	ids     []uint64
	waiting int // grants that are still in use
}

// table holds an epoch's grants, by offset.
type table struct {
	limit int // grants to hold at most

	mu    sync.Mutex
	all   []*grant          // guarded by mu: sorted by offset, without overlap
	byID  map[uint64]*grant // guarded by mu: those of all, and replaced ones that are in use
	clock uint64            // guarded by mu: ages
}

func newTable(limit int) *table { return &table{limit: limit, byID: map[uint64]*grant{}} }

// search is the index of the first grant that ends behind off.
func (t *table) search(off int64) int {
	i, _ := slices.BinarySearchFunc(t.all, off, func(g *grant, off int64) int {
		if g.off+g.n <= off {
			return -1
		}
		return 1
	})
	return i
}

// take finds the grant that covers off and holds it; the caller ends that with
// put. nil: ask for one.
func (t *table) take(off int64) *grant {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := t.search(off)
	if i == len(t.all) || t.all[i].off > off {
		return nil
	}
	g := t.all[i]
	g.refs++
	t.clock++
	g.used = t.clock
	return g
}

// covers tells whether off is granted now.
func (t *table) covers(off int64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	i := t.search(off)
	return i < len(t.all) && t.all[i].off <= off
}

// put ends a hold. It returns revocations whose last grant this was, or the id
// of a grant that can be given back now.
func (t *table) put(g *grant) (rs []*revocation, unmap uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	g.refs--
	switch {
	case g.refs > 0:
		return nil, 0
	case g.revoked != nil:
		for _, r := range g.revoked {
			r.waiting--
			if r.waiting == 0 {
				rs = append(rs, r)
			}
		}
		g.revoked = nil
	case g.unmap:
		unmap = g.id
	default:
		return nil, 0
	}
	delete(t.byID, g.id)
	return rs, unmap
}

// add takes new grants up; they replace older ones of the same bytes. It
// returns the ids to give back: of replaced grants, and of the coldest when
// there are more than the limit.
func (t *table) add(gs []wire.Grant) (giveBack []uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range gs {
		w := &gs[i]
		if w.Status != wire.StatusOK {
			continue
		}
		off, n := int64(w.Offset), int64(w.Length)
		at := t.search(off)
		for at < len(t.all) && t.all[at].off < off+n {
			old := t.all[at]
			t.remove(old)
			if old.refs == 0 {
				giveBack = append(giveBack, old.id)
			} else {
				old.unmap = true
			}
		}
		t.clock++
		g := &grant{id: w.ID, off: off, n: n, addr: w.Addr, keys: slices.Clone(w.RKeys), used: t.clock}
		t.all = slices.Insert(t.all, at, g)
		t.byID[g.id] = g
	}
	if len(t.all) > t.limit {
		giveBack = append(giveBack, t.coldest(max(1, t.limit/8))...)
	}
	return giveBack
}

// coldest takes n unused grants out, those used longest ago. Caller holds mu.
func (t *table) coldest(n int) []uint64 {
	var idle []*grant
	for _, g := range t.all {
		if g.refs == 0 {
			idle = append(idle, g)
		}
	}
	slices.SortFunc(idle, func(a, b *grant) int { return cmp.Compare(a.used, b.used) })
	var ids []uint64
	for _, g := range idle[:min(n, len(idle))] {
		t.remove(g)
		ids = append(ids, g.id)
	}
	return ids
}

// shed takes the n coldest grants out, for when the target has no more to give.
func (t *table) shed(n int) []uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.coldest(n)
}

// remove takes a grant out of use. While work requests go on under it, a REVOKE
// must still find it, and wait for them. Caller holds mu.
func (t *table) remove(g *grant) {
	if g.refs == 0 {
		delete(t.byID, g.id)
	}
	if i := t.search(g.off); i < len(t.all) && t.all[i] == g {
		t.all = slices.Delete(t.all, i, i+1)
	}
}

// revoke takes grants out on the target's demand. It tells whether the answer
// can be sent at once; if not, put will return r.
func (t *table) revoke(r *revocation) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, id := range r.ids {
		g := t.byID[id]
		if g == nil {
			continue // given back already, or about to be
		}
		t.remove(g)
		if g.refs > 0 {
			g.revoked = append(g.revoked, r)
			r.waiting++
		}
	}
	return r.waiting == 0
}

func (t *table) len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.all)
}
