// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"rblk/rdma"
	"rblk/rdma/faulty"
	"rblk/rdma/tcp"
	"rblk/target"
	"rblk/volume"
	"rblk/wire"
)

// faultyDial opens an export over a provider with faults.
func (tt *testTarget) faultyDial(export, options string) (*Volume, *faulty.Provider) {
	tt.t.Helper()
	inner, err := tcp.New(tcp.Options{})
	if err != nil {
		tt.t.Fatal(err)
	}
	p := faulty.Wrap(inner)
	return tt.dialOver(p, export, options), p
}

// states follows a volume's states until it is the wanted one.
func waitState(t testing.TB, v *Volume, want volume.State) error {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		s, why := v.State()
		if s == want {
			return why
		}
		if time.Now().After(deadline) {
			t.Fatalf("state is %v (%v), want %v", s, why, want)
		}
		time.Sleep(time.Millisecond)
	}
}

func memory16M() []target.MemoryConfig { return []target.MemoryConfig{{Name: "m", Size: 16 << 20}} }

// TestCuts: connections break at random requests, the replies of whole epochs
// are lost, and still each worker sees its own model.
func TestCuts(t *testing.T) {
	tt := startTarget(t, memory16M(), nil)
	v, p := tt.faultyDial("m", "connections=5")
	const workers, span, rounds = 6, 1 << 20, 120
	mem := arenaOf(t, v, workers*span)
	stop := make(chan struct{})
	var cutter, wg sync.WaitGroup
	cutter.Go(func() {
		rnd := rand.New(rand.NewPCG(7, 7))
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(1+rnd.IntN(40)) * time.Millisecond):
			}
			if cs := p.Conns(); len(cs) > 0 {
				cs[rnd.IntN(len(cs))].Disconnect()
			}
		}
	})
	for w := range workers {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(w), 8))
			model := make([]byte, span)
			my := mem[w*span : (w+1)*span]
			for range rounds {
				off, n := rnd.IntN(span-1), 1+rnd.IntN(64<<10)
				n = min(n, span-off)
				at := int64(w*span + off)
				if rnd.IntN(2) == 0 {
					for i := range n {
						my[i] = byte(rnd.Uint32())
					}
					copy(model[off:], my[:n])
					if err := do(t, v, volume.OpWrite, at, my[:n]); err != nil {
						t.Error(err)
						return
					}
				} else {
					if err := do(t, v, volume.OpRead, at, my[:n]); err != nil {
						t.Error(err)
						return
					}
					if !bytes.Equal(my[:n], model[off:off+n]) {
						t.Errorf("worker %d: bytes differ at %d", w, off)
						return
					}
				}
			}
		})
	}
	wg.Wait()
	close(stop)
	cutter.Wait()
	if v.Counters().Reconnects == 0 {
		t.Error("never reconnected")
	}
}

// TestAsync: operations that nobody awaits end, too, those on all lanes, many
// more than the send queue holds, and overlapping ones in order.
func TestAsync(t *testing.T) {
	tt := startTarget(t, memory16M(), nil)
	v := tt.dial("m", "")
	const n = 3000
	mem := arenaOf(t, v, n*4)
	var wg sync.WaitGroup
	ops := make([]*volume.Op, n)
	for i := range ops {
		mem[i*4] = byte(i)
		mem[i*4+1] = byte(i >> 8)
		ops[i] = &volume.Op{Kind: volume.OpWrite, Lane: volume.Lane(i % 3), Offset: int64(i % 7), Mem: mem[i*4 : i*4+2], Done: func(o *volume.Op) {
			if o.Err != nil {
				t.Error(o.Err)
			}
			wg.Done()
		}}
	}
	wg.Add(n)
	v.Submit(ops)
	wg.Wait()
	// As if written in order: the last writers of each byte.
	want := make([]byte, 8)
	for i := range n {
		copy(want[i%7:], mem[i*4:i*4+2])
	}
	got := mem[:8]
	if err := do(t, v, volume.OpRead, 0, got); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%v: overlapping writes went out of order: %v, want %v", err, got, want)
	}
}

// TestFrozen: a connection on which nothing is heard any more is replaced.
func TestFrozen(t *testing.T) {
	tt := startTarget(t, nil, nil)
	tt.stop()
	tt.mem = memory16M()
	tt.opts.Keepalive, tt.opts.Dead = 50*time.Millisecond, 300*time.Millisecond
	tt.start()
	v, p := tt.faultyDial("m", "")
	mem := arenaOf(t, v, 4096)
	gate := new(faulty.Gate)
	t.Cleanup(gate.Open)
	r := &faulty.Rule{Op: rdma.OpRead, Times: 1, Do: faulty.Freeze(gate)}
	p.Add(r)
	// Nobody awaits it, so the connection's own goroutine leads.
	done := make(chan error, 1)
	v.Submit([]*volume.Op{{Kind: volume.OpRead, Mem: mem, Done: func(o *volume.Op) { done <- o.Err }}})
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Fatal("the frozen connection is not noticed")
	}
	if p.Acted(r) != 1 || v.Counters().Reconnects == 0 {
		t.Errorf("froze %d times, reconnected %d times", p.Acted(r), v.Counters().Reconnects)
	}
}

// TestRefusedKey: an access that the target's adapter refuses again and again
// fails, and the volume lives on.
func TestRefusedKey(t *testing.T) {
	tt := startTarget(t, memory16M(), nil)
	v, p := tt.faultyDial("m", "")
	mem := arenaOf(t, v, 8192)
	r := &faulty.Rule{Op: rdma.OpRead, Match: func(w *rdma.WorkRequest) bool { return w.Local[0].Length == 123 }, Do: faulty.WrongKey()}
	p.Add(r)
	if err := do(t, v, volume.OpRead, 0, mem[:123]); !errors.Is(err, volume.ErrIO) || !errors.Is(err, rdma.StatusRemoteAccess.Err()) {
		t.Errorf("read with a wrong key: %v", err)
	}
	if err := do(t, v, volume.OpRead, 0, mem[:124]); err != nil {
		t.Error(err)
	}
}

// TestSoft: with soft, I/O fails when the target is away for so long, and works
// again when it is back.
func TestSoft(t *testing.T) {
	tt := startTarget(t, memory16M(), nil)
	v := tt.dial("m", "soft=50ms")
	mem := arenaOf(t, v, 4096)
	tt.stop()
	if err := do(t, v, volume.OpRead, 0, mem); !errors.Is(err, volume.ErrAway) {
		t.Errorf("with the target away: %v", err)
	}
	if err := v.Flush(context.Background()); !errors.Is(err, volume.ErrAway) {
		t.Errorf("flush: %v", err)
	}
	tt.start()
	waitState(t, v, volume.StateConnected)
	if err := do(t, v, volume.OpRead, 0, mem); err != nil {
		t.Errorf("with the target back: %v", err)
	}
}

// TestHardClose: hard waits for ever, yet the waiter can leave and Close ends
// what is under way, though the target is dead.
func TestHardClose(t *testing.T) {
	tt := startTarget(t, memory16M(), nil)
	v := tt.dial("m", "")
	mem := arenaOf(t, v, 4096)
	tt.stop()
	waitState(t, v, volume.StateReconnecting)
	ended := make(chan error, 1)
	o := &volume.Op{Kind: volume.OpRead, Mem: mem, Done: func(o *volume.Op) { ended <- o.Err }}
	v.Submit([]*volume.Op{o})
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := v.Await(ctx, o); !errors.Is(err, context.Canceled) {
		t.Fatalf("await of a cancelled context: %v", err)
	}
	select {
	case err := <-ended:
		t.Fatalf("the operation ended by itself: %v", err)
	default:
	}
	if err := v.Close(); err != nil {
		t.Error(err)
	}
	select {
	case err := <-ended:
		if !errors.Is(err, volume.ErrClosed) {
			t.Error(err)
		}
	default:
		t.Error("Close has returned, and the operation is not done")
	}
	if s, why := v.State(); s != volume.StateFailed || !errors.Is(why, volume.ErrClosed) {
		t.Errorf("state after Close: %v, %v", s, why)
	}
	for range v.Events() { // it is closed
	}
	if err := v.Flush(context.Background()); !errors.Is(err, volume.ErrClosed) {
		t.Errorf("flush after Close: %v", err)
	}
	if err := v.Close(); err != nil {
		t.Error(err)
	}
}

// TestForce: who is fenced fails for good, with the reason.
func TestForce(t *testing.T) {
	tt := startTarget(t, memory16M(), nil)
	v := tt.dial("m", "rw")
	mem := arenaOf(t, v, 4096)
	src, _ := ParseSource("rblk://" + tt.control + "/m?rw")
	var busy *wire.Error
	if _, err := Dial(context.Background(), src, DialOptions{Providers: v.providers}); !errors.As(err, &busy) || busy.Code != wire.CodeBusy {
		t.Errorf("second writer: %v", err)
	}
	w := tt.dial("m", "rw,force")
	err := waitState(t, v, volume.StateFailed)
	if !errors.Is(err, volume.ErrFenced) {
		t.Errorf("the first writer fails with %v", err)
	}
	if err := do(t, v, volume.OpWrite, 0, mem); !errors.Is(err, volume.ErrFenced) {
		t.Errorf("its write: %v", err)
	}
	wmem := arenaOf(t, w, 4096)
	if err := do(t, w, volume.OpWrite, 0, wmem); err != nil {
		t.Error(err)
	}
}

// TestLostContent: memory that was lost is never read as zeros.
func TestLostContent(t *testing.T) {
	tt := startTarget(t, memory16M(), nil)
	v := tt.dial("m", "ro")
	mem := arenaOf(t, v, 4096)
	tt.stop()
	if err := os.RemoveAll(tt.opts.MemoryDir); err != nil {
		t.Fatal(err)
	}
	tt.start()
	if err := waitState(t, v, volume.StateFailed); !errors.Is(err, volume.ErrInstanceChanged) {
		t.Errorf("state: %v", err)
	}
	if err := do(t, v, volume.OpRead, 0, mem); !errors.Is(err, volume.ErrInstanceChanged) {
		t.Errorf("read: %v", err)
	}
	var seen bool
	for e := range v.Events() {
		seen = seen || e.Kind == volume.EventInstance
		if seen {
			break
		}
	}
}

// TestDatasetRestart: reads go on over a restart with the same layout, though
// the session is unknown then.
func TestDatasetRestart(t *testing.T) {
	dir := t.TempDir()
	want := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	if err := os.WriteFile(filepath.Join(dir, "f"), want, 0o644); err != nil {
		t.Fatal(err)
	}
	tt := startTarget(t, nil, []target.DatasetConfig{{Name: "d", Path: dir}})
	v := tt.dial("d", "")
	mem := arenaOf(t, v, 1<<20)
	for range 3 {
		clear(mem)
		if err := do(t, v, volume.OpRead, 0, mem); err != nil || !bytes.Equal(mem, want) {
			t.Fatalf("%v; equal: %v", err, bytes.Equal(mem, want))
		}
		tt.stop()
		tt.start()
	}
	if err := do(t, v, volume.OpRead, 0, mem); err != nil {
		t.Error(err)
	}
}

// TestStaleFile: a changed file fails for its own bytes only.
func TestStaleFile(t *testing.T) {
	dir := t.TempDir()
	for _, n := range []string{"a", "b", "c"} {
		if err := os.WriteFile(filepath.Join(dir, n), bytes.Repeat([]byte(n), 10000), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	tt := startTarget(t, nil, []target.DatasetConfig{{Name: "d", Path: dir}})
	v := tt.dial("d", "")
	m, err := v.Manifest(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "b"), []byte("other"), 0o644); err != nil {
		t.Fatal(err)
	}
	mem := arenaOf(t, v, 64<<10)
	low, high := int64(1<<62), int64(0)
	for range 2 { // before and behind the first grants
		for _, n := range []string{"a", "b", "c"} {
			id, _ := m.Resolve(n)
			a, _ := m.Attr(id)
			low, high = min(low, int64(a.Offset)), max(high, int64(a.Offset+a.Size))
			err := do(t, v, volume.OpRead, int64(a.Offset), mem[:a.Size])
			if n == "b" {
				if !errors.Is(err, volume.ErrStale) {
					t.Errorf("changed file: %v", err)
				}
				continue
			}
			if err != nil || !bytes.Equal(mem[:a.Size], bytes.Repeat([]byte(n), 10000)) {
				t.Errorf("%s beside a changed file: %v", n, err)
			}
		}
	}
	if err := do(t, v, volume.OpRead, low, mem[:high-low]); !errors.Is(err, volume.ErrStale) {
		t.Errorf("over good and stale ranges: %v", err)
	}
}

// TestDialFails: what fails leaves nothing behind (TestMain, and the provider's
// Close, would tell).
func TestDialFails(t *testing.T) {
	tt := startTarget(t, memory16M(), nil)
	p, err := tcp.New(tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	f := faulty.Wrap(p)
	f.Add(&faulty.Rule{On: faulty.OnConnect, Skip: 2, Do: faulty.Refuse(errors.New("no route today"))})
	for _, uri := range []string{
		"rblk://127.0.0.1:1/m", "rblk://" + tt.control + "/nope", "rblk://" + tt.control + "/m", "rblk://" + tt.control + "/m?transport=verbs",
		"rblk://" + tt.control + "/m?tls-ca=/nonexistent",
	} {
		src, err := ParseSource(uri)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		_, err = Dial(ctx, src, DialOptions{Providers: []rdma.Provider{f}})
		cancel()
		if err == nil || bytes.ContainsRune([]byte(err.Error()), '\n') {
			t.Errorf("%s: %v, want one line", uri, err)
		}
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}
