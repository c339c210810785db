// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"rblk/initiator"
	"rblk/rdma/tcp"
	"rblk/target"
)

// serveMemory runs a target with one memory export and names it.
func serveMemory(t *testing.T, size int64) initiator.Source {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "rblk-test-")
	if err != nil {
		t.Fatal(err)
	}
	p, err := tcp.New(tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	s, err := target.New(ctx, target.Options{
		StateDir: filepath.Join(dir, "s"), MemoryDir: filepath.Join(dir, "m"), Listen: []string{"127.0.0.1:0"},
		Providers: []target.DataListen{{Provider: p, Addr: "127.0.0.1:0"}}, Frames: 16 << 20,
	})
	if err == nil {
		err = s.AddMemory(ctx, target.MemoryConfig{Name: "m", Size: size})
	}
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		p.Close()
		os.RemoveAll(dir)
	})
	src, err := initiator.ParseSource("rblk://" + s.ControlAddrs()[0] + "/m")
	if err != nil {
		t.Fatal(err)
	}
	return src
}

// TestPutGetSizes: sizes around a chunk's and a window's borders, and nothing
// behind the file's end changes.
func TestPutGetSizes(t *testing.T) {
	const size = chunk * (window + 2)
	src := serveMemory(t, size)
	dir := t.TempDir()
	ctx := context.Background()
	model := make([]byte, size)
	for i, n := range []int{size, size - 3, 0, 1, chunk - 1, chunk, chunk + 1, chunk * window, chunk*window + 1} {
		file := bytes.Repeat([]byte{byte(i + 1)}, n)
		copy(model, file)
		in, out := filepath.Join(dir, "in"), filepath.Join(dir, "out")
		if err := os.WriteFile(in, file, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := put(ctx, in, src, true); err != nil {
			t.Fatal(err)
		}
		if err := get(ctx, src, out); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(out)
		if err != nil || !bytes.Equal(got, model) {
			t.Fatalf("%d bytes: what comes back differs, %v", n, err)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*.part")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// TestBench: the figures belong together, and writes want to be asked for.
func TestBench(t *testing.T) {
	src := serveMemory(t, 1<<20)
	for _, rw := range []string{"read", "write", "randread", "randwrite"} {
		b := &benchOptions{rw: rw, bs: "4KiB", depth: 3, time: 20 * time.Millisecond, json: true}
		var out bytes.Buffer
		err := b.command(t.Context(), &out, src.String())
		if b.writes() != (err != nil) {
			t.Errorf("%s without --destroy-data: %v", rw, err)
		}
		b.destroy = true
		if err := b.command(t.Context(), &out, src.String()); err != nil || !bytes.Contains(out.Bytes(), []byte(`"p99.9"`)) {
			t.Errorf("%s: %v\n%s", rw, err, out.String())
		}
	}
}

func TestAllZero(t *testing.T) {
	p := make([]byte, 37)
	if !allZero(p) || !allZero(nil) {
		t.Error("zeros are not seen")
	}
	for i := range p {
		q := slices.Clone(p)
		q[i] = 1
		if allZero(q) {
			t.Errorf("a byte at %d is not seen", i)
		}
	}
}
