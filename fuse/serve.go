// SPDX-License-Identifier: Apache-2.0

package fuse

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"

	gofuse "github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

const (
	// maxIO is the largest READ and WRITE: 256 pages, the most that kernels
	// take without a sysctl.
	maxIO = 1 << 20
	// requestSize is the size of a read buffer: the largest request is a WRITE.
	requestSize = sizeWriteIn + maxIO
	// smallRequest is the most bytes of a request that is moved out of the read
	// buffer, so that a blocked READ or LOOKUP does not hold a megabyte.
	// Header, arguments and one name of the longest kind fit.
	smallRequest = 512
	// maxReply bounds every reply but READ's: the longest are extended
	// attributes (64 KiB, XATTR_SIZE_MAX) and directory listings, whose size we
	// choose.
	maxReply = 64 << 10
	// replySize adds room for the header and the fixed part.
	replySize = maxReply + 1024
	// minIdle and maxIdle bound the workers that wait in read(2) at the same
	// time: one to take the next request while another serves, and no more
	// than can run.
	minIdle = 2
	maxIdle = 16
)

// operations is what the loop serves: go-fuse's raw file system, and READ and
// WRITE in a form that needs no copy.
type operations interface {
	gofuse.RawFileSystem

	// read returns the bytes of a READ. The loop releases a non-nil reply once
	// the kernel has it.
	read(ctx context.Context, in *gofuse.ReadIn) (reply, gofuse.Status)
	// write takes the bytes of a WRITE and returns how many it took; data is
	// valid until it returns.
	write(ctx context.Context, in *gofuse.WriteIn, data []byte) (uint32, gofuse.Status)
}

// reply is leased memory that a READ is answered from.
type reply interface {
	Slices() [][]byte
	Len() int
	Release()
}

// server reads requests from a device and answers them. It is go-fuse's
// ProtocolServer under a descriptor loop of our own, which the hand-over of a
// live mount needs: a new process adopts the descriptor and the INIT request
// that the old one saved.
type server struct {
	dev  device
	ops  operations
	ps   *gofuse.ProtocolServer
	init []byte // the kernel's INIT request
	log  *slog.Logger

	maxIdle  int32
	idle     atomic.Int32 // workers that are in read(2) or about to be
	stopping atomic.Bool  // no worker reads any more
	canceled atomic.Bool  // every request is interrupted
	active   sync.WaitGroup
	done     chan struct{} // closed after the last worker has left

	mu      sync.Mutex
	workers map[*worker]struct{} // guarded by mu
	dead    error                // guarded by mu: why reading ended, if not by stop

	requestBuffers, replyBuffers sync.Pool
}

// newServer takes over a device that was just mounted, answers the kernel's
// INIT and is ready to start.
func newServer(dev device, ops operations, opts *gofuse.MountOptions, log *slog.Logger) (*server, error) {
	s := makeServer(dev, ops, opts, log)
	buf := make([]byte, requestSize)
	n, err := dev.read(buf)
	if err != nil {
		return nil, fmt.Errorf("reading the kernel's INIT: %w", err)
	}
	reply, err := s.handshake(buf[:n])
	if err != nil {
		return nil, err
	}
	if err := dev.writev(reply); err != nil {
		return nil, fmt.Errorf("answering the kernel's INIT: %w", err)
	}
	return s, nil
}

// adoptServer takes over a device that another server has served, with the
// INIT that it saved.
func adoptServer(dev device, init []byte, ops operations, opts *gofuse.MountOptions, log *slog.Logger) (*server, error) {
	s := makeServer(dev, ops, opts, log)
	if _, err := s.handshake(init); err != nil {
		return nil, err
	}
	return s, nil
}

func makeServer(dev device, ops operations, opts *gofuse.MountOptions, log *slog.Logger) *server {
	s := &server{
		dev:     dev,
		ops:     ops,
		ps:      gofuse.NewProtocolServer(ops, opts),
		log:     log,
		maxIdle: int32(min(max(runtime.GOMAXPROCS(0), minIdle), maxIdle)),
		done:    make(chan struct{}),
		workers: make(map[*worker]struct{}),
	}
	s.requestBuffers.New = func() any { b := make([]byte, requestSize); return &b }
	s.replyBuffers.New = func() any { b := make([]byte, replySize); return &b }
	return s
}

// handshake lets go-fuse see the INIT request, keeps it, and returns the answer.
func (s *server) handshake(request []byte) ([]byte, error) {
	if len(request) < sizeInHeader || as[gofuse.InHeader](request).Opcode != opInit {
		return nil, errors.New("the first message of the kernel is not an INIT")
	}
	s.init = append([]byte(nil), request...)
	out := make([]byte, replySize)
	n, status := s.ps.HandleRequest([][]byte{s.init}, [][]byte{out})
	if !status.Ok() {
		return nil, fmt.Errorf("the kernel's INIT was refused: %v", status)
	}
	if code := as[gofuse.OutHeader](out).Status; code != 0 {
		return nil, fmt.Errorf("the kernel's INIT was refused: %w", unix.Errno(-code))
	}
	return out[:n], nil
}

// start begins to serve; done is closed when serving has ended.
func (s *server) start() {
	s.idle.Store(1)
	s.active.Add(1)
	go s.work()
	go func() {
		s.active.Wait()
		close(s.done)
	}()
}

// stop ends reading, and waits until everything that was read is answered or
// ctx ends. The device stays open, and what was not read stays with the kernel
// for whoever reads the device next. Requests that block hold it up: see
// cancelAll.
//
// poke must make the kernel send one message, and may block until that is
// answered. It may come to be called more often than there are readers; such
// a call returns when the next server serves, or the device is closed. The
// caller waits for all of them through pokes.
func (s *server) stop(ctx context.Context, poke func()) (pokes *sync.WaitGroup, err error) {
	s.stopping.Store(true)
	pokes = new(sync.WaitGroup)
	// A worker counts itself idle before it looks at stopping, so whoever is
	// not counted here will not read; whoever is reads one message at most.
	for range s.idle.Load() {
		pokes.Go(poke)
	}
	select {
	case <-s.done:
		return pokes, nil
	case <-ctx.Done():
		return pokes, fmt.Errorf("waiting for the readers of /dev/fuse: %w", ctx.Err())
	}
}

// cancelAll interrupts every request that is being served, and all that will
// be. A worker makes its request known before it looks at canceled, so none
// slips through.
func (s *server) cancelAll() {
	s.canceled.Store(true)
	s.mu.Lock()
	defer s.mu.Unlock()
	for w := range s.workers {
		w.interrupt(w.unique.Load() &^ 1)
		for u := w.other.Load(); u != 0 && w.other.Load() == u; {
			if s.interruptOther(w, u) {
				break
			}
			runtime.Gosched() // go-fuse has not entered it in its books yet
		}
	}
}

// work is one worker: it reads a request, answers it, and reads on. Whenever
// the last idle worker takes a request, it starts another, so that one always
// reads: a blocked request can be interrupted, and holds nobody up.
func (s *server) work() {
	w := s.enter()
	defer s.leave(w)
	for !s.stopping.Load() {
		buf := s.requestBuffers.Get().(*[]byte)
		n, err := s.dev.read(*buf)
		if err != nil {
			s.idle.Add(-1)
			s.end(err)
			return
		}
		if s.idle.Add(-1) == 0 && !s.stopping.Load() {
			s.idle.Add(1)
			s.active.Add(1)
			go s.work()
		}
		s.serve(w, buf, n)
		if s.idle.Add(1) > s.maxIdle {
			break
		}
	}
	s.idle.Add(-1)
}

func (s *server) enter() *worker {
	w := newWorker()
	s.mu.Lock()
	s.workers[w] = struct{}{}
	s.mu.Unlock()
	return w
}

func (s *server) leave(w *worker) {
	s.mu.Lock()
	delete(s.workers, w)
	s.mu.Unlock()
	s.active.Done()
}

// end records why the connection ended. Requests that are still being served
// have nobody left to answer to.
func (s *server) end(err error) {
	s.mu.Lock()
	first := s.dead == nil
	s.dead = err
	s.mu.Unlock()
	if !first {
		return
	}
	if !errors.Is(err, unix.ENODEV) {
		s.log.Error("reading from /dev/fuse failed; the mount is lost", "err", err)
	}
	s.cancelAll()
}
