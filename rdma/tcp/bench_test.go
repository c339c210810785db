// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"context"
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"rblk/rdma"
)

// load is one way to move bytes: keep depth requests of size bytes in flight
// until n are done.
type load interface{ run(b *testing.B, n int) }

// verbsLoad posts one-sided requests to a served peer.
type verbsLoad struct {
	x, y        *side
	op          rdma.Opcode
	size, depth int
	wc          []rdma.Completion
	wr          [1]rdma.WorkRequest
	seg         [1]rdma.Segment
}

func newVerbsLoad(b *testing.B, op rdma.Opcode, size, depth int, manual bool) *verbsLoad {
	x, y := connectPair(b, size*depth, manual)
	b.Cleanup(func() {
		x.close(b)
		y.close(b)
	})
	return &verbsLoad{x: x, y: y, op: op, size: size, depth: depth, wc: make([]rdma.Completion, depth)}
}

func (l *verbsLoad) post(b *testing.B, i int) {
	off := uint64(i%l.depth) * uint64(l.size)
	l.seg[0] = rdma.Seg(l.x.mr, off, uint32(l.size))
	l.wr[0] = rdma.WorkRequest{
		Op: l.op, Flags: rdma.WRSignaled, Local: l.seg[:],
		Remote: rdma.RemoteAddr{Addr: l.y.mr.Addr() + off, RKey: l.y.mr.RKey()},
	}
	if n, err := l.x.c.Post(l.wr[:]); n != 1 || err != nil {
		b.Fatal(n, err)
	}
}

func (l *verbsLoad) run(b *testing.B, n int) {
	posted := 0
	for ; posted < min(l.depth, n); posted++ {
		l.post(b, posted)
	}
	for done := 0; done < n; {
		got, err := l.x.c.Wait(context.Background(), l.wc)
		if err != nil {
			b.Fatal(err)
		}
		done += got
		for ; got > 0 && posted < n; got-- {
			l.post(b, posted)
			posted++
		}
	}
}

// netLoad is the same pattern over a bare net.Conn: requests of a header, answers
// of a header and the payload; or, for writes, the other way round. It moves the
// same bytes: from depth places to depth places.
type netLoad struct {
	c           net.Conn
	size, depth int
	out, in     int // bytes of a request and of its answer
	bufs        [][]byte
}

func places(b *testing.B, size, depth int) (bufs [][]byte) {
	mem := mapMem(b, (headerSize+size)*depth)
	for i := range depth {
		bufs = append(bufs, mem[i*(headerSize+size):(i+1)*(headerSize+size)])
	}
	return bufs
}

func newNetLoad(b *testing.B, op rdma.Opcode, size, depth int) *netLoad {
	nl := &netLoad{size: size, depth: depth, out: headerSize, in: headerSize + size, bufs: places(b, size, depth)}
	if op == rdma.OpWrite {
		nl.out, nl.in = nl.in, nl.out
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		bufs := places(b, size, depth)
		for i := 0; ; i++ {
			buf := bufs[i%depth]
			if _, err := io.ReadFull(c, buf[:nl.out]); err != nil {
				return
			}
			if _, err := c.Write(buf[:nl.in]); err != nil {
				return
			}
		}
	}()
	if nl.c, err = net.Dial("tcp", l.Addr().String()); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		nl.c.Close()
		l.Close()
		<-done
	})
	return nl
}

func (l *netLoad) run(b *testing.B, n int) {
	posted := 0
	post := func() {
		if _, err := l.c.Write(l.bufs[posted%l.depth][:l.out]); err != nil {
			b.Fatal(err)
		}
		posted++
	}
	for posted < min(l.depth, n) {
		post()
	}
	for i := range n {
		if _, err := io.ReadFull(l.c, l.bufs[i%l.depth][:l.in]); err != nil {
			b.Fatal(err)
		}
		if posted < n {
			post()
		}
	}
}

// versus runs blocks of both loads in turn and reports the median times of one
// request, and their ratio (below 1: the provider is faster).
func versus(b *testing.B, block int, verbs, bare load) {
	b.ReportAllocs()
	var times [2][]float64
	verbs.run(b, block)
	bare.run(b, block)
	b.ResetTimer()
	for range b.N {
		for i, l := range []load{verbs, bare} {
			start := time.Now()
			l.run(b, block)
			times[i] = append(times[i], float64(time.Since(start).Nanoseconds())/float64(block))
		}
	}
	b.StopTimer()
	median := func(v []float64) float64 {
		slices.Sort(v)
		return v[len(v)/2]
	}
	v, n := median(times[0]), median(times[1])
	b.ReportMetric(v, "verbs-ns")
	b.ReportMetric(n, "net-ns")
	b.ReportMetric(v/n, "ratio")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkVersusNet: `go test -bench Versus -benchtime 100x ./rdma/tcp`.
func BenchmarkVersusNet(b *testing.B) {
	for _, tt := range []struct {
		name               string
		op                 rdma.Opcode
		size, depth, block int
		manual             bool
	}{
		{"Read4K/manual", rdma.OpRead, 4096, 1, 500, true},
		{"Read4K/auto", rdma.OpRead, 4096, 1, 500, false},
		{"Write4K/manual", rdma.OpWrite, 4096, 1, 500, true},
		{"Read4Kx32/manual", rdma.OpRead, 4096, 32, 1000, true},
		{"Read1Mx8/manual", rdma.OpRead, 1 << 20, 8, 32, true},
		{"Read1Mx8/auto", rdma.OpRead, 1 << 20, 8, 32, false},
		{"Write1Mx8/manual", rdma.OpWrite, 1 << 20, 8, 32, true},
		{"Write1Mx8/auto", rdma.OpWrite, 1 << 20, 8, 32, false},
	} {
		b.Run(tt.name, func(b *testing.B) {
			versus(b, tt.block, newVerbsLoad(b, tt.op, tt.size, tt.depth, tt.manual), newNetLoad(b, tt.op, tt.size, tt.depth))
		})
	}
}
