// SPDX-License-Identifier: Apache-2.0

package dataset

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"math"
	"slices"
	"sort"

	"golang.org/x/sys/unix"
)

const (
	// alignFrom is where padding to a page costs at most 1/16.
	alignFrom = 64 << 10
	pageSize  = 4 << 10
	// growBy is what a volume grows by: the extent of a target, and a multiple
	// of every cache's block. So a new generation begins in an extent of its
	// own, and whoever holds an extent or block of an older one holds it whole,
	// and for good.
	growBy = 1 << 20
)

// File is a range of the volume that holds one file's bytes.
type File struct {
	Offset, Size int64
	Path         string // below the dataset's directory; "" when Stale
	Ident        Ident  // the zero Ident when Stale
	// Stale: the file of this range has changed or is gone; nothing may be
	// read here any more, by whoever still has an older manifest.
	Stale bool
}

// Tree is a scanned directory: what is sent, and what the target keeps. It is
// immutable.
type Tree struct {
	Manifest *Manifest
	// Files are the ranges in order, without overlap. What lies between them
	// is padding and reads as zeros.
	Files []File
	Seen  Progress // by the scan that made this tree
}

// FileIndex is the first file that ends behind off; len(Files) when none does.
// From there the files that touch a range follow one another.
func (t *Tree) FileIndex(off int64) int {
	return sort.Search(len(t.Files), func(i int) bool { return t.Files[i].Offset+t.Files[i].Size > off })
}

// Intersect are the files that have bytes in [off, off+n), in order. It is a
// part of Files.
func (t *Tree) Intersect(off, n int64) []File {
	first := t.FileIndex(off)
	last := first
	for last < len(t.Files) && t.Files[last].Offset < off+n {
		last++
	}
	return t.Files[first:last]
}

// StaleBytes counts what a new layout would give back: the ranges of files that
// have changed or gone since this layout began.
func (t *Tree) StaleBytes() int64 {
	sum := int64(0)
	for i := range t.Files {
		if t.Files[i].Stale {
			sum += t.Files[i].Size
		}
	}
	return sum
}

// Scan reads the directory tree below dir into a new layout. It fails when dir
// itself cannot be read, when ctx ends, when descriptors or memory run out, and
// beyond the limits of a manifest (ErrTooLarge).
func Scan(ctx context.Context, dir string, opts ScanOptions) (*Tree, error) {
	id := make([]byte, 16)
	rand.Read(id)
	return scan(ctx, dir, opts, &Tree{Manifest: &Manifest{layout: hex.EncodeToString(id)}})
}

// Rescan reads the tree again. When nothing differs it returns prev itself;
// else a tree of the same layout and the next generation: files that have not
// changed keep their ranges, wherever they are now in the tree; new and changed
// ones come behind the volume's present end. Who stores trees must store the
// new one before anybody sees it (see Refresh).
func Rescan(ctx context.Context, dir string, prev *Tree, opts ScanOptions) (*Tree, error) {
	next, err := scan(ctx, dir, opts, prev)
	if err != nil {
		return nil, err
	}
	if next.Manifest.same(prev.Manifest) && slices.Equal(next.Files, prev.Files) {
		return prev, nil
	}
	return next, nil
}

// same compares the content, less the generation.
func (m *Manifest) same(o *Manifest) bool {
	return m.size == o.size && m.names == o.names && m.links == o.links && slices.Equal(m.xattrs, o.xattrs) &&
		slices.Equal(m.entries, o.entries) && slices.Equal(m.nodes, o.nodes)
}

func scan(ctx context.Context, dir string, opts ScanOptions, prev *Tree) (*Tree, error) {
	root, sc, err := walk(ctx, dir, opts)
	if err != nil {
		return nil, err
	}
	b := newBuilder(prev)
	if err := b.root(ctx, &root); err != nil {
		return nil, fmt.Errorf("dataset: %s: %w", dir, err)
	}
	t := b.tree(prev.Manifest.generation + 1)
	t.Seen = sc.counts()
	sc.log.Info("dataset scanned", "dir", dir, "dirs", t.Seen.Dirs, "files", t.Seen.Files, "bytes", t.Seen.Bytes,
		"special_left_out", t.Seen.Special, "unreadable", t.Seen.Unreadable, "vanished", t.Seen.Vanished,
		"volume_bytes", t.Manifest.size, "stale_bytes", t.StaleBytes())
	return t, nil
}

// inode names a file within the machine.
type inode struct{ dev, ino uint64 }

// builder lays a walked tree out.
type builder struct {
	m            Manifest
	names, links []byte
	files        []File
	linked       map[inode]NodeID // files with several names that have a node

	prev    []File   // ranges of the layout so far, live and stale
	byInode []uint32 // indices of the live ones, sorted by inode
	kept    []bool   // those that still have their file
}

// newBuilder continues the layout of prev.
func newBuilder(prev *Tree) *builder {
	b := &builder{
		m:      Manifest{size: prev.Manifest.size, layout: prev.Manifest.layout, nodes: make([]node, 1, 1024)},
		linked: map[inode]NodeID{},
		prev:   prev.Files, kept: make([]bool, len(prev.Files)),
	}
	for i := range prev.Files {
		if !prev.Files[i].Stale {
			b.byInode = append(b.byInode, uint32(i))
		}
	}
	slices.SortFunc(b.byInode, func(i, j uint32) int {
		return cmp.Or(b.prev[i].Ident.inode().compare(b.prev[j].Ident.inode()), cmp.Compare(i, j))
	})
	return b
}

func (i inode) compare(o inode) int {
	return cmp.Or(cmp.Compare(i.dev, o.dev), cmp.Compare(i.ino, o.ino))
}

// tree is what was built.
func (b *builder) tree(generation uint64) *Tree {
	b.keepStale()
	b.m.size = roundUp(b.m.size, growBy)
	b.m.generation, b.m.names, b.m.links = generation, string(b.names), string(b.links)
	b.m.seal()
	return &Tree{Manifest: &b.m, Files: b.files}
}

var errTooMany = fmt.Errorf("%w: more than 4 GiB of names, links or attributes, or four billion names", ErrTooLarge)

// heap appends s to a heap.
func heap[T string | []byte](h *[]byte, s T) (span, error) {
	if len(s) == 0 {
		return span{}, nil
	}
	off := len(*h)
	if uint64(off)+uint64(len(s)) > math.MaxUint32 {
		return span{}, errTooMany
	}
	*h = append(*h, s...)
	return span{uint32(off), uint32(len(s))}, nil
}

// root lays out a whole tree.
func (b *builder) root(ctx context.Context, e *found) error {
	n, err := b.node(e)
	if err != nil {
		return err
	}
	return b.dir(ctx, n, "", e.dir, n)
}

// node makes a node of what was found; files are placed later. A link from
// outside the tree, or left out, does not count here.
func (b *builder) node(e *found) (NodeID, error) {
	n := node{
		size: uint64(e.id.Size), blocks: e.blocks, mtimeSec: e.id.MtimeSec, mtimeNsec: uint32(e.id.MtimeNsec),
		mode: e.mode, nlink: 1, uid: e.uid, gid: e.gid,
	}
	if e.extra != nil {
		var err error
		if n.xattr, err = heap(&b.m.xattrs, e.extra.xattr); err != nil {
			return 0, err
		}
		if n.list, err = heap(&b.links, e.extra.link); err != nil {
			return 0, err
		}
	}
	b.m.nodes = append(b.m.nodes, n)
	return NodeID(len(b.m.nodes) - 1), nil
}

// dir fills directory n with d's names, and goes on below.
func (b *builder) dir(ctx context.Context, n NodeID, path string, d *foundDir, parent NodeID) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if uint64(len(b.m.entries))+uint64(len(d.names)) > math.MaxUint32 || uint64(len(b.m.nodes))+uint64(len(d.names)) > math.MaxUint32 {
		return errTooMany
	}
	first := len(b.m.entries)
	b.m.nodes[n].parent = parent
	b.m.nodes[n].list = span{uint32(first), uint32(len(d.names))}
	subdirs := uint32(0)
	b.m.entries = append(b.m.entries, make([]entry, len(d.names))...)
	for i := range d.names {
		e := &d.names[i]
		name, err := heap(&b.names, e.name)
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
			if err := b.dir(ctx, child, path+e.name+"/", e.dir, n); err != nil {
				return err
			}
			e.dir = nil // its names are not needed any more
		}
	}
	b.m.nodes[n].nlink = 2 + subdirs
	return nil
}

// child makes the node of an entry, or finds the one it is a hard link to.
func (b *builder) child(e *found, path string) (NodeID, error) {
	file := e.is(unix.S_IFREG)
	if file && e.nlink > 1 {
		if n, ok := b.linked[e.id.inode()]; ok {
			b.m.nodes[n].nlink++
			return n, nil
		}
	}
	n, err := b.node(e)
	if err != nil || !file {
		return n, err
	}
	if e.nlink > 1 {
		b.linked[e.id.inode()] = n
	}
	return n, b.place(n, path+e.name, e.id)
}

// place gives a file its range: the one it had, when it is unchanged, or a new
// one at the end. An empty file has none; its offset is 0.
func (b *builder) place(n NodeID, path string, id Ident) error {
	if id.Size == 0 {
		return nil
	}
	if i, first := b.find(id); i >= 0 {
		b.m.nodes[n].offset = uint64(b.prev[i].Offset)
		if first {
			b.files = append(b.files, File{Offset: b.prev[i].Offset, Size: id.Size, Path: path, Ident: id})
		}
		return nil
	}
	off := b.m.size
	if id.Size >= alignFrom {
		off = roundUp(off, pageSize)
	}
	if uint64(id.Size) > maxVolume-off {
		return fmt.Errorf("%w: with %q of %d bytes the volume is beyond 2^63 bytes", ErrTooLarge, path, id.Size)
	}
	b.m.nodes[n].offset = off
	b.m.size = off + uint64(id.Size)
	b.files = append(b.files, File{Offset: int64(off), Size: id.Size, Path: path, Ident: id})
	return nil
}

// maxVolume is the largest whole number of growBy that an int64 holds.
const maxVolume = math.MaxInt64 &^ (growBy - 1)

func roundUp(n, align uint64) uint64 { return (n + align - 1) &^ (align - 1) }

// find is the index in prev of an unchanged file, or -1. The same file can be
// there, and be found, more than once when its file system is mounted in two
// places: each time the next of its ranges is given, and when they are used up,
// the last one again (then first is false).
func (b *builder) find(id Ident) (i int, first bool) {
	at := sort.Search(len(b.byInode), func(i int) bool { return b.prev[b.byInode[i]].Ident.inode().compare(id.inode()) >= 0 })
	found := -1
	for ; at < len(b.byInode); at++ {
		i := int(b.byInode[at])
		if b.prev[i].Ident.inode() != id.inode() {
			break
		}
		if b.prev[i].Ident != id {
			continue
		}
		found = i
		if !b.kept[i] {
			b.kept[i] = true
			return i, true
		}
	}
	return found, false
}

// keepStale carries on the ranges that no longer have a file, neighbours as
// one, and puts all in order.
func (b *builder) keepStale() {
	for i := range b.prev {
		if !b.kept[i] {
			b.files = append(b.files, File{Offset: b.prev[i].Offset, Size: b.prev[i].Size, Stale: true})
		}
	}
	slices.SortFunc(b.files, func(x, y File) int { return cmp.Compare(x.Offset, y.Offset) })
	files := b.files[:0]
	for _, f := range b.files {
		if n := len(files); f.Stale && n > 0 && files[n-1].Stale {
			files[n-1].Size = f.Offset + f.Size - files[n-1].Offset
			continue
		}
		files = append(files, f)
	}
	clear(b.files[len(files):])
	b.files = files
}
