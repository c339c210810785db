// SPDX-License-Identifier: Apache-2.0

// Package cache keeps blocks of volumes in registered memory and decides what
// to fetch and when. It knows a volume through volume.Source alone.
package cache

import (
	"context"
	"log/slog"

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
	Size int64
	// Readahead bounds read-ahead; the zero value of Options means off, so
	// callers say ReadaheadAuto.
	Readahead Readahead
	Logger    *slog.Logger // nil: discard
}

// SizeNone is cache=none.
const SizeNone int64 = -1

// Volume is a cached volume. All methods are safe for concurrent use. Errors
// match the sentinels of package volume, or the context's error.
type Volume struct{}

// New takes src over: Close closes it.
func New(src volume.Source, opts Options) (*Volume, error) { panic("not built") }

// Geometry of the volume as of now.
func (v *Volume) Geometry() volume.Geometry { panic("not built") }

// Read returns a view of exactly n bytes at off. Beyond the volume's end:
// volume.ErrRange. The view pins its frames until Release. A cancelled ctx
// detaches the caller only; the transfer goes on. n may be larger than a frame
// and is bounded by MaxIO.
func (v *Volume) Read(ctx context.Context, off int64, n int) (*View, error) { panic("not built") }

// MaxIO is the most bytes of one Read, Write or Buffer: 32 MiB.
const MaxIO = 32 << 20

// Write returns when [off, off+len(p)) is acknowledged by the target (and
// durable, with fua). p is not kept.
func (v *Volume) Write(ctx context.Context, off int64, p []byte, fua bool) error { panic("not built") }

// NewBuffer leases n bytes of registered memory to be filled and written with
// WriteBuffer; it waits while the budget is exhausted.
func (v *Volume) NewBuffer(ctx context.Context, n int) (*Buffer, error) { panic("not built") }

// WriteBuffer is Write from a Buffer, without a copy where alignment allows.
// The caller still owns b afterwards and releases it.
func (v *Volume) WriteBuffer(ctx context.Context, off int64, b *Buffer, fua bool) error {
	panic("not built")
}

// Flush: every Write that returned before the call is durable as the export
// states it.
func (v *Volume) Flush(ctx context.Context) error { panic("not built") }

// Zero makes the range read as zeros.
func (v *Volume) Zero(ctx context.Context, off, n int64) error { panic("not built") }

// Discard gives the range up; it reads as zeros afterwards.
func (v *Volume) Discard(ctx context.Context, off, n int64) error { panic("not built") }

// Prefetch asks for the range to be in the cache soon. It returns at once and
// reports nothing but a bad range.
func (v *Volume) Prefetch(off, n int64) error { panic("not built") }

// Drop forgets every clean block that nobody holds.
func (v *Volume) Drop() { panic("not built") }

// Resize changes Options.Size at run time.
func (v *Volume) Resize(size int64) error { panic("not built") }

// Events passes on the events of the Source, after the cache has acted on them.
// One reader. Closed after Close.
func (v *Volume) Events() <-chan volume.Event { panic("not built") }

// Stats is a snapshot of the counters.
func (v *Volume) Stats() Stats { panic("not built") }

// Close waits for views and operations to end, then closes the Source.
// Operations that are blocked in the Source end with volume.ErrClosed.
func (v *Volume) Close() error { panic("not built") }

// View is a lease on cached bytes. It must be released exactly once.
type View struct{}

// Slices are the bytes in order, in one or more pieces; valid until Release.
func (w *View) Slices() [][]byte { panic("not built") }

// Len is the number of bytes.
func (w *View) Len() int { panic("not built") }

// CopyTo copies the bytes to p and returns how many.
func (w *View) CopyTo(p []byte) int { panic("not built") }

// Release ends the lease.
func (w *View) Release() { panic("not built") }

// Buffer is leased registered memory to write from.
type Buffer struct{}

// Slices are the writable bytes in order; valid until Release.
func (b *Buffer) Slices() [][]byte { panic("not built") }

// Len is the number of bytes.
func (b *Buffer) Len() int { panic("not built") }

// Release ends the lease.
func (b *Buffer) Release() { panic("not built") }

// Stats counts since New, except gauges.
type Stats struct {
	Hits, Misses, Evictions                          uint64
	FetchedBytes                                     uint64 // over the wire
	ServedBytes                                      uint64 // to the front end
	WrittenBytes                                     uint64
	ReadaheadIssued, ReadaheadUsed, ReadaheadWasted  uint64 // bytes
	Stalls                                           uint64 // reads that waited for a fetch
	Frames, FramesUsed, FramesInFlight, FramesPinned int64  // gauges
	Size                                             int64  // bytes of frames
	Streams                                          int64
}
