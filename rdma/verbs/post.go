// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo && verbs

package verbs

/*
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"rblk/rdma"
)

// batchSize is how many requests one call into C hands over.
const batchSize = C.RBLK_BATCH

// batch is C memory through which a queue posts.
type batch struct {
	c        *C.struct_rblk_batch
	wrs      []C.struct_rblk_wr // in c
	sges     []C.struct_ibv_sge // in c
	segments int
}

func newBatch(segments int) (batch, error) {
	c := C.rblk_batch_new(C.uint(segments))
	if c == nil {
		return batch{}, syscall.ENOMEM
	}
	// cgo leaves out a flexible array member: sge begins where the structure ends.
	sge := (*C.struct_ibv_sge)(unsafe.Add(unsafe.Pointer(c), C.sizeof_struct_rblk_batch))
	return batch{c: c, wrs: c.wr[:], sges: unsafe.Slice(sge, batchSize*segments), segments: segments}, nil
}

func (b *batch) free() {
	C.free(unsafe.Pointer(b.c))
	*b = batch{}
}

// put writes request i of the batch. Empty segments are left out: to some
// adapters length 0 means 2 GiB.
func (b *batch) put(i int, id uint64, local []rdma.Segment) *C.struct_rblk_wr {
	first := i * b.segments
	next := first
	for _, s := range local {
		if s.Length > 0 {
			b.sges[next] = C.struct_ibv_sge{addr: C.uint64_t(s.Addr), length: C.uint32_t(s.Length), lkey: C.uint32_t(s.LKey)}
			next++
		}
	}
	b.wrs[i] = C.struct_rblk_wr{id: C.uint64_t(id), first_sge: C.uint32_t(first), num_sge: C.uint32_t(next - first)}
	return &b.wrs[i]
}

// recvBit marks the identifiers of receives in the completion queue that both
// queues share.
const recvBit = 1 << 63

// outstanding is one request that the adapter has.
type outstanding struct {
	id       uint64 // the caller's
	op       rdma.Opcode
	signaled bool // the caller wants to know of success

	// Where completions come out of order: this one has come, and its turn has
	// not.
	ended  bool
	status rdma.Status
	length uint32
}

// ring holds the outstanding requests of a queue that completes in order. The
// identifier that the adapter sees is the request's number, and its place is
// that number modulo the depth. Requests enter at tail, under the queue's lock,
// and leave at head, under the poller's.
type ring struct {
	entries    []outstanding
	head, tail atomic.Uint64
}

func (r *ring) init(depth int)           { r.entries = make([]outstanding, depth) }
func (r *ring) at(n uint64) *outstanding { return &r.entries[n%uint64(len(r.entries))] }
func (r *ring) used() int                { return int(r.tail.Load() - r.head.Load()) }
func (r *ring) free() int                { return len(r.entries) - r.used() }
func (r *ring) holds(n uint64) bool      { return n-r.head.Load() < r.tail.Load()-r.head.Load() }

// sendQueue is the send side of a connection.
type sendQueue struct {
	mu    sync.Mutex
	qp    *C.struct_ibv_qp // nil once destroyed; guarded by life and mu: either to read, both to write
	batch batch            // guarded by mu
	ring  ring
	quiet int // requests posted since the adapter was last asked to report; guarded by mu
	// reportAll: the adapter completes requests out of order, so that a later
	// completion says nothing of an earlier request, and each must be reported.
	reportAll bool
}

func (q *sendQueue) init(qp *C.struct_ibv_qp, o rdma.ConnOptions, reportAll bool) (err error) {
	if q.batch, err = newBatch(o.Segments); err != nil {
		return err
	}
	q.qp, q.reportAll = qp, reportAll
	q.ring.init(o.SendDepth)
	return nil
}

// sendOpcode translates to ibv_wr_opcode.
func sendOpcode(op rdma.Opcode) (code C.uint32_t, ok bool) {
	switch op {
	case rdma.OpRead:
		return C.IBV_WR_RDMA_READ, true
	case rdma.OpWrite:
		return C.IBV_WR_RDMA_WRITE, true
	case rdma.OpSend:
		return C.IBV_WR_SEND, true
	case rdma.OpWriteImm:
		return C.IBV_WR_RDMA_WRITE_WITH_IMM, true
	}
	return 0, false
}

// Post hands requests to the adapter, up to batchSize with one doorbell
// (ibv_post_send(3)).
func (c *conn) Post(wrs []rdma.WorkRequest) (int, error) {
	q := &c.send
	q.mu.Lock()
	defer q.mu.Unlock()
	done := 0
	for done < len(wrs) {
		if err := c.Err(); err != nil {
			return done, err
		}
		n, refused := c.stage(wrs[done:])
		posted, err := c.postStaged(n)
		done += posted
		if err != nil {
			return done, err
		}
		if refused != nil {
			return done, refused
		}
		if n < batchSize {
			break // full, or all handed over
		}
	}
	return done, nil
}

// stage writes as many requests as there is room for into the batch, and into
// the ring without moving its tail: how many, and why the next was refused.
func (c *conn) stage(wrs []rdma.WorkRequest) (int, error) {
	q := &c.send
	free := q.ring.free()
	tail := q.ring.tail.Load()
	for i := range wrs {
		wr := &wrs[i]
		signaled := wr.Flags&rdma.WRSignaled != 0
		// The last place is for a signaled request.
		if i == batchSize || free == 0 || free == 1 && !signaled {
			return i, nil
		}
		if err := c.check(wr); err != nil {
			return i, err
		}
		free--
		n := tail + uint64(i)
		*q.ring.at(n) = outstanding{id: wr.ID, op: wr.Op, signaled: signaled}
		w := q.batch.put(i, n, wr.Local)
		w.opcode, _ = sendOpcode(wr.Op)
		w.imm = C.uint32_t(wr.Imm)
		w.remote_addr = C.uint64_t(wr.Remote.Addr)
		w.rkey = C.uint32_t(wr.Remote.RKey)
		w.flags = q.flags(wr)
	}
	return len(wrs), nil
}

// flags translates WRFlags. At least one request in half a queue is reported,
// asked for or not, so that places always come free.
func (q *sendQueue) flags(wr *rdma.WorkRequest) C.uint32_t {
	var f C.uint32_t
	q.quiet++
	if wr.Flags&rdma.WRSignaled != 0 || q.reportAll || q.quiet >= len(q.ring.entries)/2 {
		f |= C.IBV_SEND_SIGNALED
		q.quiet = 0
	}
	// siw refuses a fence on a READ, and needs none: READs are answered in order.
	if wr.Flags&rdma.WRFence != 0 && !(q.reportAll && wr.Op == rdma.OpRead) {
		f |= C.IBV_SEND_FENCE
	}
	if wr.Flags&rdma.WRInline != 0 {
		f |= C.IBV_SEND_INLINE
	}
	if wr.Flags&rdma.WRSolicited != 0 {
		f |= C.IBV_SEND_SOLICITED
	}
	return f
}

// postStaged posts the first n requests of the batch. The tail moves first: the
// adapter may complete a request before the call returns.
func (c *conn) postStaged(n int) (int, error) {
	if n == 0 {
		return 0, nil
	}
	q := &c.send
	tail := q.ring.tail.Load()
	q.ring.tail.Store(tail + uint64(n))
	rc := C.rblk_post_send(q.qp, q.batch.c, C.uint(n))
	if rc == 0 {
		return n, nil
	}
	posted := int(q.batch.c.posted)
	q.ring.tail.Store(tail + uint64(posted))
	q.quiet = len(q.ring.entries) // the one that was to be reported may not have gone
	return posted, c.postError("ibv_post_send", int(rc))
}

// postError is the meaning of a refused post. The requests were checked, so
// that what is left is the queue pair's end, or a limit the driver did not tell.
func (c *conn) postError(op string, rc int) error {
	if err := c.Err(); err != nil {
		return err
	}
	switch errno := syscall.Errno(rc); errno {
	case syscall.ENOMEM: // the driver's queue is fuller than ours: back-pressure
		return nil
	case syscall.EINVAL, syscall.EOPNOTSUPP, syscall.EMSGSIZE:
		return fmt.Errorf("%s: %w: %w", op, rdma.ErrInvalid, errno)
	}
	err := errnoFromRet(op, rc)
	go c.die(err) // not under the queue's lock
	return fmt.Errorf("%w: %w", rdma.ErrBroken, err)
}

// check refuses what no adapter should see.
func (c *conn) check(wr *rdma.WorkRequest) error {
	if _, ok := sendOpcode(wr.Op); !ok {
		return fmt.Errorf("%w: opcode %v", rdma.ErrInvalid, wr.Op)
	}
	if wr.Op == rdma.OpWriteImm && c.dev.info.Caps&rdma.CapImmediate == 0 {
		return fmt.Errorf("%w: %s has no immediate data", rdma.ErrInvalid, c.dev.name)
	}
	total, err := lengthOf(wr.Local, c.opts.Segments, c.dev.info.MaxMessage)
	if err != nil {
		return err
	}
	if wr.Flags&rdma.WRInline == 0 {
		return c.pd.check(wr.Local, wr.Op == rdma.OpRead)
	}
	if wr.Op == rdma.OpRead {
		return fmt.Errorf("%w: a READ cannot be inline", rdma.ErrInvalid)
	}
	if total > uint64(c.opts.Inline) {
		return fmt.Errorf("%w: %d bytes inline, limit %d", rdma.ErrInvalid, total, c.opts.Inline)
	}
	return nil
}

// lengthOf is the length of a request, when that and its segments are within the
// limits.
func lengthOf(local []rdma.Segment, segments int, limit uint64) (total uint64, err error) {
	if len(local) > segments {
		return 0, fmt.Errorf("%w: %d segments, limit %d", rdma.ErrInvalid, len(local), segments)
	}
	for _, s := range local {
		total += uint64(s.Length)
	}
	if limit > 0 && total > limit {
		return 0, fmt.Errorf("%w: %d bytes in one request, limit %d", rdma.ErrInvalid, total, limit)
	}
	return total, nil
}

// recvQueue is the receive side of a connection without a shared queue.
type recvQueue struct {
	mu    sync.Mutex
	qp    *C.struct_ibv_qp // as sendQueue.qp
	batch batch            // guarded by mu
	ring  ring
}

func (q *recvQueue) init(qp *C.struct_ibv_qp, o rdma.ConnOptions) (err error) {
	if q.batch, err = newBatch(o.Segments); err != nil {
		return err
	}
	q.qp = qp
	depth := o.RecvDepth
	if o.SharedReceive != nil {
		depth = 0
	}
	q.ring.init(depth)
	return nil
}

// PostRecv hands receives to the adapter (ibv_post_recv(3)).
func (c *conn) PostRecv(rrs []rdma.RecvRequest) (int, error) {
	if len(rrs) == 0 {
		return 0, nil
	}
	if c.opts.SharedReceive != nil {
		return 0, fmt.Errorf("%w: the connection receives through its shared queue", rdma.ErrInvalid)
	}
	q := &c.recv
	q.mu.Lock()
	defer q.mu.Unlock()
	done := 0
	for done < len(rrs) {
		if err := c.Err(); err != nil {
			return done, err
		}
		n, refused := c.stageRecv(rrs[done:])
		posted, err := c.postStagedRecv(n)
		done += posted
		if err != nil {
			return done, err
		}
		if refused != nil {
			return done, refused
		}
		if n < batchSize {
			break
		}
	}
	return done, nil
}

func (c *conn) stageRecv(rrs []rdma.RecvRequest) (int, error) {
	q := &c.recv
	tail, limit := q.ring.tail.Load(), min(q.ring.free(), batchSize, len(rrs))
	for i := range limit {
		if err := c.pd.checkRecv(rrs[i].Local, c.opts.Segments); err != nil {
			return i, err
		}
		n := tail + uint64(i)
		*q.ring.at(n) = outstanding{id: rrs[i].ID, op: rdma.OpRecv, signaled: true}
		q.batch.put(i, n|recvBit, rrs[i].Local)
	}
	return limit, nil
}

func (c *conn) postStagedRecv(n int) (int, error) {
	if n == 0 {
		return 0, nil
	}
	q := &c.recv
	tail := q.ring.tail.Load()
	q.ring.tail.Store(tail + uint64(n))
	rc := C.rblk_post_recv(q.qp, q.batch.c, C.uint(n))
	if rc == 0 {
		return n, nil
	}
	posted := int(q.batch.c.posted)
	q.ring.tail.Store(tail + uint64(posted))
	return posted, c.postError("ibv_post_recv", int(rc))
}
