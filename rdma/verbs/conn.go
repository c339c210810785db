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
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"rblk/rdma"
)

const (
	defaultSendDepth = 128
	defaultRecvDepth = 64
	defaultReadDepth = 16
	defaultSegments  = 4
	defaultInline    = 64

	// rnrTimerCode tells the peer to wait 0.96 ms before it repeats a message
	// that found no receive (IBTA table 45). The default, 0, means 655 ms.
	rnrTimerCode = 13
	rnrTimer     = 960 * time.Microsecond
	// rnrForever is the retry count that means "until the peer is dead".
	rnrForever = 7

	// connectGrace is how long a cancelled Connect waits for a connect call
	// under way. Only iWARP's can take longer, when the peer's host is silent.
	connectGrace = 2 * time.Second

	// flushGrace is how long a dead connection waits for the adapter to flush
	// what is outstanding before it destroys the queue pair. Adapters need
	// microseconds; waiting longer costs nothing but time, and waiting less
	// nothing but the knowledge of which late requests succeeded.
	flushGrace = 200 * time.Millisecond
)

// conn implements rdma.Conn: a queue pair with its completion queue, channel and
// id, all of which Close destroys.
type conn struct {
	p    *provider
	dev  *device
	pd   *domain
	id   *cmID
	srq  *sharedQueue // nil without
	opts rdma.ConnOptions
	info rdma.ConnInfo // final once established

	cq      *C.struct_ibv_cq
	channel *C.struct_ibv_comp_channel
	fd      *eventFD

	done    chan struct{}
	closing atomic.Bool           // Close has begun
	err     atomic.Pointer[error] // why it is dead

	// life guards the death of the connection and of its queue pair. Order of
	// locks: poll.mu, life, send.mu, recv.mu.
	life    sync.Mutex
	flushBy time.Time // set once, before done is closed

	closeMu sync.Mutex // held by Close
	closed  bool       // Close has run; guarded by closeMu

	send sendQueue
	recv recvQueue
	poll poller
}

var _ rdma.Conn = (*conn)(nil)

// newConn makes the queue pair for id in dom, with its receives posted. On
// failure nothing is left but id, which stays the caller's.
func newConn(id *cmID, dev *device, dom *domain, opts rdma.ConnOptions) (*conn, error) {
	p := dev.p
	cpd, err := dom.hold()
	if err != nil {
		return nil, err
	}
	c := &conn{p: p, dev: dev, pd: dom, id: id, opts: dev.clamp(opts), done: make(chan struct{})}
	if err := c.prepare(cpd); err != nil {
		c.free()
		dom.release()
		return nil, err
	}
	return c, nil
}

// prepare makes what free ends.
func (c *conn) prepare(cpd *C.struct_ibv_pd) error {
	if shared := c.opts.SharedReceive; shared != nil {
		srq, ok := shared.(*sharedQueue)
		if !ok || srq.pd != c.pd {
			return fmt.Errorf("shared receive queue is of another domain: %w", rdma.ErrInvalid)
		}
		if err := srq.hold(); err != nil {
			return err
		}
		c.srq = srq
	}
	if err := c.create(cpd); err != nil {
		return err
	}
	receives := c.opts.Receives
	if n, err := c.PostRecv(receives); err != nil {
		return err
	} else if n < len(receives) {
		return fmt.Errorf("%d receives for a queue of %d: %w", len(receives), n, rdma.ErrInvalid)
	}
	return c.p.hold(&c.p.live.conns)
}

// clamp fills in defaults and keeps to the device's limits.
func (d *device) clamp(o rdma.ConnOptions) rdma.ConnOptions {
	pick := func(v, def, least, limit int) int {
		if v <= 0 {
			v = def
		}
		if limit > 0 {
			v = min(v, limit)
		}
		return max(v, least)
	}
	// Two send places at least: one of them is for signaled requests.
	o.SendDepth = pick(o.SendDepth, defaultSendDepth, 2, d.info.MaxSendQueue)
	o.RecvDepth = pick(o.RecvDepth, defaultRecvDepth, 1, d.info.MaxRecvQueue)
	o.ReadDepth = min(pick(o.ReadDepth, defaultReadDepth, 1, d.info.MaxReadDepth), 255)
	o.Segments = pick(o.Segments, defaultSegments, 1, d.info.MaxSegments)
	o.Inline = pick(o.Inline, defaultInline, 0, d.info.MaxInlineData)
	if d.info.MaxInlineData == 0 {
		o.Inline = 0
	}
	if o.Spin == 0 {
		o.Spin = d.p.opts.Spin
	}
	if o.SharedReceive == nil && d.maxCQ > 0 && o.SendDepth+o.RecvDepth > d.maxCQ {
		o.SendDepth = max(2, min(o.SendDepth, d.maxCQ/2))
		o.RecvDepth = max(1, min(o.RecvDepth, d.maxCQ-o.SendDepth))
	}
	return o
}

// create makes completion channel, completion queue and queue pair. The queue
// has a place for every request that can be outstanding, so it cannot overflow.
func (c *conn) create(cpd *C.struct_ibv_pd) error {
	ctx := c.dev.ctx
	var errno error
	if c.channel, errno = C.ibv_create_comp_channel(ctx); c.channel == nil {
		return errnoFromPtr("ibv_create_comp_channel", true, errno)
	}
	var err error
	if c.fd, err = newEventFD(int(c.channel.fd), "ibv-cq"); err != nil {
		return err
	}
	receives := c.opts.RecvDepth
	if c.srq != nil {
		receives = c.srq.depth
	}
	handle := C.uint64_t(c.id.handle)
	if c.cq, errno = C.rblk_create_cq(ctx, C.int(c.opts.SendDepth+receives), handle, c.channel); c.cq == nil {
		return errnoFromPtr("ibv_create_cq", true, errno)
	}
	cap := C.struct_ibv_qp_cap{
		max_send_wr:     C.uint32_t(c.opts.SendDepth),
		max_recv_wr:     C.uint32_t(c.opts.RecvDepth),
		max_send_sge:    C.uint32_t(c.opts.Segments),
		max_recv_sge:    C.uint32_t(c.opts.Segments),
		max_inline_data: C.uint32_t(c.opts.Inline),
	}
	var srq *C.struct_ibv_srq
	if c.srq != nil {
		srq = c.srq.srq
		cap.max_recv_wr, cap.max_recv_sge = 0, 0
	}
	qp, errno := C.rblk_create_qp(cpd, c.cq, srq, handle, &cap)
	if qp == nil {
		return fmt.Errorf("queue pair with %d+%d requests of %d segments, %d inline: %w", c.opts.SendDepth, c.opts.RecvDepth, c.opts.Segments, c.opts.Inline, errnoFromPtr("ibv_create_qp", true, errno))
	}
	if err := c.send.init(qp, c.opts, c.dev.reorders); err != nil {
		C.ibv_destroy_qp(qp)
		return err
	}
	if err := c.recv.init(qp, c.opts); err != nil {
		return err
	}
	c.poll.init()
	rc, errno := C.rblk_qp_init(c.id.id, qp)
	return errnoFromCM("rdma_init_qp_attr", int(rc), errno)
}

// param is what both ends of a set-up have in common; the depths are filled in
// by the role.
func (c *conn) param() C.struct_rblk_param {
	p := C.struct_rblk_param{
		responder_resources: C.uint32_t(c.opts.ReadDepth),
		initiator_depth:     C.uint32_t(c.opts.ReadDepth),
		retry_count:         C.uint32_t(c.p.opts.RetryCount),
		rnr_retry:           C.uint32_t(rnrRetries(c.opts.RNRTimeout)),
		ack_timeout:         C.uint32_t(ackTimeoutCode(c.p.opts.AckTimeout)),
		path_mtu:            C.uint32_t(mtuCode(c.p.opts.PathMTU)),
		min_rnr_timer:       rnrTimerCode,
	}
	if c.srq != nil {
		p.srq = 1
	}
	return p
}

// rnrRetries is the retry count for a timeout: the wire knows 1 to 6 retries of
// what the peer's timer says, or "for ever".
func rnrRetries(timeout time.Duration) int {
	if timeout <= 0 {
		return rnrForever
	}
	return int(min(max((timeout+rnrTimer-1)/rnrTimer, 1), rnrForever-1))
}

// accept is the passive side's set-up.
func (c *conn) accept(ctx context.Context, r *request, reply []byte) error {
	c.id.conn.Store(c)
	p := c.param()
	p.responder_resources = min(p.responder_resources, C.uint32_t(r.depth.responder))
	p.initiator_depth = min(p.initiator_depth, C.uint32_t(r.depth.initiator))
	c.establishInfo(int(p.initiator_depth), r.private)
	rc, errno := C.rblk_qp_ready(c.id.id, c.send.qp, &p)
	if err := errnoFromCM("ibv_modify_qp", int(rc), errno); err != nil {
		C.rdma_reject(c.id.id, nil, 0)
		return err
	}
	rc, errno = C.rblk_accept(c.id.id, c.send.qp, &p, unsafe.Pointer(unsafe.SliceData(reply)), C.uint8_t(len(reply)))
	if err := errnoFromCM("rdma_accept", int(rc), errno); err != nil {
		return err
	}
	_, err := c.id.await(ctx, "rdma_accept", C.RDMA_CM_EVENT_ESTABLISHED)
	return err
}

// connect is the active side's set-up. On failure the connection is closed.
func (c *conn) connect(ctx context.Context, private []byte) error {
	c.id.conn.Store(c)
	p := c.param()
	// iWARP connects TCP inside rdma_connect, which no context can interrupt:
	// it runs beside, and when it outlasts ctx by connectGrace, it is left to
	// end by itself.
	called := make(chan error, 1)
	go func() {
		rc, errno := C.rblk_connect(c.id.id, c.send.qp, &p, unsafe.Pointer(unsafe.SliceData(private)), C.uint8_t(len(private)))
		called <- errnoFromCM("rdma_connect", int(rc), errno)
	}()
	select {
	case err := <-called:
		if err == nil {
			err = c.finishConnect(ctx, p)
		}
		if err != nil {
			c.Close()
		}
		return err
	case <-ctx.Done():
	}
	select {
	case <-called:
		c.Close()
	case <-time.After(connectGrace):
		go func() { // the domain and the provider stay busy until then
			<-called
			c.Close()
		}()
	}
	return ctx.Err()
}

// finishConnect waits for the answer. InfiniBand and RoCE leave the queue pair
// to this side; on iWARP the driver has made it ready.
func (c *conn) finishConnect(ctx context.Context, p C.struct_rblk_param) error {
	e, err := c.id.await(ctx, "rdma_connect", C.RDMA_CM_EVENT_CONNECT_RESPONSE, C.RDMA_CM_EVENT_ESTABLISHED)
	if err != nil {
		return err
	}
	if c.dev.iwarp {
		c.establishInfo(c.opts.ReadDepth, e.private)
		if e.initiatorDepth > 0 {
			c.info.ReadDepth = min(c.opts.ReadDepth, e.initiatorDepth)
		}
		return nil
	}
	p.responder_resources = min(p.responder_resources, C.uint32_t(e.responderResources))
	p.initiator_depth = min(p.initiator_depth, C.uint32_t(e.initiatorDepth))
	c.establishInfo(int(p.initiator_depth), e.private)
	rc, errno := C.rblk_qp_ready(c.id.id, c.send.qp, &p)
	if err := errnoFromCM("ibv_modify_qp", int(rc), errno); err != nil {
		return err
	}
	rc, errno = C.rdma_establish(c.id.id)
	return errnoFromCM("rdma_establish", int(rc), errno)
}

func (c *conn) establishInfo(readDepth int, private []byte) {
	c.info = rdma.ConnInfo{
		LocalAddr:   tcpAddr(c.id.local()),
		RemoteAddr:  tcpAddr(c.id.peer()),
		Device:      c.dev,
		PrivateData: clip(private, rdma.MaxPrivateData),
		SendDepth:   c.opts.SendDepth,
		RecvDepth:   c.opts.RecvDepth,
		ReadDepth:   readDepth,
		Segments:    c.opts.Segments,
		Inline:      c.opts.Inline,
		QPNum:       uint32(c.send.qp.qp_num),
	}
}

func (c *conn) Info() rdma.ConnInfo   { return c.info }
func (c *conn) Done() <-chan struct{} { return c.done }

func (c *conn) Err() error {
	if e := c.err.Load(); e != nil {
		return *e
	}
	return nil
}

// die ends the connection once: the queue pair goes to the error state, which
// makes the adapter flush what is outstanding, the peer is told, waiters wake.
func (c *conn) die(cause error) {
	if c.err.Load() != nil {
		return
	}
	c.life.Lock()
	defer c.life.Unlock()
	if c.err.Load() != nil {
		return
	}
	err := fmt.Errorf("%w: %w", rdma.ErrBroken, cause)
	c.err.Store(&err)
	c.flushBy = time.Now().Add(flushGrace)
	if c.send.qp != nil {
		C.rblk_qp_error(c.send.qp)
		C.rdma_disconnect(c.id.id)
	}
	close(c.done)
	c.fd.kick()
}

// failed is die for a completion's error. It also names the status as a cause
// when the news of the peer's disconnect, which the same failure brought about,
// came first.
func (c *conn) failed(s rdma.Status) {
	if s == rdma.StatusFlushed {
		c.die(rdma.ErrDisconnected)
		return
	}
	c.die(s.Err())
	if old := c.err.Load(); !errors.Is(*old, s.Err()) && !c.closing.Load() {
		err := fmt.Errorf("%w: %w", *old, s.Err())
		c.err.CompareAndSwap(old, &err)
	}
}

// Disconnect breaks the connection (ibv_modify_qp(3), rdma_disconnect(3)).
func (c *conn) Disconnect() { c.die(rdma.ErrDisconnected) }

// Close destroys the connection, in the order of the package documentation.
func (c *conn) Close() error {
	c.closeMu.Lock()
	defer c.closeMu.Unlock()
	if c.closed {
		return nil
	}
	c.closing.Store(true)
	c.die(rdma.ErrDisconnected)
	if err := c.destroyQP(); err != nil {
		return err // the adapter may still hold buffers
	}
	c.closed = true
	c.fd.kick()
	c.poll.mu.Lock() // whoever was inside has left
	err := c.free()
	c.poll.mu.Unlock()
	c.id.destroy()
	c.pd.release()
	c.p.release(&c.p.live.conns)
	return err
}

// destroyQP destroys the queue pair: afterwards the adapter touches no buffer of
// the connection.
func (c *conn) destroyQP() error {
	c.life.Lock()
	defer c.life.Unlock()
	c.send.mu.Lock()
	defer c.send.mu.Unlock()
	c.recv.mu.Lock()
	defer c.recv.mu.Unlock()
	if c.send.qp == nil {
		return nil
	}
	if err := errnoFromRet("ibv_destroy_qp", int(C.ibv_destroy_qp(c.send.qp))); err != nil {
		return err
	}
	c.send.qp, c.recv.qp = nil, nil
	return nil
}

// free ends what create made, except the id. The queue pair goes first; the
// caller of a failed set-up has no other user of the connection.
func (c *conn) free() error {
	var errs []error
	if c.send.qp != nil {
		errs = append(errs, errnoFromRet("ibv_destroy_qp", int(C.ibv_destroy_qp(c.send.qp))))
		c.send.qp, c.recv.qp = nil, nil
	}
	if c.cq != nil {
		errs = append(errs, errnoFromRet("ibv_destroy_cq", int(C.ibv_destroy_cq(c.cq))))
		c.cq = nil
	}
	if c.fd != nil {
		c.fd.close()
	}
	if c.channel != nil {
		errs = append(errs, errnoFromRet("ibv_destroy_comp_channel", int(C.ibv_destroy_comp_channel(c.channel))))
		c.channel = nil
	}
	if c.srq != nil {
		c.srq.release()
		c.srq = nil
	}
	c.send.batch.free()
	c.recv.batch.free()
	c.poll.free()
	return errors.Join(errs...)
}

// closedErr is what Poll and Wait answer after Close.
var closedErr = net.ErrClosed
