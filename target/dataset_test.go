// SPDX-License-Identifier: Apache-2.0

package target

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"rblk/internal/need"
	"rblk/rdma"
	"rblk/wire"
)

// pattern is what byte i of the test volume holds.
func pattern(off uint64, n int) []byte {
	p := make([]byte, n)
	for i := range p {
		v := off + uint64(i)
		p[i] = byte(v ^ v>>8 ^ v>>16 ^ v>>21)
	}
	return p
}

// bigDataset is one file of n bytes of pattern, old enough to be read at once.
func bigDataset(t testing.TB, n int) DatasetConfig {
	t.Helper()
	dir := t.TempDir()
	putOld(t, dir, "big", pattern(0, n))
	return DatasetConfig{"big", dir}
}

func putOld(t testing.TB, dir, name string, p []byte) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), p, 0o644); err != nil {
		t.Fatal(err)
	}
}

func datasets(cfgs ...DatasetConfig) func(*Server) error {
	return func(s *Server) error {
		for _, c := range cfgs {
			if err := s.AddDataset(s.ctx, c); err != nil {
				return err
			}
		}
		return nil
	}
}

// answered counts the grants of each status.
func answered(gs []wire.Grant) map[wire.Status]int {
	n := map[wire.Status]int{}
	for _, g := range gs {
		n[g.Status]++
	}
	return n
}

// TestDatasetRead: every byte, with many extents in one MAP.
func TestDatasetRead(t *testing.T) {
	const size = 5<<20 + 4321
	r := start(t, testOptions(t), datasets(bigDataset(t, size)))
	c := r.dial("big", wire.AccessRead, 1).conns[0]
	var rs []wire.Range
	for off := uint64(0); off < size; off += extentSize {
		rs = append(rs, wire.Range{Offset: off, Length: 1})
	}
	gs := c.mapRanges(wire.IntentRead, rs...)
	if len(gs) != 6 || answered(gs)[wire.StatusOK] != 6 {
		t.Fatalf("grants %+v", gs)
	}
	for _, g := range gs {
		for off := g.Offset; off < g.Offset+g.Length; off += peerData {
			n := int(min(peerData, g.Offset+g.Length-off))
			want := pattern(off, n)
			clear(want[min(n, max(0, size-int(off))):]) // behind the file
			if got := c.read(g, off, n); !bytes.Equal(got, want) {
				t.Fatalf("wrong bytes at %d", off)
			}
		}
	}
	if n := r.Status().Frames.Granted; n != 6 {
		t.Errorf("%d frames granted", n)
	}
	for _, g := range gs {
		c.unmap(g.ID)
	}
	if f := r.Status().Frames; f.Granted != 0 || f.Resident != 6 {
		t.Errorf("after UNMAP: %+v", f)
	}
	if gs := c.mapRanges(wire.IntentRead, ranges(6<<20, 1)...); gs[0].Status != wire.StatusRange {
		t.Errorf("beyond the end: %+v", gs)
	}
	if gs := c.mapRanges(wire.IntentWrite, ranges(0, 1)...); gs[0].Status != wire.StatusReadOnly {
		t.Errorf("to write: %+v", gs)
	}
}

// TestChangedFile: its range is stale, its neighbours in the same extent are
// not; a rescan gives it a new place.
func TestChangedFile(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a", "b", "c"} {
		putOld(t, dir, name, bytes.Repeat([]byte(name), 1000))
	}
	r := start(t, testOptions(t), datasets(DatasetConfig{"d", dir}))
	putOld(t, dir, "b", bytes.Repeat([]byte("B"), 1000))
	c := r.dial("d", wire.AccessRead, 1).conns[0]
	gs := c.mapRanges(wire.IntentRead, ranges(0, 3000)...)
	if len(gs) != 3 || gs[0].Status != wire.StatusOK || gs[1].Status != wire.StatusStale || gs[2].Status != wire.StatusOK {
		t.Fatalf("grants %+v", gs)
	}
	if gs[1].Offset != 1000 || gs[1].Length != 1000 {
		t.Errorf("stale range %+v", gs[1])
	}
	for i, name := range []string{"a", "", "c"} {
		if name != "" && !bytes.Equal(c.read(gs[i], uint64(1000*i), 1000), bytes.Repeat([]byte(name), 1000)) {
			t.Errorf("%s: wrong bytes", name)
		}
	}
	if gs := c.mapRanges(wire.IntentRead, ranges(1500, 100)...); len(gs) != 1 || gs[0].Status != wire.StatusStale {
		t.Errorf("in the midst of the stale range: %+v", gs)
	}
	var changed AdminRescan
	if err := r.call("POST", "/v1/admin/exports/d/rescan", nil, &changed); err != nil || !changed.Changed {
		t.Fatalf("rescan: %v, %+v", err, changed)
	}
	at := r.export("d").content.(*data).tree.Load().Files
	last := at[len(at)-1]
	gs = c.mapRanges(wire.IntentRead, ranges(uint64(last.Offset), 1000)...)
	if len(gs) != 1 || gs[0].Status != wire.StatusOK || !bytes.Equal(c.read(gs[0], uint64(last.Offset), 1000), bytes.Repeat([]byte("B"), 1000)) {
		t.Errorf("after the rescan: %+v", gs)
	}
	if gs := c.mapRanges(wire.IntentRead, ranges(1000, 1000)...); gs[0].Status != wire.StatusStale {
		t.Errorf("the old range after the rescan: %+v", gs)
	}
}

// TestUnreadableFile: an error that may pass is asked for again every time,
// beside grants of the same extent, and heals.
func TestUnreadableFile(t *testing.T) {
	dir := t.TempDir()
	putOld(t, dir, "a", bytes.Repeat([]byte("a"), 1000))
	putOld(t, dir, "b", bytes.Repeat([]byte("b"), 1000))
	r := start(t, testOptions(t), datasets(DatasetConfig{"d", dir}))
	d := r.export("d").content.(*data)
	// Root reads everything, so the failure comes from a store in between.
	flaky := &flakyStore{store: d, off: 1000, n: 1000}
	flaky.fail(true)
	d.stage.store = flaky
	c := r.dial("d", wire.AccessRead, 1).conns[0]
	for range 3 {
		gs := c.mapRanges(wire.IntentRead, ranges(0, 2000)...)
		if len(gs) != 2 || gs[0].Status != wire.StatusOK || gs[1].Status != wire.StatusIO {
			t.Fatalf("grants %+v", gs)
		}
		if !bytes.Equal(c.read(gs[0], 0, 1000), bytes.Repeat([]byte("a"), 1000)) {
			t.Error("the neighbour's bytes are wrong")
		}
	}
	flaky.fail(false)
	gs := c.mapRanges(wire.IntentRead, ranges(1000, 1000)...)
	if gs[0].Status != wire.StatusOK || !bytes.Equal(c.read(gs[0], 1000, 1000), bytes.Repeat([]byte("b"), 1000)) {
		t.Errorf("after the error has passed: %+v", gs)
	}
}

// TestPressure: sessions that each want more than there are frames, in MAPs of
// many extents, all progress and read right bytes while frames are revoked
// under them.
func TestPressure(t *testing.T) {
	const size = 96 << 20 // three times the frames
	opts := testOptions(t)
	opts.Frames = 32 << 20
	r := start(t, opts, datasets(bigDataset(t, size)))
	var wg sync.WaitGroup
	for i := range 4 {
		p := r.dial("big", wire.AccessRead, 1)
		wg.Go(func() { p.wander(rand.New(rand.NewPCG(1, uint64(i))), size, 150) })
	}
	wg.Wait()
	if r.revokes.Load() == 0 {
		t.Error("nothing was revoked: the test tests nothing")
	}
	eventually(t, "no grant is left", func() bool { return r.Status().Frames.Revoking == 0 })
}

// wander reads random extents under many grants, and gives back what is
// revoked.
func (p *peer) wander(rnd *rand.Rand, size, rounds int) {
	c := p.conns[0]
	held := map[uint64]wire.Grant{}
	for range rounds {
		var rs []wire.Range
		for range 1 + rnd.IntN(48) {
			off := uint64(rnd.IntN(size/extentSize)) * extentSize
			rs = append(rs, wire.Range{Offset: off, Length: extentSize})
		}
		m := wire.Map{Intent: wire.IntentRead, Ranges: rs}
		seq := c.send(m.Append, wire.TypeMap)
		var got wire.Mapped
		for {
			msg, ok := c.recv(func(h wire.Header) bool { return h.Type == wire.TypeRevoke || h.Seq == seq })
			if !ok {
				p.t.Errorf("connection lost: %v", c.conn.Err())
				return
			}
			if msg.h.Type != wire.TypeRevoke {
				if err := got.Parse(msg.body); err != nil {
					p.t.Error(err)
				}
				break
			}
			p.giveBack(msg, held)
		}
		for _, g := range got.Grants {
			if g.Status == wire.StatusOK {
				held[g.ID] = g
				p.told[g.ID] = true
			} else if g.Status != wire.StatusAgain && g.Status != wire.StatusQuota {
				p.t.Errorf("status %d", g.Status)
			}
		}
		for _, g := range held {
			off := g.Offset + uint64(rnd.IntN(int(g.Length)-512))
			if b := c.read(g, off, 512); !bytes.Equal(b, pattern(off, 512)) {
				p.t.Errorf("wrong bytes at %d", off)
				return
			}
			break // any one
		}
		if len(held) > 20 {
			m := wire.IDs{}
			for id := range held {
				m.IDs = append(m.IDs, id)
			}
			clear(held)
			c.send(m.Append, wire.TypeUnmap)
		}
	}
	// Others may want what is held: the session ends.
	for _, c := range p.conns {
		c.conn.Disconnect()
	}
}

// giveBack answers a REVOKE.
func (p *peer) giveBack(m received, held map[uint64]wire.Grant) {
	var ids wire.IDs
	if err := ids.Parse(m.body); err != nil {
		p.t.Error(err)
	}
	for _, id := range ids.IDs {
		if !p.told[id] {
			p.t.Errorf("REVOKE of %d overtook its grant", id)
		}
		delete(held, id)
	}
	p.conns[0].sendRaw(ids.Append(nil, wire.Header{Type: wire.TypeRevoked, Seq: m.h.Seq}))
}

// TestGreedy: a MAP of more extents than frames is answered, in part.
func TestGreedy(t *testing.T) {
	opts := testOptions(t)
	opts.Frames = 1 // the least there can be: two slabs
	r := start(t, opts, datasets(bigDataset(t, 40<<20)))
	c := r.dial("big", wire.AccessRead, 1).conns[0]
	var rs []wire.Range
	for i := range uint64(40) {
		rs = append(rs, wire.Range{Offset: i * extentSize, Length: 1})
	}
	n := answered(c.mapRanges(wire.IntentRead, rs...))
	if n[wire.StatusOK] != 32 || n[wire.StatusAgain] != 8 {
		t.Errorf("answered %v", n)
	}
}

// TestQuota: a session that gives nothing back gets no more than its share.
func TestQuota(t *testing.T) {
	opts := testOptions(t)
	r := start(t, opts, datasets(bigDataset(t, 2<<20)))
	r.limits.MaxGrants = 3
	c := r.dial("big", wire.AccessRead, 1).conns[0]
	for range 3 {
		c.mapRanges(wire.IntentRead, ranges(0, 1)...)
	}
	if gs := c.mapRanges(wire.IntentRead, ranges(0, 1)...); gs[0].Status != wire.StatusQuota {
		t.Errorf("fourth grant: %+v", gs)
	}
}

// TestRevokeUnanswered: a session that does not give back loses its queue
// pairs, and its frames go to those who ask.
func TestRevokeUnanswered(t *testing.T) {
	opts := testOptions(t)
	opts.Frames = 1
	opts.Revoke = 50 * time.Millisecond
	r := start(t, opts, datasets(bigDataset(t, 40<<20)))
	hog := r.dial("big", wire.AccessRead, 2)
	var rs []wire.Range
	for i := range uint64(32) {
		rs = append(rs, wire.Range{Offset: i * extentSize, Length: 1})
	}
	if n := answered(hog.conns[0].mapRanges(wire.IntentRead, rs...)); n[wire.StatusOK] != 32 {
		t.Fatalf("hog got %v", n)
	}
	c := r.dial("big", wire.AccessRead, 1).conns[0]
	off := uint64(39 << 20)
	gs := c.mapRanges(wire.IntentRead, ranges(off, 1)...)
	if gs[0].Status != wire.StatusOK || !bytes.Equal(c.read(gs[0], off, 100), pattern(off, 100)) {
		t.Fatalf("got %+v", gs)
	}
	hog.conns[0].dead()
	hog.conns[1].dead()
	// Re-opened, it is a session like any other.
	req := request("big", wire.AccessRead, 1)
	req.Reopen = &wire.Reopen{Session: hog.reply.Session, Epoch: 1, Secret: hog.reply.Secret}
	reply, err := r.open(req)
	if err != nil {
		t.Fatal(err)
	}
	again := r.join(reply)
	if gs := again.conns[0].mapRanges(wire.IntentRead, ranges(0, 1)...); gs[0].Status != wire.StatusOK {
		t.Errorf("after the re-open: %+v", gs)
	}
}

// TestSlabsMove: more exports than slabs, all of them read; no key of one
// reaches another.
func TestSlabsMove(t *testing.T) {
	opts := testOptions(t)
	opts.Frames = 1
	var cfgs []DatasetConfig
	for i := range 4 {
		c := bigDataset(t, 3<<20)
		c.Name = fmt.Sprintf("d%d", i)
		cfgs = append(cfgs, c)
	}
	r := start(t, opts, datasets(cfgs...))
	var stale wire.Grant
	for round := range 3 {
		for _, cfg := range cfgs {
			p := r.dial(cfg.Name, wire.AccessRead, 1)
			off := uint64(round) << 20
			gs := p.conns[0].mapRanges(wire.IntentRead, ranges(off, 1)...)
			if gs[0].Status != wire.StatusOK || !bytes.Equal(p.conns[0].read(gs[0], off, 1000), pattern(off, 1000)) {
				t.Fatalf("%s: %+v", cfg.Name, gs)
			}
			if stale.RKeys == nil {
				stale = gs[0]
			}
			p.close()
		}
	}
	p := r.dial("d3", wire.AccessRead, 1)
	if st := p.conns[0].transfer(rdma.OpRead, stale, 0, 100); st != rdma.StatusRemoteAccess {
		t.Errorf("key of another export's frame: %v", st)
	}
}

// TestRemoveExport: its sessions end, its frames come back.
func TestRemoveExport(t *testing.T) {
	r := start(t, testOptions(t), datasets(bigDataset(t, 2<<20)))
	p := r.dial("big", wire.AccessRead, 1)
	p.conns[0].mapRanges(wire.IntentRead, ranges(0, 1)...)
	before := r.Status().Frames.Free
	if err := r.call("DELETE", "/v1/admin/exports/big", nil, nil); err != nil {
		t.Fatal(err)
	}
	p.conns[0].dead()
	if f := r.Status().Frames; f.Free != before+1 || len(r.Status().Sessions) != 0 {
		t.Errorf("left over: %+v, %d free before", f, before)
	}
	if err := r.call("DELETE", "/v1/admin/exports/big", nil, nil); code(err) != wire.CodeUnknownExport {
		t.Errorf("again: %v", err)
	}
}

// TestScanErrors: what cannot be a dataset is refused by its path.
func TestScanErrors(t *testing.T) {
	need.Root(t)
	r := start(t, testOptions(t), datasets())
	file := filepath.Join(t.TempDir(), "file")
	putOld(t, filepath.Dir(file), "file", nil)
	for _, path := range []string{"/nonexistent/dir", file} {
		err := r.AddDataset(within(t), DatasetConfig{"x", path})
		if err == nil || !bytes.Contains([]byte(err.Error()), []byte(path)) {
			t.Errorf("%s: %v", path, err)
		}
	}
}
