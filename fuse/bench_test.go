// SPDX-License-Identifier: Apache-2.0

package fuse

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"rblk/cache"
	"rblk/cache/cachetest"
	"rblk/dataset"
	"rblk/volume"
)

// benchEnv makes this binary serve a mount for load from outside until its
// standard input ends: KIND:DIR, where KIND is "bare" (a file in memory without
// cache), "volume" (the same behind a cache) or a directory that is shown as a
// dataset.
const benchEnv = "RBLK_BENCH_MOUNT"

const benchSize = 2 << 30

func serveBench(what string) error {
	kind, dir, _ := strings.Cut(what, ":")
	end, err := benchMount(kind, dir)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	io.ReadAll(os.Stdin)
	return end()
}

func benchMount(kind, dir string) (end func() error, err error) {
	ctx := context.Background()
	if kind == "bare" {
		dev, err := attach(dir, Options{Source: "bare"})
		if err != nil {
			return nil, err
		}
		r := newRAM(benchSize) // all of it touched
		r.cached = true
		s, err := newServer(dev, r, protocolOptions(false, true, discard), discard)
		if err != nil {
			return nil, err
		}
		s.start()
		m := &Mount{dir: dir, log: discard}
		m.identify()
		m.raiseReadAhead()
		return func() error { return Unmount(ctx, dir, Lazy) }, nil
	}
	e := &Export{Name: "file"}
	size := int64(benchSize)
	var tree *dataset.Tree
	if kind != "volume" {
		if tree, err = dataset.Scan(ctx, kind, dataset.ScanOptions{}); err != nil {
			return nil, err
		}
		e.Manifest, size = tree.Manifest, tree.Manifest.VolumeSize()
	}
	src := cachetest.NewSource(size, cachetest.Options{Geometry: func(g *volume.Geometry) { g.ReadOnly = tree != nil }})
	if tree != nil {
		for _, f := range tree.Files {
			b, err := os.ReadFile(filepath.Join(kind, f.Path))
			if err != nil {
				return nil, err
			}
			src.Poke(f.Offset, b)
		}
	}
	if e.Volume, err = cache.New(src, cache.Options{Size: 256 << 20, Readahead: cache.ReadaheadAuto}); err != nil {
		return nil, err
	}
	m, err := MountExport(dir, e, Options{Source: kind}, discard)
	if err != nil {
		return nil, err
	}
	return func() error { return m.Unmount(ctx, Clean) }, nil
}

// benchServe starts another process that serves a mount, so that caller and
// server do not share a scheduler.
func benchServe(b *testing.B, kind string) (dir string) {
	b.Helper()
	dir = mountPoint(b)
	cmd := selfCommand(b, benchEnv, kind+":"+dir)
	stop := startReady(b, cmd)
	b.Cleanup(func() {
		if err := stop(); err != nil {
			b.Error(err)
		}
	})
	return dir
}

// BenchmarkRead reads a file with O_DIRECT, so that every read is a request:
// the price of one at small sizes, the bandwidth at large.
func BenchmarkRead(b *testing.B) {
	for _, kind := range []string{"bare", "volume"} {
		dir := benchServe(b, kind)
		for _, n := range []int{4 << 10, 128 << 10, 1 << 20} {
			b.Run(fmt.Sprintf("%s/%dKiB", kind, n>>10), func(b *testing.B) {
				fd, err := unix.Open(dir+"/file", unix.O_RDONLY|unix.O_DIRECT, 0)
				if err != nil {
					b.Fatal(err)
				}
				defer unix.Close(fd)
				buf := aligned(n)
				b.SetBytes(int64(n))
				b.ReportAllocs()
				var off int64
				for b.Loop() {
					if _, err := unix.Pread(fd, buf, off%(128<<20)); err != nil {
						b.Fatal(err)
					}
					off += int64(n)
				}
			})
		}
	}
}

// BenchmarkStat looks up a name that the kernel may not remember.
func BenchmarkStat(b *testing.B) {
	dir := benchServe(b, "bare")
	b.ReportAllocs()
	var st unix.Stat_t
	for b.Loop() {
		if err := unix.Lstat(dir+"/file", &st); err != nil {
			b.Fatal(err)
		}
	}
}
