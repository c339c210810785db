// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"bytes"
	"sync"
	"testing"

	"rblk/volume"
	"rblk/wire"
)

// TestConfirmByRead: where a WRITE's completion proves nothing, a READ behind it
// confirms it, and lands in nobody's memory.
func TestConfirmByRead(t *testing.T) {
	f := newFakeTarget(t, wire.ExportInfo{Confirm: "read"})
	v := f.mustDial("connections=1")
	const n = 200
	mem := arenaOf(t, v, n*512)
	for round := range 10 {
		var wg sync.WaitGroup
		ops := make([]*volume.Op, n)
		for i := range ops {
			p := mem[i*512 : (i+1)*512]
			for j := range p {
				p[j] = byte(1 + (i+round)%255)
			}
			ops[i] = &volume.Op{Kind: volume.OpWrite, Lane: volume.LaneWrite, Offset: int64(i * 512), Mem: p, Done: func(o *volume.Op) {
				if o.Err != nil {
					t.Error(o.Err)
				}
				wg.Done()
			}}
		}
		wg.Add(n)
		v.Submit(ops)
		wg.Wait()
		if !bytes.Equal(f.mem[:len(mem)], mem) {
			t.Fatal("acknowledged bytes are not there")
		}
		if err := v.Flush(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if n := v.Counters().Reconnects; n > 0 {
		t.Errorf("%d reconnects", n)
	}
}
