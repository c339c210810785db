// SPDX-License-Identifier: Apache-2.0

package fuse

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	gofuse "github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// worker holds what serving one request needs. Its memory is reused for the
// next one, so that a READ allocates nothing here.
type worker struct {
	// unique is the kernel's number of the READ or WRITE being served, or 0.
	// Request numbers are even; the lowest bit says that it was interrupted.
	unique atomic.Uint64
	call   call // its context
	// other is the same for the request that go-fuse is serving.
	other atomic.Uint64

	small  [smallRequest]byte
	header gofuse.OutHeader
	wrote  gofuse.WriteOut
	iov    [][]byte
}

func newWorker() *worker {
	return &worker{call: call{done: make(chan struct{})}, iov: make([][]byte, 0, 8)}
}

// interrupt cancels the worker's call if it is serving u.
func (w *worker) interrupt(u uint64) bool {
	if u == 0 || !w.unique.CompareAndSwap(u, u|1) {
		return false
	}
	close(w.call.done)
	return true
}

// finish ends the call. No lock here: whoever interrupts must win the exchange
// first.
func (w *worker) finish() {
	if w.unique.Swap(0)&1 != 0 {
		<-w.call.done // the interrupter may be about to close it
		w.call.done = make(chan struct{})
	}
}

// call is the context of a READ or WRITE: done when the kernel interrupts it.
type call struct{ done chan struct{} }

var _ context.Context = (*call)(nil)

func (c *call) Deadline() (time.Time, bool) { return time.Time{}, false }
func (c *call) Done() <-chan struct{}       { return c.done }
func (c *call) Value(any) any               { return nil }
func (c *call) Err() error                  { return doneErr(c.done) }

// canceled is a context over go-fuse's cancel channel, which is closed when
// the kernel interrupts the request.
type canceled <-chan struct{}

var _ context.Context = canceled(nil)

func (c canceled) Deadline() (time.Time, bool) { return time.Time{}, false }
func (c canceled) Done() <-chan struct{}       { return c }
func (c canceled) Value(any) any               { return nil }
func (c canceled) Err() error                  { return doneErr(c) }

func doneErr(done <-chan struct{}) error {
	select {
	case <-done:
		return context.Canceled
	default:
		return nil
	}
}

// serve answers the request in (*buf)[:n] and gives buf back.
func (s *server) serve(w *worker, buf *[]byte, n int) {
	request := (*buf)[:n]
	if n <= len(w.small) {
		request = w.small[:copy(w.small[:], request)]
		s.requestBuffers.Put(buf)
		buf = nil
	}
	in := as[gofuse.InHeader](request)
	unique := in.Unique
	switch in.Opcode {
	case opRead, opWrite:
		w.unique.Store(unique)
		if s.canceled.Load() {
			w.interrupt(unique)
		}
		s.transfer(w, in.Opcode, request)
		w.finish()
	case opInterrupt:
		s.interrupt(w, request)
	case opForget, opBatchForget:
		s.ps.HandleRequest([][]byte{request}, nil)
	default:
		w.other.Store(unique)
		if s.canceled.Load() {
			s.send(w, gofuse.EINTR, unique)
		} else {
			s.dispatch(w, in.Opcode, request)
		}
		w.other.Store(0)
	}
	if buf != nil {
		s.requestBuffers.Put(buf)
	}
}

// transfer serves READ and WRITE.
func (s *server) transfer(w *worker, opcode uint32, request []byte) {
	if len(request) < sizeReadIn { // WriteIn is as long
		s.send(w, gofuse.EIO, as[gofuse.InHeader](request).Unique)
		return
	}
	if opcode == opRead {
		in := as[gofuse.ReadIn](request)
		r, status := s.ops.read(&w.call, in)
		if r == nil {
			s.send(w, status, in.Unique)
			return
		}
		s.send(w, gofuse.OK, in.Unique, r.Slices()...)
		r.Release()
		return
	}
	in := as[gofuse.WriteIn](request)
	data := request[sizeWriteIn:]
	if int(in.Size) != len(data) {
		s.send(w, gofuse.EIO, in.Unique)
		return
	}
	wrote, status := s.ops.write(&w.call, in, data)
	if !status.Ok() {
		s.send(w, status, in.Unique)
		return
	}
	w.wrote = gofuse.WriteOut{Size: wrote}
	s.send(w, gofuse.OK, in.Unique, bytesOf(&w.wrote))
}

// dispatch serves everything else through go-fuse.
func (s *server) dispatch(w *worker, opcode uint32, request []byte) {
	if (opcode == opReaddir || opcode == opReaddirplus) && len(request) >= sizeReadIn {
		in := as[gofuse.ReadIn](request)
		in.Size = min(in.Size, maxReply)
	}
	unique := as[gofuse.InHeader](request).Unique
	out := s.replyBuffers.Get().(*[]byte)
	defer s.replyBuffers.Put(out)
	n, status := s.ps.HandleRequest([][]byte{request}, [][]byte{*out})
	switch {
	case n > 0:
		s.check(s.dev.writev((*out)[:n]))
	case !status.Ok(): // go-fuse could not make anything of it
		s.send(w, status, unique)
	}
}

// interrupt passes FUSE_INTERRUPT on to the request that it names. If that is
// not found the answer is EAGAIN, and the kernel asks again should the request
// still be under way: it may have been read, but not looked at yet.
func (s *server) interrupt(w *worker, request []byte) {
	if len(request) < len(bytesOf(&gofuse.InterruptIn{})) {
		return
	}
	in := as[gofuse.InterruptIn](request)
	if !s.interruptUnique(in.Unique) {
		s.send(w, gofuse.EAGAIN, in.InHeader.Unique)
	}
}

func (s *server) interruptUnique(u uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for w := range s.workers {
		if w.interrupt(u) || s.interruptOther(w, u) {
			return true
		}
	}
	return false
}

// interruptOther cancels request u if go-fuse is serving it for w. It is true
// also when that was done before.
func (s *server) interruptOther(w *worker, u uint64) bool {
	if got := w.other.Load(); got != u {
		return got == u|1
	}
	in := gofuse.InterruptIn{Unique: u}
	in.Length, in.Opcode = uint32(len(bytesOf(&in))), opInterrupt
	var out [sizeOutHeader]byte
	if n, _ := s.ps.HandleRequest([][]byte{bytesOf(&in)}, [][]byte{out[:]}); n > 0 {
		return false // EAGAIN
	}
	w.other.CompareAndSwap(u, u|1)
	return true
}

// send answers request unique: with an error, or with body.
func (s *server) send(w *worker, status gofuse.Status, unique uint64, body ...[]byte) {
	w.header = gofuse.OutHeader{Length: uint32(sizeOutHeader), Status: -int32(status), Unique: unique}
	w.iov = append(w.iov[:0], bytesOf(&w.header))
	for _, b := range body {
		w.header.Length += uint32(len(b))
		w.iov = append(w.iov, b)
	}
	s.check(s.dev.writev(w.iov...))
	clear(w.iov)
}

// check reports a reply that the kernel refused. It is right to refuse one when
// the request was aborted (ENOENT) or the mount is gone (ENODEV).
func (s *server) check(err error) {
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENODEV) {
		s.log.Error("the kernel refused a reply", "err", err)
	}
}
