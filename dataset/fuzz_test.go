// SPDX-License-Identifier: Apache-2.0

package dataset

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/cespare/xxhash/v2"
	"golang.org/x/sys/unix"
)

// reseal gives spoiled bytes a right checksum, so that the fuzzer gets past it.
func reseal(b []byte) []byte {
	if len(b) < 8 {
		return b
	}
	return le.AppendUint64(b[:len(b)-8:len(b)-8], xxhash.Sum64(b[:len(b)-8]))
}

// oddTree has one of everything.
func oddTree(t testing.TB) (dir string) {
	t.Helper()
	dir = t.TempDir()
	put(t, dir, "a/b", 10)
	put(t, dir, "a/d/e", 0)
	put(t, dir, "c", 100000)
	for _, err := range []error{
		os.Symlink("x", filepath.Join(dir, "l")),
		os.Link(filepath.Join(dir, "c"), filepath.Join(dir, "a/c")),
		os.Mkdir(filepath.Join(dir, "z"), 0o700),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"user.a", "user.b"} {
		if err := unix.Setxattr(filepath.Join(dir, "c"), name, []byte("v"), 0); err != nil && !errors.Is(err, unix.ENOTSUP) {
			t.Fatal(err)
		}
	}
	return dir
}

// roam calls every accessor on every node, and on some that do not exist.
func roam(t testing.TB, m *Manifest) {
	entries := 0
	for i := range m.NumNodes() + 3 {
		id := NodeID(i)
		a, ok := m.Attr(id)
		if ok != (i > 0 && i <= m.NumNodes()) {
			t.Fatalf("Attr(%d): %v", id, ok)
		}
		if a.Mode&unix.S_IFMT == unix.S_IFREG && int64(a.Offset+a.Size) > m.VolumeSize() {
			t.Fatalf("node %d ends at %d", id, a.Offset+a.Size)
		}
		if link, ok := m.Readlink(id); ok && link == "" {
			t.Fatalf("node %d: empty link", id)
		}
		for _, x := range m.ListXattr(id) {
			if _, ok := m.Xattr(id, x); !ok {
				t.Fatalf("node %d has no attribute %q", id, x)
			}
		}
		m.Xattr(id, "user.none")
		m.Lookup(id, "none")
		m.Entry(id, -1)
		m.Entry(id, m.NumEntries(id))
		for i := range m.NumEntries(id) {
			entries++
			name, c := m.Entry(id, i)
			if got, ok := m.Lookup(id, name); !ok || got != c {
				t.Fatalf("Lookup(%d, %q) = %d, %v", id, name, got, ok)
			}
			if ca, _ := m.Attr(c); ca.Mode&unix.S_IFMT == unix.S_IFDIR && m.Parent(c) != id {
				t.Fatalf("directory %d: parent %d, want %d", c, m.Parent(c), id)
			}
		}
		// Every directory leads to the root.
		for steps := 0; id != Root && m.Parent(id) != 0; steps++ {
			if id = m.Parent(id); steps > m.NumNodes() {
				t.Fatalf("node %d is in a cycle", i)
			}
		}
	}
	if entries != len(m.entries) {
		t.Errorf("%d entries of %d", entries, len(m.entries))
	}
	m.Order()
}

func FuzzDecode(f *testing.F) {
	f.Add(mustScan(f, oddTree(f)).Manifest.Encode())
	f.Add(mustScan(f, f.TempDir()).Manifest.Encode())
	f.Add([]byte(fileMagic))
	f.Fuzz(func(t *testing.T, b []byte) {
		b = reseal(b)
		m, err := Decode(b)
		if err != nil {
			if !errors.Is(err, ErrCorrupt) {
				t.Error(err)
			}
			return
		}
		roam(t, m)
		if !bytes.Equal(m.Encode(), b) {
			t.Error("decoded and encoded again differs")
		}
	})
}

func FuzzLoad(f *testing.F) {
	tr := mustScan(f, oddTree(f))
	f.Add(tr.Save(), uint(len(tr.Save())-int(tr.Manifest.EncodedSize())))
	f.Fuzz(func(t *testing.T, b []byte, cut uint) {
		// Both halves have their own sum.
		if cut < uint(len(b)) {
			b = append(reseal(b[:cut:cut]), reseal(b[cut:])...)
		}
		tr, err := Load(b)
		if err != nil {
			if !errors.Is(err, ErrCorrupt) {
				t.Error(err)
			}
			return
		}
		for _, f := range tr.Files {
			if got := tr.Intersect(f.Offset, f.Size); len(got) != 1 || got[0] != f {
				t.Errorf("%+v: found %+v", f, got)
			}
		}
		if !bytes.Equal(tr.Save(), b) {
			t.Error("loaded and saved again differs")
		}
	})
}

func FuzzDecompress(f *testing.F) {
	z, err := Compress(mustScan(f, oddTree(f)).Manifest.Encode())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(z)
	f.Fuzz(func(t *testing.T, b []byte) {
		const limit = 1 << 16
		out, err := Decompress(b, limit)
		if len(out) > limit {
			t.Errorf("%d bytes, at most %d", len(out), limit)
		}
		if err != nil && !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrTooLarge) {
			t.Error(err)
		}
	})
}
