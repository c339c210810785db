// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"rblk/cache/cachetest"
)

// evenFiles are files of size bytes in gaps of step, in the order of next.
type evenFiles struct {
	size, step, count int64
	next              func(i int64) int64
}

func (f evenFiles) At(off int64) (int64, int64, bool) {
	start := off / f.step * f.step
	return start, start + f.size, off < start+f.size
}

func (f evenFiles) Next(start int64) (int64, int64, bool) {
	i := f.next(start / f.step)
	return i * f.step, i*f.step + f.size, i >= 0 && i < f.count
}

func TestSmallFileIsReadWhole(t *testing.T) {
	src := cachetest.NewSource(1<<20, cachetest.Options{})
	v := open(t, src, Options{Readahead: ReadaheadAuto})
	v.SetFiles(evenFiles{100_000, 100 << 10, 10, func(i int64) int64 { return i + 1 }})
	readOn(t, v, 2*100<<10, 2*100<<10+4096, 4096)
	quiesce(t, v)
	if st := v.Stats(); st.FetchedBytes != 100<<10 {
		t.Errorf("fetched %d", st.FetchedBytes)
	}
	before := v.Stats().Stalls
	readOn(t, v, 2*100<<10, 2*100<<10+100_000, 50_000)
	if st := v.Stats(); st.Stalls != before {
		t.Error("the rest of the file was not there")
	}
}

// Readers of small files find the next ones there, in volume order and in an
// order of the user's.
func TestFileOrder(t *testing.T) {
	const count, step, size = 2000, 64 << 10, 60_000
	perm := rand.New(rand.NewPCG(1, 1)).Perm(count)
	place := make([]int64, count)
	for i, p := range perm {
		place[p] = int64(i)
	}
	for name, order := range map[string]struct {
		at   func(i int64) int64
		next func(file int64) int64
	}{
		"volume": {func(i int64) int64 { return i }, func(f int64) int64 { return f + 1 }},
		"user": {func(i int64) int64 { return int64(perm[i]) }, func(f int64) int64 {
			if place[f]+1 == count {
				return -1
			}
			return int64(perm[place[f]+1])
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				v := open(t, cachetest.NewSource(count*step, far), Options{Size: 64 << 20, Readahead: ReadaheadAuto})
				v.SetFiles(evenFiles{size, step, count, order.next})
				for i := range int64(count) {
					off := order.at(i) * step
					readOn(t, v, off, off+size, size)
					time.Sleep(300 * time.Microsecond)
				}
				if st := v.Stats(); st.Stalls > count/50 || st.FetchedBytes > count*step*105/100 {
					t.Errorf("%d stalls for %d files, fetched %d", st.Stalls, count, st.FetchedBytes)
				}
			})
		})
	}
}

func TestBudget(t *testing.T) {
	if _, err := NewBudget(1); err == nil {
		t.Error("a budget of one byte")
	}
	b, err := NewBudget(2*MinBudget + minPiece)
	if err != nil {
		t.Fatal(err)
	}
	const size = 256 << 20
	src := func() *cachetest.Source { return cachetest.NewSource(size, cachetest.Options{}) }
	first, second := src(), src()
	v := open(t, first, Options{Budget: b})
	w := open(t, second, Options{Budget: b})
	third := src()
	defer third.Close()
	if _, err := New(third, Options{Budget: b}); err == nil {
		t.Error("a third volume")
	}
	for range 2 {
		readOn(t, v, 0, size, MaxIO)
		readOn(t, w, 0, size, 1<<20)
	}
	if n := first.Counters().ArenaBytes + second.Counters().ArenaBytes; n > 2*MinBudget+minPiece {
		t.Errorf("%d bytes of arenas", n)
	}
}

func TestCollector(t *testing.T) {
	v := open(t, cachetest.NewSource(1<<20, cachetest.Options{}), Options{})
	readOn(t, v, 0, 8192, 4096)
	readOn(t, v, 0, 8192, 4096)
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(NewCollector(func() []*Volume { return []*Volume{v, v} }))
	families, err := reg.Gather()
	if err != nil || len(families) != len(metrics) {
		t.Fatalf("%d families: %v", len(families), err)
	}
	for _, f := range families {
		if f.GetName() == "rblk_cache_served_bytes_total" {
			if got := f.Metric[0].GetCounter().GetValue(); got != 2*16384 { // two volumes of one export
				t.Errorf("served %v", got)
			}
		}
	}
}

func TestStreams(t *testing.T) {
	v := open(t, cachetest.NewSource(4<<20, cachetest.Options{}), Options{Readahead: ReadaheadAuto})
	readOn(t, v, 0, 1<<20, 64<<10)
	got := v.Streams()
	if len(got) != 1 || got[0].Kind != "forward" || got[0].Position != 1<<20 || got[0].Window == 0 {
		t.Errorf("%+v", got)
	}
}
