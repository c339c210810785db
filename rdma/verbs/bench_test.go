// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo && verbs && vm

package verbs

import (
	"fmt"
	"net"
	"testing"
	"time"

	"rblk/rdma"
)

// The counterparts of perftest's ib_read_lat and ib_read_bw, between both ends of
// one device in this process; test/vm/guest/test-bench.sh interleaves them.

func benchPair(b *testing.B, spin time.Duration) *pair {
	b.Helper()
	p := &pair{active: providerFrom(b, ""), passive: providerFrom(b, "")}
	p.active.(*provider).opts.Spin = spin
	var err error
	if p.l, err = p.passive.Listen(vmContext(b), net.JoinHostPort(testAddr(b), "0")); err != nil {
		b.Fatal(err)
	}
	p.a, p.b = p.connect(b)
	return p
}

// polling is longer than any READ takes: Wait never sleeps, as perftest does
// not. (The default would do for an adapter; emulation needs 60 µs and more.)
const polling = 10 * time.Millisecond

func readWR(p *pair, n int) rdma.WorkRequest {
	return rdma.WorkRequest{Op: rdma.OpRead, Flags: rdma.WRSignaled, Local: []rdma.Segment{rdma.Seg(p.a.mr, 0, uint32(n))},
		Remote: rdma.RemoteAddr{Addr: p.b.mr.Addr(), RKey: p.b.mr.RKey()}}
}

// BenchmarkReadLatency: one READ of 4 KiB at a time, polling, and sleeping until
// the completion's event (ib_read_lat -e).
func BenchmarkReadLatency(b *testing.B) {
	b.Run("poll", func(b *testing.B) { benchLatency(b, polling) })
	b.Run("event", func(b *testing.B) { benchLatency(b, -1) })
}

func benchLatency(b *testing.B, spin time.Duration) {
	p := benchPair(b, spin)
	defer p.close(b)
	wrs, wc, ctx := []rdma.WorkRequest{readWR(p, 4096)}, make([]rdma.Completion, 1), vmContext(b)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := p.a.conn.Post(wrs); err != nil {
			b.Fatal(err)
		}
		if _, err := p.a.conn.Wait(ctx, wc); err != nil || wc[0].Status != rdma.StatusOK {
			b.Fatal(err, wc[0].Status)
		}
	}
}

// BenchmarkReadBandwidth keeps 128 READs posted, as ib_read_bw does.
func BenchmarkReadBandwidth(b *testing.B) {
	for _, size := range []int{64 << 10, 1 << 20} {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			p := benchPair(b, polling)
			defer p.close(b)
			const depth = 128
			wrs := make([]rdma.WorkRequest, depth)
			for i := range wrs {
				wrs[i] = readWR(p, size)
			}
			wc, ctx := make([]rdma.Completion, 16), vmContext(b)
			b.SetBytes(int64(size))
			b.ReportAllocs()
			posted, done := 0, 0
			for done < b.N {
				if room := min(depth-(posted-done), b.N-posted); room > 0 {
					n, err := p.a.conn.Post(wrs[:room])
					if err != nil {
						b.Fatal(err)
					}
					posted += n
				}
				n, err := p.a.conn.Wait(ctx, wc)
				if err != nil {
					b.Fatal(err)
				}
				for _, c := range wc[:n] {
					if c.Status != rdma.StatusOK {
						b.Fatal(c.Status)
					}
				}
				done += n
			}
		})
	}
}
