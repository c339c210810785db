// SPDX-License-Identifier: Apache-2.0

package nbd

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"rblk/cache"
	"rblk/volume"
)

// transmission is a connection past its handshake. Its goroutines are workers:
// one leads, that is, reads requests; the others carry out requests they have
// read, or are idle.
type transmission struct {
	// set once
	srv        *Server
	exp        *Export
	vol        *cache.Volume
	conn       net.Conn
	r          *bufio.Reader // the leader's
	flags      uint16
	structured bool
	extended   bool
	allocation bool
	ctx        context.Context
	cancel     context.CancelCauseFunc
	workers    sync.WaitGroup
	lead       chan struct{} // the right to read, when nobody has it

	mu      sync.Mutex
	count   int  // guarded by mu: workers
	idle    int  // guarded by mu: of them, waiting to lead
	leaving bool // guarded by mu: DISC was read; nobody leads any more

	wmu  sync.Mutex
	head [40]byte    // guarded by wmu: a reply's header
	vecs net.Buffers // guarded by wmu: what a writev takes
}

// errDisconnect: the client said DISC.
var errDisconnect = errors.New("client disconnected")

// transmit serves requests until the client leaves.
func (s *Server) transmit(ctx context.Context, h *handshake, exp *Export) error {
	if err := h.conn.SetDeadline(time.Time{}); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	t := &transmission{
		srv: s, exp: exp, vol: exp.Volume, conn: h.conn, r: h.r,
		flags:      exp.flags(exp.Volume.Geometry(), h.structured),
		structured: h.structured, extended: h.extended, allocation: h.allocation,
		ctx: ctx, cancel: cancel, lead: make(chan struct{}, 1),
	}
	// Whatever ends the transmission also ends a blocked read or write.
	stop := context.AfterFunc(ctx, func() { t.conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	t.lead <- struct{}{}
	t.count = 1
	t.workers.Add(1)
	t.work()
	t.workers.Wait()
	if err := context.Cause(ctx); err != nil && !errors.Is(err, errDisconnect) {
		return err
	}
	return nil
}

// work is a worker's life.
func (t *transmission) work() {
	defer t.workers.Done()
	for t.await() {
		for leading := true; leading; {
			q, err := t.read()
			if err != nil {
				t.end(err)
				return
			}
			job, err := t.take(&q)
			if err != nil {
				t.end(err)
				return
			}
			leading = !t.pass()
			job()
		}
	}
}

// await waits for the right to lead; false ends the worker.
func (t *transmission) await() bool {
	select {
	case _, ok := <-t.lead:
		return ok // closed: the client has left
	default:
	}
	t.mu.Lock()
	if t.leaving {
		t.mu.Unlock()
		return false
	}
	t.idle++
	t.mu.Unlock()
	select {
	case _, ok := <-t.lead:
		return ok
	case <-t.ctx.Done():
		return false
	}
}

// pass gives the right to lead to an idle worker, or to a new one. With all
// places taken it tells false: the caller leads on after its request, and until
// then the client waits in its socket.
func (t *transmission) pass() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.idle > 0:
		t.idle--
		t.lead <- struct{}{}
		return true
	case t.count < t.srv.opts.MaxRequests:
		t.count++
		t.lead <- struct{}{}
		t.workers.Add(1)
		go t.work()
		return true
	}
	return false
}

// end is the leader's last act. After DISC the others finish their requests;
// after an error they are cut off.
func (t *transmission) end(err error) {
	if errors.Is(err, errDisconnect) {
		t.mu.Lock()
		t.leaving = true
		close(t.lead)
		t.mu.Unlock()
		return
	}
	t.cancel(err)
}

// read takes the next request from the socket. Its payload, if it has one, is
// still there.
func (t *transmission) read() (request, error) {
	n := requestSize
	if t.extended {
		n = requestExtSize
	}
	b, err := t.r.Peek(n)
	if err != nil {
		if len(b) == 0 && errors.Is(err, io.EOF) {
			return request{}, io.EOF
		}
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		if errors.Is(err, os.ErrDeadlineExceeded) && t.ctx.Err() != nil {
			err = context.Cause(t.ctx)
		}
		return request{}, err
	}
	q, err := parseRequest(b, t.extended)
	if err != nil {
		return q, err
	}
	if _, err := t.r.Discard(n); err != nil {
		return q, err
	}
	if q.cmd == cmdDisc {
		return q, errDisconnect
	}
	q.refuse = q.check(t.vol.Geometry(), t.flags, t.extended, t.allocation)
	return q, nil
}

// take receives a request's payload and returns what is left to do. An error
// ends the connection.
func (t *transmission) take(q *request) (job func(), err error) {
	n := q.payload(t.extended)
	if n > maxPayload || q.refuse != errnoOK || q.cmd != cmdWrite {
		if err := discard(t.r, n); err != nil {
			return nil, err
		}
		if n > maxPayload && q.refuse == errnoOK {
			q.refuse = errnoInval
		}
		return func() { t.do(q) }, nil
	}
	if err := t.srv.bytes.Acquire(t.ctx, int64(n)); err != nil {
		return nil, context.Cause(t.ctx)
	}
	buf, err := t.receive(int(n))
	if err != nil {
		t.srv.bytes.Release(int64(n))
		return nil, err
	}
	return func() {
		defer t.srv.bytes.Release(int64(n))
		defer buf.Release()
		t.reply(q, t.write(q, buf))
	}, nil
}

// receive reads a payload into registered memory.
func (t *transmission) receive(n int) (*cache.Buffer, error) {
	buf, err := t.vol.NewBuffer(t.ctx, n)
	if err != nil {
		return nil, err
	}
	for _, p := range buf.Slices() {
		if _, err := io.ReadFull(t.r, p); err != nil {
			buf.Release()
			return nil, err
		}
	}
	return buf, nil
}

func (t *transmission) write(q *request, buf *cache.Buffer) error {
	fua := q.flags&cfFUA != 0
	native := t.vol.Geometry().CanFUA
	if err := t.vol.WriteBuffer(t.ctx, int64(q.offset), buf, fua && native); err != nil {
		return err
	}
	if fua && !native {
		return t.vol.Flush(t.ctx)
	}
	return nil
}

// do carries out everything but writes.
func (t *transmission) do(q *request) {
	if q.refuse != errnoOK {
		t.replyErrno(q, q.refuse)
		return
	}
	off, n := int64(q.offset), int64(q.length)
	switch q.cmd {
	case cmdRead:
		t.doRead(q)
	case cmdFlush:
		t.reply(q, t.vol.Flush(t.ctx))
	case cmdTrim:
		t.reply(q, t.durable(q, t.vol.Discard(t.ctx, off, n)))
	case cmdWriteZeroes:
		if q.flags&cfNoHole == 0 && t.vol.Geometry().CanDiscard {
			t.reply(q, t.durable(q, t.vol.Discard(t.ctx, off, n)))
			return
		}
		t.reply(q, t.durable(q, t.vol.Zero(t.ctx, off, n)))
	case cmdCache:
		t.reply(q, t.vol.Prefetch(off, n))
	case cmdBlockStatus:
		t.replyStatus(q)
	default:
		t.replyErrno(q, errnoInval)
	}
}

func (t *transmission) doRead(q *request) {
	if err := t.srv.bytes.Acquire(t.ctx, int64(q.length)); err != nil {
		return
	}
	defer t.srv.bytes.Release(int64(q.length))
	view, err := t.vol.Read(t.ctx, int64(q.offset), int(q.length))
	if err != nil {
		t.reply(q, err)
		return
	}
	defer view.Release()
	t.replyRead(q, view)
}

// durable adds a FLUSH when FUA asks for it.
func (t *transmission) durable(q *request, err error) error {
	if err != nil || q.flags&cfFUA == 0 {
		return err
	}
	return t.vol.Flush(t.ctx)
}

// ending tells whether err means the connection's end rather than a failure of
// the volume.
func (t *transmission) ending(err error) bool {
	return errors.Is(err, context.Canceled) && t.ctx.Err() != nil && !errors.Is(err, volume.ErrClosed)
}
