// SPDX-License-Identifier: Apache-2.0

package dataset

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"rblk/internal/need"
)

// descriptors open in this process.
func descriptors(t testing.TB) int {
	t.Helper()
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(names)
}

// TestDescriptors: a scan that ends, is cancelled or fails leaves none open.
func TestDescriptors(t *testing.T) {
	dir := t.TempDir()
	for _, a := range "abcdefgh" {
		for _, b := range "abcdefgh" {
			put(t, dir, string(a)+"/"+string(b)+"/f", 1)
		}
	}
	before := descriptors(t)
	mustScan(t, dir)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	for range 20 {
		if _, err := Scan(ctx, dir, ScanOptions{Workers: 3}); !errors.Is(err, context.Canceled) {
			t.Fatalf("cancelled before: %v", err)
		}
	}
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors, %d before", after, before)
	}
}

// TestCancelMidway ends the context while names are read.
func TestCancelMidway(t *testing.T) {
	dir := t.TempDir()
	for i := range progressEvery {
		put(t, dir, fmt.Sprintf("d%d/f%d", i%64, i), 0)
	}
	before := descriptors(t)
	ctx, cancel := context.WithCancel(context.Background())
	calls := 0
	_, err := Scan(ctx, dir, ScanOptions{Progress: func(Progress) { calls++; cancel() }})
	if !errors.Is(err, context.Canceled) || calls == 0 {
		t.Errorf("%v after %d calls of Progress", err, calls)
	}
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors, %d before", after, before)
	}
}

// TestProgress: the last call tells all, and agrees with the tree.
func TestProgress(t *testing.T) {
	var last Progress
	dir := oddTree(t)
	unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600)
	tr, err := Scan(context.Background(), dir, ScanOptions{Progress: func(p Progress) { last = p }})
	if err != nil {
		t.Fatal(err)
	}
	want := Progress{Dirs: 4, Files: 4, Bytes: 200010, Special: 1}
	if last != want || tr.Seen != want {
		t.Errorf("progress %+v, seen %+v, want %+v", last, tr.Seen, want)
	}
}

// TestSparse: a file of 8 GiB without blocks, and one of 1 EiB.
func TestSparse(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "a", 1)
	for name, size := range map[string]int64{"b": 8 << 30, "c": 1 << 60} {
		put(t, dir, name, 0)
		if err := os.Truncate(filepath.Join(dir, name), size); errors.Is(err, unix.EFBIG) {
			os.Remove(filepath.Join(dir, name))
		} else if err != nil {
			t.Fatal(err)
		}
	}
	put(t, dir, "d", 10)
	tr := mustScan(t, dir)
	n, _ := tr.Manifest.Resolve("b")
	a, _ := tr.Manifest.Attr(n)
	if a.Size != 8<<30 || a.Offset != 4096 || a.Blocks != 0 {
		t.Errorf("%+v", a)
	}
	if off := offset(t, tr, "d"); off < 4096+8<<30 {
		t.Errorf("the file behind begins at %d", off)
	}
}

// TestDevices are left out and counted.
func TestDevices(t *testing.T) {
	need.Root(t)
	dir := t.TempDir()
	for name, mode := range map[string]uint32{"null": unix.S_IFCHR, "disk": unix.S_IFBLK} {
		if err := unix.Mknod(filepath.Join(dir, name), mode|0o600, int(unix.Mkdev(1, 3))); err != nil {
			need.Skip(t, "mknod: "+err.Error())
		}
	}
	tr := mustScan(t, dir)
	if tr.Seen.Special != 2 || tr.Manifest.NumNodes() != 1 {
		t.Errorf("%+v, %d nodes", tr.Seen, tr.Manifest.NumNodes())
	}
}

// TestOwners are kept, of files, directories and symlinks.
func TestOwners(t *testing.T) {
	need.Root(t)
	dir := oddTree(t)
	for i, name := range []string{"c", "z", "l", ""} {
		if err := os.Lchown(filepath.Join(dir, name), 70000+i, 80000+i); err != nil {
			t.Fatal(err)
		}
	}
	m := mustScan(t, dir).Manifest
	for i, name := range []string{"c", "z", "l", ""} {
		n, _ := m.Resolve(name)
		if a, _ := m.Attr(n); a.UID != uint32(70000+i) || a.GID != uint32(80000+i) {
			t.Errorf("%q belongs to %d:%d", name, a.UID, a.GID)
		}
	}
}

// TestXattrs: many, empty, the largest, and those that are not user.*.
func TestXattrs(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "f", 1)
	want := map[string][]byte{}
	set := func(path, name string, value []byte) bool {
		err := unix.Setxattr(path, name, value, 0)
		if errors.Is(err, unix.ENOTSUP) {
			need.Skip(t, "extended attributes on "+dir)
		}
		return err == nil
	}
	for name, value := range map[string][]byte{
		"user.empty": {}, "user.z": []byte("z"), "user.bytes": {0, 1, 0xff}, "user.\xff\n": []byte("odd"),
		"user.big": bytes.Repeat([]byte("x"), 2000), "user.largest": bytes.Repeat([]byte("x"), maxXattrValue),
	} {
		if set(filepath.Join(dir, "f"), name, value) { // some are more than the file system takes
			want[name] = value
		}
	}
	if len(want) < 4 {
		t.Fatalf("only %d attributes could be set", len(want))
	}
	set(filepath.Join(dir, "f"), "trusted.hidden", []byte("x"))
	set(dir, "user.root", []byte("r"))
	m := mustScan(t, dir).Manifest
	n, _ := m.Resolve("f")
	names := m.ListXattr(n)
	if !slices.IsSorted(names) || len(names) != len(want) {
		t.Errorf("names %q, want %d of them", names, len(want))
	}
	for name, value := range want {
		if got, ok := m.Xattr(n, name); !ok || !bytes.Equal(got, value) {
			t.Errorf("%q: %d bytes, %v, want %d", name, len(got), ok, len(value))
		}
	}
	if got, ok := m.Xattr(Root, "user.root"); !ok || string(got) != "r" {
		t.Errorf("of the root: %q, %v", got, ok)
	}
}

// TestOtherMounts: the scan descends into a file system mounted below, and
// keeps its equal inode numbers apart.
func TestOtherMounts(t *testing.T) {
	need.Root(t)
	dir := t.TempDir()
	for _, d := range []string{"m1", "m2"} {
		at := filepath.Join(dir, d)
		os.Mkdir(at, 0o755)
		if err := unix.Mount("none", at, "tmpfs", 0, "size=1m"); err != nil {
			need.Skip(t, "mounting tmpfs: "+err.Error())
		}
		t.Cleanup(func() { unix.Unmount(at, unix.MNT_DETACH) })
		put(t, at, "f", 100)
		os.Link(filepath.Join(at, "f"), filepath.Join(at, "g"))
	}
	tr := mustScan(t, dir)
	a, _ := tr.Manifest.Resolve("m1/f")
	b, _ := tr.Manifest.Resolve("m2/f")
	if a == 0 || b == 0 || a == b || len(tr.Files) != 2 {
		t.Errorf("nodes %d and %d, files %+v", a, b, tr.Files)
	}
	if same := mustRescan(t, dir, tr); same != tr {
		t.Error("nothing changed, yet a new tree")
	}
}

// TestSymlinkRace swaps a directory and a symlink that leads out, while scans
// run: nothing from outside may ever be in a tree.
func TestSymlinkRace(t *testing.T) {
	dir, out := t.TempDir(), t.TempDir()
	put(t, out, "secret", 10)
	put(t, dir, "d/inside", 10)
	if err := os.Symlink(out, filepath.Join(dir, "l")); err != nil {
		t.Fatal(err)
	}
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				unix.Renameat2(unix.AT_FDCWD, filepath.Join(dir, "d"), unix.AT_FDCWD, filepath.Join(dir, "l"), unix.RENAME_EXCHANGE)
			}
		}
	}()
	defer func() { close(stop); <-stopped }()
	for range 200 {
		m := mustScan(t, dir).Manifest
		for _, p := range []string{"d/secret", "l/secret"} {
			if _, ok := m.Resolve(p); ok {
				t.Fatalf("%s is in the tree", p)
			}
		}
	}
}

// asHelper runs this test binary's function test in a process of its own, as
// another user where uid is not 0, with dir as its argument.
func asHelper(t *testing.T, test, dir string, uid uint32) {
	t.Helper()
	exe, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	place := t.TempDir()
	for p := place; p != "/" && p != os.TempDir(); p = filepath.Dir(p) {
		os.Chmod(p, 0o755)
	}
	bin := filepath.Join(place, "test")
	if err := os.WriteFile(bin, exe, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(bin, "-test.run=^"+test+"$", "-test.v")
	cmd.Dir = place
	cmd.Env = append(os.Environ(), "DATASET_HELPER="+dir, "GOCOVERDIR=")
	if uid != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	}
	out, err := cmd.CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("--- PASS")) {
		t.Errorf("%s: %v\n%s", test, err, out)
	}
}

// TestUnreadable scans as a user who may see and not read.
func TestUnreadable(t *testing.T) {
	need.Root(t)
	dir := t.TempDir()
	put(t, dir, "open", 10)
	put(t, dir, "closed", 20)
	put(t, dir, "dir/below", 30)
	put(t, dir, "listed/unseen", 40)
	os.Chmod(filepath.Join(dir, "closed"), 0o600)
	os.Chmod(filepath.Join(dir, "dir"), 0o700)
	os.Chmod(filepath.Join(dir, "listed"), 0o744)
	for p := dir; p != "/" && p != os.TempDir(); p = filepath.Dir(p) {
		os.Chmod(p, 0o755)
	}
	asHelper(t, "TestHelperUnreadable", dir, 65534)
}

func TestHelperUnreadable(t *testing.T) {
	dir := os.Getenv("DATASET_HELPER")
	if dir == "" {
		return // runs from TestUnreadable alone
	}
	var log bytes.Buffer
	tr, err := Scan(context.Background(), dir, ScanOptions{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	check(t, tr)
	// closed, dir, and unseen, which can be listed and not looked at.
	if tr.Seen.Unreadable != 3 || strings.Count(log.String(), "cannot read") != 3 {
		t.Errorf("%+v\n%s", tr.Seen, log.String())
	}
	n, ok := tr.Manifest.Resolve("closed")
	if a, _ := tr.Manifest.Attr(n); !ok || a.Size != 20 {
		t.Error("a file that cannot be read is not in the tree")
	}
	if n, ok := tr.Manifest.Resolve("dir"); !ok || tr.Manifest.NumEntries(n) != 0 {
		t.Error("a directory that cannot be read is not there, empty")
	}
	if _, ok := tr.Manifest.Resolve("listed/unseen"); ok {
		t.Error("a name without attributes is in the tree")
	}
	os.Chdir("/")
	if _, err := Scan(context.Background(), filepath.Join(dir, "dir"), ScanOptions{}); !errors.Is(err, fs.ErrPermission) {
		t.Errorf("the directory itself cannot be read: %v", err)
	}
}

// TestTooFewDescriptors: better no tree than one with holes.
func TestTooFewDescriptors(t *testing.T) {
	dir := t.TempDir()
	deep := dir
	for range 60 { // each level keeps one open, for the sibling
		put(t, deep, "z/f", 1)
		deep = filepath.Join(deep, "a")
	}
	put(t, deep, "f", 1)
	asHelper(t, "TestHelperTooFewDescriptors", dir, 0)
}

func TestHelperTooFewDescriptors(t *testing.T) {
	dir := os.Getenv("DATASET_HELPER")
	if dir == "" {
		return // runs from TestTooFewDescriptors alone
	}
	mustScan(t, dir) // the runtime opens its poller
	before := descriptors(t)
	var old unix.Rlimit
	unix.Getrlimit(unix.RLIMIT_NOFILE, &old)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(before) + 20, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	_, err := Scan(context.Background(), dir, ScanOptions{Workers: 1})
	unix.Setrlimit(unix.RLIMIT_NOFILE, &old)
	if !errors.Is(err, unix.EMFILE) || !strings.Contains(err.Error(), "ulimit -n") || strings.Contains(err.Error(), "\n") {
		t.Errorf("error %v", err)
	}
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors, %d before", after, before)
	}
	mustScan(t, dir)
}

// TestComplaintsAreBounded: a tree full of unreadable names does not flood the
// log.
func TestComplaintsAreBounded(t *testing.T) {
	var log bytes.Buffer
	sc := &scanner{log: slog.New(slog.NewTextHandler(&log, nil))}
	dir := &openDir{f: os.NewFile(1<<20, "dir")}
	for range 10 * maxComplaints {
		sc.trouble("stat", dir, "a\nb", unix.EACCES)
	}
	if n := strings.Count(log.String(), "\n"); n != maxComplaints || sc.unreadable.Load() != 10*maxComplaints {
		t.Errorf("%d lines, %d counted", n, sc.unreadable.Load())
	}
}

// TestMaxMemory: a tree beyond the limit is refused with one line.
func TestMaxMemory(t *testing.T) {
	dir := t.TempDir()
	for i := range 50 {
		put(t, dir, fmt.Sprintf("d/%d", i), 0)
	}
	before := descriptors(t)
	_, err := Scan(context.Background(), dir, ScanOptions{MaxMemory: 10_000})
	if !errors.Is(err, ErrTooLarge) || strings.Contains(err.Error(), "\n") {
		t.Error(err)
	}
	if _, err := Scan(context.Background(), dir, ScanOptions{MaxMemory: 100_000}); err != nil {
		t.Error(err)
	}
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors, %d before", after, before)
	}
}

// TestTooDeep: a tree of endless depth ends at a limit.
func TestTooDeep(t *testing.T) {
	dir := t.TempDir()
	at, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		t.Fatal(err)
	}
	for range maxDepth + 10 {
		if err := unix.Mkdirat(at, "d", 0o755); err != nil {
			t.Fatal(err)
		}
		sub, err := unix.Openat(at, "d", unix.O_RDONLY|unix.O_DIRECTORY, 0)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(at)
		at = sub
	}
	unix.Close(at)
	// os.RemoveAll would recurse as deep, with every level open.
	t.Cleanup(func() { exec.Command("rm", "-rf", filepath.Join(dir, "d")).Run() })
	tr := mustScan(t, dir)
	if tr.Manifest.NumNodes() != maxDepth+2 || tr.Seen.Unreadable != 1 {
		t.Errorf("%d nodes, %+v", tr.Manifest.NumNodes(), tr.Seen)
	}
}
