// SPDX-License-Identifier: Apache-2.0

package fuse

import (
	"context"

	"golang.org/x/sync/semaphore"

	"rblk/cache"
)

// blockWriter writes any range to a volume that takes whole blocks only: a
// block that is written in part is read, changed and written back. Meanwhile
// nobody else of this mount writes.
type blockWriter struct {
	// turn is a reader-writer lock that a cancelled request need not wait for:
	// writes of whole blocks take one of it, others take it all.
	turn *semaphore.Weighted
}

// writers bounds the writes of whole blocks at a time; it is more than the
// kernel sends.
const writers = 1 << 20

func newBlockWriter() *blockWriter { return &blockWriter{semaphore.NewWeighted(writers)} }

func (b *blockWriter) write(ctx context.Context, v *cache.Volume, off int64, data []byte) error {
	size := v.Geometry().BlockSize
	if size <= 1 {
		return v.Write(ctx, off, data, false)
	}
	start, end := off&^(size-1), (off+int64(len(data))+size-1)&^(size-1)
	share := int64(1)
	if whole := end-start == int64(len(data)); !whole {
		share = writers
	}
	if err := b.turn.Acquire(ctx, share); err != nil {
		return err
	}
	defer b.turn.Release(share)
	if share == 1 {
		return v.Write(ctx, off, data, false)
	}
	buf := make([]byte, end-start)
	if err := readBlock(ctx, v, start, buf[:size]); err != nil {
		return err
	}
	if end-start > size {
		if err := readBlock(ctx, v, end-size, buf[int64(len(buf))-size:]); err != nil {
			return err
		}
	}
	copy(buf[off-start:], data)
	return v.Write(ctx, start, buf, false)
}

func readBlock(ctx context.Context, v *cache.Volume, off int64, p []byte) error {
	view, err := v.Read(ctx, off, len(p))
	if err != nil {
		return err
	}
	view.CopyTo(p)
	view.Release()
	return nil
}
