// SPDX-License-Identifier: Apache-2.0

package dataset

import (
	"fmt"

	"github.com/cespare/xxhash/v2"
)

// A saved tree is its manifest's encoding and the files, so that a restarted
// target keeps the layout: "RBLKTREE", u32 version, u64 length and bytes of the
// manifest, u64 number of files and each file, xxhash64 of all before it.
const (
	treeMagic   = "RBLKTREE"
	treeVersion = 1
	treeFile    = 8*9 + 1 + 4 // without its path
)

// Save encodes the tree for Load.
func (t *Tree) Save() []byte {
	b := append([]byte(nil), treeMagic...)
	b = le.AppendUint32(b, treeVersion)
	enc := t.Manifest.Encode()
	b = le.AppendUint64(b, uint64(len(enc)))
	b = append(b, enc...)
	b = le.AppendUint64(b, uint64(len(t.Files)))
	for i := range t.Files {
		f := &t.Files[i]
		id := &f.Ident
		for _, v := range [...]uint64{
			uint64(f.Offset), uint64(f.Size), id.Dev, id.Ino, uint64(id.MtimeSec), uint64(id.MtimeNsec),
			uint64(id.CtimeSec), uint64(id.CtimeNsec), uint64(id.Size),
		} {
			b = le.AppendUint64(b, v)
		}
		stale := byte(0)
		if f.Stale {
			stale = 1
		}
		b = append(b, stale)
		b = le.AppendUint32(b, uint32(len(f.Path)))
		b = append(b, f.Path...)
	}
	return le.AppendUint64(b, xxhash.Sum64(b))
}

// Load decodes what Save encoded. Errors match ErrCorrupt.
func Load(b []byte) (*Tree, error) {
	if len(b) < len(treeMagic)+4+8 || string(b[:len(treeMagic)]) != treeMagic || le.Uint32(b[len(treeMagic):]) != treeVersion {
		return nil, fmt.Errorf("%w: not a saved tree of this version", ErrCorrupt)
	}
	body := b[:len(b)-8]
	if xxhash.Sum64(body) != le.Uint64(b[len(b)-8:]) {
		return nil, fmt.Errorf("%w: checksum", ErrCorrupt)
	}
	r := &reader{b: body[len(treeMagic)+4:]}
	m, err := Decode(r.take(r.u64()))
	if err != nil {
		return nil, err
	}
	n := r.u64()
	if n > uint64(len(r.b))/treeFile {
		return nil, fmt.Errorf("%w: lengths", ErrCorrupt)
	}
	t := &Tree{Manifest: m, Files: make([]File, n)}
	end := int64(0)
	for i := range t.Files {
		p := r.take(treeFile)
		if p == nil {
			break
		}
		u := func(i int) uint64 { return le.Uint64(p[8*i:]) }
		f := &t.Files[i]
		f.Offset, f.Size = int64(u(0)), int64(u(1))
		f.Ident = Ident{u(2), u(3), int64(u(8)), int64(u(4)), int64(u(5)), int64(u(6)), int64(u(7))}
		f.Stale = p[72] != 0
		f.Path = string(r.take(uint64(le.Uint32(p[73:]))))
		if f.Offset < end || f.Size <= 0 || f.Offset > m.VolumeSize()-f.Size {
			return nil, fmt.Errorf("%w: file %d", ErrCorrupt, i)
		}
		end = f.Offset + f.Size
	}
	if r.bad || len(r.b) != 0 {
		return nil, fmt.Errorf("%w: lengths", ErrCorrupt)
	}
	return t, nil
}
