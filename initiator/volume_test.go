// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"rblk/rdma"
	"rblk/rdma/tcp"
	"rblk/target"
	"rblk/volume"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait; only a hang reaches it.
const patience = 30 * time.Second

type testTarget struct {
	t       testing.TB
	opts    target.Options
	mem     []target.MemoryConfig
	sets    []target.DatasetConfig
	p       rdma.Provider
	s       *target.Server
	cancel  context.CancelFunc
	done    chan error
	control string
	data    string
}

// testLogger shows what happens with -v.
func testLogger() *slog.Logger {
	if !testing.Verbose() {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

func startTarget(t testing.TB, mem []target.MemoryConfig, sets []target.DatasetConfig) *testTarget {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "rblk-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	tt := &testTarget{t: t, mem: mem, sets: sets, control: "127.0.0.1:0", data: "127.0.0.1:0"}
	tt.opts = target.Options{StateDir: filepath.Join(dir, "state"), MemoryDir: filepath.Join(dir, "mem"), Frames: 32 << 20}
	tt.opts.Logger = testLogger()
	tt.start()
	t.Cleanup(tt.stop)
	return tt
}

func (tt *testTarget) start() {
	tt.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var err error
	if tt.p, err = tcp.New(tcp.Options{}); err != nil {
		tt.t.Fatal(err)
	}
	tt.opts.Listen = []string{tt.control}
	tt.opts.Providers = []target.DataListen{{Provider: tt.p, Addr: tt.data}}
	if tt.s, err = target.New(ctx, tt.opts); err != nil {
		tt.t.Fatal(err)
	}
	for _, m := range tt.mem {
		if err := tt.s.AddMemory(ctx, m); err != nil {
			tt.t.Fatal(err)
		}
	}
	for _, d := range tt.sets {
		if err := tt.s.AddDataset(ctx, d); err != nil {
			tt.t.Fatal(err)
		}
	}
	tt.control, tt.data = tt.s.ControlAddrs()[0], tt.s.DataAddrs()[0].Addr
	tt.cancel, tt.done = cancel, make(chan error, 1)
	go func() { tt.done <- tt.s.Serve(ctx) }()
}

func (tt *testTarget) stop() {
	tt.t.Helper()
	if tt.cancel == nil {
		return
	}
	tt.cancel()
	tt.cancel = nil
	select {
	case err := <-tt.done:
		if err != nil {
			tt.t.Error(err)
		}
	case <-time.After(patience):
		tt.t.Fatal("target does not end")
	}
	if err := tt.p.Close(); err != nil {
		tt.t.Error(err)
	}
}

func (tt *testTarget) dial(export, options string) *Volume {
	tt.t.Helper()
	p, err := tcp.New(tcp.Options{})
	if err != nil {
		tt.t.Fatal(err)
	}
	return tt.dialOver(p, export, options)
}

// dialOver opens an export over p, which ends with the test and must then have
// nothing left.
func (tt *testTarget) dialOver(p rdma.Provider, export, options string) *Volume {
	tt.t.Helper()
	src, err := ParseSource("rblk://" + tt.control + "/" + export)
	if err == nil {
		src, err = src.WithOptions(options)
	}
	if err != nil {
		tt.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	v, err := Dial(ctx, src, DialOptions{Providers: []rdma.Provider{p}, Logger: testLogger()})
	if err != nil {
		tt.t.Fatal(err)
	}
	tt.t.Cleanup(func() {
		v.Close()
		if err := p.Close(); err != nil {
			tt.t.Error(err)
		}
	})
	return v
}

// do runs one operation to its end.
func do(t testing.TB, v *Volume, k volume.OpKind, off int64, mem []byte) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	called := 0
	o := &volume.Op{Kind: k, Offset: off, Mem: mem, Done: func(*volume.Op) { called++ }}
	if k == volume.OpWrite {
		o.Lane = volume.LaneWrite
	}
	v.Submit([]*volume.Op{o})
	err := v.Await(ctx, o)
	if errors.Is(err, context.DeadlineExceeded) {
		t.Fatal("operation hangs")
	}
	if called != 1 {
		t.Fatalf("Done called %d times before Await returned", called)
	}
	return err
}

func arenaOf(t testing.TB, v *Volume, n int64) []byte {
	t.Helper()
	a, err := v.NewArena(n)
	if err != nil {
		t.Fatal(err)
	}
	return a.Bytes()
}

func TestMemoryReadWrite(t *testing.T) {
	tt := startTarget(t, []target.MemoryConfig{{Name: "m", Size: 16 << 20}}, nil)
	for _, options := range []string{"", "connections=1", "connections=2", "connections=3", "connections=8"} {
		v := tt.dial("m", options)
		mem := arenaOf(t, v, 16<<20)
		rnd := rand.New(rand.NewPCG(1, 2))
		want := make([]byte, 8<<20)
		for i := range want {
			want[i] = byte(rnd.Uint32())
		}
		copy(mem, want)
		if err := do(t, v, volume.OpWrite, 12345, mem[:8<<20]); err != nil {
			t.Fatal(err)
		}
		clear(mem)
		if err := do(t, v, volume.OpRead, 12345, mem[8<<20:16<<20]); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(mem[8<<20:], want) {
			t.Fatal("bytes differ")
		}
		ctx := context.Background()
		if err := errors.Join(v.Flush(ctx), v.Zero(ctx, 12345+100, 1000), v.Discard(ctx, 20000, 5)); err != nil {
			t.Fatal(err)
		}
		if err := do(t, v, volume.OpRead, 12345, mem[:4096]); err != nil {
			t.Fatal(err)
		}
		clear(want[100:1100])
		if !bytes.Equal(mem[:4096], want[:4096]) {
			t.Fatal("zeroed bytes differ")
		}
		if err := do(t, v, volume.OpRead, 16<<20-10, mem[:11]); !errors.Is(err, volume.ErrRange) {
			t.Errorf("beyond the end: %v", err)
		}
		v.Close()
	}
}

// TestTargetRestart: operations go on over a restarted target, and nothing that
// was acknowledged is lost.
func TestTargetRestart(t *testing.T) {
	tt := startTarget(t, []target.MemoryConfig{{Name: "m", Size: 1 << 20}}, nil)
	v := tt.dial("m", "")
	mem := arenaOf(t, v, 1<<20)
	var wg sync.WaitGroup
	stop := make(chan struct{})
	for w := range 4 {
		wg.Go(func() {
			my := mem[w*8192 : (w+1)*8192]
			for i := byte(1); ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				for j := range my[:4096] {
					my[j] = i
				}
				off := int64(w) * 65536
				if err := do(t, v, volume.OpWrite, off, my[:4096]); err != nil {
					t.Error(err)
					return
				}
				if err := do(t, v, volume.OpRead, off, my[4096:]); err != nil {
					t.Error(err)
					return
				}
				if !bytes.Equal(my[:4096], my[4096:]) {
					t.Error("an acknowledged write is not read back")
					return
				}
			}
		})
	}
	for range 3 {
		time.Sleep(50 * time.Millisecond) // some work; any amount is right
		tt.stop()
		tt.start()
	}
	close(stop)
	wg.Wait()
	if v.Counters().Reconnects == 0 {
		t.Error("never reconnected")
	}
}

func TestDataset(t *testing.T) {
	dir := t.TempDir()
	rnd := rand.New(rand.NewPCG(3, 4))
	files := map[string][]byte{}
	for _, name := range []string{"a", "b", "c", "d"} {
		b := make([]byte, 17<<20+rnd.IntN(1<<20))
		for i := range b {
			b[i] = byte(rnd.Uint32())
		}
		files[name] = b
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	// 68 MiB through 32 MiB of frames: grants are revoked and given back.
	tt := startTarget(t, nil, []target.DatasetConfig{{Name: "d", Path: dir}})
	v := tt.dial("d", "")
	m, err := v.control.Manifest(context.Background(), "d", "")
	if err != nil {
		t.Fatal(err)
	}
	mem := arenaOf(t, v, 8<<20)
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(w), 5))
			my := mem[w<<20 : (w+1)<<20]
			for range 300 {
				name := []string{"a", "b", "c", "d"}[rnd.IntN(4)]
				n, _ := m.Resolve(name)
				a, _ := m.Attr(n)
				size := 1 + rnd.IntN(1<<20)
				off := rnd.IntN(int(a.Size) - size)
				if err := do(t, v, volume.OpRead, int64(a.Offset)+int64(off), my[:size]); err != nil {
					t.Error(err)
					return
				}
				if !bytes.Equal(my[:size], files[name][off:off+size]) {
					t.Errorf("%s at %d: bytes differ", name, off)
					return
				}
			}
		})
	}
	wg.Wait()
}

func benchVolume(b *testing.B, size int) {
	tt := startTarget(b, []target.MemoryConfig{{Name: "m", Size: 64 << 20}}, nil)
	v := tt.dial("m", "ro")
	mem := arenaOf(b, v, 8<<20)
	b.SetBytes(int64(size))
	b.ReportAllocs()
	ctx := context.Background()
	o := &volume.Op{Mem: mem[:size], Done: func(*volume.Op) {}}
	ops := []*volume.Op{o}
	b.ResetTimer()
	for i := range b.N {
		o.Offset = int64(i%16) * int64(size)
		v.Submit(ops)
		if err := v.Await(ctx, o); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkRead4K(b *testing.B) { benchVolume(b, 4096) }
func BenchmarkRead1M(b *testing.B) { benchVolume(b, 1<<20) }
