// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo && verbs

package verbs

/*
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"context"
	"fmt"
	"sync"
	"time"
	"unsafe"

	"rblk/rdma"
)

// poller is the completion side of a connection.
type poller struct {
	mu         sync.Mutex         // held by Poll and Wait, and by Close to wait for them
	wcs        []C.struct_rblk_wc // C memory; guarded by mu
	armed      bool               // an event will come, or waits already; guarded by mu
	sendFailed bool               // a send request has failed, on a device that reorders; guarded by mu
	try        func(uintptr) bool // takes events; made once, since a closure escapes
	tried      struct {           // what try found; guarded by mu
		n     C.int
		errno error
	}
}

func (p *poller) init() {
	mem := (*C.struct_rblk_wc)(C.calloc(batchSize, C.sizeof_struct_rblk_wc))
	p.wcs = unsafe.Slice(mem, batchSize)
}

func (p *poller) free() {
	C.free(unsafe.Pointer(unsafe.SliceData(p.wcs)))
	p.wcs = nil
}

// Poll takes what is ready (ibv_poll_cq(3)).
func (c *conn) Poll(wc []rdma.Completion) (int, error) {
	c.poll.mu.Lock()
	defer c.poll.mu.Unlock()
	return c.pollLocked(wc)
}

// pollLocked takes completions; on a dead connection also those that the adapter
// owes, and in the end Err.
func (c *conn) pollLocked(wc []rdma.Completion) (int, error) {
	if c.closing.Load() {
		return 0, closedErr
	}
	if n := c.harvest(wc); n > 0 || len(wc) == 0 {
		return n, nil
	}
	err := c.Err()
	if err == nil {
		return 0, nil
	}
	if c.outstanding() > 0 {
		return c.settle(wc)
	}
	return 0, err
}

func (c *conn) outstanding() int { return c.send.ring.used() + c.recv.ring.used() }

// harvest takes completions from the queue until wc is full or the queue empty.
func (c *conn) harvest(wc []rdma.Completion) int {
	out := c.inTurn(wc)
	for out < len(wc) {
		want := min(len(wc)-out, batchSize)
		n := int(C.rblk_poll(c.cq, &c.poll.wcs[0], C.int(want)))
		if err := errPoll(n); err != nil {
			c.die(err)
			break
		}
		for i := range c.poll.wcs[:n] {
			out += c.take(&c.poll.wcs[i], wc[out:])
		}
		if n < want {
			break
		}
	}
	return out
}

// take turns one completion of the adapter into those for the caller that it
// brings about: none when only the ring wanted it. wc has room for it.
func (c *conn) take(w *C.struct_rblk_wc, wc []rdma.Completion) int {
	n := uint64(w.id)
	if n&recvBit != 0 {
		if c.srq != nil {
			return c.report(c.srq.take(n&^recvBit), w, wc)
		}
		return c.takeFrom(&c.recv.ring, n&^recvBit, w, wc)
	}
	if !c.send.reportAll {
		return c.takeFrom(&c.send.ring, n, w, wc)
	}
	if r := &c.send.ring; r.holds(n) {
		req := r.at(n)
		req.ended, req.status, req.length = true, status(uint32(w.status)), uint32(w.length)
	}
	return c.inTurn(wc)
}

// takeFrom reports request n of a ring that completes in order: whatever was
// before it, unreported, has succeeded.
func (c *conn) takeFrom(r *ring, n uint64, w *C.struct_rblk_wc, wc []rdma.Completion) int {
	if !r.holds(n) {
		return 0
	}
	req := *r.at(n)
	r.head.Store(n + 1)
	return c.report(req, w, wc)
}

// report writes the completion of req.
func (c *conn) report(req outstanding, w *C.struct_rblk_wc, wc []rdma.Completion) int {
	req.status, req.length = status(uint32(w.status)), uint32(w.length)
	if n := c.tell(req, wc); n == 0 {
		return 0
	}
	if req.status != rdma.StatusOK {
		wc[0].VendorErr = uint32(w.vendor_err)
	} else if w.has_imm != 0 {
		wc[0].HasImm, wc[0].Imm = true, uint32(w.imm)
	}
	return 1
}

// tell writes the completion of a request that has ended, when the caller wants
// it. A failure ends the connection.
func (c *conn) tell(req outstanding, wc []rdma.Completion) int {
	if req.status == rdma.StatusOK && !req.signaled {
		return 0
	}
	wc[0] = rdma.Completion{ID: req.id, Op: req.op, Status: req.status}
	switch {
	case req.status != rdma.StatusOK:
		c.failed(req.status)
	case req.op == rdma.OpRead || req.op == rdma.OpRecv:
		wc[0].Length = req.length
	}
	return 1
}

// inTurn reports, where completions come out of order, those whose turn it is.
// What the adapter completed behind a failure is reported as flushed: on iWARP
// success only means that TCP had it.
func (c *conn) inTurn(wc []rdma.Completion) int {
	if !c.send.reportAll {
		return 0
	}
	out := 0
	for r := &c.send.ring; out < len(wc) && r.used() > 0; {
		req := *r.at(r.head.Load())
		if !req.ended {
			break
		}
		r.head.Add(1)
		if c.poll.sendFailed {
			req.status = rdma.StatusFlushed
		}
		c.poll.sendFailed = req.status != rdma.StatusOK
		out += c.tell(req, wc[out:])
	}
	return out
}

// settle waits, across calls, for the adapter to flush a dead connection. When
// it has been silent for flushGrace, the queue pair is destroyed, and what is
// then still outstanding is reported as flushed.
func (c *conn) settle(wc []rdma.Completion) (int, error) {
	<-c.done // flushBy is set
	if time.Now().Before(c.flushBy) {
		return 0, nil
	}
	if err := c.destroyQP(); err != nil {
		return 0, err
	}
	// What was reported up to the queue pair's end comes first.
	if n := c.harvest(wc); n > 0 {
		return n, nil
	}
	n := c.send.ring.flush(wc)
	n += c.recv.ring.flush(wc[n:])
	c.p.log.Debug("the adapter did not flush; done in its place", "device", c.dev.name, "requests", n)
	return n, nil
}

// flush takes requests off the ring as flushed.
func (r *ring) flush(wc []rdma.Completion) int {
	n := 0
	for n < len(wc) && r.used() > 0 {
		req := r.at(r.head.Load())
		wc[n] = rdma.Completion{ID: req.id, Op: req.op, Status: rdma.StatusFlushed}
		r.head.Add(1)
		n++
	}
	return n
}

// Wait polls for a while, then arms the completion channel and sleeps on it in
// the network poller (ibv_req_notify_cq(3), ibv_get_cq_event(3)).
func (c *conn) Wait(ctx context.Context, wc []rdma.Completion) (int, error) {
	c.poll.mu.Lock()
	defer c.poll.mu.Unlock()
	if len(wc) == 0 {
		return 0, nil
	}
	if n, err := c.spin(ctx, wc); n > 0 || err != nil {
		return n, err
	}
	stop := c.fd.kickWhenDone(ctx)
	defer stop()
	for {
		if err := c.arm(); err != nil {
			c.die(err)
		}
		if n, err := c.pollLocked(wc); n > 0 || err != nil {
			return n, err
		}
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		if err := c.sleep(); err != nil {
			return 0, err
		}
	}
}

// spin polls for opts.Spin, at least once.
func (c *conn) spin(ctx context.Context, wc []rdma.Completion) (int, error) {
	n, err := c.pollLocked(wc)
	if n > 0 || err != nil || c.opts.Spin <= 0 {
		return n, err
	}
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	const pollsPerClock = 8 // the clock costs as much as a poll
	for start := time.Now(); time.Since(start) < c.opts.Spin; {
		for range pollsPerClock {
			if n, err = c.pollLocked(wc); n > 0 || err != nil {
				return n, err
			}
		}
	}
	return 0, nil
}

// arm asks for an event unless one is under way.
func (c *conn) arm() error {
	if c.poll.armed {
		return nil
	}
	if err := errnoFromRet("ibv_req_notify_cq", int(C.rblk_req_notify(c.cq))); err != nil {
		return err
	}
	c.poll.armed = true
	return nil
}

// sleep waits for an event or a kick. On a dead connection that is not yet
// settled it sleeps until flushBy at the latest.
func (c *conn) sleep() error {
	p := &c.poll
	if p.try == nil {
		p.try = func(uintptr) bool {
			p.tried.n, p.tried.errno = C.rblk_cq_events(c.channel)
			return p.tried.n != 0
		}
	}
	err := c.fd.wait(p.try)
	switch {
	case err == nil && p.tried.n > 0:
		p.armed = false
		return nil
	case kicked(err):
		c.fd.rearm()
		if c.err.Load() != nil {
			<-c.done // flushBy is set
			c.fd.kickAt(c.flushBy)
		}
		return nil
	case err != nil:
		return closedErr
	}
	// The channel is broken: end the connection, and do not spin on it.
	err = errnoFromCM("ibv_get_cq_event", int(p.tried.n), p.tried.errno)
	c.die(err)
	return fmt.Errorf("%w: %w", rdma.ErrBroken, err)
}

// status translates ibv_wc_status.
func status(s uint32) rdma.Status {
	switch s {
	case C.IBV_WC_SUCCESS:
		return rdma.StatusOK
	case C.IBV_WC_LOC_LEN_ERR:
		return rdma.StatusLocalLength
	case C.IBV_WC_LOC_PROT_ERR, C.IBV_WC_LOC_ACCESS_ERR, C.IBV_WC_MW_BIND_ERR:
		return rdma.StatusLocalProtection
	case C.IBV_WC_WR_FLUSH_ERR:
		return rdma.StatusFlushed
	case C.IBV_WC_REM_ACCESS_ERR:
		return rdma.StatusRemoteAccess
	case C.IBV_WC_REM_INV_REQ_ERR:
		return rdma.StatusRemoteInvalidRequest
	case C.IBV_WC_REM_OP_ERR, C.IBV_WC_REM_ABORT_ERR:
		return rdma.StatusRemoteOperation
	case C.IBV_WC_RETRY_EXC_ERR, C.IBV_WC_RESP_TIMEOUT_ERR:
		return rdma.StatusRetryExceeded
	case C.IBV_WC_RNR_RETRY_EXC_ERR:
		return rdma.StatusRNRRetryExceeded
	}
	return rdma.StatusGeneral
}
