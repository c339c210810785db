// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"

	"rblk/volume"
)

const (
	// pageSize is the unit of frames and of fetching: what the kernel faults
	// and caches in, so a random 4 KiB read fetches what it asked for.
	pageSize = 4 << 10
	// slabPages is a slab, 64 KiB: the size at which the cost of a transfer is
	// a few per cent of moving its bytes, even over the software provider. A
	// stream that finds no neighbouring slabs still makes transfers of a slab.
	slabPages = 16
	allPages  = 1<<slabPages - 1
	// minPiece is the least that is registered at a time: half of MaxIO, so
	// that an idle cache holds little and filling one takes few registrations.
	minPiece = 16 << 20
	// maxPieces bounds the number of registrations of one volume.
	maxPieces = 64
)

// poison is what freed frames hold in tests: a view used after its release
// shows it.
var poison = bytes.Repeat([]byte{0xdb}, pageSize)

// page is a frame: 1 + its number in the pool. 0 is none.
type page uint32

// piece is one arena.
type piece struct {
	arena volume.Arena
	mem   []byte
}

// pool is the frames of a volume. Memory comes from the Source in pieces, as
// the cache fills; it is cut into slabs of 16 pages. Whole slabs serve streams,
// preferably side by side, so that one transfer fills many; slabs in part serve
// what is smaller.
type pool struct {
	newArena  func(int64) (volume.Arena, error)
	pieceSize int64
	perPiece  int // slabs

	pieces atomic.Pointer[[]piece] // replaced, never changed: read without lock
	used   atomic.Int64            // pages

	mu     sync.Mutex
	free   []uint16 // per slab: its free pages
	whole  int      // slabs all free
	cursor int      // where the search for whole slabs goes on
	partly []uint32 // stack of slabs that were partly free when pushed
	listed []bool   // per slab: is in partly
	poison bool     // tests: fill what is freed
}

func (p *pool) init(newArena func(int64) (volume.Arena, error), pieceSize int64) {
	p.newArena, p.pieceSize = newArena, pieceSize
	p.perPiece = int(pieceSize / (slabPages * pageSize))
	p.pieces.Store(&[]piece{})
}

// mem is the frames of n neighbouring pages from pg on.
func (p *pool) mem(pg page, n int) []byte {
	i := int64(pg-1) * pageSize
	pc := &(*p.pieces.Load())[i/p.pieceSize]
	i %= p.pieceSize
	return pc.mem[i : i+int64(n)*pageSize : i+int64(n)*pageSize]
}

// mapped is the memory of all pieces in bytes.
func (p *pool) mapped() int64 { return int64(len(*p.pieces.Load())) * p.pieceSize }

// grow adds a piece.
func (p *pool) grow() error {
	a, err := p.newArena(p.pieceSize)
	if err != nil {
		return fmt.Errorf("cache memory: %w", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	grown := append(append([]piece{}, *p.pieces.Load()...), piece{a, a.Bytes()})
	p.pieces.Store(&grown)
	for range p.perPiece {
		p.free = append(p.free, allPages)
		p.listed = append(p.listed, false)
	}
	p.whole += p.perPiece
	return nil
}

// run is neighbouring pages.
type run struct {
	first page
	n     int
}

// alloc appends to runs the frames for n pages in as few runs as can be had, at
// most n pages, and returns how many pages are still lacking.
func (p *pool) alloc(runs []run, n int) ([]run, int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	start := n
	for n >= slabPages && p.whole > 0 {
		slab, k := p.findWhole(n / slabPages)
		for i := range k {
			p.free[slab+i] = 0
		}
		p.whole -= k
		runs = append(runs, run{page(slab*slabPages) + 1, k * slabPages})
		n -= k * slabPages
	}
	for n > 0 {
		slab, ok := p.findPartly()
		if !ok {
			if p.whole == 0 {
				break
			}
			slab, _ = p.findWhole(1)
			p.whole--
			p.list(slab)
		}
		at, k := longest(p.free[slab], n)
		p.free[slab] &^= span(at, k)
		runs = append(runs, run{page(slab*slabPages+at) + 1, k})
		n -= k
	}
	p.used.Add(int64(start - n))
	return runs, n
}

// findWhole finds up to want neighbouring whole slabs. p.mu is held, p.whole is
// not 0.
func (p *pool) findWhole(want int) (slab, n int) {
	bestAt, best := 0, 0
	for seen, i := 0, p.cursor; seen < len(p.free); {
		if i >= len(p.free) {
			i = 0
		}
		k := 0
		for i+k < len(p.free) && p.free[i+k] == allPages && k < want && (k == 0 || (i+k)%p.perPiece != 0) {
			k++
		}
		if k > best {
			bestAt, best = i, k
		}
		// A run of half the wish is good enough: looking on costs more than the
		// few larger transfers gain.
		if best >= (want+1)/2 {
			break
		}
		seen += max(k, 1)
		i += max(k, 1)
	}
	p.cursor = bestAt + best
	return bestAt, best
}

// findPartly finds a slab with some pages free and some not. p.mu is held.
func (p *pool) findPartly() (int, bool) {
	for len(p.partly) > 0 {
		slab := int(p.partly[len(p.partly)-1])
		if f := p.free[slab]; f != 0 && f != allPages {
			return slab, true
		}
		p.partly = p.partly[:len(p.partly)-1]
		p.listed[slab] = false
	}
	return 0, false
}

func (p *pool) list(slab int) {
	if !p.listed[slab] {
		p.listed[slab] = true
		p.partly = append(p.partly, uint32(slab))
	}
}

// release frees the pages of pages that mask selects, and clears them.
func (p *pool) release(pages *[slabPages]page, mask uint16) {
	if mask == 0 {
		return
	}
	n := 0
	p.mu.Lock()
	for m := mask; m != 0; m &= m - 1 {
		i := bits.TrailingZeros16(m)
		if pages[i] == 0 {
			continue
		}
		p.releaseOne(pages[i])
		pages[i] = 0
		n++
	}
	p.mu.Unlock()
	p.used.Add(-int64(n))
}

// releaseOne frees a page. p.mu is held.
func (p *pool) releaseOne(pg page) {
	if p.poison {
		copy(p.mem(pg, 1), poison)
	}
	slab, bit := int(pg-1)/slabPages, uint16(1)<<((pg-1)%slabPages)
	if p.free[slab]&bit != 0 {
		panic("cache: frame freed twice")
	}
	p.free[slab] |= bit
	if p.free[slab] == allPages {
		p.whole++
	} else {
		p.list(slab)
	}
}

// releaseRuns frees what alloc gave.
func (p *pool) releaseRuns(runs []run) {
	n := 0
	p.mu.Lock()
	for _, r := range runs {
		for i := range r.n {
			p.releaseOne(r.first + page(i))
		}
		n += r.n
	}
	p.mu.Unlock()
	p.used.Add(-int64(n))
}

// span is the bits [at, at+n).
func span(at, n int) uint16 { return uint16((1<<n - 1) << at) }

// longest is the first run of up to want set bits, or else the longest one.
func longest(mask uint16, want int) (at, n int) {
	want = min(want, slabPages)
	for i := 0; i < slabPages; {
		rest := mask >> i
		if rest == 0 {
			break
		}
		i += bits.TrailingZeros16(rest)
		k := bits.TrailingZeros16(^(mask >> i))
		if i+k > slabPages {
			k = slabPages - i
		}
		if k >= want {
			return i, want
		}
		if k > n {
			at, n = i, k
		}
		i += k
	}
	return at, n
}

// rest is the memory from pg to the end of its piece, for a slice that may
// grow; adjoins is whether pg continues the memory of the page before it.
func (p *pool) rest(pg page) []byte {
	i := int64(pg-1) * pageSize
	return (*p.pieces.Load())[i/p.pieceSize].mem[i%p.pieceSize:]
}

func (p *pool) adjoins(pg page) bool { return int64(pg-1)*pageSize%p.pieceSize != 0 }

// calm ends the poisoning: the memory is about to go.
func (p *pool) calm() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.poison = false
}
