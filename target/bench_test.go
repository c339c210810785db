// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"testing"

	"rblk/wire"
)

// BenchmarkAcquireResident: what a MAP of an extent that is in memory costs
// before it is sent.
func BenchmarkAcquireResident(b *testing.B) {
	st := newTestStager(b, &patternStore{n: 16 << 20})
	ctx := context.Background()
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		e, _, err := st.acquire(ctx, int64(i%16), false)
		if err != nil {
			b.Fatal(err)
		}
		st.release(e)
	}
}

// BenchmarkMap: MAP and UNMAP of a resident extent, over the wire.
func BenchmarkMap(b *testing.B) {
	r := start(b, testOptions(b), datasets(bigDataset(b, 1<<20)))
	c := r.dial("big", wire.AccessRead, 1).conns[0]
	c.unmap(c.mapRanges(wire.IntentRead, ranges(0, 1)...)[0].ID) // waits until the file has rested
	b.ReportAllocs()
	for b.Loop() {
		g := c.mapRanges(wire.IntentRead, ranges(0, 1)...)
		c.unmap(g[0].ID)
	}
}
