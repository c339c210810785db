// SPDX-License-Identifier: Apache-2.0

package fuse

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"testing"

	"rblk/dataset"
	"rblk/volume"
)

// testDirectory is a target with one dataset and one volume.
type testDirectory struct {
	t      *testing.T
	source string // of the dataset

	mu     sync.Mutex
	names  []Listed // guarded by mu
	err    error    // guarded by mu: how List and Open fail
	opened []string // guarded by mu
	ends   []<-chan struct{}
	data   *source       // of the dataset, once it is open
	tree   *dataset.Tree // its newest generation
}

// rescan makes a new generation of the dataset.
func (d *testDirectory) rescan() {
	d.t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	tree, err := dataset.Rescan(context.Background(), d.source, d.tree, dataset.ScanOptions{})
	if err != nil {
		d.t.Fatal(err)
	}
	d.tree = tree
	d.data.Resize(tree.Manifest.VolumeSize())
	d.data.Poke(0, content(d.t, d.source, tree))
	d.data.Emit(volume.Event{Kind: volume.EventGeneration})
}

func (d *testDirectory) List(context.Context) ([]Listed, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.names), d.err
}

func (d *testDirectory) Open(_ context.Context, name string) (*Export, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.err != nil {
		return nil, d.err
	}
	d.opened = append(d.opened, name)
	if name == "data" {
		e, src, tree := scanned(d.t, d.source)
		e.Reload = func(context.Context) (*dataset.Manifest, error) { return d.tree.Manifest, nil }
		d.data, d.tree = src, tree
		d.ends = append(d.ends, src.closed)
		return e, nil
	}
	v, src := mustSource(d.t, pattern(volumeSize), nil)
	d.ends = append(d.ends, src.closed)
	return &Export{Name: name, Volume: v}, nil
}

func (d *testDirectory) uses() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.opened)
}

// TestDirectory mounts all exports: each is opened on first use, once, and
// closed at the end.
func TestDirectory(t *testing.T) {
	d := &testDirectory{t: t, source: oddTree(t), names: []Listed{{"vol", false}, {"data", true}}}
	dir := mountPoint(t)
	m, err := MountDirectory(dir, d, Options{Source: "rblk://host/"}, testLog(t))
	if err != nil {
		t.Fatal(err)
	}
	closed := false
	defer func() {
		if !closed {
			ended(t, m)
		}
	}()
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 2 || entries[0].Name() != "data" || entries[1].Name() != "vol" {
		t.Fatalf("exports %v, %v", entries, err)
	}
	if st, err := os.Stat(dir + "/vol"); err != nil || !st.IsDir() {
		t.Errorf("vol: %v, %v", st, err)
	}
	if _, err := os.Stat(dir + "/none"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("an export that does not exist: %v", err)
	}
	if got := d.uses(); len(got) != 0 {
		t.Errorf("looking at the list has opened %v", got)
	}

	d.set(errors.Join(volume.ErrAway))
	if _, err := os.ReadDir(dir + "/data"); !errors.Is(err, syscall.EIO) {
		t.Errorf("an export that does not open: %v", err)
	}
	d.set(nil)
	primePoll(t, dir+"/data/attr")
	sameTree(t, d.source, dir+"/data")
	if err := os.WriteFile(dir+"/vol/vol", []byte("head"), 0); err != nil {
		t.Fatal(err)
	}
	want := pattern(volumeSize)
	copy(want, "head")
	if got, err := os.ReadFile(dir + "/vol/vol"); err != nil || !bytes.Equal(got, want) {
		t.Errorf("the volume: %d bytes, %v", len(got), err)
	}
	for _, err := range []error{
		os.WriteFile(dir+"/data/attr", nil, 0o644), os.Mkdir(dir+"/data/d", 0o755), os.Mkdir(dir+"/d", 0o755), os.Remove(dir + "/vol"),
	} {
		if !errors.Is(err, syscall.EROFS) && !errors.Is(err, syscall.EPERM) {
			t.Errorf("a change: %v, want EROFS or EPERM", err)
		}
	}
	if err := os.WriteFile(d.source+"/fresh", []byte("fresh"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(d.source + "/empty"); err != nil {
		t.Fatal(err)
	}
	d.rescan()
	eventually(t, "the new generation", func() bool {
		_, err := os.Stat(dir + "/data/fresh")
		return err == nil
	})
	sameTree(t, d.source, dir+"/data")
	var top, up, sub, below syscall.Stat_t
	for path, st := range map[string]*syscall.Stat_t{"/": &top, "/data/..": &up, "/data": &sub, "/data/sub/..": &below} {
		if err := syscall.Lstat(dir+path, st); err != nil {
			t.Fatal(err)
		}
	}
	if top.Ino != up.Ino || sub.Ino != below.Ino || top.Ino == sub.Ino {
		t.Errorf("inodes: top %d, from below %d; export %d, from below %d", top.Ino, up.Ino, sub.Ino, below.Ino)
	}
	if got := d.uses(); !slices.Equal(got, []string{"data", "vol"}) {
		t.Errorf("opened %v, want each once", got)
	}
	ended(t, m)
	closed = true
	for _, end := range d.ends {
		wait(t, end, "the export's end")
	}
}

func (d *testDirectory) set(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.err = err
}

// TestKillBlockedReader kills a process that waits for a target that does not
// answer: with the kernel's pages, without them, and through O_DIRECT.
func TestKillBlockedReader(t *testing.T) {
	for _, c := range []struct {
		name   string
		direct bool
		args   []string
	}{
		{"cached", false, []string{"bs=64k"}},
		{"cached O_DIRECT", false, []string{"bs=1M", "iflag=direct"}},
		{"direct", true, []string{"bs=64k"}},
		{"direct O_DIRECT", true, []string{"bs=4M", "iflag=direct"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			v, src := mustSource(t, pattern(volumeSize), nil)
			dir, _ := shown(t, &Export{Name: "vol", Volume: v, Direct: c.direct}, Options{Source: "test"})
			src.Hold()
			defer src.Resume()
			cmd := exec.Command("dd", append(c.args, "if="+dir+"/vol", "of=/dev/null")...)
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			eventually(t, "a read under way", func() bool { return src.Waiting() > 0 })
			cmd.Process.Kill()
			if err := cmd.Wait(); err == nil {
				t.Error("dd was not killed")
			}
		})
	}
}
