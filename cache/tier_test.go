// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"errors"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"rblk/cache/cachetest"
	"rblk/volume"
)

// tierVolume opens a dataset of size bytes with a tier in dir.
func tierVolume(t *testing.T, dir string, size, disk int64) (*Volume, *cachetest.Source) {
	t.Helper()
	src := cachetest.NewSource(size, cachetest.Options{Geometry: dataset})
	src.Fill(7)
	v := open(t, src, Options{Size: 32 << 20, Readahead: ReadaheadAuto, Dir: dir, DiskSize: disk})
	return v, src
}

// kept waits until the keeper has nothing to do.
func kept(t *testing.T, v *Volume) {
	t.Helper()
	eventually(t, "the tier has kept what came", func() bool {
		v.keeper.mu.Lock()
		defer v.keeper.mu.Unlock()
		return len(v.keeper.queue) == 0 && !v.keeper.busy
	})
}

// compare reads the whole volume past the memory and checks every byte. Memory
// holds the volume, so that no block is evicted before the keeper comes to it.
func compare(t *testing.T, v *Volume, src *cachetest.Source) {
	t.Helper()
	v.Drop()
	size := src.Geometry().Size
	want := make([]byte, 256<<10)
	for off := int64(0); off < size; off += int64(len(want)) {
		n := int(min(int64(len(want)), size-off))
		src.Peek(off, want[:n])
		w, err := v.Read(ctx, off, n)
		if err != nil {
			t.Fatal(err)
		}
		at := 0
		for _, s := range w.Slices() {
			if string(s) != string(want[at:at+len(s)]) {
				t.Fatalf("wrong bytes in [%d, %d)", off+int64(at), off+int64(at+len(s)))
			}
			at += len(s)
		}
		w.Release()
	}
	quiesce(t, v)
	kept(t, v)
}

func diskUsed(t *testing.T, dir string) (n int64) {
	t.Helper()
	filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if st, e := d.Info(); err == nil && e == nil && st.Mode().IsRegular() {
			n += st.Size()
		}
		return err
	})
	return n
}

// The second epoch does not cross the network, nor does the first after a
// restart.
func TestTierServesTheSecondEpoch(t *testing.T) {
	dir, size := t.TempDir(), int64(8<<20+5000)
	t.Run("first", func(t *testing.T) {
		v, src := tierVolume(t, dir, size, 64<<20)
		compare(t, v, src)
		first := src.Counters().ReadBytes
		compare(t, v, src)
		if n := src.Counters().ReadBytes - first; n > 4*pageSize {
			t.Errorf("the second epoch fetched %d bytes", n)
		}
	})
	t.Run("restarted", func(t *testing.T) {
		v, src := tierVolume(t, dir, size, 64<<20)
		compare(t, v, src)
		if n := src.Counters().ReadBytes; n > 4*pageSize { // the page at the end
			t.Errorf("fetched %d bytes", n)
		}
		if st := v.Stats(); st.Tier.HitBytes == 0 || st.Tier.Bytes == 0 {
			t.Errorf("%+v", st.Tier)
		}
	})
}

// Whatever happens to the files, the bytes are right.
func TestTierIsDamaged(t *testing.T) {
	for _, c := range []struct {
		name   string
		damage func(t *testing.T, home string)
	}{
		{"a bit of data", func(t *testing.T, home string) { flip(t, filepath.Join(home, "data"), 100_000) }},
		{"a bit of the index", func(t *testing.T, home string) { flip(t, filepath.Join(home, "index"), recordSize*3+50) }},
		{"data cut short", func(t *testing.T, home string) { cut(t, filepath.Join(home, "data"), 300_001) }},
		{"index cut short", func(t *testing.T, home string) { cut(t, filepath.Join(home, "index"), recordSize*5+7) }},
		{"data gone", func(t *testing.T, home string) { cut(t, filepath.Join(home, "data"), 0) }},
		{"records exchanged", func(t *testing.T, home string) {
			f := filepath.Join(home, "index")
			p, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			a, b := p[:recordSize], p[recordSize:2*recordSize]
			for i := range a {
				a[i], b[i] = b[i], a[i]
			}
			if err := os.WriteFile(f, p, 0o600); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			t.Run("fill", func(t *testing.T) {
				v, src := tierVolume(t, dir, 4<<20, 64<<20)
				compare(t, v, src)
			})
			homes, err := filepath.Glob(filepath.Join(dir, "*"))
			if err != nil || len(homes) != 1 {
				t.Fatal(homes, err)
			}
			c.damage(t, homes[0])
			v, src := tierVolume(t, dir, 4<<20, 64<<20)
			compare(t, v, src)
			if n := src.Counters().ReadBytes; n == 0 {
				t.Error("nothing was fetched again")
			}
			compare(t, v, src)
		})
	}
}

func flip(t *testing.T, file string, at int) {
	t.Helper()
	p, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	p[at] ^= 0x10
	if err := os.WriteFile(file, p, 0o600); err != nil {
		t.Fatal(err)
	}
}

func cut(t *testing.T, file string, size int64) {
	t.Helper()
	if err := os.Truncate(file, size); err != nil {
		t.Fatal(err)
	}
}

// The cap holds, for one layout and for several.
func TestTierCap(t *testing.T) {
	dir := t.TempDir()
	const disk = 2 << 20
	v, src := tierVolume(t, dir, 16<<20, disk)
	compare(t, v, src)
	compare(t, v, src)
	if n := diskUsed(t, dir); n > disk {
		t.Errorf("%d bytes on disk, cap %d", n, disk)
	}
	other := cachetest.NewSource(8<<20, cachetest.Options{Geometry: func(g *volume.Geometry) {
		dataset(g)
		g.Layout = "layout-2"
	}})
	if w, err := New(other, Options{Dir: dir, DiskSize: disk}); err == nil {
		w.Close()
		if n := diskUsed(t, dir); n > disk {
			t.Errorf("%d bytes on disk with a second layout, cap %d", n, disk)
		}
	} else {
		other.Close()
	}
}

// A layout is in use once: the second mount is told what to do.
func TestTierInUse(t *testing.T) {
	dir := t.TempDir()
	tierVolume(t, dir, 1<<20, 8<<20)
	src := cachetest.NewSource(1<<20, cachetest.Options{Geometry: dataset})
	defer src.Close()
	if v, err := New(src, Options{Dir: dir}); err == nil {
		v.Close()
		t.Fatal("no error")
	}
}

// A disk that is full keeps what it has and never fails a read. RLIMIT_FSIZE
// stands for it: writes beyond it fail with EFBIG.
func TestTierFullDisk(t *testing.T) {
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_FSIZE, &old); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	v, src := tierVolume(t, dir, 8<<20, 64<<20)
	if err := unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: 1 << 20, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	defer unix.Setrlimit(unix.RLIMIT_FSIZE, &old)
	compare(t, v, src)
	compare(t, v, src)
	if st := v.Stats().Tier; st.Errors != 1 || st.HitBytes == 0 {
		t.Errorf("%+v", st)
	}
}

// A tier whose files can be neither read nor written is given up, quietly for
// the reader.
func TestTierGone(t *testing.T) {
	v, src := tierVolume(t, t.TempDir(), 4<<20, 64<<20)
	compare(t, v, src)
	v.tier.closeFiles()
	compare(t, v, src)
}

// Writable volumes have no tier.
func TestTierNotForWritable(t *testing.T) {
	dir := t.TempDir()
	v := open(t, cachetest.NewSource(1<<20, cachetest.Options{}), Options{Dir: dir})
	readOn(t, v, 0, 1<<20, 64<<10)
	if v.tier != nil {
		t.Error("a tier")
	}
	if _, err := os.Stat(filepath.Join(dir, "data")); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}

// Random reads with evictions on both levels.
func TestTierModel(t *testing.T) {
	v, src := tierVolume(t, t.TempDir(), 16<<20, 6<<20)
	rng := rand.New(rand.NewPCG(3, 3))
	for i := range 3000 {
		if i%50 == 0 {
			v.Drop()
		}
		off := rng.Int64N(16<<20 - 200<<10)
		n := 1 + rng.IntN(200<<10)
		want := make([]byte, n)
		src.Peek(off, want)
		w, err := v.Read(ctx, off, n)
		if err != nil {
			t.Fatal(err)
		}
		got := make([]byte, n)
		w.CopyTo(got)
		w.Release()
		if string(got) != string(want) {
			t.Fatalf("wrong bytes at %d", off)
		}
	}
}
