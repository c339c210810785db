// SPDX-License-Identifier: Apache-2.0

package rdmatest

import (
	"math/rand/v2"

	"rblk/rdma"
)

// testRandom runs a random sequence of READs and WRITEs, many in flight, some
// unsignaled, against a model of the peer's memory.
func testRandom(r *rig) {
	const (
		total = 1500
		depth = 32
		slots = 24     // of the peer's memory
		room  = 40_000 // bytes of a slot
		local = 30_000 // bytes of a place in this side's memory
	)
	seed := rand.Uint64()
	r.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	l := r.connect(linkOptions{active: rdma.ConnOptions{SendDepth: depth, ReadDepth: 8}})
	fill(l.b.mem, 1)
	model := append([]byte(nil), l.b.mem...)
	type read struct {
		at, to uint64
		want   []byte
	}
	reads := map[uint64]read{}      // in flight, by id
	reading := make([]int, slots)   // READs in flight of a slot
	slotOf := make(map[uint64]int)  // of a READ in flight
	var inFlight []rdma.WorkRequest // not known to be done, in order
	done := func(c rdma.Completion) {
		l.Helper()
		// Everything up to c is done; only c is reported.
		for len(inFlight) > 0 {
			wr := inFlight[0]
			inFlight = inFlight[1:]
			if rd, ok := reads[wr.ID]; ok {
				l.same(l.a.mem[rd.to:rd.to+uint64(len(rd.want))], rd.want)
				reading[slotOf[wr.ID]]--
				delete(reads, wr.ID)
			}
			if wr.ID == c.ID && wr.Flags&rdma.WRSignaled != 0 {
				if c.Status != rdma.StatusOK {
					l.Fatalf("request %d: %v", c.ID, c.Status)
				}
				return
			}
			if wr.Flags&rdma.WRSignaled != 0 {
				l.Fatalf("completion %d before %d", c.ID, wr.ID)
			}
		}
		l.Fatalf("completion %d of nothing", c.ID)
	}
	signaled := 0 // in flight
	take := func() {
		done(l.a.next())
		signaled--
	}
	for id := range uint64(total) {
		// A place of this side's memory is free when the request that had it,
		// depth before, is done.
		for len(inFlight) >= depth-1 {
			take()
		}
		slot := rnd.IntN(slots)
		n := 1 + rnd.IntN(local-1)
		at := uint64(slot*room + rnd.IntN(room-n))
		to := id % depth * local
		var wr rdma.WorkRequest
		if rnd.IntN(2) == 0 {
			wr = l.a.readWR(id, l.b, at, to, n)
			reads[id] = read{at, to, append([]byte(nil), model[at:at+uint64(n)]...)}
			slotOf[id] = slot
			reading[slot]++
		} else {
			wr = l.a.writeWR(id, l.b, at, to, n)
			fill(l.a.mem[to:to+uint64(n)], id)
			copy(model[at:], l.a.mem[to:to+uint64(n)])
			if reading[slot] > 0 {
				wr.Flags |= rdma.WRFence
			}
			// Enough signaled ones that the queue can be drained.
			if rnd.IntN(3) == 0 && len(inFlight) < depth-4 {
				wr.Flags &^= rdma.WRSignaled
			}
		}
		for {
			n, err := l.a.conn.Post([]rdma.WorkRequest{wr})
			l.must(err, "post")
			if n == 1 {
				break
			}
			if signaled == 0 { // only unsignaled ones: the reserved place is for this
				wr.Flags |= rdma.WRSignaled
				continue
			}
			take()
		}
		inFlight = append(inFlight, wr)
		if wr.Flags&rdma.WRSignaled != 0 {
			signaled++
		}
	}
	last := l.a.readWR(total, l.b, 0, regionSize-1, 1)
	l.a.postAll([]rdma.WorkRequest{last}, func(c rdma.Completion) { done(c); signaled-- })
	inFlight = append(inFlight, last)
	for signaled++; signaled > 0; {
		take()
	}
	l.same(l.b.mem, model)
}
