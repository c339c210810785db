// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"rblk/rdma"
)

const (
	// spillSize is what is read beyond what is known to come: a burst of
	// headers. Payload that lands here is copied, so it is small.
	spillSize = 1024
	// guessReads and guessBytes bound the responses whose place is guessed
	// (see guess). A wrong guess costs a copy of that much.
	guessReads = 16
	guessBytes = 64 << 10
)

// incoming is the reader of a connection: a state machine between frames and
// payloads.
type incoming struct {
	c *conn

	// active: somebody is the reader. Guarded by conn.mu.
	active bool

	buf        []byte // bytes read and not yet understood: buf[pos:]
	pos        int
	spill      []byte   // the usual backing of buf
	regathered []byte   // its backing after a wrong guess
	cur        header   // the frame whose payload is being read
	dest       [][]byte // where the rest of it goes
	left       int      // bytes of it to come
	seq        uint64   // number of the peer's next request

	// guarded by conn.mu: memory of cur
	region  *region
	current recv // the receive that cur uses
	hasRecv bool

	// guarded by conn.mu: manual progress
	waiting   context.Context // of the Wait that reads, or nil
	watched   <-chan struct{} // the Done channel whose end pokes the reader
	stopWatch func() bool     // ends that
	poked     bool            // the read deadline is in the past
	stalled   time.Time       // since when the next message waits for a receive

	destBack [][]byte // backing of dest
	hdrs     [guessReads][headerSize]byte
	lens     [guessReads]int // bytes of payload guessed, by frame
	iov      [iovMax]syscall.Iovec
	n        int
	got      int
	err      error
	attempt  func(fd uintptr) bool
	persist  func(fd uintptr) bool
}

func (in *incoming) init(c *conn) {
	in.c = c
	in.spill = make([]byte, 0, spillSize)
	in.buf = in.spill
	in.attempt = func(fd uintptr) bool { in.readv(fd); return true }
	in.persist = func(fd uintptr) bool { in.readv(fd); return !errors.Is(in.err, syscall.EAGAIN) }
	in.stopWatch = func() bool { return true }
}

// watch lets ctx's end interrupt the step that follows. The watch outlives the
// step: most callers come with the same context again, and then it costs
// nothing. Caller holds conn.mu.
func (in *incoming) watch(ctx context.Context) {
	c := in.c
	in.waiting = ctx
	in.unpoke()
	done := ctx.Done()
	if done == nil || done == in.watched {
		return
	}
	in.stopWatch()
	in.watched = done
	in.stopWatch = context.AfterFunc(ctx, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		in.poke()
	})
}

// cutoff tells whether the context of the Wait that reads has ended. Caller
// holds conn.mu.
func (in *incoming) cutoff() bool { return in.waiting != nil && in.waiting.Err() != nil }

// poke interrupts a blocked reader. Caller holds conn.mu.
func (in *incoming) poke() {
	in.poked = true
	in.c.sock.SetReadDeadline(time.Unix(1, 0))
	in.c.cond.Broadcast()
}

// unpoke makes the socket readable again. Caller holds conn.mu.
func (in *incoming) unpoke() {
	if in.poked {
		in.poked = false
		in.c.sock.SetReadDeadline(time.Time{})
	}
}

// nudge tells whoever waits of completions that the reader has not made. Caller
// holds conn.mu.
func (in *incoming) nudge() {
	in.c.wake()
	if in.c.manual && in.active {
		in.poke()
	}
}

// uses tells whether the frame under way touches r. Caller holds conn.mu.
func (in *incoming) uses(r *region) bool {
	return in.region == r || in.hasRecv && touches(in.current.regions, r)
}

// takeCurrent hands over the receive that a broken frame was using. Caller
// holds conn.mu.
func (in *incoming) takeCurrent(r *recv) bool {
	if !in.hasRecv {
		return false
	}
	in.hasRecv = false
	*r, in.current = in.current, recv{}
	return true
}

// step understands what is there and reads more: until it has produced
// completions (manual progress) or has read once. It tells false when the
// connection is dead. Only the active reader calls it.
func (in *incoming) step(block bool) bool {
	c := in.c
	before := c.tail()
	for {
		if err := in.understand(block); err != nil {
			return in.stop(err)
		}
		c.mu.Lock()
		c.out.flush()
		dead, produced := c.err != nil, c.cqTail != before
		if produced {
			c.wake()
		}
		c.mu.Unlock()
		if dead {
			return false
		}
		if produced && c.manual {
			return true
		}
		if produced {
			// The waiter first: it has work, this goroutine only expects some.
			runtime.Gosched()
		}
		before = c.tail()
		if err := in.read(block); err != nil {
			if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, syscall.EAGAIN) {
				return !in.c.dead()
			}
			return in.stop(err)
		}
	}
}

func (c *conn) tail() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.cqTail
}

func (c *conn) dead() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err != nil
}

// stop breaks the connection.
func (in *incoming) stop(err error) bool {
	c := in.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if errors.Is(err, errInterrupted) && c.err == nil {
		return true
	}
	if errors.Is(err, io.EOF) && (in.left > 0 || len(in.buf) > in.pos) {
		err = io.ErrUnexpectedEOF
	}
	c.fail(lost(err))
	c.out.flush() // a NAK, if that is why
	return false
}

// lost is the reason of an end that the socket told of: the peer ended it,
// unless the error is another.
func lost(err error) error {
	switch {
	case errors.Is(err, io.EOF):
		return rdma.ErrDisconnected
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return fmt.Errorf("%w: %w", rdma.ErrDisconnected, err)
	}
	return err
}

// errInterrupted: a stalled reader was called off by its waiter's context.
var errInterrupted = errors.New("interrupted")

// understand consumes the bytes at hand.
func (in *incoming) understand(block bool) error {
	for {
		if in.left > 0 {
			in.copyPending()
			if in.left > 0 {
				return nil
			}
		} else {
			b := in.buf[in.pos:]
			if len(b) < headerSize {
				in.compact()
				return nil
			}
			h, err := parseHeader(b)
			if err != nil {
				return err
			}
			if err := in.begin(h, block); err != nil {
				return err
			}
			in.pos += headerSize
		}
		if in.left == 0 {
			if err := in.finish(); err != nil {
				return err
			}
		}
	}
}

// compact moves pending bytes, less than a header, to the start of the usual
// buffer.
func (in *incoming) compact() {
	in.buf, in.pos = append(in.spill[:0], in.buf[in.pos:]...), 0
}

// copyPending moves pending bytes into the payload's place.
func (in *incoming) copyPending() {
	for in.left > 0 && in.pos < len(in.buf) {
		n := copy(in.dest[0], in.buf[in.pos:])
		in.pos += n
		in.fill(n)
	}
}

// fill notes that n more bytes of the payload are in place.
func (in *incoming) fill(n int) {
	in.left -= n
	for n > 0 {
		m := min(n, len(in.dest[0]))
		in.dest[0] = in.dest[0][m:]
		n -= m
		if len(in.dest[0]) == 0 {
			in.dest = in.dest[1:]
		}
	}
	for len(in.dest) > 0 && len(in.dest[0]) == 0 {
		in.dest = in.dest[1:]
	}
}

// aim sets where a payload of n bytes goes.
func (in *incoming) aim(segs [][]byte, n int) {
	in.destBack = in.destBack[:0]
	in.left = n
	for _, s := range segs {
		if n == 0 {
			break
		}
		s = s[:min(n, len(s))]
		n -= len(s)
		if len(s) > 0 {
			in.destBack = append(in.destBack, s)
		}
	}
	in.dest = in.destBack
}

// begin checks a frame and finds the place of its payload. A frame that has to
// wait for a receive is errInterrupted when block is false.
func (in *incoming) begin(h header, block bool) error {
	c := in.c
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return c.err
	}
	in.cur = h
	in.left, in.dest = 0, nil
	switch h.typ {
	case frameReadReq, frameWrite, frameSend:
		if h.seq != in.seq {
			return fmt.Errorf("%w: request %d, expected %d", rdma.ErrProtocol, h.seq, in.seq)
		}
		return in.request(h, block)
	case frameReadResp:
		e, err := c.response(h)
		if err != nil {
			return err
		}
		in.aim(e.segs, int(h.length))
	}
	return nil
}

// request begins a request of the peer. Caller holds conn.mu.
func (in *incoming) request(h header, block bool) error {
	c := in.c
	switch h.typ {
	case frameReadReq:
		data, r := c.dom.remote(h.addr, h.length, h.rkey, rdma.AccessRemoteRead)
		if r == nil && h.length > 0 {
			return in.refuse(h.seq, rdma.StatusRemoteAccess)
		}
		if !c.out.respond(h.seq, data, r) {
			return fmt.Errorf("%w: more READs in flight than agreed", rdma.ErrProtocol)
		}
	case frameWrite:
		data, r := c.dom.remote(h.addr, h.length, h.rkey, rdma.AccessRemoteWrite)
		if r == nil && h.length > 0 {
			return in.refuse(h.seq, rdma.StatusRemoteAccess)
		}
		if h.flags&flagImm != 0 {
			if err := in.receive(h, block); err != nil {
				return err
			}
		}
		in.region = r
		in.destBack = append(in.destBack[:0], data)
		in.aim(in.destBack, int(h.length))
	case frameSend:
		if err := in.receive(h, block); err != nil {
			return err
		}
		if int(h.length) > in.current.length {
			c.complete(rdma.Completion{ID: in.current.id, Op: rdma.OpRecv, Status: rdma.StatusLocalLength}, 0, 1)
			in.hasRecv = false
			return in.refuse(h.seq, rdma.StatusRemoteInvalidRequest)
		}
		in.aim(in.current.segs, int(h.length))
	}
	in.seq++
	return nil
}

// refuse answers with a NAK and breaks the connection. Caller holds conn.mu.
func (in *incoming) refuse(seq uint64, s rdma.Status) error {
	in.c.out.refuse(seq, s)
	return fmt.Errorf("request of the peer refused: %w", s.Err())
}

// receive takes a posted receive for the frame; it waits for one when there is
// none. Caller holds conn.mu.
func (in *incoming) receive(h header, block bool) error {
	c := in.c
	var timer *time.Timer
	defer func() {
		if timer != nil {
			timer.Stop()
		}
	}()
	for {
		if ok, err := in.takeRecv(h); ok || err != nil {
			in.stalled = time.Time{}
			return err
		}
		if c.err != nil {
			return c.err
		}
		if in.stalled.IsZero() {
			in.stalled = time.Now()
		}
		if c.out.due() {
			// What was answered so far must not wait with us. The lock was
			// given up: look again.
			c.out.flush()
			continue
		}
		if c.rnr > 0 && time.Since(in.stalled) >= c.rnr {
			return in.refuse(h.seq, rdma.StatusRNRRetryExceeded)
		}
		if !block || in.cutoff() {
			return errInterrupted
		}
		// Nobody reads the socket meanwhile, so the peer's end is looked for.
		if c.hungUp() {
			return io.ErrUnexpectedEOF
		}
		next := stallCheck
		if c.rnr > 0 {
			next = min(next, c.rnr-time.Since(in.stalled))
		}
		if timer != nil {
			timer.Stop()
		}
		timer = time.AfterFunc(next, func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.cond.Broadcast()
		})
		if c.cqHead != c.cqTail {
			if c.manual {
				return errInterrupted
			}
			c.wake()
		}
		c.cond.Wait()
	}
}

// stallCheck is how often a connection that waits for a receive looks whether
// its peer is still there.
const stallCheck = 100 * time.Millisecond

// hungUp tells whether the peer has closed or the kernel has given it up.
func (c *conn) hungUp() bool {
	gone := false
	err := c.raw.Control(func(fd uintptr) {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(p, 0)
		gone = err == nil && n > 0 && p[0].Revents&(unix.POLLRDHUP|unix.POLLHUP|unix.POLLERR) != 0
	})
	return gone || err != nil
}

// takeRecv takes a receive if there is one, and finds its memory, which may
// have gone since it was posted. Caller holds conn.mu.
func (in *incoming) takeRecv(h header) (bool, error) {
	c := in.c
	if in.hasRecv {
		return true, nil
	}
	if c.shared != nil {
		// A shared queue can outrun this connection's completions: then the
		// message waits as if there were no receive.
		if c.cqTail-c.cqHead >= uint64(len(c.cq)-len(c.sq)) || !c.shared.take(&in.current) {
			return false, nil
		}
	} else {
		if c.rq.empty() {
			return false, nil
		}
		c.rq.take(&in.current)
	}
	if err := in.current.resolve(c.dom); err != nil {
		c.complete(rdma.Completion{ID: in.current.id, Op: rdma.OpRecv, Status: rdma.StatusLocalProtection}, 0, 1)
		return false, in.refuse(h.seq, rdma.StatusRemoteOperation)
	}
	in.hasRecv = true
	return true, nil
}

// response finds the READ that a response is for and ends what came before it.
// Caller holds conn.mu.
func (c *conn) response(h header) (*sendEntry, error) {
	if h.seq < c.sqDone || h.seq >= c.sqGiven {
		return nil, fmt.Errorf("%w: answer to request %d", rdma.ErrProtocol, h.seq)
	}
	e := c.entry(h.seq)
	if e.op != rdma.OpRead || e.length != h.length {
		return nil, fmt.Errorf("%w: %d bytes in answer to request %d", rdma.ErrProtocol, h.length, h.seq)
	}
	if err := c.skipTo(h.seq); err != nil {
		return nil, err
	}
	return e, nil
}

// skipTo ends the requests before n, among which no READ may be. Caller holds
// mu.
func (c *conn) skipTo(n uint64) error {
	for i := c.sqDone; i != n; i++ {
		if c.entry(i).op == rdma.OpRead {
			return fmt.Errorf("%w: answer to request %d before that to %d", rdma.ErrProtocol, n, i)
		}
	}
	c.answered(n)
	return nil
}

// finish acts on a frame that is complete.
func (in *incoming) finish() error {
	c := in.c
	c.mu.Lock()
	defer c.mu.Unlock()
	h := &in.cur
	switch h.typ {
	case frameReadResp:
		c.answered(h.seq + 1)
		c.pump()
	case frameWrite, frameSend:
		in.region = nil
		if in.hasRecv {
			in.hasRecv = false
			op := rdma.OpRecv
			c.complete(rdma.Completion{ID: in.current.id, Op: op, Length: h.length, HasImm: h.flags&flagImm != 0, Imm: h.imm}, 0, 1)
		}
		if h.flags&flagAck != 0 {
			c.out.acknowledge(h.seq)
		}
		c.cond.Broadcast()
	case frameAck:
		if h.seq >= c.sqGiven {
			return fmt.Errorf("%w: answer to request %d", rdma.ErrProtocol, h.seq)
		}
		if h.seq < c.sqDone {
			return nil
		}
		if err := c.skipTo(h.seq + 1); err != nil {
			return err
		}
		c.pump()
	case frameNak:
		if h.seq < c.sqDone || h.seq >= c.sqGiven {
			return fmt.Errorf("%w: refusal of request %d", rdma.ErrProtocol, h.seq)
		}
		if err := c.skipTo(h.seq); err != nil {
			return err
		}
		c.refused(h.seq, h.status)
	}
	return nil
}

// read brings more bytes: into the rest of a payload, into the places that the
// next responses are guessed to go to, and into the spill.
func (in *incoming) read(block bool) error {
	in.n = 0
	guessed := 0
	spill := true
	if in.pos == len(in.buf) {
		in.buf, in.pos = in.spill[:0], 0
	}
	have := len(in.buf)
	switch {
	case in.left > 0:
		for _, d := range in.dest {
			in.vec(d)
		}
	case have == 0:
		guessed, spill = in.guess()
	}
	if spill {
		in.vec(in.buf[have:cap(in.buf)])
	}
	how := in.attempt
	if block {
		how = in.persist
	}
	in.got, in.err = 0, nil
	err := in.c.raw.Read(how)
	if err == nil {
		err = in.err
	}
	if err != nil {
		return err
	}
	if in.got == 0 {
		return io.EOF
	}
	if guessed > 0 {
		return in.match(guessed, in.got)
	}
	n := in.got
	if in.left > 0 {
		m := min(n, in.left)
		in.fill(m)
		n -= m
		if in.left == 0 {
			if err := in.finish(); err != nil {
				return err
			}
		}
	}
	in.buf = in.buf[:have+n]
	return nil
}

func (in *incoming) vec(b []byte) {
	if len(b) == 0 {
		return
	}
	in.iov[in.n].Base = unsafe.SliceData(b)
	in.iov[in.n].SetLen(len(b))
	in.n++
}

func (in *incoming) readv(fd uintptr) {
	for {
		n, _, errno := syscall.Syscall(syscall.SYS_READV, fd, uintptr(unsafe.Pointer(&in.iov[0])), uintptr(in.n))
		if errno == syscall.EINTR {
			continue
		}
		in.got, in.err = int(n), nil
		if errno != 0 {
			in.got, in.err = 0, errno
		}
		return
	}
}

// guess lays out the next bytes as the responses to the oldest READs in flight,
// in order: header, payload, header, payload. What is a guess is only that
// nothing else comes between; the payloads' memory belongs to the network in
// any case. It tells how many frames, and whether the spill may follow.
func (in *incoming) guess() (frames int, spill bool) {
	c := in.c
	c.mu.Lock()
	defer c.mu.Unlock()
	room := guessBytes
	for i := c.sqDone; i != c.sqNext && frames < guessReads; i++ {
		e := c.entry(i)
		if e.op != rdma.OpRead {
			if e.flags&rdma.WRSignaled != 0 {
				break // its ACK comes first
			}
			continue
		}
		if in.n+2+len(e.segs) > iovMax-1 || in.guessed(e.segs) {
			break
		}
		in.vec(in.hdrs[frames][:])
		n := min(room, int(e.length))
		in.lens[frames] = n
		for _, s := range e.segs {
			s = s[:min(n, len(s))]
			in.vec(s)
			n -= len(s)
		}
		room -= in.lens[frames]
		whole := in.lens[frames] == int(e.length)
		frames++
		if !whole {
			return frames, false
		}
	}
	return frames, true
}

// guessed tells whether one of segs shares bytes with another, or with a place
// that is laid out already. Were the guess wrong, the stream could not be taken
// out of them again.
func (in *incoming) guessed(segs [][]byte) bool {
	for i, s := range segs {
		for j := range in.n {
			if overlap(s, unsafe.Slice(in.iov[j].Base, int(in.iov[j].Len))) {
				return true
			}
		}
		for _, other := range segs[:i] {
			if overlap(s, other) {
				return true
			}
		}
	}
	return false
}

func overlap(a, b []byte) bool {
	if len(a) == 0 || len(b) == 0 {
		return false
	}
	x, y := uintptr(unsafe.Pointer(unsafe.SliceData(a))), uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	return x < y+uintptr(len(b)) && y < x+uintptr(len(a))
}

// match holds n bytes that were read against the guess. What was guessed right
// is in place already; the rest moves to the buffer.
func (in *incoming) match(frames, n int) error {
	for i := range frames {
		if n < headerSize {
			in.buf = append(in.buf, in.hdrs[i][:n]...)
			return nil
		}
		h, err := parseHeader(in.hdrs[i][:])
		if err != nil {
			return err
		}
		if h.typ != frameReadResp {
			in.regather(n)
			return nil
		}
		if err := in.begin(h, true); err != nil {
			return err
		}
		n -= headerSize
		m := min(n, in.lens[i])
		in.fill(m)
		n -= m
		if in.left > 0 {
			return nil // n is 0: more of this payload is to come
		}
		if err := in.finish(); err != nil {
			return err
		}
	}
	in.buf = in.buf[:n]
	return nil
}

// regather rebuilds the stream from the iovecs of the last read, whose last n
// bytes went to wrong places.
func (in *incoming) regather(n int) {
	skip := in.got - n
	if cap(in.regathered) < n {
		in.regathered = make([]byte, 0, guessReads*headerSize+guessBytes+spillSize)
	}
	stream := in.regathered[:0]
	for i := range in.n {
		b := unsafe.Slice(in.iov[i].Base, int(in.iov[i].Len))
		if skip >= len(b) {
			skip -= len(b)
			continue
		}
		b = b[skip:]
		skip = 0
		stream = append(stream, b[:min(len(b), n-len(stream))]...)
		if len(stream) == n {
			break
		}
	}
	in.buf, in.pos = stream, 0
}
