// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"rblk/internal/need"
)

// noise is n reproducible bytes.
func noise(seed uint64, n int) []byte {
	var key [32]byte
	key[0], key[1] = byte(seed), byte(seed>>8)
	b := make([]byte, n)
	rand.NewChaCha8(key).Read(b)
	return b
}

// TestMemory: one writable file; what is written and fsynced is read back by
// this mount and by the next.
func TestMemory(t *testing.T) {
	tg := serve(t, "--memory", "scratch=64MiB")
	dir := mount(t, tg.uri("scratch"))
	path := filepath.Join(dir, "scratch")
	fi, err := os.Stat(path)
	if err != nil || fi.Size() != 64<<20 {
		t.Fatalf("%v, %v; want 64 MiB", fi, err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	want := make([]byte, 64<<20)
	for i, off := range []int{0, 4095, 1<<20 - 7, 10<<20 + 1, 64<<20 - 3000} {
		piece := noise(uint64(i), min(3<<20+i, len(want)-off))
		copy(want[off:], piece)
		if _, err := f.WriteAt(piece, int64(off)); err != nil {
			t.Fatalf("write at %d: %v", off, err)
		}
	}
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("read back: %v", err)
	}
	if _, err := f.WriteAt([]byte("x"), 64<<20); err == nil {
		t.Error("a write past the end succeeded")
	}
	f.Close()
	must(t, "rmount", "umount", dir)
	if got, err := os.ReadFile(filepath.Join(mount(t, tg.uri("scratch")), "scratch")); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("second mount: %v", err)
	}
}

// TestTargetKilled: kill -9 of rblkd while a mount reads and writes; the
// restarted daemon has every acknowledged byte and the mount goes on by itself.
func TestTargetKilled(t *testing.T) {
	tg := serve(t, "--memory", "scratch=16MiB")
	path := filepath.Join(mount(t, tg.uri("scratch"), "cache=none"), "scratch")
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const block = 64 << 10
	var stop atomic.Bool
	done := make(chan error, 1)
	acked := 0
	go func() {
		for i := 0; !stop.Load(); i++ {
			if _, err := f.WriteAt(noise(uint64(i), block), int64(i%256)*block); err != nil {
				done <- err
				return
			}
			acked = i + 1
		}
		done <- nil
	}()
	for range 3 {
		time.Sleep(200 * time.Millisecond) // let some work be under way; any amount is right
		tg.kill()
		tg.start()
	}
	stop.Store(true)
	select {
	case err := <-done:
		if err != nil {
			t.Fatalf("write over a killed target: %v", err)
		}
	case <-time.After(patience):
		t.Fatal("the mount did not find the restarted target")
	}
	if acked == 0 {
		t.Fatal("nothing was written")
	}
	buf := make([]byte, block)
	for slot := range min(acked, 256) {
		last := slot + (acked-1-slot)/256*256
		if _, err := f.ReadAt(buf, int64(slot)*block); err != nil || !bytes.Equal(buf, noise(uint64(last), block)) {
			t.Fatalf("slot %d of %d writes: %v, or not the last acknowledged bytes", slot, acked, err)
		}
	}
}

// TestRootMount: every export is a subdirectory.
func TestRootMount(t *testing.T) {
	src := oddTree(t)
	tg := serve(t, "--memory", "scratch=8MiB", "--dataset", "odd="+src)
	dir := mount(t, tg.uri(""))
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) != 2 || entries[0].Name() != "odd" || entries[1].Name() != "scratch" {
		t.Fatalf("entries %v, want odd and scratch", entries)
	}
	a, b := snapshot(t, src), snapshot(t, filepath.Join(dir, "odd"))
	// Of its directories the mount of all exports knows just the names, until
	// something in them is used.
	delete(a, ".")
	delete(b, ".")
	sameNodes(t, a, b)
	want := noise(1, 8<<20)
	vol := filepath.Join(dir, "scratch", "scratch")
	f, err := os.OpenFile(vol, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt(want, 0); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(vol); err != nil || !bytes.Equal(got, want) {
		t.Errorf("read back: %v", err)
	}
}

// daemonPID finds the daemon of a mount through its status.
func daemonPID(t *testing.T, dir string) int {
	t.Helper()
	var st struct {
		PID int `json:"pid"`
	}
	decode(t, must(t, "rmount", "stat", "--json", dir), &st)
	if st.PID <= 1 {
		t.Fatalf("no pid in the status of %s", dir)
	}
	return st.PID
}

// TestInitiatorKilled: the mount of a dead daemon answers with an error, is
// cleaned by umount, and is replaced by a new mount in its place.
func TestInitiatorKilled(t *testing.T) {
	tg := serve(t, "--memory", "scratch=8MiB")
	dir := mount(t, tg.uri("scratch"))
	kill := func() {
		t.Helper()
		if err := syscall.Kill(daemonPID(t, dir), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		eventually(t, "an error from a dead mount", func() bool {
			_, err := os.Stat(filepath.Join(dir, "scratch"))
			return errors.Is(err, syscall.ENOTCONN) || errors.Is(err, syscall.ECONNABORTED)
		})
	}
	kill()
	mountAt(t, tg.uri("scratch"), dir)
	if _, err := os.Stat(filepath.Join(dir, "scratch")); err != nil {
		t.Fatalf("replaced mount: %v", err)
	}
	kill()
	must(t, "rmount", "umount", dir)
	if mounted(t, dir) {
		t.Fatal("still mounted")
	}
}

// TestOneWriter: the second writer is told who holds the claim; --force fences
// the first.
func TestOneWriter(t *testing.T) {
	tg := serve(t, "--memory", "scratch=8MiB")
	first := mount(t, tg.uri("scratch"), "rw")
	r := run(t, "rmount", tg.uri("scratch"), t.TempDir(), "-o", "rw")
	oneLine(t, r, 1, "scratch", "127.0.0.1")
	ro := mount(t, tg.uri("scratch"), "ro")
	if _, err := os.OpenFile(filepath.Join(ro, "scratch"), os.O_WRONLY, 0); err == nil {
		t.Error("a read-only mount opened its file for writing")
	}
	second := mount(t, tg.uri("scratch"), "rw", "force")
	if err := os.WriteFile(filepath.Join(second, "scratch"), []byte("second"), 0); err != nil && !strings.Contains(err.Error(), "truncate") {
		t.Errorf("the new writer: %v", err)
	}
	f, err := os.OpenFile(filepath.Join(first, "scratch"), os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteAt([]byte("late"), 0)
		if serr := f.Sync(); err == nil {
			err = serr
		}
		f.Close()
	}
	if err == nil {
		t.Error("the fenced writer could still write")
	}
}

// TestHugePages: memory on hugetlbfs survives kill -9 as any other.
func TestHugePages(t *testing.T) {
	need.Root(t)
	const knob = "/proc/sys/vm/nr_hugepages"
	before, err := os.ReadFile(knob)
	if err != nil {
		need.Skip(t, "huge pages: "+err.Error())
	}
	have, err := strconv.Atoi(strings.TrimSpace(string(before)))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(knob, []byte(strconv.Itoa(have+8)), 0); err != nil {
		need.Skip(t, "huge pages: "+err.Error())
	}
	t.Cleanup(func() { os.WriteFile(knob, before, 0) })
	if now, err := os.ReadFile(knob); err != nil || strings.TrimSpace(string(now)) != strconv.Itoa(have+8) {
		need.Skip(t, "16 MiB of free memory in huge pages")
	}
	dir := t.TempDir()
	if err := syscall.Mount("none", dir, "hugetlbfs", 0, "pagesize=2M"); err != nil {
		need.Skip(t, "hugetlbfs: "+err.Error())
	}
	t.Cleanup(func() { syscall.Unmount(dir, syscall.MNT_DETACH) })
	tg := serve(t, "--memory", "huge=16MiB,hugepages=2MiB")
	in, out := filepath.Join(t.TempDir(), "in"), filepath.Join(t.TempDir(), "out")
	want := noise(40, 16<<20)
	if err := os.WriteFile(in, want, 0o644); err != nil {
		t.Fatal(err)
	}
	must(t, "rmount", "put", in, tg.uri("huge"))
	tg.kill()
	tg.start()
	must(t, "rmount", "get", tg.uri("huge"), out)
	if got, err := os.ReadFile(out); err != nil || !bytes.Equal(got, want) {
		t.Errorf("after kill -9: %v, or other bytes", err)
	}
}
