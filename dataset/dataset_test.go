// SPDX-License-Identifier: Apache-2.0

package dataset

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func put(t testing.TB, dir, name string, size int) {
	t.Helper()
	p := filepath.Join(dir, name)
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p, bytes.Repeat([]byte{'x'}, size), 0o644); err != nil {
		t.Fatal(err)
	}
}

func mustScan(t testing.TB, dir string) *Tree {
	t.Helper()
	tr, err := Scan(context.Background(), dir, ScanOptions{})
	if err != nil {
		t.Fatal(err)
	}
	check(t, tr)
	return tr
}

func mustRescan(t testing.TB, dir string, prev *Tree) *Tree {
	t.Helper()
	tr, err := Rescan(context.Background(), dir, prev, ScanOptions{})
	if err != nil {
		t.Fatal(err)
	}
	check(t, tr)
	return tr
}

// offset of a file that must be there.
func offset(t testing.TB, tr *Tree, path string) int64 {
	t.Helper()
	n, ok := tr.Manifest.Resolve(path)
	if !ok {
		t.Fatalf("%q is not in the manifest", path)
	}
	a, _ := tr.Manifest.Attr(n)
	return int64(a.Offset)
}

// check verifies what every tree promises: it survives its own encodings, its
// files do not overlap, and every regular file's range is there.
func check(t testing.TB, tr *Tree) {
	t.Helper()
	enc := tr.Manifest.Encode()
	if int64(len(enc)) != tr.Manifest.EncodedSize() {
		t.Errorf("EncodedSize %d, encoded %d", tr.Manifest.EncodedSize(), len(enc))
	}
	again, err := Decode(enc)
	if err != nil {
		t.Fatalf("own encoding: %v", err)
	}
	if again.Digest() != tr.Manifest.Digest() || again.NumFiles() != tr.Manifest.NumFiles() || !again.same(tr.Manifest) {
		t.Error("differs after decoding")
	}
	end := int64(0)
	for _, f := range tr.Files {
		if f.Offset < end || f.Size <= 0 {
			t.Errorf("%q at %d+%d overlaps what ends at %d", f.Path, f.Offset, f.Size, end)
		}
		end = f.Offset + f.Size
	}
	if size := tr.Manifest.VolumeSize(); end > size || size%growBy != 0 {
		t.Errorf("files end at %d, the volume at %d", end, size)
	}
	order := tr.Manifest.Order()
	if len(order) != tr.Manifest.NumFiles() {
		t.Errorf("%d in order, of %d files", len(order), tr.Manifest.NumFiles())
	}
	last := uint64(0)
	for _, n := range order {
		a, _ := tr.Manifest.Attr(n)
		if a.Offset < last {
			t.Errorf("node %d at %d is behind %d in order", n, a.Offset, last)
		}
		last = a.Offset
		if a.Size == 0 {
			continue
		}
		fs := tr.Intersect(int64(a.Offset), int64(a.Size))
		if len(fs) != 1 || fs[0].Offset != int64(a.Offset) || fs[0].Size != int64(a.Size) || fs[0].Stale {
			t.Errorf("node %d: no live range at %d", n, a.Offset)
		}
	}
	loaded, err := Load(tr.Save())
	if err != nil || !slices.Equal(loaded.Files, tr.Files) || loaded.Manifest.Digest() != tr.Manifest.Digest() {
		t.Errorf("saved and loaded: %v, or differs", err)
	}
}

// TestAgainstWalkDir compares a real tree of odd things, name by name.
func TestAgainstWalkDir(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a", "b/c", "b/d/e", "bad\xffutf8", "new\nline", strings.Repeat("n", 255), "z.", "-", "b.c"} {
		put(t, dir, name, len(name)*1000)
	}
	put(t, dir, "empty", 0)
	os.Mkdir(filepath.Join(dir, "emptydir"), 0o700)
	os.Symlink("a", filepath.Join(dir, "link"))
	os.Symlink(strings.Repeat("l", 4000), filepath.Join(dir, "longlink"))
	os.Chmod(filepath.Join(dir, "a"), 0o4751)
	os.Chtimes(filepath.Join(dir, "a"), time.Time{}, time.Unix(-7, 123456789))
	if err := unix.Setxattr(filepath.Join(dir, "a"), "user.k", []byte{0, 1}, 0); err != nil && !errors.Is(err, unix.ENOTSUP) {
		t.Fatal(err)
	}
	unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600)
	sock, err := net.Listen("unix", filepath.Join(dir, "sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer sock.Close()
	tr := mustScan(t, dir)
	m := tr.Manifest
	if tr.Seen.Special != 2 {
		t.Errorf("%d special files left out, want 2", tr.Seen.Special)
	}
	seen := 0
	filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			t.Fatal(err)
		}
		if d.Type()&(fs.ModeNamedPipe|fs.ModeSocket) != 0 {
			return nil
		}
		seen++
		rel, _ := filepath.Rel(dir, path)
		if rel == "." {
			rel = ""
		}
		n, ok := m.Resolve(rel)
		if !ok {
			t.Fatalf("%q is not in the manifest", rel)
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			t.Fatal(err)
		}
		a, _ := m.Attr(n)
		if a.Mode != st.Mode || a.UID != st.Uid || a.GID != st.Gid || a.Size != uint64(st.Size) ||
			a.MtimeSec != st.Mtim.Sec || int64(a.MtimeNsec) != st.Mtim.Nsec || a.Blocks != uint64(st.Blocks) {
			t.Errorf("%q: %+v differs from %+v", rel, a, st)
		}
		if link, err := os.Readlink(path); err == nil {
			if got, ok := m.Readlink(n); !ok || got != link {
				t.Errorf("%q: link %q", rel, got)
			}
		}
		return nil
	})
	if seen != m.NumNodes() {
		t.Errorf("%d nodes for %d names", m.NumNodes(), seen)
	}
	n, _ := m.Resolve("a")
	if v, ok := m.Xattr(n, "user.k"); ok && !bytes.Equal(v, []byte{0, 1}) || ok != slices.Equal(m.ListXattr(n), []string{"user.k"}) {
		t.Errorf("xattr %v %v", v, m.ListXattr(n))
	}
	for _, name := range []string{"nope", "", ".", "..", "fifo", "a/b"} {
		if _, ok := m.Lookup(Root, name); ok {
			t.Errorf("Lookup(%q) found something", name)
		}
	}
}

func TestHardLinks(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "b/one", 5000)
	put(t, dir, "outside", 10)
	os.Link(filepath.Join(dir, "b/one"), filepath.Join(dir, "two"))
	out := filepath.Join(t.TempDir(), "elsewhere")
	if err := os.Link(filepath.Join(dir, "outside"), out); err != nil {
		t.Skipf("need: one file system for both temporary directories: %v", err)
	}
	m := mustScan(t, dir).Manifest
	one, _ := m.Resolve("b/one")
	two, _ := m.Resolve("two")
	if one != two || one == 0 {
		t.Errorf("nodes %d and %d", one, two)
	}
	if a, _ := m.Attr(one); a.Nlink != 2 {
		t.Errorf("nlink %d, want 2", a.Nlink)
	}
	o, _ := m.Resolve("outside")
	if a, _ := m.Attr(o); a.Nlink != 1 {
		t.Errorf("nlink %d of a file whose other name is elsewhere, want 1", a.Nlink)
	}
	if m.NumFiles() != 2 || m.VolumeSize() != growBy {
		t.Errorf("%d files in %d bytes", m.NumFiles(), m.VolumeSize())
	}
}

func TestAlignment(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "a", 10)
	put(t, dir, "b", alignFrom)
	put(t, dir, "c", 10)
	put(t, dir, "d", alignFrom-1)
	m := mustScan(t, dir).Manifest
	for name, want := range map[string]uint64{"a": 0, "b": 4096, "c": 4096 + alignFrom, "d": 4096 + alignFrom + 10} {
		n, _ := m.Resolve(name)
		if a, _ := m.Attr(n); a.Offset != want {
			t.Errorf("%s at %d, want %d", name, a.Offset, want)
		}
	}
}

// TestVanishing: names come and go while the scan runs.
func TestVanishing(t *testing.T) {
	dir := t.TempDir()
	for i := range 200 {
		put(t, dir, fmt.Sprintf("d%d/f", i), 1)
	}
	var wg sync.WaitGroup
	stop := make(chan struct{})
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			d := filepath.Join(dir, fmt.Sprintf("d%d", i%200))
			os.RemoveAll(d)
			os.MkdirAll(d, 0o755)
			os.WriteFile(filepath.Join(d, "f"), nil, 0o644)
		}
	})
	for range 10 {
		mustScan(t, dir)
	}
	close(stop)
	wg.Wait()
}

// TestDeep: paths beyond PATH_MAX.
func TestDeep(t *testing.T) {
	dir := t.TempDir()
	at, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	const depth = 60
	name := strings.Repeat("d", 200)
	for range depth {
		if err := unix.Mkdirat(int(at.Fd()), name, 0o755); err != nil {
			t.Fatal(err)
		}
		fd, err := unix.Openat(int(at.Fd()), name, unix.O_RDONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		at.Close()
		at = os.NewFile(uintptr(fd), name)
	}
	at.Close()
	if m := mustScan(t, dir).Manifest; m.NumNodes() != depth+1 {
		t.Errorf("%d nodes, want %d", m.NumNodes(), depth+1)
	}
}

func TestScanErrors(t *testing.T) {
	if _, err := Scan(context.Background(), "/nonexistent/dir", ScanOptions{}); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	file := filepath.Join(t.TempDir(), "f")
	os.WriteFile(file, nil, 0o644)
	if _, err := Scan(context.Background(), file, ScanOptions{}); !errors.Is(err, unix.ENOTDIR) {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Scan(ctx, t.TempDir(), ScanOptions{}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestCompress(t *testing.T) {
	want := bytes.Repeat([]byte("manifest"), 10000)
	z, err := Compress(want)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := Decompress(z, int64(len(want))); err != nil || !bytes.Equal(got, want) {
		t.Error(err)
	}
	if _, err := Decompress(z, int64(len(want))-1); !errors.Is(err, ErrTooLarge) {
		t.Errorf("beyond the limit: %v", err)
	}
	if _, err := Decompress(want, 1<<20); !errors.Is(err, ErrCorrupt) {
		t.Errorf("not zstd: %v", err)
	}
}
