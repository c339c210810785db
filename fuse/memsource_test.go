// SPDX-License-Identifier: Apache-2.0

package fuse

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"testing"

	"rblk/cache"
	"rblk/cache/cachetest"
	"rblk/dataset"
	"rblk/volume"
)

// source is a volume in memory that tells of its end.
type source struct {
	*cachetest.Source
	closed chan struct{}
}

func (s *source) Close() error {
	err := s.Source.Close()
	close(s.closed)
	return err
}

// newSource makes a volume that holds data, and a cache on it.
func newSource(data []byte, change func(*volume.Geometry)) (*cache.Volume, *source, error) {
	s := &source{cachetest.NewSource(int64(len(data)), cachetest.Options{Geometry: change}), make(chan struct{})}
	s.Poke(0, data)
	v, err := cache.New(s, cache.Options{Size: 64 << 20})
	return v, s, err
}

func mustSource(t testing.TB, data []byte, change func(*volume.Geometry)) (*cache.Volume, *source) {
	t.Helper()
	v, s, err := newSource(data, change)
	if err != nil {
		t.Fatal(err)
	}
	return v, s
}

// holds compares the whole volume.
func (s *source) holds(want []byte) bool {
	got := make([]byte, s.Geometry().Size)
	s.Peek(0, got)
	return bytes.Equal(got, want)
}

// fail makes every operation fail with err, or none with nil.
func (s *source) fail(err error) {
	s.SetFault(func(*volume.Op) error { return err })
}

// scanned is a dataset volume of the directory dir.
func scanned(t testing.TB, dir string) (*Export, *source, *dataset.Tree) {
	t.Helper()
	tree, err := dataset.Scan(context.Background(), dir, dataset.ScanOptions{})
	if err != nil {
		t.Fatal(err)
	}
	v, s := mustSource(t, content(t, dir, tree), func(g *volume.Geometry) {
		g.Kind, g.ReadOnly, g.Layout = volume.KindDataset, true, tree.Manifest.Layout()
	})
	return &Export{Name: "data", Volume: v, Manifest: tree.Manifest}, s, tree
}

// content is the bytes of a dataset's volume.
func content(t testing.TB, dir string, tree *dataset.Tree) []byte {
	t.Helper()
	data := make([]byte, tree.Manifest.VolumeSize())
	for _, f := range tree.Files {
		if f.Stale {
			continue
		}
		b, err := os.ReadFile(filepath.Join(dir, f.Path))
		if err != nil {
			t.Fatal(err)
		}
		copy(data[f.Offset:], b)
	}
	return data
}
