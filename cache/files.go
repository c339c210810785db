// SPDX-License-Identifier: Apache-2.0

package cache

const (
	// smallFile is read whole on its first read: with the latency of one READ it
	// is there, and readers of small files read all of them.
	smallFile = 256 << 10
	// filesAhead is how many files of the order are read ahead at most, beside
	// the window: enough to cover a round trip for files of a few KiB.
	filesAhead = 32
	// orderProof is how many files must follow each other in order before the
	// next are read ahead, and maxOrder how much of that is remembered.
	orderProof, maxOrder = 2, 8
)

// Files tells where the files of a volume lie. Its methods are called on reads,
// concurrently, and must be quick.
type Files interface {
	// At is the file that holds byte off, as [start, end).
	At(off int64) (start, end int64, ok bool)
	// Next is the file that is likely to be read after the one that begins at
	// start: in volume order, or in an order that the user gave.
	Next(start int64) (nextStart, nextEnd int64, ok bool)
}

// SetFiles gives the read-ahead the borders of files. A small file is then read
// whole on its first read, and readers that go from file to file in the order
// of Next find the next ones there. nil takes the hint back.
func (v *Volume) SetFiles(f Files) {
	r := &v.ahead
	r.mu.Lock()
	defer r.mu.Unlock()
	r.files, r.expected, r.order = f, nil, 0
}

// opened is a read at the start of a file, or the first in a small one: it
// appends the rest of a small file, and, when files were read in order lately,
// the next ones. r.mu is held.
func (r *readahead) opened(want []span64, off, n int64) []span64 {
	if r.files == nil {
		return want
	}
	start, end, ok := r.files.At(off)
	if !ok || off != start {
		return want
	}
	if end-start <= smallFile && off+n < end {
		want = append(want, span64{nil, off + n, end})
	}
	next, nextEnd, ok := r.files.Next(start)
	if _, in := r.expected[start]; in {
		delete(r.expected, start)
		r.order = min(r.order+1, maxOrder)
	} else if r.order > 0 {
		r.order--
	}
	if !ok {
		return want
	}
	if len(r.expected) > maxStreams || r.expected == nil {
		r.expected = map[int64]struct{}{} // readers that went elsewhere
	}
	r.expected[next] = struct{}{}
	if r.order < orderProof {
		return want
	}
	left := min(r.budget()*pageSize/maxOrder, floorWindow)
	for i := 0; ok && i < filesAhead && left > 0; i++ {
		hi := min(nextEnd, next+left, next+smallFile)
		if hi > next {
			want = append(want, span64{nil, next, hi})
			left -= hi - next
		}
		next, nextEnd, ok = r.files.Next(next)
	}
	return want
}
