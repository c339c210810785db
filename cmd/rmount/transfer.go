// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/cespare/xxhash/v2"
	"github.com/schollz/progressbar/v3"

	"rblk/initiator"
	"rblk/volume"
)

// A transfer keeps window operations of chunk bytes in flight: enough to fill
// the path of a fast network, little enough to pin everywhere.
const (
	chunk  = 1 << 20
	window = 16
)

// transfer moves the ranges of a volume through an arena of its own, in order.
type transfer struct {
	vol   *initiator.Volume
	arena volume.Arena
	free  chan int // chunks of the arena
	bar   *progressbar.ProgressBar
}

// progress is a bar on a terminal, and nothing elsewhere.
func progress(total int64, what string) *progressbar.ProgressBar {
	if terminal() {
		return progressbar.DefaultBytes(total, what)
	}
	return progressbar.DefaultBytesSilent(total, what)
}

// newTransfer shows how far it is on bar, which stays the caller's.
func newTransfer(v *initiator.Volume, bar *progressbar.ProgressBar) (*transfer, error) {
	a, err := v.NewArena(chunk * window)
	if err != nil {
		return nil, err
	}
	t := &transfer{vol: v, arena: a, free: make(chan int, window), bar: bar}
	for i := range window {
		t.free <- i
	}
	return t, nil
}

func (t *transfer) close() { t.arena.Close() }

func (t *transfer) chunk(i, n int) []byte { return t.arena.Bytes()[i*chunk : i*chunk+n] }

// flight is an operation under way and its place in the arena.
type flight struct {
	op   *volume.Op
	slot int
}

// read hands [off, off+n) to sink, in order, with reads in flight ahead.
func (t *transfer) read(ctx context.Context, off, n int64, sink func([]byte) error) error {
	var queue []flight
	defer func() {
		for _, f := range queue {
			t.vol.Await(context.Background(), f.op) // its memory is the network's until then
			t.free <- f.slot
		}
	}()
	for end := off + n; off < end || len(queue) > 0; {
		for off < end && len(queue) < window {
			slot := <-t.free
			size := int(min(chunk, end-off))
			op := &volume.Op{Kind: volume.OpRead, Lane: volume.LaneReadahead, Offset: off, Mem: t.chunk(slot, size), Done: func(*volume.Op) {}}
			t.vol.Submit([]*volume.Op{op})
			queue = append(queue, flight{op, slot})
			off += int64(size)
		}
		f := queue[0]
		if err := t.vol.Await(ctx, f.op); err != nil {
			return err
		}
		err := sink(f.op.Mem)
		queue = queue[1:]
		t.free <- f.slot
		if err != nil {
			return err
		}
		t.bar.Add(len(f.op.Mem))
	}
	return nil
}

// write writes what source gives, n bytes, to off, with writes in flight.
func (t *transfer) write(ctx context.Context, off, n int64, source io.Reader) error {
	var queue []flight
	finish := func(ctx context.Context) error {
		f := queue[0]
		err := t.vol.Await(ctx, f.op)
		if ctx.Err() != nil && err != nil {
			return err
		}
		queue = queue[1:]
		t.free <- f.slot
		if err == nil {
			t.bar.Add(len(f.op.Mem))
		}
		return err
	}
	defer func() {
		for len(queue) > 0 {
			finish(context.Background())
		}
	}()
	for end := off + n; off < end; {
		if len(queue) == window {
			if err := finish(ctx); err != nil {
				return err
			}
		}
		slot := <-t.free
		buf := t.chunk(slot, int(min(chunk, end-off)))
		if _, err := io.ReadFull(source, buf); err != nil {
			t.free <- slot
			if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
				err = fmt.Errorf("%w: the file got shorter meanwhile", errShort)
			}
			return err
		}
		mem, err := t.whole(ctx, slot, len(buf), off)
		if err != nil {
			t.free <- slot
			return err
		}
		op := &volume.Op{Kind: volume.OpWrite, Lane: volume.LaneWrite, Offset: off, Mem: mem, Done: func(*volume.Op) {}}
		t.vol.Submit([]*volume.Op{op})
		queue = append(queue, flight{op, slot})
		off += int64(len(buf))
	}
	for len(queue) > 0 {
		if err := finish(ctx); err != nil {
			return err
		}
	}
	return t.vol.Flush(ctx)
}

// whole completes the n bytes in a chunk to whole blocks of the volume, with
// what the last block holds behind them.
func (t *transfer) whole(ctx context.Context, slot, n int, off int64) ([]byte, error) {
	bs := int(t.vol.Geometry().BlockSize)
	rest := n % bs
	if rest == 0 {
		return t.chunk(slot, n), nil
	}
	mem := t.chunk(slot, n-rest+bs)
	head := append([]byte(nil), mem[n-rest:n]...)
	op := &volume.Op{Kind: volume.OpRead, Offset: off + int64(n-rest), Mem: mem[n-rest:], Done: func(*volume.Op) {}}
	t.vol.Submit([]*volume.Op{op})
	// Not ctx: the memory is the network's until the operation ends.
	if err := t.vol.Await(context.WithoutCancel(ctx), op); err != nil {
		return nil, err
	}
	copy(mem[n-rest:], head)
	return mem, nil
}

// verify reads [0, n) back and compares its checksum.
func (t *transfer) verify(ctx context.Context, n int64, want uint64) error {
	h := xxhash.New()
	err := t.read(ctx, 0, n, func(p []byte) error {
		h.Write(p)
		return nil
	})
	if err == nil && h.Sum64() != want {
		err = fmt.Errorf("what was written is not what is read back (checksum %016x, want %016x)", h.Sum64(), want)
	}
	return err
}

// create makes a file that is there under its name only when it is whole.
func create(path string) (f *os.File, commit func() error, abort func(), err error) {
	tmp := path + ".part"
	f, err = os.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return nil, nil, nil, err
	}
	commit = func() error { return errors.Join(f.Sync(), f.Close(), os.Rename(tmp, path)) }
	abort = func() { f.Close(); os.Remove(tmp) }
	return f, commit, abort, nil
}
