// SPDX-License-Identifier: Apache-2.0

package dataset

import (
	"bytes"
	"errors"
	"math"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestHostile spoils one thing at a time in a good manifest and gives it a
// right checksum, as a malicious target would.
func TestHostile(t *testing.T) {
	dir := oddTree(t)
	at := func(m *Manifest, path string) *node {
		n, ok := m.Resolve(path)
		if !ok {
			t.Fatalf("no %q", path)
		}
		return &m.nodes[n]
	}
	// first is the first entry of a directory.
	first := func(m *Manifest, path string) *entry { return &m.entries[at(m, path).list.off] }
	rename := func(m *Manifest, e *entry, name string) {
		e.name = span{uint32(len(m.names)), uint32(len(name))}
		m.names += name
	}
	for name, spoil := range map[string]func(m *Manifest){
		"no nodes":                  func(m *Manifest) { m.nodes = nil },
		"no root":                   func(m *Manifest) { m.nodes = m.nodes[:1] },
		"root is a file":            func(m *Manifest) { m.nodes[Root].mode = unix.S_IFREG },
		"root has a parent":         func(m *Manifest) { m.nodes[Root].parent = 2 },
		"root is below itself":      func(m *Manifest) { first(m, "a").node = Root },
		"node 0 is used":            func(m *Manifest) { m.nodes[0].size = 1 },
		"volume beyond int64":       func(m *Manifest) { m.size = math.MaxInt64 + 1 },
		"file outside the volume":   func(m *Manifest) { at(m, "c").offset = m.size - at(m, "c").size + 1 },
		"file wraps":                func(m *Manifest) { at(m, "c").offset = math.MaxUint64 },
		"file size wraps":           func(m *Manifest) { at(m, "c").size = math.MaxUint64 },
		"file has entries":          func(m *Manifest) { at(m, "c").list = at(m, "a").list },
		"file has entries beyond":   func(m *Manifest) { at(m, "c").list.off = math.MaxUint32 },
		"file has a parent":         func(m *Manifest) { at(m, "c").parent = Root },
		"directory has an offset":   func(m *Manifest) { at(m, "a").offset = 1 },
		"entries beyond":            func(m *Manifest) { at(m, "a").list.n = math.MaxUint32 },
		"entries wrap":              func(m *Manifest) { at(m, "a").list = span{math.MaxUint32, math.MaxUint32} },
		"entries shared":            func(m *Manifest) { at(m, "z").list = at(m, "a").list },
		"entries unused":            func(m *Manifest) { at(m, "a").list.n-- },
		"child 0":                   func(m *Manifest) { first(m, "a").node = 0 },
		"child beyond":              func(m *Manifest) { first(m, "a").node = NodeID(len(m.nodes)) },
		"node without a name":       func(m *Manifest) { first(m, "a").node = first(m, "a/d").node },
		"name beyond":               func(m *Manifest) { first(m, "a").name.off = uint32(len(m.names)) },
		"name wraps":                func(m *Manifest) { first(m, "a").name.off = math.MaxUint32 },
		"name empty":                func(m *Manifest) { first(m, "a").name.n = 0 },
		"name .":                    func(m *Manifest) { rename(m, first(m, ""), ".") },
		"name ..":                   func(m *Manifest) { rename(m, first(m, ""), "..") },
		"name with slash":           func(m *Manifest) { rename(m, first(m, ""), "../b") },
		"name with NUL":             func(m *Manifest) { rename(m, first(m, ""), "a\x00") },
		"name too long":             func(m *Manifest) { rename(m, first(m, ""), strings.Repeat("a", 256)) },
		"names unsorted":            func(m *Manifest) { rename(m, first(m, ""), "zz") },
		"names equal":               func(m *Manifest) { rename(m, first(m, ""), "c") },
		"wrong parent":              func(m *Manifest) { at(m, "a/d").parent = Root },
		"parent is a file":          func(m *Manifest) { at(m, "a/d").parent = first(m, "a/d").node },
		"parent beyond":             func(m *Manifest) { at(m, "a/d").parent = math.MaxUint32 },
		"symlink empty":             func(m *Manifest) { at(m, "l").list.n = 0 },
		"symlink beyond":            func(m *Manifest) { at(m, "l").list.off++ },
		"symlink too long":          func(m *Manifest) { m.links = strings.Repeat("x", 4096); at(m, "l").list = span{0, 4096} },
		"symlink with NUL":          func(m *Manifest) { m.links = "\x00" },
		"a socket":                  func(m *Manifest) { at(m, "c").mode = unix.S_IFSOCK },
		"a device":                  func(m *Manifest) { at(m, "c").mode = unix.S_IFBLK },
		"no type":                   func(m *Manifest) { at(m, "c").mode = 0o644 },
		"mode beyond 16 bits":       func(m *Manifest) { at(m, "c").mode |= 1 << 16 },
		"nanoseconds":               func(m *Manifest) { at(m, "c").mtimeNsec = 1e9 },
		"attributes beyond":         func(m *Manifest) { at(m, "c").xattr = span{uint32(len(m.xattrs)), 1} },
		"attributes cut":            func(m *Manifest) { m.xattrs = []byte{1, 1, 0, 0}; at(m, "c").xattr = span{0, 4} },
		"attribute without a name":  func(m *Manifest) { m.xattrs = appendXattr(nil, "", nil); at(m, "c").xattr = span{0, 5} },
		"attribute's value beyond":  func(m *Manifest) { m.xattrs = []byte{1, 255, 255, 255, 255, 'a'}; at(m, "c").xattr = span{0, 6} },
		"attribute's name with NUL": func(m *Manifest) { m.xattrs = appendXattr(nil, "a\x00", nil); at(m, "c").xattr = span{0, 7} },
		"attribute twice": func(m *Manifest) {
			m.xattrs = appendXattr(appendXattr(nil, "a", nil), "a", nil)
			at(m, "c").xattr = span{0, 12}
		},
		"attribute too large": func(m *Manifest) {
			m.xattrs = appendXattr(nil, "a", make([]byte, 65537))
			at(m, "c").xattr = span{0, 65543}
		},
		"layout empty":             func(m *Manifest) { m.layout = "" },
		"layout with a line's end": func(m *Manifest) { m.layout = "a\n" },
		"layout too long":          func(m *Manifest) { m.layout = strings.Repeat("a", 65) },
		"two directories in a cycle": func(m *Manifest) {
			// a/d moves below itself: it and its entry have each other.
			d := first(m, "a/d")
			for i := range m.entries {
				if m.nodes[m.entries[i].node].is(unix.S_IFDIR) && m.nodes[m.entries[i].node].parent != Root {
					m.entries[i].node, d.node = d.node, m.entries[i].node
					break
				}
			}
			m.nodes[d.node].parent = d.node
		},
	} {
		m := mustScan(t, dir).Manifest
		if _, err := Decode(m.Encode()); err != nil {
			t.Fatal(err)
		}
		spoil(m)
		if _, err := Decode(m.Encode()); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%s: %v", name, err)
		} else if strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: more than one line: %v", name, err)
		}
	}
}

// TestCut: no prefix, and no manifest with something behind it, is one.
func TestCut(t *testing.T) {
	b := mustScan(t, oddTree(t)).Manifest.Encode()
	for n := range b {
		for _, c := range [][]byte{b[:n], reseal(bytes.Clone(b[:n]))} {
			if _, err := Decode(c); !errors.Is(err, ErrCorrupt) {
				t.Fatalf("cut to %d bytes: %v", n, err)
			}
		}
	}
	if _, err := Decode(reseal(append(bytes.Clone(b), 0))); !errors.Is(err, ErrCorrupt) {
		t.Errorf("a byte more: %v", err)
	}
}

// TestFlips: every single bit that flips is noticed.
func TestFlips(t *testing.T) {
	tr := mustScan(t, oddTree(t))
	for name, b := range map[string][]byte{"manifest": tr.Manifest.Encode(), "state": tr.Save()} {
		for i := range b {
			b[i] ^= 1 << (i % 8)
			var err error
			if name == "state" {
				_, err = Load(b)
			} else {
				_, err = Decode(b)
			}
			if !errors.Is(err, ErrCorrupt) {
				t.Fatalf("%s: byte %d: %v", name, i, err)
			}
			b[i] ^= 1 << (i % 8)
		}
	}
}

// TestVersion: another version is said to be one.
func TestVersion(t *testing.T) {
	b := mustScan(t, t.TempDir()).Manifest.Encode()
	b[len(fileMagic)]++
	if _, err := Decode(reseal(b)); !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), "version 2") {
		t.Error(err)
	}
}

// TestDecodeIsBounded: counts that promise more than is there allocate nothing.
func TestDecodeIsBounded(t *testing.T) {
	b := append([]byte(fileMagic), fileVersion, 0, 0, 0)
	b = append(b, make([]byte, 16)...)
	b = append(b, 1, 0, 'x')
	b = le.AppendUint64(b, math.MaxUint32)
	b = append(b, make([]byte, 100)...)
	b = reseal(b)
	if n := testing.AllocsPerRun(10, func() { Decode(b) }); n > 20 {
		t.Errorf("%v allocations", n)
	}
	if _, err := Decode(b); !errors.Is(err, ErrCorrupt) {
		t.Error(err)
	}
}

// TestNoAllocations: a kernel's LOOKUP, GETATTR, READDIR and READLINK cost no
// garbage.
func TestNoAllocations(t *testing.T) {
	m := mustScan(t, oddTree(t)).Manifest
	dir, _ := m.Resolve("a")
	link, _ := m.Resolve("l")
	if n := testing.AllocsPerRun(100, func() {
		m.Lookup(dir, "b")
		m.Attr(dir)
		m.Entry(dir, 0)
		m.Readlink(link)
		m.Resolve("a/d/e")
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
