// SPDX-License-Identifier: Apache-2.0

package dataset

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func mustOpen(t *testing.T, dir, state string) *Tree {
	t.Helper()
	tr, err := Open(context.Background(), dir, state, ScanOptions{})
	if err != nil {
		t.Fatal(err)
	}
	check(t, tr)
	return tr
}

// TestRestart: the layout, the offsets and the generation go on.
func TestRestart(t *testing.T) {
	dir, state := t.TempDir(), filepath.Join(t.TempDir(), "corpus.layout")
	put(t, dir, "a", 100)
	put(t, dir, "b", 200)
	one := mustOpen(t, dir, state)
	again := mustOpen(t, dir, state)
	if again.Manifest.Digest() != one.Manifest.Digest() {
		t.Error("nothing changed, yet another manifest after a restart")
	}
	os.Remove(filepath.Join(dir, "a"))
	put(t, dir, "c", 50)
	two := mustOpen(t, dir, state) // changed while the target was away
	if two.Manifest.Layout() != one.Manifest.Layout() || two.Manifest.Generation() != one.Manifest.Generation()+1 {
		t.Errorf("layout %s, generation %d", two.Manifest.Layout(), two.Manifest.Generation())
	}
	if offset(t, two, "b") != offset(t, one, "b") || offset(t, two, "c") != one.Manifest.VolumeSize() {
		t.Errorf("b at %d, c at %d", offset(t, two, "b"), offset(t, two, "c"))
	}
	put(t, dir, "d", 60)
	three, err := Refresh(context.Background(), dir, state, two, ScanOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if four := mustOpen(t, dir, state); four.Manifest.Digest() != three.Manifest.Digest() {
		t.Error("what Refresh returned was not saved")
	}
	if same, err := Refresh(context.Background(), dir, state, three, ScanOptions{}); err != nil || same != three {
		t.Errorf("nothing changed: %v, or a new tree", err)
	}
	if names, _ := os.ReadDir(filepath.Dir(state)); len(names) != 1 {
		t.Errorf("left beside the state: %v", names)
	}
}

// TestBadState: whatever is wrong with it, a new layout begins, with one line
// in the log.
func TestBadState(t *testing.T) {
	dir, state := t.TempDir(), filepath.Join(t.TempDir(), "s")
	put(t, dir, "a", 100)
	one := mustOpen(t, dir, state)
	good, err := os.ReadFile(state)
	if err != nil {
		t.Fatal(err)
	}
	flipped := bytes.Clone(good)
	flipped[len(flipped)/2]++
	for name, bad := range map[string][]byte{"empty": {}, "cut": good[:len(good)-1], "flipped": flipped, "text": []byte("hello")} {
		if err := os.WriteFile(state, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		var log bytes.Buffer
		tr, err := Open(context.Background(), dir, state, ScanOptions{Logger: slog.New(slog.NewTextHandler(&log, nil))})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if tr.Manifest.Layout() == one.Manifest.Layout() || strings.Count(log.String(), "level=WARN") != 1 {
			t.Errorf("%s: layout %s\n%s", name, tr.Manifest.Layout(), log.String())
		}
		if again := mustOpen(t, dir, state); again.Manifest.Digest() != tr.Manifest.Digest() {
			t.Errorf("%s: the new layout was not saved", name)
		}
	}
}

// TestNoState: without a place to save there is a new layout each time.
func TestNoState(t *testing.T) {
	dir := t.TempDir()
	one, two := mustOpen(t, dir, ""), mustOpen(t, dir, "")
	if one.Manifest.Layout() == two.Manifest.Layout() {
		t.Error("the same layout twice")
	}
}

// TestUnsavable: a tree that cannot be saved is not to be served.
func TestUnsavable(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "a", 100)
	nowhere := filepath.Join(t.TempDir(), "none", "s")
	if tr, err := Open(context.Background(), dir, nowhere, ScanOptions{}); tr != nil || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v, %v", tr, err)
	}
	prev := mustScan(t, dir)
	put(t, dir, "b", 100)
	if tr, err := Refresh(context.Background(), dir, nowhere, prev, ScanOptions{}); tr != nil || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("%v, %v", tr, err)
	}
	if _, err := Open(context.Background(), dir, t.TempDir(), ScanOptions{}); err == nil || errors.Is(err, ErrCorrupt) {
		t.Errorf("the state is a directory: %v", err)
	}
}

// failing is a writer that has room for n bytes.
type failing struct{ n int }

var errFull = errors.New("full")

func (w *failing) Write(p []byte) (int, error) {
	if len(p) > w.n {
		return 0, errFull
	}
	w.n -= len(p)
	return len(p), nil
}

// TestSaveErrors: the first error of the writer is Save's.
func TestSaveErrors(t *testing.T) {
	tr := mustScan(t, oddTree(t))
	size := len(tr.Save())
	for n := range size {
		if err := tr.write(&failing{n}); !errors.Is(err, errFull) {
			t.Fatalf("room for %d of %d bytes: %v", n, size, err)
		}
	}
	if err := tr.write(&failing{size}); err != nil {
		t.Error(err)
	}
}
