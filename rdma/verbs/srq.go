// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo && verbs

package verbs

/*
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"net"
	"sync"
	"syscall"

	"rblk/rdma"
)

// sharedQueue implements rdma.SharedReceiveQueue. Its receives complete on
// several connections, in no order, so each has a slot rather than a place in a
// ring.
type sharedQueue struct {
	pd    *domain
	depth int

	mu    sync.Mutex
	srq   *C.struct_ibv_srq // nil after Close; guarded by mu
	users int               // connections; guarded by mu
	batch batch             // guarded by mu
	slots []uint64          // the callers' identifiers; guarded by mu
	free  []uint32          // slots without a receive; guarded by mu
}

var _ rdma.SharedReceiveQueue = (*sharedQueue)(nil)

// NewSharedReceiveQueue makes the queue (ibv_create_srq(3)).
func (pd *domain) NewSharedReceiveQueue(depth int) (rdma.SharedReceiveQueue, error) {
	if pd.d.info.Caps&rdma.CapSharedReceive == 0 {
		return nil, fmt.Errorf("%s: shared receive queue: %w", pd.d.name, rdma.ErrUnsupported)
	}
	if depth <= 0 {
		return nil, fmt.Errorf("shared receive queue of %d: %w", depth, rdma.ErrInvalid)
	}
	depth = min(depth, pd.d.info.MaxRecvQueue)
	cpd, err := pd.hold()
	if err != nil {
		return nil, err
	}
	segments := min(defaultSegments, pd.d.info.MaxSegments)
	b, err := newBatch(segments)
	if err != nil {
		pd.release()
		return nil, err
	}
	srq, errno := C.rblk_create_srq(cpd, C.uint(depth), C.uint(segments))
	if srq == nil {
		b.free()
		pd.release()
		return nil, errnoFromPtr("ibv_create_srq", true, errno)
	}
	q := &sharedQueue{pd: pd, depth: depth, srq: srq, batch: b, slots: make([]uint64, depth), free: make([]uint32, depth)}
	for i := range q.free {
		q.free[i] = uint32(depth - 1 - i)
	}
	pd.d.p.mu.Lock()
	pd.d.p.live.shared++
	pd.d.p.mu.Unlock()
	return q, nil
}

func (q *sharedQueue) hold() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.srq == nil {
		return net.ErrClosed
	}
	q.users++
	return nil
}

func (q *sharedQueue) release() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.users--
}

// PostRecv hands receives to the adapter (ibv_post_srq_recv(3)).
func (q *sharedQueue) PostRecv(rrs []rdma.RecvRequest) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	done := 0
	for done < len(rrs) {
		if q.srq == nil {
			return done, net.ErrClosed
		}
		n, refused := q.stage(rrs[done:])
		posted, err := q.postStaged(n)
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

// stage writes receives into the batch; request i takes the i-th free slot from
// the end, which postStaged then removes.
func (q *sharedQueue) stage(rrs []rdma.RecvRequest) (int, error) {
	limit := min(len(rrs), len(q.free), batchSize)
	for i := range limit {
		if err := q.pd.checkRecv(rrs[i].Local, q.batch.segments); err != nil {
			return i, err
		}
		slot := q.free[len(q.free)-1-i]
		q.slots[slot] = rrs[i].ID
		q.batch.put(i, uint64(slot)|recvBit, rrs[i].Local)
	}
	return limit, nil
}

func (q *sharedQueue) postStaged(n int) (int, error) {
	if n == 0 {
		return 0, nil
	}
	rc := C.rblk_post_srq(q.srq, q.batch.c, C.uint(n))
	posted := int(q.batch.c.posted)
	q.free = q.free[:len(q.free)-posted]
	switch errno := syscall.Errno(rc); errno {
	case 0, syscall.ENOMEM: // full is back-pressure
		return posted, nil
	case syscall.EINVAL:
		return posted, fmt.Errorf("ibv_post_srq_recv: %w: %w", rdma.ErrInvalid, errno)
	default:
		return posted, errnoFromRet("ibv_post_srq_recv", int(rc))
	}
}

// take gives a slot's receive back to the connection on which it completed.
func (q *sharedQueue) take(slot uint64) outstanding {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.free = append(q.free, uint32(slot))
	return outstanding{id: q.slots[slot], op: rdma.OpRecv, signaled: true}
}

// Close destroys the queue (ibv_destroy_srq(3)).
func (q *sharedQueue) Close() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.srq == nil {
		return nil
	}
	if q.users > 0 {
		return fmt.Errorf("shared receive queue with %d connections: %w", q.users, rdma.ErrBusy)
	}
	if err := errnoFromRet("ibv_destroy_srq", int(C.ibv_destroy_srq(q.srq))); err != nil {
		return err
	}
	q.srq = nil
	q.batch.free()
	q.pd.release()
	q.pd.d.p.release(&q.pd.d.p.live.shared)
	return nil
}
