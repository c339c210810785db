// SPDX-License-Identifier: Apache-2.0

package dataset

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

func rewrite(t testing.TB, dir, name, content string) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestRescan: rule by rule.
func TestRescan(t *testing.T) {
	dir := t.TempDir()
	for _, n := range []string{"a", "b", "c", "sub/d"} {
		put(t, dir, n, 1000)
	}
	put(t, dir, "bb-empty", 0)
	one := mustScan(t, dir)
	if same := mustRescan(t, dir, one); same != one {
		t.Fatal("nothing changed, yet a new tree")
	}
	os.Remove(filepath.Join(dir, "a"))
	rewrite(t, dir, "b", "another content of another size")
	put(t, dir, "aa", 500)
	os.Rename(filepath.Join(dir, "sub"), filepath.Join(dir, "bus"))
	two := mustRescan(t, dir, one)
	if two.Manifest.Layout() != one.Manifest.Layout() || two.Manifest.Generation() != one.Manifest.Generation()+1 {
		t.Errorf("layout %s generation %d", two.Manifest.Layout(), two.Manifest.Generation())
	}
	if two.Manifest.Digest() == one.Manifest.Digest() {
		t.Error("another manifest of the same digest")
	}
	if offset(t, two, "c") != offset(t, one, "c") {
		t.Error("an unchanged file has moved")
	}
	if off := offset(t, one, "sub/d"); offset(t, two, "bus/d") != off {
		t.Error("an unchanged file of a renamed directory has moved")
	} else if f := two.Intersect(off, 1)[0]; f.Path != "bus/d" {
		t.Errorf("its path is %q", f.Path)
	}
	for _, name := range []string{"aa", "b"} {
		if offset(t, two, name) < one.Manifest.VolumeSize() {
			t.Errorf("%s uses a range again", name)
		}
	}
	for _, name := range []string{"a", "b"} {
		if f := two.Intersect(offset(t, one, name), 1); len(f) != 1 || !f[0].Stale || f[0].Path != "" {
			t.Errorf("the old range of %s: %+v", name, f)
		}
	}
	if got := two.StaleBytes(); got != 2000 {
		t.Errorf("%d stale bytes, want 2000", got)
	}
	if three := mustRescan(t, dir, two); three != two {
		t.Error("third scan: a new tree")
	}
	os.Remove(filepath.Join(dir, "c"))
	four := mustRescan(t, dir, two)
	if four == two {
		t.Error("a file less was not seen")
	}
	if four.Manifest.VolumeSize() != two.Manifest.VolumeSize() {
		t.Error("the volume has another size, but no new file")
	}
}

// TestRescanDirectory: a difference without any file's is a difference.
func TestRescanDirectory(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "a", 10)
	last := mustScan(t, dir)
	for name, change := range map[string]func() error{
		"mkdir":   func() error { return os.Mkdir(filepath.Join(dir, "d"), 0o755) },
		"chmod":   func() error { return os.Chmod(dir, 0o700) },
		"symlink": func() error { return os.Symlink("a", filepath.Join(dir, "l")) },
		"empty":   func() error { return os.WriteFile(filepath.Join(dir, "e"), nil, 0o644) },
	} {
		if err := change(); err != nil {
			t.Fatal(err)
		}
		next := mustRescan(t, dir, last)
		if next == last || next.Manifest.Generation() != last.Manifest.Generation()+1 {
			t.Errorf("%s: not seen", name)
		}
		if offset(t, next, "a") != offset(t, last, "a") {
			t.Errorf("%s: a file has moved", name)
		}
		last = next
	}
}

// TestBoundInTwoPlaces: the same inode under two paths, without being a hard
// link, settles after one rescan.
func TestBoundInTwoPlaces(t *testing.T) {
	file := func(name string) found {
		return found{name: name, mode: unix.S_IFREG, nlink: 1, id: Ident{Dev: 1, Ino: 7, Size: 100}}
	}
	build := func(prev *Tree, names ...string) *Tree {
		root := &found{mode: unix.S_IFDIR, dir: &foundDir{}}
		for _, n := range names {
			root.dir.names = append(root.dir.names, file(n))
		}
		b := newBuilder(prev)
		if err := b.root(context.Background(), root); err != nil {
			t.Fatal(err)
		}
		tr := b.tree(prev.Manifest.Generation() + 1)
		check(t, tr)
		return tr
	}
	one := build(&Tree{Manifest: &Manifest{layout: "x"}}, "a", "b")
	if two := build(one, "a", "b"); !two.Manifest.same(one.Manifest) {
		t.Error("nothing changed, yet it differs")
	}
	three := build(one, "a", "b", "c")
	if three.Manifest.VolumeSize() != one.Manifest.VolumeSize() {
		t.Error("a third place of the same file has its own range")
	}
}

// TestVolumeLimit: files whose sum is beyond an int64 are refused, not wrapped.
func TestVolumeLimit(t *testing.T) {
	root := &found{mode: unix.S_IFDIR, dir: &foundDir{}}
	for i := range 3 {
		root.dir.names = append(root.dir.names, found{
			name: fmt.Sprint(i), mode: unix.S_IFREG, nlink: 1, id: Ident{Ino: uint64(i), Size: 1 << 62},
		})
	}
	b := newBuilder(&Tree{Manifest: &Manifest{layout: "x"}})
	if err := b.root(context.Background(), root); !errors.Is(err, ErrTooLarge) {
		t.Errorf("%v, want %v", err, ErrTooLarge)
	}
}

func TestSettle(t *testing.T) {
	now := time.Unix(1000, 500)
	for _, c := range []struct{ age, want time.Duration }{
		{time.Hour, 0}, {2 * time.Second, 0}, {time.Second, time.Second}, {0, 2 * time.Second},
		{-time.Second, 3 * time.Second}, {-time.Hour, 0},
	} {
		ctime := now.Add(-c.age)
		id := Ident{CtimeSec: ctime.Unix(), CtimeNsec: int64(ctime.Nanosecond())}
		if got := id.Settle(now); got != c.want {
			t.Errorf("changed %v ago: %v, want %v", c.age, got, c.want)
		}
	}
}

// TestLayoutModel changes a tree at random and rescans it, and remembers every
// range ever given: whoever caches by (layout, offset) must never be wrong.
func TestLayoutModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		dir, err := os.MkdirTemp("", "layout")
		if err != nil {
			rt.Fatal(err)
		}
		defer os.RemoveAll(dir)
		m := &model{t: t, dir: dir, given: map[int64]string{}}
		os.Mkdir(filepath.Join(dir, "d0"), 0o755)
		os.Mkdir(filepath.Join(dir, "d1"), 0o755)
		tree := mustScan(t, dir)
		m.verify(rt, tree)
		for range rapid.IntRange(1, 4).Draw(rt, "rescans") {
			for range rapid.IntRange(0, 5).Draw(rt, "changes") {
				m.change(rt)
			}
			next := mustRescan(t, dir, tree)
			if (next == tree) != (next.Manifest.Generation() == tree.Manifest.Generation()) || next.Manifest.Layout() != tree.Manifest.Layout() {
				rt.Errorf("generation %d after %d", next.Manifest.Generation(), tree.Manifest.Generation())
			}
			if tree = next; rapid.Bool().Draw(rt, "restart") {
				if tree, err = Load(tree.Save()); err != nil {
					rt.Fatal(err)
				}
			}
			m.verify(rt, tree)
		}
		if again := mustRescan(t, dir, tree); again != tree {
			rt.Error("nothing changed, yet a new tree")
		}
	})
}

type model struct {
	t       *testing.T
	dir     string
	version int
	given   map[int64]string // first offset → content, of every range ever given
}

func (m *model) path(rt *rapid.T, label string) string {
	return filepath.Join(m.dir, rapid.SampledFrom([]string{"", "d0", "d1"}).Draw(rt, label+" dir"),
		rapid.SampledFrom([]string{"a", "b", "c"}).Draw(rt, label))
}

// change does one random thing; that it may fail is part of the game.
func (m *model) change(rt *rapid.T) {
	p := m.path(rt, "path")
	switch rapid.SampledFrom([]string{"write", "write", "remove", "rename", "link", "chmod", "dirs"}).Draw(rt, "op") {
	case "write":
		m.version++
		size := rapid.SampledFrom([]int{0, 1, 100, alignFrom, alignFrom + 1}).Draw(rt, "size")
		content := bytes.Repeat([]byte(fmt.Sprintf("%08d", m.version)), size/8+1)[:size]
		os.WriteFile(p, content, 0o644)
		// Two writes within a tick of the clock would be alike; a target waits
		// that long before it reads (Settle).
		os.Chtimes(p, time.Time{}, time.Unix(int64(m.version), 0))
	case "remove":
		os.Remove(p)
	case "rename":
		os.Rename(p, m.path(rt, "to"))
	case "link":
		os.Link(p, m.path(rt, "to"))
	case "chmod":
		os.Chmod(p, os.FileMode(rapid.SampledFrom([]int{0o600, 0o644, 0o755}).Draw(rt, "mode")))
	case "dirs":
		d0, d1, tmp := filepath.Join(m.dir, "d0"), filepath.Join(m.dir, "d1"), filepath.Join(m.dir, "tmp")
		os.Rename(d0, tmp)
		os.Rename(d1, d0)
		os.Rename(tmp, d1)
	}
}

// verify reads every live range as a target does, and compares it with what was
// ever given at that offset.
func (m *model) verify(rt *rapid.T, tree *Tree) {
	end := int64(-1)
	for off, content := range m.given {
		end = max(end, (off+int64(len(content))-1)/growBy)
	}
	for _, f := range tree.Files {
		if f.Stale {
			continue
		}
		b, err := os.ReadFile(filepath.Join(m.dir, f.Path))
		if err != nil || int64(len(b)) != f.Size {
			rt.Fatalf("%q: %d bytes, %v", f.Path, len(b), err)
		}
		old, known := m.given[f.Offset]
		if known && old != string(b) {
			rt.Errorf("%q at %d: other bytes than before", f.Path, f.Offset)
		}
		if !known && f.Offset/growBy <= end {
			rt.Errorf("%q at %d: in an extent that was given before", f.Path, f.Offset)
		}
	}
	for _, f := range tree.Files {
		if !f.Stale {
			b, _ := os.ReadFile(filepath.Join(m.dir, f.Path))
			m.given[f.Offset] = string(b)
		}
	}
	// What is no longer there is stale, not forgotten.
	for off, content := range m.given {
		if fs := tree.Intersect(off, int64(len(content))); len(fs) == 0 || !fs[0].Stale && fs[0].Offset != off {
			rt.Errorf("the range at %d is forgotten: %+v", off, fs)
		}
	}
}
