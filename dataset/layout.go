// SPDX-License-Identifier: Apache-2.0

package dataset

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"math"
	"sort"

	"golang.org/x/sys/unix"
)

const (
	// alignFrom is where padding to a page costs at most 1/16.
	alignFrom = 64 << 10
	pageSize  = 4 << 10
	// extentMax is where a later generation's files begin: no extent that was
	// cut short by the old end of the volume gets more bytes later. It is a
	// multiple of every extent size.
	extentMax = 16 << 20
)

// File is a range of the volume that holds one file's bytes.
type File struct {
	Offset, Size int64
	Path         string // below the dataset's directory; "" when Stale
	Ident        Ident
	// Stale: the file of this range has changed or is gone; nothing may be
	// read here any more.
	Stale bool
}

// Tree is a scanned directory: what is sent, and what the target keeps.
type Tree struct {
	Manifest *Manifest
	// Files are the ranges in order, without overlap. What lies between them
	// is padding and reads as zeros.
	Files []File
	Seen  Progress
}

// FileIndex is the first file that ends behind off; len(Files) when none does.
// From there the files that touch a range follow one another.
func (t *Tree) FileIndex(off int64) int {
	return sort.Search(len(t.Files), func(i int) bool { return t.Files[i].Offset+t.Files[i].Size > off })
}

// Scan reads the directory tree below dir into a new layout. It fails when dir
// itself cannot be read, when ctx ends, or beyond four billion names.
func Scan(ctx context.Context, dir string, opts ScanOptions) (*Tree, error) {
	id := make([]byte, 16)
	rand.Read(id)
	return scan(ctx, dir, opts, &Tree{Manifest: &Manifest{layout: hex.EncodeToString(id)}})
}

// Rescan reads the tree again. When nothing differs it returns prev itself;
// else a tree of the same layout and the next generation.
func Rescan(ctx context.Context, dir string, prev *Tree, opts ScanOptions) (*Tree, error) {
	next, err := scan(ctx, dir, opts, prev)
	if err != nil {
		return nil, err
	}
	if next.Manifest.same(prev.Manifest) && len(next.Files) == len(prev.Files) {
		prev.Seen = next.Seen
		return prev, nil
	}
	return next, nil
}

// same compares the content, less the generation.
func (m *Manifest) same(o *Manifest) bool {
	if len(m.nodes) != len(o.nodes) || m.size != o.size {
		return false
	}
	a, b := *m, *o
	a.generation, b.generation = 0, 0
	return string(a.Encode()) == string(b.Encode())
}

func scan(ctx context.Context, dir string, opts ScanOptions, prev *Tree) (*Tree, error) {
	root, sc, err := walk(ctx, dir, opts)
	if err != nil {
		return nil, err
	}
	b := &builder{
		m:    &Manifest{generation: prev.Manifest.generation + 1, size: prev.Manifest.size, layout: prev.Manifest.layout},
		prev: map[string]*File{}, links: map[[2]uint64]NodeID{}, fresh: prev.Manifest.size > 0,
	}
	for i := range prev.Files {
		if f := &prev.Files[i]; !f.Stale {
			b.prev[f.Path] = f
		}
	}
	b.m.nodes = make([]node, 1, 1+sc.dirs.Load()+sc.files.Load())
	if err := b.dir(b.node(&root), "", root.dir, Root); err != nil {
		return nil, err
	}
	b.keepStale(prev)
	sort.Slice(b.files, func(i, j int) bool { return b.files[i].Offset < b.files[j].Offset })
	b.m.seal(b.m.Encode())
	seen := sc.counts()
	sc.log.Info("dataset scanned", "dir", dir, "dirs", seen.Dirs, "files", seen.Files, "bytes", seen.Bytes,
		"special_left_out", seen.Special, "unreadable", seen.Unreadable, "vanished", seen.Vanished)
	return &Tree{Manifest: b.m, Files: b.files, Seen: seen}, nil
}

// builder lays a walked tree out.
type builder struct {
	m     *Manifest
	files []File
	prev  map[string]*File     // live ranges of the layout so far
	links map[[2]uint64]NodeID // (dev, ino) of files with several names
	fresh bool                 // nothing was appended to an older layout yet
}

var errTooMany = fmt.Errorf("dataset: %w: more than 4 GiB of names, links or attributes", ErrTooLarge)

// heap appends s to a heap.
func heap[T string | []byte](h *[]byte, s T) (span, error) {
	off := len(*h)
	if uint64(off)+uint64(len(s)) > math.MaxUint32 {
		return span{}, errTooMany
	}
	*h = append(*h, s...)
	return span{uint32(off), uint32(len(s))}, nil
}

// node makes a node of what was found; files are placed later.
func (b *builder) node(e *found) NodeID {
	st := &e.st
	b.m.nodes = append(b.m.nodes, node{attr: Attr{
		Mode: st.Mode, Nlink: uint32(st.Nlink), UID: st.Uid, GID: st.Gid, Size: uint64(st.Size),
		MtimeSec: st.Mtim.Sec, MtimeNsec: uint32(st.Mtim.Nsec), Blocks: uint64(st.Blocks),
	}})
	return NodeID(len(b.m.nodes) - 1)
}

// dir fills directory n with d's names, and goes on below.
func (b *builder) dir(n NodeID, path string, d *foundDir, parent NodeID) error {
	if uint64(len(b.m.entries))+uint64(len(d.names)) > math.MaxUint32 || uint64(len(b.m.nodes))+uint64(len(d.names)) > math.MaxUint32 {
		return errTooMany
	}
	first := len(b.m.entries)
	b.m.nodes[n].parent = parent
	b.m.nodes[n].first, b.m.nodes[n].count = uint32(first), uint32(len(d.names))
	subdirs := 0
	b.m.entries = append(b.m.entries, make([]entry, len(d.names))...)
	for i := range d.names {
		e := &d.names[i]
		name, err := heap(&b.m.names, e.name)
		if err != nil {
			return err
		}
		child, err := b.child(e, path)
		if err != nil {
			return err
		}
		b.m.entries[first+i] = entry{name, child}
		if e.dir != nil {
			subdirs++
			if err := b.dir(child, path+e.name+"/", e.dir, n); err != nil {
				return err
			}
			e.dir = nil // its names are not needed any more
		}
	}
	b.m.nodes[n].attr.Nlink = uint32(2 + subdirs)
	return nil
}

// child makes the node of an entry, or finds the one it is a hard link to.
func (b *builder) child(e *found, path string) (NodeID, error) {
	file := e.st.Mode&unix.S_IFMT == unix.S_IFREG
	key := [2]uint64{uint64(e.st.Dev), e.st.Ino}
	if file && e.st.Nlink > 1 {
		if n, ok := b.links[key]; ok {
			b.m.nodes[n].attr.Nlink++
			return n, nil
		}
	}
	n := b.node(e)
	var err error
	if b.m.nodes[n].xattr, err = heap(&b.m.xattrs, e.xattr); err != nil {
		return 0, err
	}
	if e.link != "" {
		if b.m.nodes[n].link, err = heap(&b.m.links, e.link); err != nil {
			return 0, err
		}
	}
	if file {
		// Links from outside the tree, or left out, do not count here.
		b.m.nodes[n].attr.Nlink = 1
		if e.st.Nlink > 1 {
			b.links[key] = n
		}
		b.place(n, path+e.name, &e.st)
	}
	return n, nil
}

// place gives a file its range: the one it had, when it is unchanged, or a new
// one at the end.
func (b *builder) place(n NodeID, path string, st *unix.Stat_t) {
	a := &b.m.nodes[n].attr
	id := IdentOf(st)
	if p := b.prev[path]; p != nil && p.Ident == id {
		a.Offset = uint64(p.Offset)
		b.files = append(b.files, *p)
		delete(b.prev, path)
		return
	}
	switch {
	case b.fresh:
		// What was clipped at the old end stays as it was.
		b.m.size = roundUp(b.m.size, extentMax)
		b.fresh = false
	case st.Size >= alignFrom:
		b.m.size = roundUp(b.m.size, pageSize)
	}
	a.Offset = b.m.size
	b.m.size += uint64(st.Size)
	if st.Size > 0 {
		b.files = append(b.files, File{Offset: int64(a.Offset), Size: st.Size, Path: path, Ident: id})
	}
}

// roundUp rounds n up to a multiple of to, a power of two.
func roundUp(n, to uint64) uint64 { return (n + to - 1) &^ (to - 1) }

// keepStale carries on the ranges that no longer have a file.
func (b *builder) keepStale(prev *Tree) {
	for i := range prev.Files {
		f := &prev.Files[i]
		if f.Stale {
			b.files = append(b.files, *f)
		} else if _, gone := b.prev[f.Path]; gone {
			b.files = append(b.files, File{Offset: f.Offset, Size: f.Size, Stale: true})
		}
	}
}
