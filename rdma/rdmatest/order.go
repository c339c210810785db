// SPDX-License-Identifier: Apache-2.0

package rdmatest

import (
	"context"
	"encoding/binary"
	"sync"
	"unsafe"

	"rblk/rdma"
)

func contextOf(r *rig) (context.Context, context.CancelFunc) {
	return context.WithTimeout(r.ctx, r.pair.Patience)
}

func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// testBackPressure: 1,000 mixed requests against a send queue of 64 complete in
// the order posted, each exactly once.
func testBackPressure(r *rig) {
	const total, depth = 1000, 64
	l := r.connect(linkOptions{active: rdma.ConnOptions{SendDepth: depth}})
	if got := l.a.conn.Info().SendDepth; got != depth {
		l.Fatalf("send depth %d, want %d", got, depth)
	}
	var wrs []rdma.WorkRequest
	for i := range uint64(total) {
		if i%3 == 0 {
			wrs = append(wrs, l.a.writeWR(i, l.b, 300_000, 0, int(i)))
		} else {
			wrs = append(wrs, l.a.readWR(i, l.b, 0, 100_000, int(i)))
		}
	}
	want := uint64(0)
	got := func(c rdma.Completion) {
		if c.ID != want || c.Status != rdma.StatusOK {
			l.Fatalf("completion %d %v, want %d", c.ID, c.Status, want)
		}
		want++
	}
	n, err := l.a.conn.Post(wrs)
	l.must(err, "post")
	if n != depth {
		l.Fatalf("an empty queue of %d took %d requests", depth, n)
	}
	if n, err := l.a.conn.Post(wrs[n:]); err != nil || n > depth {
		l.Fatalf("a full queue: %d, %v", n, err)
	} else {
		wrs = wrs[depth+n:]
	}
	l.a.postAll(wrs, got)
	for want < total {
		got(l.a.next())
	}
	var wc [8]rdma.Completion
	if n, err := l.a.conn.Poll(wc[:]); n != 0 || err != nil {
		l.Fatalf("Poll after all completions: %d, %v", n, err)
	}
}

// testUnsignaled: unsignaled requests leave one place for a signaled one, give
// their places back with it, and report nothing.
func testUnsignaled(r *rig) {
	const depth = 16
	l := r.connect(linkOptions{active: rdma.ConnOptions{SendDepth: depth}})
	var quiet []rdma.WorkRequest
	for i := range uint64(2 * depth) {
		wr := l.a.writeWR(i, l.b, i*8, 0, 8)
		wr.Flags = 0
		quiet = append(quiet, wr)
	}
	for round := range uint64(20) {
		binary.LittleEndian.PutUint64(l.a.mem, round)
		n, err := l.a.conn.Post(quiet)
		l.must(err, "post")
		if n < depth/2 || n >= depth {
			l.Fatalf("round %d: a queue of %d took %d unsignaled requests", round, depth, n)
		}
		l.a.post(l.a.readWR(100+round, l.b, 0, 4096, 8*n))
		l.a.expect(100 + round)
		for i := range n {
			if got := binary.LittleEndian.Uint64(l.a.mem[4096+8*i:]); got != round {
				l.Fatalf("round %d: write %d brought %d", round, i, got)
			}
		}
	}
}

func testReadsBeyondDepth(r *rig) {
	const total = 200
	l := r.connect(linkOptions{
		active:  rdma.ConnOptions{SendDepth: 256, ReadDepth: 4},
		passive: rdma.ConnOptions{ReadDepth: 2},
	})
	if d := l.a.conn.Info().ReadDepth; d > 2 {
		l.Fatalf("READ depth %d; the peer allows 2", d)
	}
	fill(l.b.mem, 4)
	var wrs []rdma.WorkRequest
	for i := range uint64(total) {
		wrs = append(wrs, l.a.readWR(i, l.b, i*1000, i*3000, 2000))
	}
	l.a.post(wrs...)
	for i := range uint64(total) {
		l.a.expect(i)
		l.same(l.a.mem[i*3000:i*3000+2000], l.b.mem[i*1000:i*1000+2000])
	}
}

func testReadAfterWrite(r *rig) {
	l := r.connect(linkOptions{})
	for i := range uint64(100) {
		size := 1 + int(i*977)%100_000
		fill(l.a.mem[:size], i)
		w := l.a.writeWR(1, l.b, i, 0, size)
		w.Flags = 0
		l.a.post(w, l.a.readWR(i, l.b, i, 200_000, size))
		l.a.expect(i)
		l.same(l.a.mem[200_000:200_000+size], l.a.mem[:size])
	}
}

// testSendAfterWrite: when the SEND has arrived, the WRITEs before it are there.
func testSendAfterWrite(r *rig) {
	const rounds = 60
	l := r.connect(linkOptions{receives: rounds})
	want := make([]byte, 100_000)
	for i := range uint64(rounds) {
		size := 1 + int(i*1009)%100_000
		fill(l.a.mem[:size], i)
		fill(want[:size], i)
		w := l.a.writeWR(1, l.b, i, 0, size)
		w.Flags = 0
		l.a.post(w, l.a.sendWR(i, 0, 1))
		l.b.expect(i)
		l.same(l.b.mem[i:i+uint64(size)], want[:size])
		l.a.expect(i)
	}
}

// testFence: a fenced WRITE does not overtake the READs before it.
func testFence(r *rig) {
	const size = 200_000
	l := r.connect(linkOptions{})
	old := make([]byte, size)
	for i := range uint64(20) {
		fill(l.b.mem[:size], i)
		fill(old, i)
		fill(l.a.mem[:size], 1000+i)
		w := l.a.writeWR(2, l.b, 0, 0, size)
		w.Flags |= rdma.WRFence
		l.a.post(l.a.readWR(1, l.b, 0, 300_000, size), w, l.a.readWR(3, l.b, 0, 600_000, size))
		l.a.expect(1)
		l.same(l.a.mem[300_000:300_000+size], old)
		l.a.expect(2)
		l.a.expect(3)
		l.same(l.a.mem[600_000:600_000+size], l.a.mem[:size])
	}
}

// testConcurrentPost: Post is safe for many callers beside one taker.
func testConcurrentPost(r *rig) {
	const posters, each = 6, 150
	l := r.connect(linkOptions{active: rdma.ConnOptions{SendDepth: 32}})
	fill(l.b.mem, 1)
	place := make(chan struct{}, 32) // as many requests as the queue has places
	var wg sync.WaitGroup
	for p := range uint64(posters) {
		wg.Go(func() {
			for i := range uint64(each) {
				select {
				case place <- struct{}{}:
				case <-r.ctx.Done():
					return
				}
				off := p*10_000 + i
				wr := l.a.readWR(p<<32|i, l.b, off, p*100_000, 5000)
				if n, err := l.a.conn.Post([]rdma.WorkRequest{wr}); n != 1 || err != nil {
					r.Errorf("poster %d: %d, %v", p, n, err)
					return
				}
			}
		})
	}
	var next [posters]uint64
	for range posters * each {
		c := l.a.next()
		p := c.ID >> 32
		if c.Status != rdma.StatusOK || p >= posters || c.ID&0xffffffff != next[p] {
			l.Fatalf("completion %#x %v, want number %d of poster %d", c.ID, c.Status, next[p], p)
		}
		next[p]++
		<-place
	}
	wg.Wait()
}

// testTinyQueues: a ring of two places and one READ in flight wraps all the
// time, with writers and readers on different goroutines.
func testTinyQueues(r *rig) {
	o := rdma.ConnOptions{SendDepth: 2, RecvDepth: 1, ReadDepth: 1}
	l := r.connect(linkOptions{active: o, passive: o})
	fill(l.b.mem, 9)
	for i := range uint64(300) {
		size := 1 + int(i*i*31)%200_000
		wr := l.a.readWR(i, l.b, i, i*2, size)
		if i%2 == 1 {
			wr = l.a.writeWR(i, l.b, 700_000, 0, size)
		}
		l.a.postAll([]rdma.WorkRequest{wr}, func(rdma.Completion) { l.Fatal("queue is full") })
		l.a.expect(i)
		if i%2 == 0 {
			l.same(l.a.mem[i*2:i*2+uint64(size)], l.b.mem[i:i+uint64(size)])
		}
	}
}
