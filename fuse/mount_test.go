// SPDX-License-Identifier: Apache-2.0

package fuse

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"rblk/dataset"
	"rblk/internal/need"
	"rblk/volume"
)

func mountPoint(t testing.TB) string {
	t.Helper()
	need.Root(t)
	need.FUSE(t)
	dir, err := MountPath(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// shown mounts e. The test's end unmounts it by whatever means it takes.
func shown(t testing.TB, e *Export, o Options) (string, *Mount) {
	t.Helper()
	dir := mountPoint(t)
	m, err := MountExport(dir, e, o, testLog(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ended(t, m) })
	return dir, m
}

// ended closes a mount and makes sure that it is gone.
func ended(t testing.TB, m *Mount) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := m.Close(ctx); err != nil {
		t.Errorf("closing the mount: %v", err)
	}
	wait(t, m.Done(), "the mount's end")
	if info, mounted, err := FindMount(m.dir); mounted || err != nil {
		t.Errorf("still mounted: %+v, %v", info, err)
	}
}

// oddTree makes what a tree may hold and a careless program trips over.
func oddTree(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	put := func(name string, data []byte, mode os.FileMode) {
		t.Helper()
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, data, mode); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(p, mode); err != nil {
			t.Fatal(err)
		}
	}
	put("empty", nil, 0o600)
	put("sub/one", []byte("x"), 0o4755)
	put("sub/deep/er/file", pattern(3<<20+7), 0o444)
	put("sub/"+strings.Repeat("n", 255), pattern(100), 0o640)
	put("new\nline and \xff\xfe", pattern(4097), 0o644)
	put("attr", pattern(10), 0o644)
	for _, d := range []string{"emptydir", "sub/other"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o1750); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 3000 {
		put("many/"+strings.Repeat("f", i%200+1)+string(rune('a'+i%26))+time.Duration(i).String(), pattern(i%50), 0o644)
	}
	for link, target := range map[string]string{"link": "sub/one", "dangling": "/no/where", "sub/" + strings.Repeat("l", 200): strings.Repeat("x", 4000)} {
		if err := os.Symlink(target, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Link(filepath.Join(dir, "sub/one"), filepath.Join(dir, "hard")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setxattr(filepath.Join(dir, "attr"), "user.colour", []byte("blue"), 0); err != nil {
		t.Logf("no xattrs here: %v", err)
	}
	when := time.Unix(1234567890, 123456789)
	for _, name := range []string{"attr", "sub/one", "emptydir"} {
		if err := os.Chtimes(filepath.Join(dir, name), when, when); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Lchown(filepath.Join(dir, "empty"), 12345, 54321); err != nil {
		t.Fatal(err)
	}
	return dir
}

func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*31 + i>>8)
	}
	return b
}

// node is what a program sees of a file.
type node struct {
	Mode     uint32
	UID, GID uint32
	Nlink    uint64
	Size     int64
	Mtime    syscall.Timespec
	Content  string
	Xattr    string
}

// snapshot reads a whole tree, through file names and readdir.
func snapshot(t testing.TB, dir string) map[string]node {
	t.Helper()
	all := map[string]node{}
	err := filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st syscall.Stat_t
		if err := syscall.Lstat(path, &st); err != nil {
			return err
		}
		n := node{Mode: st.Mode, UID: st.Uid, GID: st.Gid, Size: st.Size, Mtime: st.Mtim}
		switch st.Mode & syscall.S_IFMT {
		case syscall.S_IFREG:
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			n.Content, n.Nlink = string(b), uint64(st.Nlink)
		case syscall.S_IFLNK:
			if n.Content, err = os.Readlink(path); err != nil {
				return err
			}
		case syscall.S_IFDIR:
			n.Size = 0
		}
		n.Xattr = userXattrs(t, path)
		rel, err := filepath.Rel(dir, path)
		all[rel] = n
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func userXattrs(t testing.TB, path string) string {
	buf := make([]byte, 64<<10)
	n, err := unix.Llistxattr(path, buf)
	if err != nil {
		t.Fatal(err)
	}
	var all strings.Builder
	for name := range strings.SplitSeq(string(buf[:n]), "\x00") {
		if !strings.HasPrefix(name, "user.") {
			continue
		}
		val := make([]byte, 64<<10)
		n, err := unix.Lgetxattr(path, name, val)
		if err != nil {
			t.Fatal(err)
		}
		all.WriteString(name + "=" + string(val[:n]))
	}
	return all.String()
}

func sameTree(t testing.TB, source, mount string) {
	t.Helper()
	if d := cmp.Diff(snapshot(t, source), snapshot(t, mount)); d != "" {
		t.Errorf("the mounted tree differs (-source +mount):\n%.3000s", d)
	}
}

func TestDataset(t *testing.T) {
	source := oddTree(t)
	e, _, _ := scanned(t, source)
	dir, m := shown(t, e, Options{Source: "rblk://h1,h2/da ta"})
	primePoll(t, dir+"/attr")
	sameTree(t, source, dir)
	sameTree(t, source, dir) // from the kernel's caches

	var one, hard, top, up syscall.Stat_t
	for path, st := range map[string]*syscall.Stat_t{"/sub/one": &one, "/hard": &hard, "/": &top, "/sub/..": &up} {
		if err := syscall.Lstat(dir+path, st); err != nil {
			t.Fatal(err)
		}
	}
	if one.Ino != hard.Ino {
		t.Errorf("hard links have inodes %d and %d", one.Ino, hard.Ino)
	}
	if top.Ino != up.Ino {
		t.Errorf("the top is inode %d from above and %d from below", top.Ino, up.Ino)
	}
	for _, err := range []error{
		os.WriteFile(dir+"/attr", nil, 0o644), os.Mkdir(dir+"/d", 0o755), os.Remove(dir + "/attr"),
		os.Chmod(dir+"/attr", 0o777), os.Truncate(dir+"/attr", 0), os.Symlink("x", dir+"/y"),
	} {
		if !errors.Is(err, syscall.EROFS) {
			t.Errorf("a change of a read-only tree: %v, want EROFS", err)
		}
	}
	if m.Info().Source != "rblk://h1,h2/da ta" || m.Info().Type != FSType {
		t.Errorf("mountinfo: %+v", m.Info())
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil || int64(fs.Blocks)*fs.Bsize < e.Manifest.VolumeSize() || fs.Bfree != 0 {
		t.Errorf("statfs: %+v, %v", fs, err)
	}
}

// TestConcurrentReaders reads every file of a tree from many threads, some of
// which meet in the same file.
func TestConcurrentReaders(t *testing.T) {
	source := oddTree(t)
	e, _, _ := scanned(t, source)
	dir, _ := shown(t, e, Options{Source: "x"})
	primePoll(t, dir+"/attr")
	want := snapshot(t, source)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for name, n := range want {
				if n.Mode&syscall.S_IFMT != syscall.S_IFREG {
					continue
				}
				if b, err := os.ReadFile(filepath.Join(dir, name)); err != nil || string(b) != n.Content {
					t.Errorf("%q: %d bytes, %v", name, len(b), err)
				}
			}
		})
	}
	all.Wait()
}

// TestAllow lets others in, or only root, or nobody.
func TestAllow(t *testing.T) {
	const nobody = 65534
	for _, c := range []struct {
		name    string
		options Options
		enters  bool
	}{
		{"nobody else", Options{}, false},
		{"allow_other", Options{AllowOther: true}, true},
		{"allow_root", Options{AllowRoot: true}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			source := t.TempDir()
			if err := os.WriteFile(source+"/file", []byte("text"), 0o644); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(source+"/secret", []byte("text"), 0o600); err != nil {
				t.Fatal(err)
			}
			e, _, _ := scanned(t, source)
			dir, _ := shown(t, e, c.options)
			passable(t, dir)
			primePoll(t, dir+"/file")
			sameNames(t, source, dir) // so that the kernel has it all
			for name, want := range map[string]bool{"file": c.enters, "secret": false} {
				cmd := exec.Command("cat", dir+"/"+name)
				cmd.Dir = "/"
				cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
				if out, err := cmd.CombinedOutput(); (err == nil) != want {
					t.Errorf("nobody reads %s: %v, %s", name, err, out)
				}
			}
		})
	}
}

func sameNames(t *testing.T, a, b string) {
	t.Helper()
	x, err := os.ReadDir(a)
	if err != nil {
		t.Fatal(err)
	}
	y, err := os.ReadDir(b)
	if err != nil || len(x) != len(y) {
		t.Errorf("%d names, want %d: %v", len(y), len(x), err)
	}
}

// TestGeneration changes the tree under a mount: names appear, vanish and
// change; what was open stays as it was; the old tree goes when it is unused.
func TestGeneration(t *testing.T) {
	source := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		os.MkdirAll(filepath.Dir(filepath.Join(source, name)), 0o755)
		if err := os.WriteFile(filepath.Join(source, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("keep", "keep")
	write("change", "old")
	write("gone", "gone")
	write("dir/in", "old in dir")
	e, src, tree := scanned(t, source)
	next := make(chan *dataset.Manifest, 1)
	handled := make(chan struct{}, 1)
	e.Reload = func(context.Context) (*dataset.Manifest, error) { return <-next, nil }
	e.OnEvent = func(volume.Event) { handled <- struct{}{} }
	dir, m := shown(t, e, Options{Source: "x"})
	primePoll(t, dir+"/keep")
	sameTree(t, source, dir)
	if _, err := os.Stat(dir + "/fresh"); !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err) // now remembered as absent
	}
	old, err := os.Open(dir + "/change")
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	write("change", "new and longer")
	write("fresh", "fresh")
	write("dir/in", "new in dir")
	os.Remove(source + "/gone")
	tree, err = dataset.Rescan(context.Background(), source, tree, dataset.ScanOptions{})
	if err != nil {
		t.Fatal(err)
	}
	src.Resize(tree.Manifest.VolumeSize())
	wait(t, handled, "the new size")
	src.Poke(0, content(t, source, tree)) // ranges that both have keep their bytes
	next <- tree.Manifest
	src.Emit(volume.Event{Kind: volume.EventGeneration})
	wait(t, handled, "the new generation")
	eventually(t, "the new tree", func() bool {
		_, err := os.Stat(dir + "/gone")
		return errors.Is(err, os.ErrNotExist)
	})
	eventually(t, "the new listing", func() bool {
		_, err := os.Stat(dir + "/fresh")
		return err == nil
	})
	sameTree(t, source, dir)
	if b, err := readAll(old); err != nil || b != "old" {
		t.Errorf("the open file reads %q, %v", b, err)
	}
	if n := m.fs.count(); n != 2 {
		t.Errorf("%d trees while the old one is in use, want 2", n)
	}
	old.Close()
	eventually(t, "the old tree's end", func() bool { return m.fs.count() == 1 })
}

func readAll(f *os.File) (string, error) {
	var b bytes.Buffer
	_, err := b.ReadFrom(f)
	return b.String(), err
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}
