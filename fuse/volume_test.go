// SPDX-License-Identifier: Apache-2.0

package fuse

import (
	"bytes"
	"errors"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"rblk/internal/need"
	"rblk/volume"
)

const volumeSize = 8<<20 + 4096

// openVolume mounts a writable volume and opens its file.
func openVolume(t *testing.T, direct bool) (f *os.File, src *source, dir string) {
	t.Helper()
	v, src := mustSource(t, pattern(volumeSize), nil)
	dir, _ = shown(t, &Export{Name: "vol", Volume: v, Direct: direct}, Options{Source: "test"})
	primePoll(t, dir+"/vol")
	f, err := os.OpenFile(dir+"/vol", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f, src, dir
}

// TestVolume uses the file as programs use a disk, through the kernel's pages
// and past them.
func TestVolume(t *testing.T) {
	for name, direct := range map[string]bool{"cached": false, "direct": true} {
		t.Run(name, func(t *testing.T) {
			f, src, dir := openVolume(t, direct)
			want := pattern(volumeSize)
			check := func(what string) {
				t.Helper()
				got := make([]byte, volumeSize)
				if n, err := f.ReadAt(got, 0); n != volumeSize || err != nil {
					t.Fatalf("%s: read %d bytes: %v", what, n, err)
				}
				if !bytes.Equal(got, want) {
					t.Errorf("%s: what is read differs", what)
				}
				if err := f.Sync(); err != nil {
					t.Errorf("%s: fsync: %v", what, err)
				}
				if !src.holds(want) {
					t.Errorf("%s: what the volume holds differs", what)
				}
			}
			check("untouched")
			for i, off := range []int{0, 1, 4095, 1<<20 - 7, 3 << 20, volumeSize - 5} {
				piece := bytes.Repeat([]byte{byte(200 + i)}, min(2<<20+i, volumeSize-off))
				copy(want[off:], piece)
				if n, err := f.WriteAt(piece, int64(off)); n != len(piece) || err != nil {
					t.Fatalf("write at %d: %d, %v", off, n, err)
				}
			}
			check("written")
			if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 || entries[0].Name() != "vol" {
				t.Errorf("the directory holds %v, %v", entries, err)
			}
		})
	}
}

// TestVolumeEnd writes at and behind the end.
func TestVolumeEnd(t *testing.T) {
	f, src, dir := openVolume(t, false)
	if n, err := unix.Pwrite(int(f.Fd()), make([]byte, 100), volumeSize-40); n != 40 || err != nil {
		t.Errorf("across the end: %d, %v; want 40 bytes", n, err)
	}
	if n, err := f.WriteAt([]byte{1}, volumeSize); n != 0 || !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("behind the end: %d, %v; want ENOSPC", n, err)
	}
	if n, err := f.ReadAt(make([]byte, 100), volumeSize-40); n != 40 {
		t.Errorf("reading across the end: %d, %v", n, err)
	}
	if err := os.Truncate(dir+"/vol", 10); !errors.Is(err, syscall.EPERM) {
		t.Errorf("shrink: %v, want EPERM", err)
	}
	if err := os.Truncate(dir+"/vol", 1<<40); !errors.Is(err, syscall.EFBIG) {
		t.Errorf("grow: %v, want EFBIG", err)
	}
	if err := os.Truncate(dir+"/vol", volumeSize); err != nil {
		t.Errorf("the same size: %v", err)
	}
	// As `cp image vol` does it: the file stays as long as it is.
	if err := os.WriteFile(dir+"/vol", []byte("head"), 0); err != nil {
		t.Errorf("O_TRUNC: %v", err)
	}
	st, err := os.Stat(dir + "/vol")
	if err != nil || st.Size() != volumeSize {
		t.Errorf("after O_TRUNC: %v, %v", st, err)
	}
	want := pattern(volumeSize)
	copy(want, "head")
	clear(want[volumeSize-40:])
	if got, err := os.ReadFile(dir + "/vol"); err != nil || !bytes.Equal(got, want) || !src.holds(want) {
		t.Errorf("content after O_TRUNC: %d bytes, %v", len(got), err)
	}
	for what, err := range map[string]error{
		"chmod": os.Chmod(dir+"/vol", 0o777), "chown": os.Chown(dir+"/vol", 1, 1), "remove": os.Remove(dir + "/vol"),
		"mkdir": os.Mkdir(dir+"/d", 0o755), "create": os.WriteFile(dir+"/new", nil, 0o644), "rename": os.Rename(dir+"/vol", dir+"/x"),
		"symlink": os.Symlink("a", dir+"/b"), "link": os.Link(dir+"/vol", dir+"/b"),
	} {
		if !errors.Is(err, syscall.EPERM) {
			t.Errorf("%s: %v, want EPERM", what, err)
		}
	}
}

func TestVolumeFallocate(t *testing.T) {
	f, src, _ := openVolume(t, false)
	want := pattern(volumeSize)
	const punch = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
	fd := int(f.Fd())
	for _, c := range []struct {
		mode     uint32
		off, len int64
		err      error
	}{
		{0, 0, 4096, nil},
		{punch, 8192, 1 << 20, nil},
		{unix.FALLOC_FL_ZERO_RANGE, 5 << 20, 123, nil},
		{0, volumeSize - 10, 20, syscall.EFBIG},
		{unix.FALLOC_FL_COLLAPSE_RANGE, 0, 4096, syscall.EOPNOTSUPP},
	} {
		if err := unix.Fallocate(fd, c.mode, c.off, c.len); !errors.Is(err, c.err) {
			t.Errorf("fallocate(%#x, %d, %d): %v, want %v", c.mode, c.off, c.len, err, c.err)
		}
	}
	clear(want[8192 : 8192+1<<20])
	clear(want[5<<20 : 5<<20+123])
	got := make([]byte, volumeSize)
	if _, err := f.ReadAt(got, 0); err != nil || !bytes.Equal(got, want) || !src.holds(want) {
		t.Errorf("content after fallocate differs: %v", err)
	}
}

// TestVolumeMmap writes through a shared mapping. Another process does that: a
// thread that waits for a page fault cannot be stopped, so the garbage
// collector of the process that has to serve the fault would wait for itself.
func TestVolumeMmap(t *testing.T) {
	for name, direct := range map[string]bool{"cached": false, "direct": true} {
		t.Run(name, func(t *testing.T) {
			_, src, dir := openVolume(t, direct)
			want := pattern(volumeSize)
			out, err := selfCommand(t, mmapEnv, dir+"/vol").CombinedOutput()
			if direct && strings.Contains(string(out), syscall.ENODEV.Error()) {
				need.Skip(t, "a kernel with shared mappings beside direct I/O (6.6)")
			}
			if err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			for _, off := range mappedOffsets {
				copy(want[off:], mappedText)
			}
			if !src.holds(want) {
				t.Error("the volume differs from the mapping")
			}
		})
	}
}

const (
	mmapEnv    = "RBLK_TEST_MMAP"
	mappedText = "through the mapping"
)

var mappedOffsets = []int{0, 4096 + 17, 3<<20 - 1, volumeSize - 3}

// mapVolume is the other process of TestVolumeMmap.
func mapVolume(path string) error {
	fd, err := unix.Open(path, unix.O_RDWR, 0)
	if err != nil {
		return err
	}
	mem, err := unix.Mmap(fd, 0, volumeSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	if !bytes.Equal(mem, pattern(volumeSize)) {
		return errors.New("the mapping differs from the volume")
	}
	for _, off := range mappedOffsets {
		copy(mem[off:], mappedText)
	}
	return unix.Msync(mem, unix.MS_SYNC)
}

// TestVolumeODirect reads and writes with O_DIRECT, from many threads.
func TestVolumeODirect(t *testing.T) {
	_, src, dir := openVolume(t, false)
	fd, err := unix.Open(dir+"/vol", unix.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	const threads = 8
	part := volumeSize / threads / 4096 * 4096
	var all sync.WaitGroup
	for i := range threads {
		all.Go(func() {
			buf := aligned(part)
			off := int64(i * part)
			if n, err := unix.Pread(fd, buf, off); n != part || err != nil {
				t.Errorf("read: %d, %v", n, err)
			}
			if !bytes.Equal(buf, pattern(volumeSize)[off:off+int64(part)]) {
				t.Error("what was read differs")
			}
			for j := range buf {
				buf[j] ^= 0xff
			}
			if n, err := unix.Pwrite(fd, buf, off); n != part || err != nil {
				t.Errorf("write: %d, %v", n, err)
			}
		})
	}
	all.Wait()
	want := pattern(volumeSize)
	for i := range threads * part {
		want[i] ^= 0xff
	}
	if !src.holds(want) {
		t.Error("what was written differs")
	}
}

// aligned is n bytes that O_DIRECT takes.
func aligned(n int) []byte {
	b := make([]byte, n+4096)
	skip := -int(uintptr(unsafe.Pointer(&b[0]))) & 4095
	return b[skip : skip+n : skip+n]
}

func TestVolumeReadOnly(t *testing.T) {
	v, _ := mustSource(t, pattern(volumeSize), func(g *volume.Geometry) { g.ReadOnly = true })
	dir, _ := shown(t, &Export{Name: "vol", Volume: v}, Options{Source: "test"})
	primePoll(t, dir+"/vol")
	if _, err := os.OpenFile(dir+"/vol", os.O_RDWR, 0); !errors.Is(err, syscall.EROFS) {
		t.Errorf("opening for write: %v", err)
	}
	if got, err := os.ReadFile(dir + "/vol"); err != nil || !bytes.Equal(got, pattern(volumeSize)) {
		t.Errorf("reading: %d bytes, %v", len(got), err)
	}
}

// TestVolumeErrors passes on how the volume fails.
func TestVolumeErrors(t *testing.T) {
	f, src, _ := openVolume(t, true)
	for i, c := range []struct {
		fail error
		want syscall.Errno
	}{{volume.ErrAway, syscall.EIO}, {volume.ErrFenced, syscall.EIO}, {volume.ErrNoSpace, syscall.ENOSPC}} {
		src.fail(c.fail)
		off := int64(i) << 20 // not cached yet
		if _, err := f.ReadAt(make([]byte, 10), off); !errors.Is(err, c.want) {
			t.Errorf("read, %v: %v", c.fail, err)
		}
		if _, err := f.WriteAt(make([]byte, 10), off); !errors.Is(err, c.want) {
			t.Errorf("write, %v: %v", c.fail, err)
		}
	}
	src.fail(nil)
}

// TestVolumeEvents grows a volume, and loses its content, under an open file.
func TestVolumeEvents(t *testing.T) {
	f, src, dir := openVolume(t, false)
	if _, err := f.ReadAt(make([]byte, volumeSize), 0); err != nil {
		t.Fatal(err) // all of it is in the kernel's pages
	}
	src.Resize(volumeSize + 4096)
	eventually(t, "the new size", func() bool {
		st, err := os.Stat(dir + "/vol")
		return err == nil && st.Size() == volumeSize+4096
	})
	if n, err := f.ReadAt(make([]byte, 4096), volumeSize); n != 4096 || err != nil {
		t.Errorf("the new end: %d, %v", n, err)
	}
	src.LoseContent("i2")
	eventually(t, "an error for what was cached", func() bool {
		_, err := f.ReadAt(make([]byte, 4096), 4096)
		return errors.Is(err, syscall.EIO)
	})
}

// TestVolumeBlocks writes any range to a volume that takes whole blocks only,
// from many threads at once.
func TestVolumeBlocks(t *testing.T) {
	const block = 512
	v, src := mustSource(t, pattern(volumeSize), func(g *volume.Geometry) { g.BlockSize = block })
	dir, _ := shown(t, &Export{Name: "vol", Volume: v, Direct: true}, Options{Source: "test"})
	primePoll(t, dir+"/vol")
	f, err := os.OpenFile(dir+"/vol", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	want := pattern(volumeSize)
	var all sync.WaitGroup
	const threads, step = 8, 100 // steps meet inside blocks
	for i := range threads {
		piece := bytes.Repeat([]byte{byte(i + 1)}, step)
		for off := i * step; off+step < 100<<10; off += threads * step {
			copy(want[off:], piece)
		}
		all.Go(func() {
			for off := i * step; off+step < 100<<10; off += threads * step {
				if n, err := f.WriteAt(piece, int64(off)); n != step || err != nil {
					t.Errorf("write at %d: %d, %v", off, n, err)
				}
			}
		})
	}
	all.Wait()
	for _, c := range [][2]int{{1 << 20, 1 << 20}, {3<<20 + 1, 1<<20 + 700}, {5<<20 + 511, 2}, {volumeSize - 1, 1}} {
		piece := bytes.Repeat([]byte{0xee}, c[1])
		copy(want[c[0]:], piece)
		if n, err := f.WriteAt(piece, int64(c[0])); n != c[1] || err != nil {
			t.Errorf("write of %d at %d: %d, %v", c[1], c[0], n, err)
		}
	}
	if !src.holds(want) {
		t.Error("the volume differs")
	}
}
