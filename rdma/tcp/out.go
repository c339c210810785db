// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"errors"
	"syscall"
	"unsafe"

	"rblk/rdma"
)

// frame is a frame to be written: header and payload straight from memory.
type frame struct {
	next   *frame
	hdr    [headerSize]byte
	segs   [][]byte
	one    [1][]byte // backing of segs for responses
	region *region   // of a response
	size   int       // header and payload
	resp   bool      // goes back to outgoing.free
	queued bool

	request bool // counts in conn.sqGiven and conn.sqSent
}

func (f *frame) set(h *header, segs [][]byte, r *region) {
	h.put(&f.hdr)
	f.segs, f.region, f.size = segs, r, headerSize
	for _, s := range segs {
		f.size += len(s)
	}
}

// iovMax bounds one writev (IOV_MAX), batchMax what one call may carry: enough
// to amortise the call, little enough that completions are seen meanwhile.
const (
	iovMax   = 256
	batchMax = 4 << 20
)

// outgoing is the queue of frames and its writer.
type outgoing struct {
	c *conn

	// guarded by conn.mu
	head, tail *frame
	off        int    // bytes of head that are written
	writing    bool   // somebody is the writer
	free       *frame // frames for responses
	given      uint64 // requests in the iovecs of the next system call
	ack        frame
	ackDue     bool
	ackSeq     uint64
	nak        bool // a NAK is queued: the connection ends behind it
	nakSent    bool
	gone       bool // the peer takes no more bytes
	nakFrame   frame

	// the writer's
	iov     [iovMax]syscall.Iovec
	n       int
	wrote   int
	err     error
	attempt func(fd uintptr) bool
	persist func(fd uintptr) bool
}

func (o *outgoing) init(c *conn, reads int) {
	o.c = c
	// Two for each READ that the peer may have in flight: it may have read a
	// response, and asked again, before the writer has learnt that it is out.
	for range 2 * max(1, reads) {
		o.free = &frame{next: o.free, resp: true}
	}
	o.attempt = func(fd uintptr) bool { o.writev(fd); return true }
	o.persist = func(fd uintptr) bool { o.writev(fd); return !errors.Is(o.err, syscall.EAGAIN) }
}

func (o *outgoing) push(f *frame) {
	f.next, f.queued = nil, true
	if o.tail == nil {
		o.head = f
	} else {
		o.tail.next = f
	}
	o.tail = f
}

// respond queues the answer to a READ; false when the peer has more in flight
// than agreed. Caller holds conn.mu.
func (o *outgoing) respond(seq uint64, data []byte, r *region) bool {
	f := o.free
	if f == nil {
		return false
	}
	o.free = f.next
	f.one[0] = data
	f.set(&header{typ: frameReadResp, length: uint32(len(data)), seq: seq}, f.one[:], r)
	o.push(f)
	return true
}

// acknowledge makes an ACK due; several are one. Caller holds conn.mu.
func (o *outgoing) acknowledge(seq uint64) { o.ackDue, o.ackSeq = true, seq }

// pushAck queues a due ACK, unless one is queued still. Caller holds conn.mu.
func (o *outgoing) pushAck() {
	if !o.ackDue || o.ack.queued || o.nak {
		return
	}
	o.ackDue = false
	o.ack.set(&header{typ: frameAck, seq: o.ackSeq}, nil, nil)
	o.push(&o.ack)
}

// refuse queues a NAK, the last frame. Caller holds conn.mu.
func (o *outgoing) refuse(seq uint64, s rdma.Status) {
	o.nak = true
	o.nakFrame.set(&header{typ: frameNak, status: s, seq: seq}, nil, nil)
	o.push(&o.nakFrame)
}

// uses tells whether a queued response reads r. Requests are looked at in the
// send queue. Caller holds conn.mu.
func (o *outgoing) uses(r *region) bool {
	for f := o.head; f != nil; f = f.next {
		if f.region == r {
			return true
		}
	}
	return false
}

// drop forgets what is queued. Caller holds conn.mu and there is no writer.
func (o *outgoing) drop() {
	for f := o.head; f != nil; f = f.next {
		f.segs, f.region, f.one[0], f.queued = nil, nil, nil, false
	}
	o.head, o.tail, o.off = nil, nil, 0
}

// due tells whether flush would write. Caller holds conn.mu.
func (o *outgoing) due() bool {
	return !o.writing && !o.gone && (o.c.err == nil || o.nak) && (o.head != nil || o.ackDue && !o.ack.queued && !o.nak)
}

// flush writes what is queued, as far as the socket takes it at once; the rest
// is a goroutine's. Caller holds conn.mu, which is given up over system calls.
func (o *outgoing) flush() {
	o.pushAck()
	if !o.due() {
		return
	}
	o.writing = true
	if o.write(o.attempt) {
		go func() {
			o.c.mu.Lock()
			defer o.c.mu.Unlock()
			o.write(o.persist)
		}()
	}
}

// write is the writer. It tells true when the socket is full: then the caller
// must see to it that somebody carries on as the writer. Caller holds conn.mu.
func (o *outgoing) write(how func(uintptr) bool) (full bool) {
	c := o.c
	for o.head != nil && !o.gone && (c.err == nil || o.nak) {
		o.gather()
		c.sqGiven = max(c.sqGiven, o.given)
		c.mu.Unlock()
		o.wrote, o.err = 0, nil
		err := c.raw.Write(how)
		c.mu.Lock()
		if err == nil {
			err = o.err
		}
		if errors.Is(err, syscall.EAGAIN) {
			return true
		}
		if err != nil {
			o.nak = false
			if err = lost(err); c.err == nil && errors.Is(err, rdma.ErrDisconnected) {
				// The reader tells why: a NAK may have come before the end.
				o.gone = true
			} else {
				c.fail(err)
			}
			break
		}
		o.advance(o.wrote)
		o.pushAck()
	}
	o.writing = false
	if o.nak && o.head == nil {
		o.nak, o.nakSent = false, true
	}
	c.settle()
	return false
}

// gather fills the iovecs from the queue.
func (o *outgoing) gather() {
	o.n = 0
	skip, total, requests := o.off, 0, uint64(0)
	for f := o.head; f != nil && total < batchMax; f = f.next {
		if o.n+1+len(f.segs) > iovMax {
			break
		}
		skip = o.vec(f.hdr[:], skip)
		for _, s := range f.segs {
			skip = o.vec(s, skip)
		}
		total += f.size
		if f.request {
			requests++
		}
	}
	o.given = o.c.sqSent + requests
}

// vec adds b less its first skip bytes, and returns what is left to skip.
func (o *outgoing) vec(b []byte, skip int) int {
	if skip >= len(b) {
		return skip - len(b)
	}
	b = b[skip:]
	o.iov[o.n].Base = unsafe.SliceData(b)
	o.iov[o.n].SetLen(len(b))
	o.n++
	return 0
}

func (o *outgoing) writev(fd uintptr) {
	for {
		n, _, errno := syscall.Syscall(syscall.SYS_WRITEV, fd, uintptr(unsafe.Pointer(&o.iov[0])), uintptr(o.n))
		if errno == syscall.EINTR {
			continue
		}
		o.wrote, o.err = int(n), nil
		if errno != 0 {
			o.wrote, o.err = 0, errno
		}
		return
	}
}

// advance takes n written bytes off the queue. Caller holds conn.mu.
func (o *outgoing) advance(n int) {
	c, freed := o.c, false
	for n > 0 {
		f := o.head
		left := f.size - o.off
		if n < left {
			o.off += n
			break
		}
		n -= left
		o.off = 0
		o.head = f.next
		if o.head == nil {
			o.tail = nil
		}
		f.next, f.queued = nil, false
		if f.request {
			c.sqSent++
		}
		if f.resp {
			f.segs, f.region, f.one[0] = nil, nil, nil
			f.next, o.free = o.free, f
			freed = true
		}
	}
	if freed {
		c.cond.Broadcast()
	}
	before := c.cqTail
	if c.reap(); c.cqTail != before {
		c.in.nudge()
	}
}
