// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"math/rand/v2"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"rblk/cache/cachetest"
)

// far is a target 5 ms away at 1 GiB/s; time in these tests is that of
// testing/synctest, so they measure decisions, not machines.
var far = cachetest.Options{Latency: 5 * time.Millisecond, Bandwidth: 1 << 30}

// elapsed is how long the readers take in virtual time.
func elapsed(readers ...func()) time.Duration {
	began := time.Now()
	var wg sync.WaitGroup
	for _, r := range readers {
		wg.Go(r)
	}
	wg.Wait()
	return time.Since(began)
}

// sequence returns n readers that share [0, size) evenly.
func sequence(t testing.TB, v *Volume, size int64, n, bs int) []func() {
	readers := make([]func(), n)
	for i := range readers {
		part := size / int64(n)
		readers[i] = func() { readOn(t, v, int64(i)*part, int64(i+1)*part, bs) }
	}
	return readers
}

func TestOneReaderFillsThePath(t *testing.T) {
	const size = 512 << 20
	for _, bs := range []int{128 << 10, 1 << 20} {
		took := map[int]time.Duration{}
		for _, readers := range []int{1, 32} {
			synctest.Test(t, func(t *testing.T) {
				v := open(t, cachetest.NewSource(size, far), Options{Size: 128 << 20, Readahead: ReadaheadAuto})
				took[readers] = elapsed(sequence(t, v, size, readers, bs)...)
				st := v.Stats()
				if st.FetchedBytes > size+uint64(readers)*floorWindow {
					t.Errorf("%d readers: fetched %d of %d", readers, st.FetchedBytes, size)
				}
				t.Logf("%d readers of %d KiB: %v, %d stalls, wasted %d KiB", readers, bs>>10, took[readers], st.Stalls, st.ReadaheadWasted>>10)
			})
		}
		if took[1]*9 > took[32]*10 {
			t.Errorf("%d KiB: one reader takes %v, 32 take %v", bs>>10, took[1], took[32])
		}
	}
}

// A reader that is slower than the path never waits once it is warm.
func TestSteadyReaderDoesNotStall(t *testing.T) {
	const size, bs = 256 << 20, 128 << 10
	for _, c := range []struct {
		name  string
		order func(i int) int
	}{
		{"in order", func(i int) int { return i }},
		{"neighbours swapped", func(i int) int { return i ^ 1 }},
		{"groups of four reversed", func(i int) int { return i ^ 3 }},
		{"backward", func(i int) int { return size/bs - 1 - i }},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				v := open(t, cachetest.NewSource(size, far), Options{Size: 64 << 20, Readahead: ReadaheadAuto})
				warm := uint64(0)
				for i := range size / bs {
					if i == size/bs/8 {
						warm = v.Stats().Stalls
					}
					readOn(t, v, int64(c.order(i))*bs, int64(c.order(i)+1)*bs, bs)
					time.Sleep(150 * time.Microsecond) // 128 KiB take the path 122 µs
				}
				st := v.Stats()
				if n := st.Stalls - warm; n > size/bs/1000 {
					t.Errorf("%d stalls in %d reads once warm", n, size/bs*7/8)
				}
				if st.FetchedBytes > size*102/100 {
					t.Errorf("fetched %d of %d", st.FetchedBytes, size)
				}
			})
		})
	}
}

func TestStridedReader(t *testing.T) {
	const size, bs, stride = 1 << 30, 16 << 10, 1 << 20
	synctest.Test(t, func(t *testing.T) {
		v := open(t, cachetest.NewSource(size, far), Options{Size: 64 << 20, Readahead: ReadaheadAuto})
		for i := int64(0); i < size/stride; i++ {
			readOn(t, v, i*stride, i*stride+bs, bs)
			time.Sleep(time.Millisecond)
		}
		st := v.Stats()
		if st.Stalls > size/stride/20 {
			t.Errorf("%d stalls in %d reads", st.Stalls, size/stride)
		}
		if asked := uint64(size / stride * bs); st.FetchedBytes > asked*102/100 {
			t.Errorf("fetched %d, asked for %d", st.FetchedBytes, asked)
		}
	})
}

// Sixty-four steady readers, interleaved with random reads, as page faults and
// data loaders are.
func TestInterleavedStreams(t *testing.T) {
	const size, bs, readers = 512 << 20, 64 << 10, 64
	synctest.Test(t, func(t *testing.T) {
		v := open(t, cachetest.NewSource(size, far), Options{Size: 128 << 20, Readahead: ReadaheadAuto})
		rng := rand.New(rand.NewPCG(1, 1))
		var pos [readers]int64
		const part = size / readers
		warm, reads := uint64(0), 0
		for done := 0; done < readers; {
			i := rng.IntN(readers)
			if pos[i] == part {
				continue
			}
			off := int64(i)*part + pos[i]
			before := v.Stats().Stalls
			readOn(t, v, off, off+bs, bs)
			if pos[i] > part/4 {
				reads++
				warm += v.Stats().Stalls - before
			}
			if pos[i] += bs; pos[i] == part {
				done++
			}
			if rng.IntN(8) == 0 {
				off := rng.Int64N(size/4096) * 4096
				readOn(t, v, off, off+4096, 4096)
			}
			time.Sleep(80 * time.Microsecond) // 64 KiB take the path 61 µs
		}
		if warm > uint64(reads)/100 { // a burst of one reader teaches its window
			t.Errorf("%d stalls in %d reads once warm", warm, reads)
		}
		// Each reader's window goes on beyond its end once.
		if st := v.Stats(); st.FetchedBytes > size+readers*(128<<20)/aheadShare/readers+size/32 {
			t.Errorf("fetched %d of %d, wasted %d", st.FetchedBytes, size, st.ReadaheadWasted)
		}
	})
}

// A reader that turns to random access and back is followed both ways.
func TestRecoversFromRandomPhase(t *testing.T) {
	const size, bs = 1 << 30, 128 << 10
	synctest.Test(t, func(t *testing.T) {
		v := open(t, cachetest.NewSource(size, far), Options{Size: 64 << 20, Readahead: ReadaheadAuto})
		rng := rand.New(rand.NewPCG(1, 1))
		for phase := range int64(4) {
			lo := phase * 100 << 20
			first := elapsed(func() { readOn(t, v, lo, lo+64<<20, bs) })
			if first > 400*time.Millisecond { // 62 ms at the path's rate, 2.6 s without read-ahead
				t.Errorf("phase %d: 64 MiB took %v", phase, first)
			}
			for range 500 {
				off := 512<<20 + rng.Int64N(64<<10)*4096
				readOn(t, v, off, off+4096, 4096)
			}
		}
	})
}

func TestRandomReadsAreNotAmplified(t *testing.T) {
	const cacheSize = 16 << 20
	for _, c := range []struct {
		bs, size int64
	}{{4 << 10, 10 * cacheSize}, {128 << 10, 10 * cacheSize}, {4 << 10, 2 * cacheSize}} {
		v := open(t, cachetest.NewSource(c.size, cachetest.Options{}), Options{Size: cacheSize, Readahead: ReadaheadAuto})
		rng := rand.New(rand.NewPCG(1, 1))
		for range 20_000 {
			off := rng.Int64N(c.size/c.bs) * c.bs
			readOn(t, v, off, off+c.bs, int(c.bs))
		}
		st := v.Stats()
		if float64(st.FetchedBytes) > 1.05*float64(st.ServedBytes) {
			t.Errorf("%d KiB over %d MiB: fetched/served = %.3f (read ahead %d, used %d)", c.bs>>10, c.size>>20,
				float64(st.FetchedBytes)/float64(st.ServedBytes), st.ReadaheadIssued, st.ReadaheadUsed)
		}
	}
}

// readahead=0 means zero: bytes fetched are bytes asked for, rounded to pages.
func TestReadaheadOff(t *testing.T) {
	const size = 16 << 20
	src := cachetest.NewSource(size, cachetest.Options{})
	v := open(t, src, Options{Size: 32 << 20, Readahead: ReadaheadOff})
	readOn(t, v, 0, size/2, 4<<10)
	readOn(t, v, size/2, size/2+100, 100)
	if st := v.Stats(); st.FetchedBytes != size/2+pageSize || st.ReadaheadIssued != 0 {
		t.Errorf("%+v", st)
	}
	if n := src.Counters().ReadaheadBytes; n != 0 {
		t.Errorf("%d bytes on the read-ahead lane", n)
	}
}

// A wrong guess costs at most one window.
func TestWrongGuessCostsOneWindow(t *testing.T) {
	const size, bs = 1 << 30, 16 << 10
	v := open(t, cachetest.NewSource(size, cachetest.Options{}), Options{Size: 64 << 20, Readahead: ReadaheadAuto})
	for i := int64(0); i < 1000; i++ {
		off := i * 1 << 20 * 1021 % size / bs * bs
		readOn(t, v, off, off+3*bs, bs) // three in a row, then elsewhere
	}
	st := v.Stats()
	if st.ReadaheadIssued > 1000*firstReads*bs {
		t.Errorf("read ahead %d for 1000 wrong guesses of %d", st.ReadaheadIssued, firstReads*bs)
	}
}
