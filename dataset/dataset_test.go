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

	"github.com/cespare/xxhash/v2"
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

// check verifies what every tree promises: it survives its own encoding, its
// files do not overlap, and every regular file's range is there.
func check(t testing.TB, tr *Tree) {
	t.Helper()
	again, err := Decode(tr.Manifest.Encode())
	if err != nil {
		t.Fatalf("own encoding: %v", err)
	}
	if again.Digest() != tr.Manifest.Digest() || again.NumFiles() != tr.Manifest.NumFiles() {
		t.Error("digest or files differ after decoding")
	}
	end := int64(0)
	for _, f := range tr.Files {
		if f.Offset < end {
			t.Errorf("%q at %d overlaps what ends at %d", f.Path, f.Offset, end)
		}
		end = f.Offset + f.Size
	}
	if end > tr.Manifest.VolumeSize() {
		t.Errorf("files end at %d, the volume at %d", end, tr.Manifest.VolumeSize())
	}
	for _, n := range tr.Manifest.Order() {
		a, _ := tr.Manifest.Attr(n)
		if a.Size == 0 {
			continue
		}
		i := tr.FileIndex(int64(a.Offset))
		if i == len(tr.Files) || tr.Files[i].Offset != int64(a.Offset) || tr.Files[i].Size != int64(a.Size) || tr.Files[i].Stale {
			t.Errorf("node %d: no live range at %d", n, a.Offset)
		}
	}
	saved, err := Load(tr.Save())
	if err != nil || !slices.Equal(saved.Files, tr.Files) || saved.Manifest.Digest() != tr.Manifest.Digest() {
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
	if m.NumFiles() != 2 || m.VolumeSize() != 5010 {
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

// TestRescan: rule by rule.
func TestRescan(t *testing.T) {
	dir := t.TempDir()
	for _, n := range []string{"a", "b", "c"} {
		put(t, dir, n, 1000)
	}
	one := mustScan(t, dir)
	same, err := Rescan(context.Background(), dir, one, ScanOptions{})
	if err != nil || same != one {
		t.Fatalf("nothing changed, yet a new tree: %v", err)
	}
	os.Remove(filepath.Join(dir, "a"))
	os.WriteFile(filepath.Join(dir, "b"), bytes.Repeat([]byte("y"), 1000), 0o644)
	put(t, dir, "aa", 500)
	two, err := Rescan(context.Background(), dir, one, ScanOptions{})
	if err != nil {
		t.Fatal(err)
	}
	check(t, two)
	if two.Manifest.Layout() != one.Manifest.Layout() || two.Manifest.Generation() != one.Manifest.Generation()+1 {
		t.Errorf("layout %s generation %d", two.Manifest.Layout(), two.Manifest.Generation())
	}
	offset := func(tr *Tree, name string) uint64 {
		n, ok := tr.Manifest.Resolve(name)
		if !ok {
			t.Fatalf("%s is gone", name)
		}
		a, _ := tr.Manifest.Attr(n)
		return a.Offset
	}
	if offset(two, "c") != offset(one, "c") {
		t.Error("an unchanged file has moved")
	}
	for _, name := range []string{"aa", "b"} {
		if offset(two, name) < uint64(one.Manifest.VolumeSize()) {
			t.Errorf("%s uses a range again", name)
		}
	}
	for _, name := range []string{"a", "b"} {
		if i := two.FileIndex(int64(offset(one, name))); !two.Files[i].Stale {
			t.Errorf("the old range of %s is not stale", name)
		}
	}
	three, err := Rescan(context.Background(), dir, two, ScanOptions{})
	if err != nil || three != two {
		t.Errorf("third scan: %v, or a new tree", err)
	}
	os.Remove(filepath.Join(dir, "c"))
	if four, err := Rescan(context.Background(), dir, two, ScanOptions{}); err != nil || four == two {
		t.Errorf("a file less was not seen: %v", err)
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

// reseal gives spoiled bytes a right checksum, so that the fuzzer gets past it.
func reseal(b []byte) []byte {
	if len(b) < 8 {
		return b
	}
	return le.AppendUint64(b[:len(b)-8:len(b)-8], xxhash.Sum64(b[:len(b)-8]))
}

func FuzzDecode(f *testing.F) {
	dir := f.TempDir()
	put(f, dir, "a/b", 10)
	put(f, dir, "c", 100000)
	os.Symlink("x", filepath.Join(dir, "l"))
	tr := mustScan(f, dir)
	f.Add(tr.Manifest.Encode())
	f.Add([]byte(fileMagic))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := Decode(reseal(b))
		if err != nil {
			if !errors.Is(err, ErrCorrupt) {
				t.Error(err)
			}
			return
		}
		// Every accessor, over the whole tree, must end and stay in bounds.
		n := 0
		var visit func(NodeID)
		visit = func(id NodeID) {
			m.Readlink(id)
			for _, x := range m.ListXattr(id) {
				m.Xattr(id, x)
			}
			for i := range m.NumEntries(id) {
				n++
				name, c := m.Entry(id, i)
				if got, ok := m.Lookup(id, name); !ok || got != c {
					t.Fatalf("Lookup(%d, %q) = %d, %v", id, name, got, ok)
				}
				if m.NumEntries(c) > 0 {
					visit(c)
				}
			}
		}
		visit(Root)
		m.Order()
		if n > len(m.entries) {
			t.Error("a directory was visited twice")
		}
	})
}

func FuzzLoad(f *testing.F) {
	dir := f.TempDir()
	put(f, dir, "a/b", 10)
	f.Add(mustScan(f, dir).Save())
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, err := Load(reseal(b)); err != nil && !errors.Is(err, ErrCorrupt) {
			t.Error(err)
		}
	})
}

func benchTree(b *testing.B, files int) *Tree {
	m := &Manifest{layout: "x", generation: 1, nodes: make([]node, 1)}
	b.Helper()
	bl := &builder{m: m, prev: map[string]*File{}, links: map[[2]uint64]NodeID{}}
	root := found{st: unix.Stat_t{Mode: unix.S_IFDIR | 0o755}, dir: &foundDir{}}
	for i := range files / 1000 {
		d := &foundDir{}
		for j := range 1000 {
			d.names = append(d.names, found{name: fmt.Sprintf("file-%06d", j), st: unix.Stat_t{Mode: unix.S_IFREG, Size: 1000, Nlink: 1}})
		}
		root.dir.names = append(root.dir.names, found{name: fmt.Sprintf("dir-%06d", i), st: unix.Stat_t{Mode: unix.S_IFDIR}, dir: d})
	}
	if err := bl.dir(bl.node(&root), "", root.dir, Root); err != nil {
		b.Fatal(err)
	}
	return &Tree{Manifest: m, Files: bl.files}
}

func BenchmarkLookup1M(b *testing.B) {
	m := benchTree(b, 1_000_000).Manifest
	b.ReportMetric(float64(len(m.nodes)*nodeSize+len(m.entries)*entrySize+len(m.names))/float64(len(m.nodes)), "bytes/node")
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		d := NodeID(2 + i%1000*1001)
		if _, ok := m.Lookup(d, "file-000777"); !ok {
			b.Fatal("not found")
		}
	}
}

func BenchmarkScan10k(b *testing.B) {
	dir := b.TempDir()
	for i := range 10_000 {
		put(b, dir, fmt.Sprintf("d%d/f%d", i/100, i), 10)
	}
	for b.Loop() {
		mustScan(b, dir)
	}
}
