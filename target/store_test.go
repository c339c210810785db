// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"sync"

	"rblk/wire"
)

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
