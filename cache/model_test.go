// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"rblk/cache/cachetest"
	"rblk/volume"
)

// model is what the volume must hold. Its stripes are locked for as long as an
// operation on them is checked, and are no multiple of a page, so that
// neighbouring operations meet inside pages and blocks all the time.
type model struct {
	t     *testing.T
	v     *Volume
	src   *cachetest.Source
	data  []byte
	locks []sync.RWMutex
	ops   atomic.Int64
}

const stripe = 13 * 512

// noise is what is written.
var noise = func() []byte {
	p := make([]byte, 1<<20)
	cachetest.Pattern(p, 99)
	return p
}()

func (m *model) lock(off, n int, write bool) func() {
	first, last := off/stripe, (off+max(n, 1)-1)/stripe
	for i := first; i <= last; i++ {
		if write {
			m.locks[i].Lock()
		} else {
			m.locks[i].RLock()
		}
	}
	return func() {
		for i := first; i <= last; i++ {
			if write {
				m.locks[i].Unlock()
			} else {
				m.locks[i].RUnlock()
			}
		}
	}
}

// TestModel runs random operations of many goroutines over a Source that
// delays, reorders, tears and fails, and compares every byte with an array.
// RBLK_MODEL_OPS and RBLK_MODEL_SEED override the number and the seed; the
// default keeps the usual run under half a minute.
func TestModel(t *testing.T) {
	for _, c := range []struct {
		name string
		opts Options
		src  cachetest.Options
		ops  int
	}{
		{"immediate", Options{Size: 2 << 20, Readahead: ReadaheadAuto}, cachetest.Options{}, 300_000},
		{"delays", Options{Size: 2 << 20, Readahead: ReadaheadAuto}, cachetest.Options{Jitter: 200 * time.Microsecond}, 80_000},
		{"failures", Options{Size: 1 << 20, Readahead: ReadaheadAuto}, cachetest.Options{Jitter: 100 * time.Microsecond, FailRate: 0.02}, 80_000},
		{"none", Options{Size: SizeNone}, cachetest.Options{Jitter: 100 * time.Microsecond, FailRate: 0.01}, 40_000},
		{"small transfers", Options{Size: 4 << 20, Readahead: 1 << 20}, cachetest.Options{Jitter: 100 * time.Microsecond, MaxTransfer: 20 << 10}, 40_000},
	} {
		t.Run(c.name, func(t *testing.T) {
			ops, seed := c.ops, uint64(1)
			if s := os.Getenv("RBLK_MODEL_OPS"); s != "" {
				ops, _ = strconv.Atoi(s)
			}
			if s := os.Getenv("RBLK_MODEL_SEED"); s != "" {
				seed, _ = strconv.ParseUint(s, 10, 64)
			}
			if testing.Short() {
				ops /= 10
			}
			c.src.Seed = seed
			runModel(t, c.src, c.opts, ops, seed)
		})
	}
}

func runModel(t *testing.T, srcOpts cachetest.Options, opts Options, ops int, seed uint64) {
	const size = 8<<20 + 1536
	src := cachetest.NewSource(size, srcOpts)
	src.Fill(seed)
	v := open(t, src, opts)
	if len(v.shards) < 4 { // several shards, however small the cache
		v.reshard(4)
	}
	m := &model{t: t, v: v, src: src, data: make([]byte, size), locks: make([]sync.RWMutex, size/stripe+1)}
	src.Peek(0, m.data)
	var wg sync.WaitGroup
	for id := range 16 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(id)))
			pos := rng.IntN(size)
			for m.ops.Add(1) <= int64(ops) && !t.Failed() {
				m.step(rng, &pos)
			}
		})
	}
	wg.Wait()
	quiesce(t, v)
	if t.Failed() {
		return
	}
	m.src.SetFailRate(0)
	m.read(0, size, context.Background())
}

// step does one operation.
func (m *model) step(rng *rand.Rand, pos *int) {
	n := 1 + rng.IntN(2*pageSize)
	switch rng.IntN(64) {
	case 0:
		n = 1 + rng.IntN(200<<10)
	case 1:
		n = 0
	}
	off := rng.IntN(len(m.data) - n + 1)
	ctx := context.Background()
	if rng.IntN(40) == 0 {
		c, cancel := context.WithTimeout(ctx, time.Duration(rng.IntN(100))*time.Microsecond)
		defer cancel()
		ctx = c
	}
	switch k := rng.IntN(100); {
	case k < 35: // sequential
		n = min(n, len(m.data)-*pos)
		m.read(*pos, n, ctx)
		if *pos += n; *pos >= len(m.data) {
			*pos = rng.IntN(len(m.data))
		}
	case k < 65:
		m.read(off, n, ctx)
	case k < 90:
		m.write(rng, off, n, ctx)
	case k < 93:
		m.wipe(off, n, ctx, k == 91)
	case k < 96:
		m.v.Prefetch(int64(off), int64(n))
	case k < 97:
		m.v.Drop()
	case k < 98:
		m.v.Resize(int64(1+rng.IntN(4)) << 20)
	case k < 99:
		m.v.Flush(ctx)
	default: // a read that nobody checks and nobody locks
		if w, err := m.v.Read(ctx, int64(off), n); err == nil {
			w.Release()
		}
	}
}

func expected(err error) bool {
	return err == nil || errors.Is(err, volume.ErrIO) || errors.Is(err, context.DeadlineExceeded)
}

func (m *model) read(off, n int, ctx context.Context) {
	defer m.lock(off, n, false)()
	w, err := m.v.Read(ctx, int64(off), n)
	if err != nil {
		if !expected(err) {
			m.t.Errorf("read: %v", err)
		}
		return
	}
	defer w.Release()
	at := off
	for _, s := range w.Slices() {
		if !bytes.Equal(s, m.data[at:at+len(s)]) {
			i := 0
			for s[i] == m.data[at+i] {
				i++
			}
			m.t.Errorf("op %d: byte %d (page %d of block %d) of read [%d, %d) is %#x, want %#x",
				m.ops.Load(), at+i, (at+i)%blockSize/pageSize, (at+i)/blockSize, off, off+n, s[i], m.data[at+i])
			return
		}
		at += len(s)
	}
	if at != off+n || w.Len() != n {
		m.t.Errorf("read of %d bytes gave %d", n, at-off)
	}
}

func (m *model) write(rng *rand.Rand, off, n int, ctx context.Context) {
	defer m.lock(off, n, true)()
	p := noise[rng.IntN(len(noise)-n):][:n]
	if err := m.v.Write(ctx, int64(off), p, rng.IntN(4) == 0); err != nil {
		m.failed(off, n, err)
		return
	}
	copy(m.data[off:], p)
}

func (m *model) wipe(off, n int, ctx context.Context, discard bool) {
	defer m.lock(off, n, true)()
	do := m.v.Zero
	if discard {
		do = m.v.Discard
	}
	if err := do(ctx, int64(off), int64(n)); err != nil {
		m.failed(off, n, err)
		return
	}
	clear(m.data[off : off+n])
}

// failed takes the volume's own word for what a failed or cancelled write left,
// once it is over.
func (m *model) failed(off, n int, err error) {
	if !expected(err) {
		m.t.Errorf("write: %v", err)
	}
	m.v.settled(int64(off), int64(n), m.t)
	m.src.Peek(int64(off), m.data[off:off+n])
}

// settled waits for writes and wipes of the range that their callers left.
func (v *Volume) settled(off, n int64, t testing.TB) {
	eventually(t, "writes of the range have ended", func() bool {
		if v.wiping.Load() > 0 {
			return false
		}
		for num := off / blockSize; num <= (off+n)/blockSize; num++ {
			s := v.shardOf(num)
			s.mu.Lock()
			_, busy := s.writing[num]
			s.mu.Unlock()
			if busy {
				return false
			}
		}
		return true
	})
}

// reshard is for caches that nobody has used yet.
func (v *Volume) reshard(n int) {
	fresh := &Volume{shards: make([]shard, n)}
	fresh.initShards()
	v.shards = fresh.shards
}
