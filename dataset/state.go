// SPDX-License-Identifier: Apache-2.0

package dataset

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cespare/xxhash/v2"
)

// A saved tree is the files and then the manifest's encoding, so that a
// restarted target keeps the layout: "RBLKTREE", u32 version, u64 number of
// files and each file, xxhash64 of all before it, the manifest.
//
// Version 2.
const (
	treeMagic   = "RBLKTREE"
	treeVersion = 2
	treeFile    = 9*8 + 1 + 4 // without its path
)

// Open scans dir, going on with the layout saved at state, and saves what is
// new before it returns. Without a usable saved tree (none, or corrupt, which
// is logged) it begins a new layout. An empty state path saves nothing: then
// every Open is a new layout, which no initiator continues across.
//
// The order matters: had an initiator seen ranges that a restart does not know
// of, the restart would give them to other files. So a tree that cannot be
// saved is not returned.
func Open(ctx context.Context, dir, state string, opts ScanOptions) (*Tree, error) {
	if state == "" {
		return Scan(ctx, dir, opts)
	}
	prev, err := LoadFile(state)
	switch {
	case err == nil:
		return Refresh(ctx, dir, state, prev, opts)
	case errors.Is(err, ErrCorrupt):
		if opts.Logger != nil {
			opts.Logger.Warn("dataset: saved layout cannot be used, starting a new one; mounted initiators must mount anew",
				"dir", dir, "state", state, "err", err)
		}
	case !errors.Is(err, fs.ErrNotExist):
		return nil, err
	}
	next, err := Scan(ctx, dir, opts)
	if err != nil {
		return nil, err
	}
	if err := next.SaveFile(state); err != nil {
		return nil, err
	}
	return next, nil
}

// Refresh is Rescan, and saves a tree that is new at state before it returns
// it. After an error prev is still what is to be served.
func Refresh(ctx context.Context, dir, state string, prev *Tree, opts ScanOptions) (*Tree, error) {
	next, err := Rescan(ctx, dir, prev, opts)
	if err != nil || next == prev || state == "" {
		return next, err
	}
	if err := next.SaveFile(state); err != nil {
		return nil, err
	}
	return next, nil
}

// Save returns the tree's encoding, for Load.
func (t *Tree) Save() []byte {
	var b bytes.Buffer
	t.write(&b) // a Buffer does not fail
	return b.Bytes()
}

// write encodes the tree.
func (t *Tree) write(w io.Writer) error {
	e := newEncoder(w)
	e.str(treeMagic)
	e.u32(treeVersion)
	e.u64(uint64(len(t.Files)))
	for i := range t.Files {
		f := &t.Files[i]
		id := &f.Ident
		for _, v := range [...]uint64{
			uint64(f.Offset), uint64(f.Size), id.Dev, id.Ino, uint64(id.Size),
			uint64(id.MtimeSec), uint64(id.MtimeNsec), uint64(id.CtimeSec), uint64(id.CtimeNsec),
		} {
			e.u64(v)
		}
		stale := "\x00"
		if f.Stale {
			stale = "\x01"
		}
		e.str(stale)
		e.u32(uint32(len(f.Path)))
		e.str(f.Path)
	}
	if err := e.finish(); err != nil {
		return err
	}
	return t.Manifest.write(newEncoder(w))
}

// Load decodes what Save wrote. Errors match ErrCorrupt.
func Load(b []byte) (*Tree, error) {
	r := &reader{b: b}
	if string(r.take(uint64(len(treeMagic)))) != treeMagic || r.u32() != treeVersion {
		return nil, fmt.Errorf("%w: not a saved tree of this version", ErrCorrupt)
	}
	n := r.u64()
	if n > uint64(len(r.b))/treeFile {
		return nil, fmt.Errorf("%w: %d files", ErrCorrupt, n)
	}
	t := &Tree{Files: make([]File, n)}
	for i := range t.Files {
		t.Files[i].decode(r)
	}
	body := b[:len(b)-len(r.b)]
	if sum := r.u64(); r.bad || sum != xxhash.Sum64(body) {
		return nil, fmt.Errorf("%w: checksum", ErrCorrupt)
	}
	var err error
	if t.Manifest, err = Decode(r.b); err != nil {
		return nil, err
	}
	end := int64(0)
	for i := range t.Files {
		f := &t.Files[i]
		if f.Offset < end || f.Size <= 0 || f.Offset > t.Manifest.VolumeSize()-f.Size || !f.Stale && f.Ident.Size != f.Size {
			return nil, fmt.Errorf("%w: file %d", ErrCorrupt, i)
		}
		end = f.Offset + f.Size
	}
	return t, nil
}

func (f *File) decode(r *reader) {
	p := r.take(treeFile)
	if p == nil {
		return
	}
	u := func(i int) uint64 { return le.Uint64(p[8*i:]) }
	s := func(i int) int64 { return int64(u(i)) }
	*f = File{
		Offset: s(0), Size: s(1), Stale: p[72] != 0,
		Ident: Ident{Dev: u(2), Ino: u(3), Size: s(4), MtimeSec: s(5), MtimeNsec: s(6), CtimeSec: s(7), CtimeNsec: s(8)},
		Path:  string(r.take(uint64(le.Uint32(p[73:])))),
	}
}

// SaveFile writes the tree to path so that after a crash at any moment either
// the old file or the new one is there, whole. Only one process may do so at a
// time.
func (t *Tree) SaveFile(path string) error {
	fail := func(err error) error { return fmt.Errorf("dataset: saving the layout: %w", err) }
	tmp := path + ".tmp"
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return fail(err)
	}
	err = cmp.Or(t.write(f), f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		os.Remove(tmp)
		return fail(err)
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return fail(err)
	}
	defer dir.Close()
	if err := dir.Sync(); err != nil {
		return fail(err)
	}
	return nil
}

// LoadFile reads what SaveFile wrote. Errors match ErrCorrupt or fs.ErrNotExist,
// or are those of reading.
func LoadFile(path string) (*Tree, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("dataset: saved layout: %w", err)
	}
	return Load(b)
}
