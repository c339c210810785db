// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"rblk/cache/cachetest"
	"rblk/volume"
)

// contents reads [off, off+n) through v.
func contents(t testing.TB, v *Volume, off int64, n int) []byte {
	t.Helper()
	w, err := v.Read(ctx, off, n)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Release()
	p := make([]byte, n)
	w.CopyTo(p)
	return p
}

// same compares the cache with the volume itself.
func same(t testing.TB, v *Volume, src *cachetest.Source) {
	t.Helper()
	size := int(src.Geometry().Size)
	want := make([]byte, size)
	src.Peek(0, want)
	if got := contents(t, v, 0, size); !bytes.Equal(got, want) {
		t.Fatal("the cache and the volume differ")
	}
}

// Writers, wipers and readers that overlap in time leave the cache with what
// the volume holds, whatever order they had.
func TestRacingWriters(t *testing.T) {
	const size = 4 * blockSize
	src := cachetest.NewSource(size, cachetest.Options{Jitter: 50 * time.Microsecond})
	v := open(t, src, Options{Size: 4 << 20, Readahead: ReadaheadAuto})
	for round := range 300 {
		var wg sync.WaitGroup
		for id := range 8 {
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(uint64(round), uint64(id)))
				for range 4 {
					off, n := rng.Int64N(size-20_000), 1+rng.IntN(20_000)
					switch {
					case id == 0:
						v.Zero(ctx, off, int64(n))
					case id < 5:
						if err := v.Write(ctx, off, bytes.Repeat([]byte{byte(rng.Uint32())}, n), false); err != nil {
							t.Error(err)
						}
					default:
						readOn(t, v, off, off+int64(n), n)
					}
				}
			})
		}
		wg.Wait()
		same(t, v, src)
	}
}

func TestOneFetchForManyReaders(t *testing.T) {
	src := cachetest.NewSource(1<<20, cachetest.Options{})
	v := open(t, src, Options{})
	src.Hold()
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() { readOn(t, v, 4096, 8192, 4096) })
	}
	eventually(t, "one fetch", func() bool { return src.Waiting() == 1 && v.Stats().Misses == 20 })
	src.Resume()
	wg.Wait()
	if n := src.Counters().ReadBytes; n != 4096 {
		t.Errorf("%d bytes fetched", n)
	}
}

// A failed fetch fails those who waited for it once, not one after the other.
func TestFailureReachesAllWaiters(t *testing.T) {
	src := cachetest.NewSource(1<<20, cachetest.Options{})
	v := open(t, src, Options{})
	src.SetFault(func(*volume.Op) error { return volume.ErrAway })
	src.Hold()
	errs := make(chan error, 20)
	for range 20 {
		go func() {
			_, err := v.Read(ctx, 0, 4096)
			errs <- err
		}()
	}
	eventually(t, "all wait", func() bool {
		s := v.shardOf(0)
		s.mu.Lock()
		defer s.mu.Unlock()
		b := s.blocks[0]
		return b != nil && b.wake != nil && s.misses == 20
	})
	src.Resume()
	for range 20 {
		if err := <-errs; !errors.Is(err, volume.ErrAway) {
			t.Errorf("got %v", err)
		}
	}
	if n := src.Counters().Reads[volume.LaneDemand]; n > 4 {
		t.Errorf("%d fetches", n)
	}
	src.SetFault(nil)
	readOn(t, v, 0, 4096, 4096)
}

func TestCancelDetachesTheWaiterOnly(t *testing.T) {
	src := cachetest.NewSource(1<<20, cachetest.Options{})
	v := open(t, src, Options{})
	src.Hold()
	c, cancel := context.WithCancel(ctx)
	errs := make(chan error)
	go func() {
		_, err := v.Read(c, 0, 4096)
		errs <- err
	}()
	eventually(t, "the fetch", func() bool { return src.Waiting() == 1 })
	cancel()
	if err := <-errs; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if v.Stats().FramesPinned == 0 {
		t.Error("the network's frame is free")
	}
	src.Resume()
	quiesce(t, v)
	readOn(t, v, 0, 4096, 4096)
	if n := src.Counters().ReadBytes; n != 4096 {
		t.Errorf("%d bytes fetched", n)
	}
}

// Reads that would need more frames than there are wait for those before them,
// and nothing exceeds the budget.
func TestBackPressure(t *testing.T) {
	const size = 256 << 20
	src := cachetest.NewSource(size, cachetest.Options{})
	v := open(t, src, Options{Size: SizeNone})
	var held []*View
	for i := int64(0); i < 2; i++ {
		w, err := v.Read(ctx, i*MaxIO, MaxIO)
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, w)
	}
	c, cancel := context.WithCancel(ctx)
	done := make(chan error, 2)
	go func() {
		w, err := v.Read(c, 3*MaxIO, MaxIO)
		if err == nil {
			w.Release()
		}
		done <- err
	}()
	eventually(t, "the third waits", func() bool {
		v.gate.mu.Lock()
		defer v.gate.mu.Unlock()
		return len(v.gate.waiting) == 1
	})
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range int64(8) {
		wg.Go(func() { readOn(t, v, i*MaxIO/2, i*MaxIO/2+MaxIO, MaxIO) })
	}
	for _, w := range held {
		w.Release()
	}
	wg.Wait()
	if n := src.Counters().ArenaBytes; n > workingSize+minPiece {
		t.Errorf("%d bytes of arenas", n)
	}
}

func TestCloseEndsWhatIsBlocked(t *testing.T) {
	src := cachetest.NewSource(8<<20, cachetest.Options{})
	v, err := New(src, Options{Readahead: ReadaheadAuto})
	if err != nil {
		t.Fatal(err)
	}
	w, err := v.Read(ctx, 0, 4096)
	if err != nil {
		t.Fatal(err)
	}
	src.Hold()
	errs := make(chan error, 4)
	go func() { _, err := v.Read(ctx, 1<<20, 4096); errs <- err }()
	go func() { _, err := v.Read(ctx, 1<<20, 4096); errs <- err }()
	go func() { errs <- v.Write(ctx, 2<<20, []byte("x"), false) }()
	v.Prefetch(4<<20, 4<<20)
	eventually(t, "all are blocked", func() bool { return src.Waiting() >= 3 && v.Stats().Misses == 3 })
	closed := make(chan error)
	go func() { closed <- v.Close() }()
	eventually(t, "it refuses", func() bool {
		w, err := v.Read(ctx, 0, 1)
		if err == nil {
			w.Release()
		}
		return errors.Is(err, volume.ErrClosed)
	})
	select {
	case <-closed:
		t.Fatal("closed under a view")
	default:
	}
	if len(w.Slices()[0]) != 4096 || w.Slices()[0][0] != 0 {
		t.Error("the view is gone")
	}
	w.Release()
	if err := <-closed; err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := <-errs; !errors.Is(err, volume.ErrClosed) {
			t.Errorf("got %v", err)
		}
	}
	if err := v.Close(); err != nil {
		t.Error(err)
	}
	if _, ok := <-v.Events(); ok {
		t.Error("an event")
	}
	for what, err := range map[string]error{
		"write": v.Write(ctx, 0, []byte("x"), false), "flush": v.Flush(ctx), "zero": v.Zero(ctx, 0, 1), "resize": v.Resize(1 << 20),
	} {
		if !errors.Is(err, volume.ErrClosed) {
			t.Errorf("%s after Close: %v", what, err)
		}
	}
}

func TestEvents(t *testing.T) {
	src := cachetest.NewSource(1<<20+100, cachetest.Options{})
	src.Fill(1)
	v := open(t, src, Options{})
	same(t, v, src)
	if _, err := v.Read(ctx, 1<<20, 200); !errors.Is(err, volume.ErrRange) {
		t.Errorf("got %v", err)
	}
	// Grown: the page at the old end must not serve what lay behind it.
	src.Resize(2 << 20)
	src.Poke(1<<20+100, []byte("new bytes"))
	if got := contents(t, v, 1<<20+100, 9); string(got) != "new bytes" {
		t.Errorf("got %q", got)
	}
	if e := <-v.Events(); e.Kind != volume.EventResized || e.Geometry.Size != 2<<20 {
		t.Errorf("%+v", e)
	}
	src.LoseContent("i2")
	if e := <-v.Events(); e.Kind != volume.EventInstance {
		t.Errorf("%+v", e)
	}
	if _, err := v.Read(ctx, 0, 1); !errors.Is(err, volume.ErrInstanceChanged) {
		t.Errorf("got %v", err)
	}
}

func TestReadOnlyAndUnsupported(t *testing.T) {
	v := open(t, cachetest.NewSource(1<<20, cachetest.Options{Geometry: dataset}), Options{})
	for what, err := range map[string]error{
		"write": v.Write(ctx, 0, []byte("x"), false), "zero": v.Zero(ctx, 0, 1), "discard": v.Discard(ctx, 0, 1),
	} {
		if !errors.Is(err, volume.ErrReadOnly) {
			t.Errorf("%s: %v", what, err)
		}
	}
	w := open(t, cachetest.NewSource(1<<20, cachetest.Options{Geometry: func(g *volume.Geometry) { g.CanZero, g.CanDiscard = false, false }}), Options{})
	for what, err := range map[string]error{"zero": w.Zero(ctx, 0, 1), "discard": w.Discard(ctx, 0, 1)} {
		if !errors.Is(err, volume.ErrUnsupported) {
			t.Errorf("%s: %v", what, err)
		}
	}
	for _, c := range []struct{ off, n int64 }{{-1, 1}, {0, -1}, {1 << 20, 1}, {0, 1<<20 + 1}, {1 << 62, 1 << 62}} {
		if err := w.Prefetch(c.off, c.n); !errors.Is(err, volume.ErrRange) {
			t.Errorf("prefetch %v: %v", c, err)
		}
		if _, err := w.Read(ctx, c.off, int(c.n)); !errors.Is(err, volume.ErrRange) {
			t.Errorf("read %v: %v", c, err)
		}
	}
}

func TestPrefetch(t *testing.T) {
	src := cachetest.NewSource(64<<20, cachetest.Options{Jitter: 100 * time.Microsecond})
	src.Fill(1)
	v := open(t, src, Options{Size: 128 << 20})
	if err := v.Prefetch(100, 64<<20-200); err != nil {
		t.Fatal(err)
	}
	eventually(t, "all is there", func() bool { return v.Stats().FetchedBytes == 64<<20 && v.Stats().FramesInFlight == 0 })
	if c := src.Counters(); c.Reads[volume.LaneDemand] != 0 || c.MaxInFlightBy > pumpDepth+maxChunk {
		t.Errorf("%+v", c)
	}
	readOn(t, v, 0, 64<<20, 1<<20)
	if st := v.Stats(); st.Stalls != 0 {
		t.Errorf("%+v", st)
	}
	v.Drop()
	if st := v.Stats(); st.FramesUsed != 0 {
		t.Errorf("%+v", st)
	}
}

// TestHitAllocations: a read of up to 1 MiB that is there allocates nothing.
func TestHitAllocations(t *testing.T) {
	v := open(t, cachetest.NewSource(4<<20, cachetest.Options{}), Options{})
	readOn(t, v, 0, 4<<20, 1<<20)
	for _, n := range []int{1, 4096, 1 << 20} {
		if raceEnabled {
			t.Skip("the race detector empties pools")
		}
		if got := testing.AllocsPerRun(100, func() { readOn(t, v, 8192, 8192+int64(n), n) }); got != 0 {
			t.Errorf("%v allocations for %d bytes", got, n)
		}
	}
}
