// SPDX-License-Identifier: Apache-2.0

package nbd

import (
	"errors"
	"math"
	"os"
	"time"

	"rblk/cache"
)

// reply answers a request that returns no data.
func (t *transmission) reply(q *request, err error) {
	if err != nil {
		if t.ending(err) {
			return // nobody is there to read it
		}
		t.srv.opts.Logger.Warn("nbd request failed", "export", t.exp.Name, "command", q.cmd, "offset", q.offset, "length", q.length, "err", err)
	}
	t.replyErrno(q, toErrno(err))
}

func (t *transmission) replyErrno(q *request, no errno) {
	t.wmu.Lock()
	defer t.wmu.Unlock()
	switch {
	case !t.structured:
		t.send(t.simple(q, no), nil)
	case no == errnoOK:
		t.send(t.chunk(q, chunkNone, 0, 0), nil)
	default:
		// An error chunk: the number and an empty message.
		b := t.chunk(q, chunkError, 0, 6)
		b = be.AppendUint32(b, uint32(no))
		t.send(be.AppendUint16(b, 0), nil)
	}
}

// replyRead sends a view in one writev.
func (t *transmission) replyRead(q *request, view *cache.View) {
	t.wmu.Lock()
	defer t.wmu.Unlock()
	if !t.structured {
		t.send(t.simple(q, errnoOK), view.Slices())
		return
	}
	b := t.chunk(q, chunkOffsetData, q.offset, 8+q.length)
	t.send(be.AppendUint64(b, q.offset), view.Slices())
}

// replyStatus reports the whole range as allocated data: a volume does not tell
// its holes, and claiming none is always right.
func (t *transmission) replyStatus(q *request) {
	t.wmu.Lock()
	defer t.wmu.Unlock()
	if t.extended {
		b := t.chunk(q, chunkBlockStatusExt, q.offset, 24)
		b = be.AppendUint32(b, allocationID)
		b = be.AppendUint32(b, 1)
		b = be.AppendUint64(b, q.length)
		t.send(be.AppendUint64(b, 0), nil)
		return
	}
	b := t.chunk(q, chunkBlockStatus, q.offset, 12)
	b = be.AppendUint32(b, allocationID)
	b = be.AppendUint32(b, uint32(min(q.length, math.MaxUint32)))
	t.send(be.AppendUint32(b, 0), nil)
}

// simple builds a simple reply's header in t.head. Caller holds wmu.
func (t *transmission) simple(q *request, no errno) []byte {
	b := be.AppendUint32(t.head[:0], magicReply)
	b = be.AppendUint32(b, uint32(no))
	return be.AppendUint64(b, q.cookie)
}

// chunk builds the header of a structured or extended reply's only chunk in
// t.head. Caller holds wmu.
func (t *transmission) chunk(q *request, typ uint16, offset, length uint64) []byte {
	if !t.extended {
		b := be.AppendUint32(t.head[:0], magicReplyChunk)
		b = be.AppendUint16(b, chunkDone)
		b = be.AppendUint16(b, typ)
		b = be.AppendUint64(b, q.cookie)
		return be.AppendUint32(b, uint32(length))
	}
	b := be.AppendUint32(t.head[:0], magicReplyChunkExt)
	b = be.AppendUint16(b, chunkDone)
	b = be.AppendUint16(b, typ)
	b = be.AppendUint64(b, q.cookie)
	b = be.AppendUint64(b, q.offset)
	return be.AppendUint64(b, length)
}

// send writes head and data in one writev. A client that takes nothing for
// stallTime loses its connection. Caller holds wmu.
func (t *transmission) send(head []byte, data [][]byte) {
	if t.ctx.Err() != nil {
		return
	}
	t.vecs = append(append(t.vecs[:0], head), data...)
	bufs := t.vecs // WriteTo eats its receiver
	t.conn.SetWriteDeadline(time.Now().Add(stallTime))
	_, err := bufs.WriteTo(t.conn)
	clear(t.vecs[:cap(t.vecs)]) // no frame is held on to
	if err == nil {
		return
	}
	if errors.Is(err, os.ErrDeadlineExceeded) && t.ctx.Err() == nil {
		err = errors.New("client reads no replies")
	}
	t.cancel(err)
}
