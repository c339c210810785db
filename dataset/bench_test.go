// SPDX-License-Identifier: Apache-2.0

package dataset

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// walked is what the walk of a tree of files in directories of 1000 finds.
func walked(files int) *found {
	root := &found{mode: unix.S_IFDIR | 0o755, dir: &foundDir{}}
	for i := range files / 1000 {
		d := &foundDir{}
		for j := range 1000 {
			d.names = append(d.names, found{
				name: fmt.Sprintf("file-%06d", j), mode: unix.S_IFREG | 0o644, nlink: 1,
				id: Ident{Dev: 1, Ino: uint64(1000*i + j), Size: 1000},
			})
		}
		root.dir.names = append(root.dir.names, found{name: fmt.Sprintf("dir-%06d", i), mode: unix.S_IFDIR | 0o755, dir: d})
	}
	return root
}

func benchTree(b testing.TB, files int) *Tree {
	b.Helper()
	root := walked(files)
	bl := newBuilder(&Tree{Manifest: &Manifest{layout: "x"}})
	if err := bl.root(context.Background(), root); err != nil {
		b.Fatal(err)
	}
	return bl.tree(1)
}

func sizes(b *testing.B, f func(b *testing.B, files int)) {
	for _, n := range []int{100_000, 1_000_000} {
		b.Run(fmt.Sprintf("files=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			f(b, n)
		})
	}
}

func BenchmarkLookup(b *testing.B) {
	sizes(b, func(b *testing.B, files int) {
		m := benchTree(b, files).Manifest
		dirs := files / 1000
		for i := 0; b.Loop(); i++ {
			d := NodeID(2 + i%dirs*1001)
			if _, ok := m.Lookup(d, "file-000777"); !ok {
				b.Fatal("not found")
			}
		}
	})
}

// BenchmarkDecode reports what a decoded manifest costs in memory.
func BenchmarkDecode(b *testing.B) {
	sizes(b, func(b *testing.B, files int) {
		enc := benchTree(b, files).Manifest.Encode()
		b.SetBytes(int64(len(enc)))
		var m *Manifest
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		for b.Loop() {
			var err error
			if m, err = Decode(enc); err != nil {
				b.Fatal(err)
			}
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		b.ReportMetric(float64(int64(after.HeapAlloc)-int64(before.HeapAlloc))/float64(m.NumNodes()), "B/node")
		z, err := Compress(enc)
		if err != nil {
			b.Fatal(err)
		}
		b.ReportMetric(float64(len(z))/float64(m.NumNodes()), "wire-B/node")
	})
}

func BenchmarkOrder(b *testing.B) {
	sizes(b, func(b *testing.B, files int) {
		m := benchTree(b, files).Manifest
		for b.Loop() {
			m.Order()
		}
	})
}

func BenchmarkSave(b *testing.B) {
	sizes(b, func(b *testing.B, files int) {
		t := benchTree(b, files)
		for b.Loop() {
			if err := t.write(io.Discard); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkRelayout is the part of a rescan that is not the walk.
func BenchmarkRelayout(b *testing.B) {
	sizes(b, func(b *testing.B, files int) {
		prev := benchTree(b, files)
		for b.Loop() {
			b.StopTimer()
			root := walked(files)
			b.StartTimer()
			bl := newBuilder(prev)
			if err := bl.root(context.Background(), root); err != nil {
				b.Fatal(err)
			}
			if !bl.tree(2).Manifest.same(prev.Manifest) {
				b.Fatal("differs")
			}
		}
	})
}

// BenchmarkScan100k is beside a bare walk that only stats, by one thread.
func BenchmarkScan100k(b *testing.B) {
	dir := b.TempDir()
	for i := range 100_000 {
		put(b, dir, fmt.Sprintf("d%03d/f%06d", i/1000, i), i%50)
	}
	b.Run("scan", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := Scan(context.Background(), dir, ScanOptions{}); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("walkdir+lstat", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			filepath.Walk(dir, func(string, fs.FileInfo, error) error { return nil })
		}
	})
}
