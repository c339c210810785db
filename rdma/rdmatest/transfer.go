// SPDX-License-Identifier: Apache-2.0

package rdmatest

import (
	"bytes"
	"sync"

	"rblk/rdma"
)

func testLengths(r *rig) {
	l := r.connect(linkOptions{})
	for _, n := range []int{0, 1, 2, 31, 511, 4096, 4097, 65536, 300_001} {
		for _, off := range []uint64{0, 1, 4095} {
			if r.pair.Siw && n > 1 && n < 64 && off == 4095 {
				continue
			}
			l.read(off, off/2, n)
			l.write(off/2, off, n)
		}
	}
	l.read(regionSize-1, 0, 1)
	l.write(regionSize-1, 5, 1)
	l.read(0, 0, regionSize)
	// No segments at all is length 0; then no key is looked at.
	l.a.post(rdma.WorkRequest{ID: 9, Op: rdma.OpRead, Flags: rdma.WRSignaled, Remote: l.b.at(0)})
	l.a.expect(9)
	l.a.post(rdma.WorkRequest{ID: 10, Op: rdma.OpWrite, Flags: rdma.WRSignaled, Remote: l.b.at(regionSize)})
	l.a.expect(10)
}

func testGatherScatter(r *rig) {
	l := r.connect(linkOptions{active: rdma.ConnOptions{Segments: 4}, passive: rdma.ConnOptions{Segments: 4}})
	if l.a.conn.Info().Segments < 4 {
		return // iWARP: a READ has one
	}
	segs := []rdma.Segment{
		rdma.Seg(l.a.mr, 3, 5000), rdma.Seg(l.a.mr, 100_000, 0), rdma.Seg(l.a.mr, 70_001, 1), rdma.Seg(l.a.mr, 200_000, 12_345),
	}
	const total = 5000 + 1 + 12_345
	gathered := func() []byte {
		return bytes.Join([][]byte{l.a.mem[3:5003], l.a.mem[70_001:70_002], l.a.mem[200_000:212_345]}, nil)
	}
	fill(l.a.mem, 1)
	l.a.post(rdma.WorkRequest{ID: 1, Op: rdma.OpWrite, Local: segs, Remote: l.b.at(777)}, l.a.readWR(2, l.b, 777, 500_000, 1))
	l.a.expect(2)
	l.same(l.b.mem[777:777+total], gathered())

	fill(l.b.mem, 2)
	l.a.post(rdma.WorkRequest{ID: 3, Op: rdma.OpRead, Flags: rdma.WRSignaled, Local: segs, Remote: l.b.at(999)})
	l.a.expect(3)
	l.same(gathered(), l.b.mem[999:999+total])
	if l.a.mem[5003] == l.b.mem[999+5000] && l.a.mem[5004] == l.b.mem[999+5001] && l.a.mem[5005] == l.b.mem[999+5002] {
		l.Fatal("a segment was overrun")
	}

	// SEND gathers, RECV scatters.
	n, err := l.b.conn.PostRecv([]rdma.RecvRequest{{ID: 4, Local: []rdma.Segment{
		rdma.Seg(l.b.mr, 10, 1), rdma.Seg(l.b.mr, 400_000, 100_000), rdma.Seg(l.b.mr, 20, 7),
	}}})
	if n != 1 || err != nil {
		l.Fatalf("PostRecv: %d, %v", n, err)
	}
	l.a.post(rdma.WorkRequest{ID: 5, Op: rdma.OpSend, Flags: rdma.WRSignaled, Local: segs})
	l.a.expect(5)
	if c := l.b.expect(4); c.Length != total || c.Op != rdma.OpRecv {
		l.Fatalf("%v of %d bytes, want %d", c.Op, c.Length, total)
	}
	l.same(append([]byte{l.b.mem[10]}, l.b.mem[400_000:400_000+total-1]...), gathered())
}

// testBothDirections: the passive side reads and writes the active one, at the
// same time as the other way round.
func testBothDirections(r *rig) {
	const size, rounds = 20_000, 40
	l := r.connect(linkOptions{})
	fill(l.a.mem[:size], 1)
	fill(l.b.mem[:size], 2)
	for i := range uint64(rounds) {
		l.b.post(l.b.readWR(i, l.a, 0, 100_000, size), l.b.writeWR(1000+i, l.a, 200_000, 0, size))
		l.a.post(l.a.readWR(i, l.b, 0, 300_000, size), l.a.writeWR(1000+i, l.b, 400_000, 0, size))
		l.a.expect(i)
		l.a.expect(1000 + i)
		// a's help is needed when it has manual progress: its own traffic is
		// done, the peer's need not be.
		l.whileWaiting(func() {
			l.b.expect(i)
			l.b.expect(1000 + i)
		})
	}
	l.same(l.b.mem[100_000:100_000+size], l.a.mem[:size])
	l.same(l.a.mem[300_000:300_000+size], l.b.mem[:size])
}

// whileWaiting runs f while a is in Wait, where it expects no completion of its
// own: manual progress serves the peer only there.
func (l *link) whileWaiting(f func()) {
	l.Helper()
	if !l.manual {
		f()
		return
	}
	ctx, cancel := contextOf(l.rig)
	var wg sync.WaitGroup
	wg.Go(func() {
		var wc [1]rdma.Completion
		if n, _ := l.a.conn.Wait(ctx, wc[:]); n != 0 {
			l.Errorf("active: unexpected completion %d", wc[0].ID)
		}
	})
	defer wg.Wait()
	defer cancel()
	f()
}

func testInline(r *rig) {
	l := r.connect(linkOptions{receives: 8})
	n := min(l.a.conn.Info().Inline, recvSize)
	if n == 0 {
		return
	}
	loose := l.memory(4096) // no region
	addr := addressOf(loose)
	for i := range uint64(4) {
		fill(loose[:n], i)
		want := bytes.Clone(loose[:n])
		seg := []rdma.Segment{{Addr: addr, Length: uint32(n)}}
		l.a.post(
			rdma.WorkRequest{ID: 1, Op: rdma.OpWrite, Flags: rdma.WRInline, Local: seg, Remote: l.b.at(i * 100)},
			rdma.WorkRequest{ID: 2, Op: rdma.OpSend, Flags: rdma.WRInline | rdma.WRSignaled, Local: seg},
		)
		clear(loose) // it is free again at once
		l.a.expect(2)
		l.b.expect(i)
		l.same(l.b.mem[i*100:i*100+uint64(n)], want)
		at := regionSize - (i+1)*recvSize
		l.same(l.b.mem[at:at+uint64(n)], want)
	}
}

func testImmediate(r *rig) {
	l := r.connect(linkOptions{receives: 3})
	if l.a.conn.Info().Device.Info().Caps&rdma.CapImmediate == 0 {
		w := l.a.writeWR(1, l.b, 0, 0, 8)
		w.Op = rdma.OpWriteImm
		if n, err := l.a.conn.Post([]rdma.WorkRequest{w}); n != 0 || err == nil {
			l.Fatalf("WRITE with immediate on a device without it: %d, %v", n, err)
		}
		return
	}
	fill(l.a.mem[:5000], 3)
	for i, size := range []int{5000, 0} {
		w := l.a.writeWR(7, l.b, 100, 0, size)
		w.Op, w.Imm = rdma.OpWriteImm, 0xdecafbad+uint32(i)
		l.a.post(w)
		l.a.expect(7)
		c := l.b.expect(uint64(i))
		if !c.HasImm || c.Imm != w.Imm || int(c.Length) != size || c.Op != rdma.OpRecv {
			l.Fatalf("completion %+v, want %d bytes and immediate %#x", c, size, w.Imm)
		}
	}
	l.same(l.b.mem[100:5100], l.a.mem[:5000])
	l.a.post(l.a.sendWR(8, 0, 3))
	l.a.expect(8)
	if c := l.b.expect(2); c.HasImm {
		l.Fatalf("completion %+v of a plain SEND has immediate data", c)
	}
}

// testBigRegion: offsets around 4 GiB of one region, from either end.
func testBigRegion(r *rig) {
	if !r.pair.BigRegion {
		return
	}
	const four = 4 << 30
	l := r.connect(linkOptions{})
	mem := r.memory(four + 1<<20)
	mr := r.register(l.b.pd, mem, allAccess)
	for i, off := range []uint64{four - 1, four, four + 1, four - 4095, four + 1<<20 - 3} {
		const n = 3
		fill(mem[off:off+n], uint64(i))
		remote := rdma.RemoteAddr{Addr: mr.Addr() + off, RKey: mr.RKey()}
		l.a.post(rdma.WorkRequest{ID: 1, Op: rdma.OpRead, Flags: rdma.WRSignaled, Local: l.a.seg(0, n), Remote: remote})
		l.a.expect(1)
		l.same(l.a.mem[:n], mem[off:off+n])
		fill(l.a.mem[:n], uint64(i)+100)
		l.a.post(rdma.WorkRequest{ID: 2, Op: rdma.OpWrite, Local: l.a.seg(0, n), Remote: remote},
			rdma.WorkRequest{ID: 3, Op: rdma.OpRead, Flags: rdma.WRSignaled, Local: l.a.seg(64, 1), Remote: remote})
		l.a.expect(3)
		l.same(mem[off:off+n], l.a.mem[:n])
		// As a local segment, the other way round.
		l.b.post(rdma.WorkRequest{ID: 4, Op: rdma.OpRead, Flags: rdma.WRSignaled, Local: []rdma.Segment{rdma.Seg(mr, off, n)}, Remote: l.a.at(0)})
		l.b.expect(4)
	}
	// A range that wraps 32 bits must not be taken for a small one.
	l.a.post(rdma.WorkRequest{ID: 5, Op: rdma.OpRead, Flags: rdma.WRSignaled, Local: l.a.seg(0, 4), Remote: rdma.RemoteAddr{Addr: mr.Addr() + four + 1<<20 - 3, RKey: mr.RKey()}})
	r.refused(l.a.next(), 5, rdma.StatusRemoteAccess)
}

func testUnservedPeer(r *rig) {
	l := r.connect(linkOptions{unserved: true})
	for range 50 {
		l.read(10, 20, 5000)
		l.write(30, 40, 5000)
	}
}

// testFlood: both sides fill the network with all that they may, at once, and
// nobody takes completions until all is posted.
func testFlood(r *rig) {
	const depth, size = 64, 256 << 10
	o := rdma.ConnOptions{SendDepth: depth, ReadDepth: 16}
	l := r.connect(linkOptions{active: o, passive: o})
	batch := func(from, to *side) []rdma.WorkRequest {
		var wrs []rdma.WorkRequest
		for i := range uint64(depth) {
			if i%2 == 0 {
				wrs = append(wrs, from.writeWR(i, to, 512<<10, 0, size))
			} else {
				wrs = append(wrs, from.readWR(i, to, 0, 256<<10, size))
			}
		}
		return wrs
	}
	fill(l.a.mem[:size], 1)
	fill(l.b.mem[:size], 2)
	for range 3 {
		l.a.post(batch(l.a, l.b)...)
		l.b.post(batch(l.b, l.a)...)
		for i := range uint64(depth) {
			l.a.expect(i)
		}
		l.whileWaiting(func() {
			for i := range uint64(depth) {
				l.b.expect(i)
			}
		})
	}
	l.same(l.b.mem[512<<10:512<<10+size], l.a.mem[:size])
	l.same(l.b.mem[256<<10:256<<10+size], l.a.mem[:size])
	l.same(l.a.mem[256<<10:256<<10+size], l.b.mem[:size])
}

func testManyConnections(r *rig) {
	const conns, rounds = 24, 20
	listener := r.listen()
	addr := r.pair.Dial(listener.Addr())
	apd, bpd := r.domain(device(r, r.pair.Active)), r.domain(device(r, r.pair.Passive))
	target := r.newSide("passive", bpd)
	fill(target.mem, 5)
	go func() {
		for range conns {
			q, err := listener.Accept(r.ctx)
			if err != nil {
				return
			}
			c, err := q.Accept(r.ctx, bpd, rdma.ConnOptions{}, nil)
			if err != nil {
				r.Errorf("accept: %v", err)
				continue
			}
			r.later(func() { r.closes("passive connection", c.Close) })
		}
	}()
	var links []*link
	for range conns {
		route, err := r.pair.Active.Resolve(r.ctx, addr)
		r.must(err, "resolve")
		s := r.newSide("active", apd)
		c, err := route.Connect(r.ctx, apd, rdma.ConnOptions{}, nil)
		r.must(err, "connect")
		s.adopt(c, false)
		links = append(links, &link{rig: r, a: s, b: target})
	}
	var wg sync.WaitGroup
	for i, l := range links {
		wg.Go(func() {
			ctx, cancel := contextOf(r)
			defer cancel()
			for k := range uint64(rounds) {
				off := uint64(i)*1000 + k
				wr := l.a.readWR(k, target, off, 0, 30_000)
				if n, err := l.a.conn.Post([]rdma.WorkRequest{wr}); n != 1 {
					r.Errorf("connection %d: post: %v", i, err)
					return
				}
				var wc [1]rdma.Completion
				if n, err := l.a.conn.Wait(ctx, wc[:]); n != 1 || wc[0].ID != k || wc[0].Status != rdma.StatusOK {
					r.Errorf("connection %d: completion %+v, %v", i, wc[0], err)
					return
				}
				if !bytes.Equal(l.a.mem[:30_000], target.mem[off:off+30_000]) {
					r.Errorf("connection %d: wrong bytes", i)
					return
				}
			}
		})
	}
	wg.Wait()
}
