// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"rblk/wire"
)

func wireGrant(id uint64, off, n int64) wire.Grant {
	return wire.Grant{ID: id, Offset: uint64(off), Length: uint64(n), RKeys: []uint32{1}}
}

// TestReplacedGrantRevoked: the answer to a REVOKE waits for requests under a
// grant that newer ones have replaced meanwhile.
func TestReplacedGrantRevoked(t *testing.T) {
	tb := newTable(8)
	tb.add([]wire.Grant{wireGrant(1, 0, 100)})
	g := tb.take(50)
	if back := tb.add([]wire.Grant{wireGrant(2, 0, 100)}); len(back) != 0 {
		t.Fatalf("grants %v are given back while in use", back)
	}
	r := &revocation{ids: []uint64{1, 2, 99}}
	if tb.revoke(r) {
		t.Fatal("answered at once, though a request is under way")
	}
	again := &revocation{ids: []uint64{1}}
	if tb.revoke(again) {
		t.Fatal("the second time it is answered at once")
	}
	rs, id := tb.put(g)
	if !slices.Equal(rs, []*revocation{r, again}) || id != 0 {
		t.Fatalf("put: %v, %d", rs, id)
	}
	if tb.take(50) != nil || len(tb.byID) != 0 {
		t.Fatal("a revoked grant is still there")
	}
}

// TestTableModel: whatever comes and goes, a grant that is in use is neither
// given back nor answered for, each grant goes exactly once, and a look-up finds
// the newest one.
func TestTableModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		tb := newTable(rapid.IntRange(1, 6).Draw(rt, "limit"))
		var held []*grant
		alive := map[uint64]bool{} // granted and not gone yet
		newest := [32]uint64{}     // who covers each byte; 0: unknown
		inUse := func(id uint64) bool {
			return slices.ContainsFunc(held, func(g *grant) bool { return g.id == id })
		}
		gone := func(ids ...uint64) {
			for _, id := range ids {
				if id == 0 {
					continue
				}
				if inUse(id) {
					rt.Fatalf("grant %d goes while in use", id)
				}
				if !alive[id] {
					rt.Fatalf("grant %d goes twice", id)
				}
				delete(alive, id)
				for i := range newest {
					if newest[i] == id {
						newest[i] = 0
					}
				}
			}
		}
		next := uint64(0)
		var asked []*revocation
		answered := func(rs ...*revocation) {
			for _, r := range rs {
				for _, id := range r.ids {
					if alive[id] {
						gone(id)
					}
				}
				asked = slices.DeleteFunc(asked, func(x *revocation) bool { return x == r })
			}
		}
		rt.Repeat(map[string]func(*rapid.T){
			"add": func(rt *rapid.T) {
				next++
				off := rapid.IntRange(0, 31).Draw(rt, "off")
				n := rapid.IntRange(1, 32-off).Draw(rt, "n")
				alive[next] = true
				back := tb.add([]wire.Grant{wireGrant(next, int64(off), int64(n))})
				for i := off; i < off+n; i++ {
					newest[i] = next
				}
				for _, id := range back {
					gone(id)
				}
			},
			"take": func(rt *rapid.T) {
				at := rapid.IntRange(0, 31).Draw(rt, "at")
				g := tb.take(int64(at))
				if g == nil {
					return
				}
				if g.id != newest[at] || !alive[g.id] {
					rt.Fatalf("grant %d found at %d, want %d", g.id, at, newest[at])
				}
				held = append(held, g)
			},
			"put": func(rt *rapid.T) {
				if len(held) == 0 {
					return
				}
				i := rapid.IntRange(0, len(held)-1).Draw(rt, "which")
				g := held[i]
				held = slices.Delete(held, i, i+1)
				rs, id := tb.put(g)
				answered(rs...)
				gone(id)
			},
			"revoke": func(rt *rapid.T) {
				r := &revocation{ids: []uint64{rapid.Uint64Range(1, next+1).Draw(rt, "id")}}
				if !alive[r.ids[0]] {
					return
				}
				asked = append(asked, r)
				if tb.revoke(r) {
					answered(r)
				}
			},
			"": func(rt *rapid.T) {
				for i, g := range tb.all {
					if i > 0 && tb.all[i-1].off+tb.all[i-1].n > g.off {
						rt.Fatal("grants overlap")
					}
				}
			},
		})
		for len(held) > 0 {
			g := held[0]
			held = held[1:]
			rs, id := tb.put(g)
			answered(rs...)
			gone(id)
		}
		if len(asked) > 0 || len(tb.byID) != len(tb.all) {
			rt.Fatalf("%d revocations unanswered, %d grants known, %d usable", len(asked), len(tb.byID), len(tb.all))
		}
	})
}
