// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// node is what a program can learn of a file without knowing where it lies.
type node struct {
	Mode     fs.FileMode
	UID, GID uint32
	Size     int64
	Mtime    time.Time
	Nlink    uint64
	Link     string            // symlink target
	Sum      string            // sha256 of a regular file
	Xattr    map[string]string // user.* attributes
}

// snapshot reads a whole tree. Sockets, FIFOs and devices are left out, as
// datasets leave them out.
func snapshot(t testing.TB, dir string) map[string]node {
	t.Helper()
	tree := map[string]node{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := os.Lstat(path)
		if err != nil {
			return err
		}
		if fi.Mode()&(fs.ModeSocket|fs.ModeNamedPipe|fs.ModeDevice) != 0 {
			return nil
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		n, err := inspect(path, fi)
		if err != nil {
			return err
		}
		tree[rel] = n
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return tree
}

func inspect(path string, fi fs.FileInfo) (node, error) {
	st := fi.Sys().(*syscall.Stat_t)
	n := node{Mode: fi.Mode(), UID: st.Uid, GID: st.Gid, Mtime: fi.ModTime()}
	var err error
	switch {
	case fi.Mode().IsRegular():
		n.Size, n.Nlink = fi.Size(), uint64(st.Nlink)
		if n.Sum, err = sum(path); err != nil {
			return n, err
		}
	case fi.Mode()&fs.ModeSymlink != 0:
		if n.Link, err = os.Readlink(path); err != nil {
			return n, err
		}
	}
	n.Xattr, err = xattrs(path)
	return n, err
}

func sum(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return fmt.Sprintf("%x", h.Sum(nil)), nil
}

func xattrs(path string) (map[string]string, error) {
	buf := make([]byte, 64<<10)
	n, err := unix.Llistxattr(path, buf)
	if err != nil {
		return nil, fmt.Errorf("listxattr %s: %w", path, err)
	}
	var attrs map[string]string
	for _, name := range strings.Split(strings.TrimRight(string(buf[:n]), "\x00"), "\x00") {
		if !strings.HasPrefix(name, "user.") {
			continue
		}
		val := make([]byte, 64<<10)
		m, err := unix.Lgetxattr(path, name, val)
		if err != nil {
			return nil, fmt.Errorf("getxattr %s %s: %w", path, name, err)
		}
		if attrs == nil {
			attrs = map[string]string{}
		}
		attrs[name] = string(val[:m])
	}
	return attrs, nil
}

func sameTree(t testing.TB, want, got string) {
	t.Helper()
	sameNodes(t, snapshot(t, want), snapshot(t, got))
}

func sameNodes(t testing.TB, a, b map[string]node) {
	t.Helper()
	if diff := cmp.Diff(a, b); diff != "" {
		t.Errorf("tree differs from its source (-source +mount):\n%.4000s", diff)
	}
	if len(a) < 2 {
		t.Errorf("only %d entries compared", len(a))
	}
}

// TestRealTree: a directory that every Debian machine has, every byte of it.
func TestRealTree(t *testing.T) {
	const dir = "/usr/share/doc"
	tg := serve(t, "--dataset", "corpus="+dir)
	sameTree(t, dir, mount(t, tg.uri("corpus")))
}

// oddTree makes what a tree may hold and a careless program trips over.
func oddTree(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	put := func(name string, data []byte, mode fs.FileMode) {
		t.Helper()
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, data, 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(p, mode); err != nil {
			t.Fatal(err)
		}
	}
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	put("empty", nil, 0o600)
	put("one", []byte{7}, 0o444)
	put("bad\xff\xfeutf8", []byte("x"), 0o644)
	put("new\nline", []byte("y"), 0o644)
	put(strings.Repeat("n", 255), []byte("long"), 0o644)
	put("a/b/c/d/e/f/deep", bytes.Repeat([]byte("deep"), 5000), 0o640)
	put("setuid", []byte("s"), 0o755|fs.ModeSetuid|fs.ModeSticky)
	for i := range 300 {
		put(fmt.Sprintf("small/%03d", i), bytes.Repeat([]byte{byte(i)}, i*7), 0o644)
	}
	for i, size := range []int{4095, 4096, 4097, 1<<20 - 1, 1 << 20, 1<<20 + 1, 5<<20 + 123} {
		data := make([]byte, size)
		for j := range data {
			data[j] = byte(j*31 + j>>11 + i)
		}
		put(fmt.Sprintf("big/%d", size), data, 0o644)
	}
	check(os.Mkdir(filepath.Join(dir, "emptydir"), 0o711))
	check(os.Link(filepath.Join(dir, "big/4097"), filepath.Join(dir, "hardlink")))
	check(os.Symlink("one", filepath.Join(dir, "link")))
	check(os.Symlink("/nowhere/"+strings.Repeat("x", 1000), filepath.Join(dir, "dangling")))
	check(os.Symlink("..", filepath.Join(dir, "a/up")))
	check(os.Lchown(filepath.Join(dir, "one"), 1234, 4321))
	check(os.Chtimes(filepath.Join(dir, "one"), time.Unix(1, 123456789), time.Unix(-5, 987654321)))
	check(os.Chtimes(filepath.Join(dir, "empty"), time.Unix(1, 0), time.Unix(1<<33, 1)))
	if err := unix.Setxattr(filepath.Join(dir, "one"), "user.rblk", []byte("v\x00w"), 0); err != nil && !errors.Is(err, unix.ENOTSUP) {
		t.Fatal(err)
	}
	check(unix.Mkfifo(filepath.Join(dir, "fifo"), 0o644))
	check(unix.Mknod(filepath.Join(dir, "device"), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))))
	sparse, err := os.Create(filepath.Join(dir, "sparse"))
	check(err)
	check(sparse.Truncate(64 << 20))
	_, err = sparse.WriteAt([]byte("island"), 33<<20+5)
	check(err)
	check(sparse.Close())
	return dir
}

func TestOddTree(t *testing.T) {
	src := oddTree(t)
	tg := serve(t, "--dataset", "odd="+src)
	dst := mount(t, tg.uri("odd"))
	sameTree(t, src, dst)

	for _, name := range []string{"fifo", "device"} {
		if _, err := os.Lstat(filepath.Join(dst, name)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v, want it left out", name, err)
		}
	}
	a, err := os.Stat(filepath.Join(dst, "hardlink"))
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.Stat(filepath.Join(dst, "big/4097"))
	if err != nil {
		t.Fatal(err)
	}
	if !os.SameFile(a, b) {
		t.Error("hard links have different inodes")
	}
	if err := os.WriteFile(filepath.Join(dst, "new"), nil, 0o644); !errors.Is(err, syscall.EROFS) {
		t.Errorf("create in a dataset: %v, want EROFS", err)
	}
	if err := os.Remove(filepath.Join(dst, "one")); !errors.Is(err, syscall.EROFS) {
		t.Errorf("remove in a dataset: %v, want EROFS", err)
	}
}

// TestHugeSparseFile: 8 GiB that hold three islands; holes cost neither disk
// reads at the target nor patience here.
func TestHugeSparseFile(t *testing.T) {
	src := t.TempDir()
	f, err := os.Create(filepath.Join(src, "huge"))
	if err != nil {
		t.Fatal(err)
	}
	const size = 8 << 30
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	islands := []int64{0, 4<<30 - 3, size - 6}
	for _, off := range islands {
		if _, err := f.WriteAt([]byte("island"), off); err != nil {
			t.Fatal(err)
		}
	}
	f.Close()
	tg := serve(t, "--dataset", "huge="+src)
	g, err := os.Open(filepath.Join(mount(t, tg.uri("huge")), "huge"))
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	if fi, err := g.Stat(); err != nil || fi.Size() != size {
		t.Fatalf("size %v, %v", fi, err)
	}
	buf := make([]byte, 6)
	for _, off := range islands {
		if _, err := g.ReadAt(buf, off); err != nil || string(buf) != "island" {
			t.Errorf("at %d: %q, %v", off, buf, err)
		}
	}
	zeros := make([]byte, 1<<20)
	if _, err := g.ReadAt(zeros, 6<<30); err != nil || len(bytes.Trim(zeros, "\x00")) != 0 {
		t.Errorf("hole: not zeros, %v", err)
	}
}

// TestFileChangedAfterScan: its range fails, everything beside it, in the same
// extent, goes on; a rescan heals it.
func TestFileChangedAfterScan(t *testing.T) {
	src := t.TempDir()
	for _, name := range []string{"a", "b", "c"} {
		if err := os.WriteFile(filepath.Join(src, name), bytes.Repeat([]byte(name), 1000), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	tg := serve(t, "--dataset", "d="+src)
	if err := os.WriteFile(filepath.Join(src, "b"), bytes.Repeat([]byte("B"), 1000), 0o644); err != nil {
		t.Fatal(err)
	}
	dir := mount(t, tg.uri("d"))
	for _, name := range []string{"a", "c"} {
		if got, err := os.ReadFile(filepath.Join(dir, name)); err != nil || !bytes.Equal(got, bytes.Repeat([]byte(name), 1000)) {
			t.Errorf("%s beside a changed file: %v", name, err)
		}
	}
	if _, err := os.ReadFile(filepath.Join(dir, "b")); !errors.Is(err, syscall.EIO) && !errors.Is(err, syscall.ESTALE) {
		t.Errorf("changed file: %v, want EIO or ESTALE", err)
	}
	tg.cmd.Process.Signal(syscall.SIGHUP)
	eventually(t, "the rescanned file is readable with its new bytes", func() bool {
		got, err := os.ReadFile(filepath.Join(dir, "b"))
		return err == nil && bytes.Equal(got, bytes.Repeat([]byte("B"), 1000))
	})
}

// TestRescan: files that come and go are seen by a living mount.
func TestRescan(t *testing.T) {
	src := t.TempDir()
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(src, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("stays", "stays")
	write("goes", "goes")
	tg := serve(t, "--dataset", "d="+src)
	dir := mount(t, tg.uri("d"))
	held, err := os.Open(filepath.Join(dir, "stays"))
	if err != nil {
		t.Fatal(err)
	}
	defer held.Close()
	write("comes", "comes")
	os.Remove(filepath.Join(src, "goes"))
	must(t, "rblkd", "export", "rescan", "d", "--control", tg.control)
	eventually(t, "the new tree", func() bool {
		names, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, e := range names {
			got = append(got, e.Name())
		}
		return slices.Equal(got, []string{"comes", "stays"})
	})
	if got, err := os.ReadFile(filepath.Join(dir, "comes")); err != nil || string(got) != "comes" {
		t.Errorf("new file: %q, %v", got, err)
	}
	buf := make([]byte, 5)
	if _, err := held.ReadAt(buf, 0); err != nil || string(buf) != "stays" {
		t.Errorf("file held open over the rescan: %q, %v", buf, err)
	}
}

// TestSeveralAtOnce: eight readers of one mount, each the whole tree in its own
// order.
func TestSeveralAtOnce(t *testing.T) {
	src := oddTree(t)
	tg := serve(t, "--dataset", "odd="+src)
	dir := mount(t, tg.uri("odd"))
	want := snapshot(t, src)
	var names []string
	for name, n := range want {
		if n.Sum != "" {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	errs := make(chan error, 8)
	for i := range 8 {
		order := slices.Clone(names)
		for j := range order {
			k := (j*(2*i+1) + i) % len(order)
			order[j], order[k] = order[k], order[j]
		}
		go func() {
			for _, name := range order {
				if got, err := sum(filepath.Join(dir, name)); err != nil || got != want[name].Sum {
					errs <- fmt.Errorf("reader %d, %q: %v", i, name, err)
					return
				}
			}
			errs <- nil
		}()
	}
	for range 8 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}
