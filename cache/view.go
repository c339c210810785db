// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"sync"
	"sync/atomic"
)

// View is a lease on cached bytes. It must be released exactly once.
type View struct {
	v      *Volume
	off    int64
	n      int
	slices [][]byte
	blocks []*block

	private *Buffer // the bytes, when no block has them: see readExact

	reserved int64        // blocks in the gate
	users    atomic.Int32 // the holder, and demand transfers under way
	held     atomic.Bool  // by the caller

	slices4  [4][]byte // so that a read of up to 1 MiB allocates nothing
	blocks17 [17]*block
}

var views = sync.Pool{New: func() any { return new(View) }}

func newView(v *Volume, off int64, n int) *View {
	w := views.Get().(*View)
	w.v, w.off, w.n = v, off, n
	w.slices, w.blocks = w.slices4[:0], w.blocks17[:0]
	w.users.Store(1)
	w.held.Store(true)
	return w
}

// Slices are the bytes in order, in one or more pieces; valid until Release.
func (w *View) Slices() [][]byte { return w.slices }

// Len is the number of bytes.
func (w *View) Len() int { return w.n }

// CopyTo copies the bytes to p and returns how many.
func (w *View) CopyTo(p []byte) int {
	n := 0
	for _, s := range w.slices {
		n += copy(p[n:], s)
	}
	return n
}

// Release ends the lease.
func (w *View) Release() {
	if !w.held.Swap(false) {
		panic("cache: View released twice")
	}
	if w.private != nil {
		w.private.Release()
		*w = View{}
		views.Put(w)
		return
	}
	v := w.v
	for i, b := range w.blocks {
		v.unpin(b)
		w.blocks[i] = nil
	}
	clear(w.slices)
	v.trim()
	w.done(hand)
}

// done gives back the reservation when the last user is done; hands go at once.
func (w *View) done(hands int64) {
	v := w.v
	if w.users.Add(-1) > 0 {
		if hands != 0 {
			v.gate.give(hands)
		}
		return
	}
	n := w.reserved
	w.v, w.reserved = nil, 0
	views.Put(w)
	v.gate.give(n + hands)
}

// part is the bytes [lo, hi) of block i of the view that the view wants.
func (w *View) part(i int) (num int64, lo, hi int) {
	num = w.off/blockSize + int64(i)
	start := num * blockSize
	return num, int(max(w.off-start, 0)), int(min(w.off+int64(w.n)-start, blockSize))
}

// build makes the slices; all pages are valid.
func (w *View) build() {
	var last page // the page after the last slice, when that ends at its end
	for i, b := range w.blocks {
		_, lo, hi := w.part(i)
		for lo < hi {
			pg := b.pages[lo/pageSize]
			at, n := lo%pageSize, min(pageSize-lo%pageSize, hi-lo)
			if pg == last && w.v.pool.adjoins(pg) {
				s := &w.slices[len(w.slices)-1]
				*s = (*s)[:len(*s)+n]
			} else {
				s := w.v.pool.rest(pg)
				w.slices = append(w.slices, s[at:at+n])
			}
			last = pg + 1
			lo += n
		}
	}
}

// blocksOf is how many blocks [off, off+n) touches.
func blocksOf(off int64, n int) int64 {
	if n == 0 {
		return 0
	}
	return (off+int64(n)-1)/blockSize - off/blockSize + 1
}
