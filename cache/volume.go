// SPDX-License-Identifier: Apache-2.0

// Package cache keeps blocks of volumes in registered memory and decides what
// to fetch and when. It knows a volume through volume.Source alone.
//
// The parts, in the order in which a read meets them: the gate reserves frames
// (gate.go), the index finds blocks (block.go), a miss fetches pages into frames
// of the pool (read.go, pool.go), eviction makes room (evict.go), and streams
// decide what to fetch before it is asked for (stream.go, ahead.go).
package cache

import (
	"fmt"
	"log/slog"
	"math/bits"
	"sync"
	"sync/atomic"

	"rblk/internal/s3fifo"
	"rblk/volume"
)

// Readahead is a read-ahead mode: ReadaheadAuto, ReadaheadOff, or the largest
// window in bytes.
type Readahead int64

const (
	ReadaheadAuto Readahead = -1
	ReadaheadOff  Readahead = 0
)

// Options of a Volume. The zero value is a good default.
type Options struct {
	// Size is the memory for frames in bytes; 0 means 512 MiB; SizeNone keeps
	// nothing: frames live as long as a view or an operation holds them.
	// Operations under way may use up to 64 MiB together when Size is less.
	Size int64
	// Readahead bounds read-ahead; the zero value of Options means off, so
	// callers say ReadaheadAuto. SizeNone means off whatever it says.
	Readahead Readahead
	// Budget is shared with other Volumes; nil: Size alone bounds.
	Budget *Budget
	// Dir is a directory on a local disk for the second tier, empty for none. It
	// keeps what was fetched of volumes whose ranges never change (those with a
	// Geometry.Layout) across restarts, within DiskSize bytes for all of Dir; 0
	// means 16 GiB. Several volumes may share a Dir, each layout once.
	Dir      string
	DiskSize int64
	Logger   *slog.Logger // nil: discard
}

const (
	// SizeNone is cache=none.
	SizeNone int64 = -1
	// DefaultSize is Options.Size when that is 0.
	DefaultSize int64 = 512 << 20
	// DefaultDiskSize is Options.DiskSize when that is 0.
	DefaultDiskSize int64 = 16 << 30
	// MaxIO is the most bytes of one Read, Write or Buffer: 32 MiB.
	MaxIO = 32 << 20
	// workingSize is what operations under way may use whatever the Size: two
	// of MaxIO that touch a block more at either end fit side by side.
	workingSize = 2*MaxIO + 4*blockSize
)

// Volume is a cached volume. All methods are safe for concurrent use. Errors
// match the sentinels of package volume, or the context's error.
type Volume struct {
	src         volume.Source
	log         *slog.Logger
	export      string // its name
	maxTransfer int    // bytes, whole pages

	gate   gate
	pool   pool
	shards []shard // their number is a power of two
	turn   atomic.Uint64
	ahead  readahead
	tier   *tier // nil: none
	keeper keeper

	size    atomic.Int64 // of the volume in bytes
	target  atomic.Int64 // pages that may stay when nobody uses them
	growing sync.Mutex   // held while a piece is made
	budget  *Budget
	pledged int64 // taken from budget; growing's

	wipes    atomic.Uint64 // beginnings and ends of Zero and Discard
	wiping   atomic.Int64  // of them under way
	inFlight atomic.Int64  // transfers
	fetched  atomic.Uint64
	written  atomic.Uint64
	stalls   atomic.Uint64

	events chan volume.Event
	quit   chan struct{}
	work   sync.WaitGroup
	once   sync.Once
	err    error // of Close
}

// New takes src over: Close closes it.
func New(src volume.Source, opts Options) (*Volume, error) {
	if opts.Size < SizeNone {
		return nil, fmt.Errorf("cache size %d is negative", opts.Size)
	}
	if src.MaxTransfer() < pageSize {
		return nil, fmt.Errorf("%w: transfers of %d bytes, the cache needs %d", volume.ErrUnsupported, src.MaxTransfer(), pageSize)
	}
	if opts.Size == 0 {
		opts.Size = DefaultSize
	}
	if opts.Size == SizeNone {
		opts.Size, opts.Readahead = 0, ReadaheadOff
	}
	v := &Volume{
		src:         src,
		log:         opts.Logger,
		maxTransfer: src.MaxTransfer() / pageSize * pageSize,
		shards:      make([]shard, shardsFor(opts.Size)),
		events:      make(chan volume.Event, numEvents),
		quit:        make(chan struct{}),
	}
	if v.log == nil {
		v.log = slog.New(slog.DiscardHandler)
	}
	v.initShards()
	geo := src.Geometry()
	v.export = geo.Export
	v.size.Store(geo.Size)
	if v.budget, v.pledged = opts.Budget, MinBudget; !v.budget.take(v.pledged) {
		return nil, fmt.Errorf("the cache budget of %d bytes is used up; give it %d for each volume", opts.Budget.total, MinBudget)
	}
	if err := v.openKeeper(geo, opts); err != nil {
		v.budget.give(v.pledged)
		return nil, err
	}
	v.gate.init(0)
	v.pool.init(src.NewArena, pieceFor(opts.Size))
	v.setSize(opts.Size)
	v.ahead.init(v, opts.Readahead)
	v.work.Add(1)
	go v.watch()
	return v, nil
}

func (v *Volume) initShards() {
	for i := range v.shards {
		s := &v.shards[i]
		s.blocks, s.writing = map[int64]*block{}, map[int64]*mark{}
		s.queue = s3fifo.New[block]()
	}
}

// shardsFor is how many shards a cache of size bytes gets.
func shardsFor(size int64) int {
	n := min(max(size/shardBytes, 1), maxShards)
	return 1 << (bits.Len64(uint64(n)) - 1)
}

// pieceFor is the power of two that keeps within maxPieces.
func pieceFor(size int64) int64 {
	piece := int64(minPiece)
	for piece*maxPieces < size {
		piece *= 2
	}
	return piece
}

// setSize makes size bytes the memory of frames.
func (v *Volume) setSize(size int64) {
	v.growing.Lock()
	defer v.growing.Unlock()
	v.target.Store(size / pageSize)
	v.setLimit()
}

// setLimit lets in as many blocks as there can be frames for: those of the size,
// or of what the budget has granted so far. v.growing is held.
func (v *Volume) setLimit() {
	limit := max(v.target.Load()*pageSize, workingSize)
	if v.budget != nil {
		limit = min(limit, v.pledged)
	}
	v.gate.raise(limit / blockSize)
}

// grow adds a piece of memory if the size allows one more; it reports whether
// there may be more frames than before.
func (v *Volume) grow() bool {
	before := v.pool.mapped()
	v.growing.Lock()
	defer v.growing.Unlock()
	if v.pool.mapped() > before {
		return true // somebody else was faster
	}
	if before >= max(v.target.Load()*pageSize, workingSize) {
		return false
	}
	if need := before + v.pool.pieceSize - v.pledged; need > 0 {
		if !v.budget.take(need) {
			return false
		}
		v.pledged += need
	}
	defer v.setLimit()
	if err := v.pool.grow(); err != nil {
		v.log.Warn("the cache gets no more memory", "size", before, "wanted", v.pool.pieceSize, "err", err)
		return false
	}
	return true
}

// Geometry of the volume as of now.
func (v *Volume) Geometry() volume.Geometry { return v.src.Geometry() }

// inRange refuses what no read may ask for.
func (v *Volume) inRange(off, n int64) error {
	if n < 0 || off < 0 || n > MaxIO {
		return fmt.Errorf("%w: %d bytes at %d", volume.ErrRange, n, off)
	}
	return v.inside(off, n)
}

// inside refuses what is beyond the end.
func (v *Volume) inside(off, n int64) error {
	if n < 0 || off < 0 || n > v.size.Load() || off > v.size.Load()-n {
		// Perhaps it has grown and the event is on its way.
		if size := v.src.Geometry().Size; n < 0 || off < 0 || n > size || off > size-n {
			return fmt.Errorf("%w: %d bytes at %d of %d", volume.ErrRange, n, off, size)
		}
	}
	return nil
}

// writable refuses what no write may ask for.
func (v *Volume) writable(off, n int64) error {
	if v.src.Geometry().ReadOnly {
		return volume.ErrReadOnly
	}
	return v.inside(off, n)
}

// Drop forgets every clean block that nobody holds.
func (v *Volume) Drop() { v.drop(false, func(int64) bool { return true }) }

// Resize changes Options.Size at run time; the read-ahead stays as it was.
func (v *Volume) Resize(size int64) error {
	switch {
	case size < SizeNone:
		return fmt.Errorf("cache size %d is negative", size)
	case size == SizeNone:
		size = 0
	case size == 0:
		size = DefaultSize
	}
	if v.gate.closed.Load() {
		return volume.ErrClosed
	}
	v.setSize(size)
	v.trim()
	return nil
}

// Close waits for views and buffers to be released, then closes the Source.
// Operations that are blocked in the Source end with volume.ErrClosed.
func (v *Volume) Close() error {
	v.once.Do(func() {
		v.ahead.pump.stop()
		v.keeper.finish()
		v.gate.close()
		v.pool.calm()
		close(v.quit)
		v.err = v.src.Close()
		v.gate.drain()
		v.work.Wait()
		if v.tier != nil {
			v.tier.closeFiles()
		}
		v.budget.give(v.pledged)
	})
	return v.err
}

// Prefetch asks for the range to be in the cache soon. It returns at once and
// reports nothing but a bad range.
func (v *Volume) Prefetch(off, n int64) error {
	if err := v.inside(off, n); err != nil {
		return err
	}
	v.ahead.prefetch(off, n)
	return nil
}
