// SPDX-License-Identifier: Apache-2.0

package target

import (
	"bytes"
	"context"
	"log/slog"
	"sync"
	"testing"
	"time"

	"rblk/wire"
)

// patternStore holds the test pattern, and may grow.
type patternStore struct {
	mu sync.Mutex
	n  int64 // guarded by mu
}

func (p *patternStore) size() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.n
}

func (p *patternStore) fill(_ context.Context, off int64, buf []byte) []badRange {
	copy(buf, pattern(uint64(off), len(buf)))
	return nil
}

// newTestStager is a stager with the least pool there is.
func newTestStager(t testing.TB, s store) *stager {
	t.Helper()
	p, err := newPool(1, func(int, time.Time) {})
	if err != nil {
		t.Fatal(err)
	}
	st := newStager(p, s, slog.New(slog.DiscardHandler))
	t.Cleanup(func() {
		st.close()
		if len(p.free) != p.total {
			t.Errorf("%d of %d slabs are back", len(p.free), p.total)
		}
		p.close()
	})
	return st
}

// TestGrowWithinExtent: a resident extent takes up what the volume grows by.
func TestGrowWithinExtent(t *testing.T) {
	s := &patternStore{n: 1000}
	st := newTestStager(t, s)
	for _, n := range []int64{1000, 5000, extentSize} {
		s.mu.Lock()
		s.n = n
		s.mu.Unlock()
		e, fresh, err := st.acquire(within(t), 0, false)
		if err != nil {
			t.Fatal(err)
		}
		if !fresh && st.lacks(e) {
			st.refresh(within(t), e)
		}
		got, bad := st.contents(e)
		if got != n || len(bad) != 0 || !bytes.Equal(e.frame.mem[:n], pattern(0, int(n))) {
			t.Errorf("volume of %d: extent has %d bytes, bad %v", n, got, bad)
		}
		st.release(e)
	}
}

// TestWaitersInOrder: those who wait for a frame get one in the order they
// came, and a cancelled one lets the next through.
func TestWaitersInOrder(t *testing.T) {
	st := newTestStager(t, &patternStore{n: 100 << 20})
	var held []*extent
	for i := range int64(2 * slabFrames) {
		e, _, err := st.acquire(within(t), i, false)
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, e)
	}
	if _, _, err := st.acquire(within(t), 90, false); err != errNoFrame {
		t.Fatalf("a frame too many: %v", err)
	}
	order := make(chan int64, 8)
	done := make(chan struct{}) // nobody lets go before: that would serve the next one
	ctx, cancel := context.WithCancel(within(t))
	var wg sync.WaitGroup
	for i := range int64(4) {
		c := within(t)
		if i == 1 {
			c = ctx
		}
		wg.Go(func() {
			e, _, err := st.acquire(c, 40+i, true)
			if err != nil {
				return
			}
			order <- i
			<-done
			st.release(e)
		})
		eventually(t, "it waits", func() bool { return st.waiting.Load() == int32(i+1) })
	}
	cancel()
	eventually(t, "the cancelled one leaves", func() bool { return st.waiting.Load() == 3 })
	for _, want := range []int64{0, 2, 3} {
		st.release(held[want])
		if got := <-order; got != want {
			t.Errorf("served %d, want %d", got, want)
		}
	}
	close(done)
	wg.Wait()
	for i, e := range held {
		if i != 0 && i != 2 && i != 3 {
			st.release(e)
		}
	}
}

// flakyStore fails for a range of its store as long as it is told to.
type flakyStore struct {
	store
	off, n int64

	mu  sync.Mutex
	bad bool // guarded by mu
}

func (f *flakyStore) fail(bad bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.bad = bad
}

func (f *flakyStore) fill(ctx context.Context, off int64, buf []byte) []badRange {
	bad := f.store.fill(ctx, off, buf)
	f.mu.Lock()
	defer f.mu.Unlock()
	from, to := max(off, f.off), min(off+int64(len(buf)), f.off+f.n)
	if f.bad && from < to {
		bad = append(bad, badRange{from, to - from, wire.StatusIO})
	}
	return bad
}
