// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"rblk/cache/cachetest"
)

var ctx = context.Background()

// touchAll reads [0, n) once.
func touchAll(t testing.TB, v *Volume, n int64, bs int) {
	for off := int64(0); off < n; off += int64(bs) {
		w, err := v.Read(ctx, off, bs)
		if err != nil {
			t.Fatal(err)
		}
		w.Release()
	}
}

// BenchmarkHit is the hit path: bytes that are there, of one and of many
// readers.
func BenchmarkHit(b *testing.B) {
	for _, bs := range []int{4 << 10, 128 << 10, 1 << 20} {
		for _, parallel := range []bool{false, true} {
			b.Run(fmt.Sprintf("%dKiB/parallel=%v", bs>>10, parallel), func(b *testing.B) {
				const size = 64 << 20
				src := cachetest.NewSource(size, cachetest.Options{})
				v, err := New(src, Options{Size: 2 * size})
				if err != nil {
					b.Fatal(err)
				}
				defer v.Close()
				touchAll(b, v, size, 1<<20)
				b.SetBytes(int64(bs))
				b.ReportAllocs()
				b.ResetTimer()
				read := func(rng *rand.Rand) {
					w, err := v.Read(ctx, rng.Int64N(size/int64(bs))*int64(bs), bs)
					if err != nil {
						b.Error(err)
						return
					}
					w.Release()
				}
				if !parallel {
					rng := rand.New(rand.NewPCG(1, 1))
					for b.Loop() {
						read(rng)
					}
					return
				}
				b.RunParallel(func(pb *testing.PB) {
					rng := rand.New(rand.NewPCG(rand.Uint64(), 1))
					for pb.Next() {
						read(rng)
					}
				})
			})
		}
	}
}

// BenchmarkMiss is the cost of the cache itself around a transfer that costs
// nothing.
func BenchmarkMiss(b *testing.B) {
	const size = 1 << 30
	src := cachetest.NewSource(size, cachetest.Options{})
	v, err := New(src, Options{Size: 32 << 20})
	if err != nil {
		b.Fatal(err)
	}
	defer v.Close()
	rng := rand.New(rand.NewPCG(1, 1))
	b.SetBytes(4096)
	b.ReportAllocs()
	for b.Loop() {
		w, err := v.Read(ctx, rng.Int64N(size/4096)*4096, 4096)
		if err != nil {
			b.Fatal(err)
		}
		w.Release()
	}
}

// BenchmarkZipf reads 4 KiB by popularity over ten times the cache.
func BenchmarkZipf(b *testing.B) {
	const size = 320 << 20
	src := cachetest.NewSource(size, cachetest.Options{})
	v, err := New(src, Options{Size: size / 10, Readahead: ReadaheadAuto})
	if err != nil {
		b.Fatal(err)
	}
	defer v.Close()
	rng := rand.New(rand.NewPCG(1, 1))
	z := rand.NewZipf(rng, 1.1, 8, size/4096-1)
	perm := rng.Perm(size / 4096)
	b.SetBytes(4096)
	b.ReportAllocs()
	for b.Loop() {
		w, err := v.Read(ctx, int64(perm[z.Uint64()])*4096, 4096)
		if err != nil {
			b.Fatal(err)
		}
		w.Release()
	}
	st := v.Stats()
	b.ReportMetric(100*float64(st.Hits)/float64(st.Hits+st.Misses), "%hits")
	b.ReportMetric(float64(st.FetchedBytes)/float64(st.Misses*4096), "amplification")
}

// readOn reads [lo, hi) in order.
func readOn(t testing.TB, v *Volume, lo, hi int64, bs int) {
	for off := lo; off < hi; off += int64(bs) {
		w, err := v.Read(ctx, off, bs)
		if err != nil {
			t.Error(err)
			return
		}
		w.Release()
	}
}

// BenchmarkStream reads in order over 5 ms of delay at 1 GB/s: by one reader,
// and by 32 that share the volume.
func BenchmarkStream(b *testing.B) {
	for _, readers := range []int{1, 4, 32, 64} {
		b.Run(fmt.Sprintf("readers=%d", readers), func(b *testing.B) {
			const size = 1 << 30
			src := cachetest.NewSource(size, cachetest.Options{Latency: 5 * time.Millisecond, Bandwidth: 1 << 30})
			v, err := New(src, Options{Size: 256 << 20, Readahead: ReadaheadAuto})
			if err != nil {
				b.Fatal(err)
			}
			defer v.Close()
			b.SetBytes(size)
			for b.Loop() {
				v.Drop()
				var wg sync.WaitGroup
				for i := range readers {
					part := int64(size / readers)
					wg.Go(func() { readOn(b, v, int64(i)*part, int64(i+1)*part, 128<<10) })
				}
				wg.Wait()
			}
			st := v.Stats()
			b.ReportMetric(float64(st.Stalls)/float64(b.N), "stalls/op")
			b.ReportMetric(float64(st.ReadaheadWasted)/float64(b.N)/(1<<20), "wastedMiB/op")
		})
	}
}
