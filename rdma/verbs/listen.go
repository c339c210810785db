// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo && verbs

package verbs

/*
#include "shim.h"
*/
import "C"

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"rblk/rdma"
)

const (
	// backlog is how many requests may wait for Accept; more are refused.
	backlog = 128
	// defaultRequestLife is how long a request may wait for an answer: the
	// contract of rdma.ConnRequest.
	defaultRequestLife = 10 * time.Second
)

// listener implements rdma.Listener.
type listener struct {
	p       *provider
	id      *cmID
	addr    net.Addr
	pending chan *request
	closed  chan struct{} // by Close
	lost    chan struct{} // by the removal of its device

	lose sync.Once
	mu   sync.Mutex
	done bool // guarded by mu
}

var _ rdma.Listener = (*listener)(nil)

// Listen binds and listens (rdma_bind_addr(3), rdma_listen(3)). Without a host
// it takes requests of both address families, on every device.
func (p *provider) Listen(ctx context.Context, addr string) (rdma.Listener, error) {
	ips, port, err := lookupHost(ctx, addr)
	if err != nil {
		return nil, err
	}
	if len(ips) == 0 {
		ips = []netip.Addr{netip.IPv6Unspecified(), netip.IPv4Unspecified()}
	}
	var errs []error
	for _, ip := range ips {
		l, err := p.listen(netip.AddrPortFrom(ip, port))
		if err == nil {
			return l, nil
		}
		errs = append(errs, fmt.Errorf("listen verbs %s: %w", netip.AddrPortFrom(ip, port), err))
		if errors.Is(err, unix.EADDRINUSE) {
			break // the other family would only hide it
		}
	}
	return nil, errors.Join(errs...)
}

func (p *provider) listen(ap netip.AddrPort) (*listener, error) {
	ch, err := p.channel()
	if err != nil {
		return nil, err
	}
	if err := p.hold(&p.live.listeners); err != nil {
		return nil, err
	}
	id, err := ch.create()
	if err != nil {
		p.release(&p.live.listeners)
		return nil, err
	}
	l := &listener{p: p, id: id, pending: make(chan *request, backlog), closed: make(chan struct{}), lost: make(chan struct{})}
	if err := l.start(ap); err != nil {
		id.destroy()
		p.release(&p.live.listeners)
		return nil, err
	}
	return l, nil
}

func (l *listener) start(ap netip.AddrPort) error {
	var ss C.struct_sockaddr_storage
	rc, errno := C.rdma_bind_addr(l.id.id, sockaddr(ap, &ss))
	if err := errnoFromCM("rdma_bind_addr", int(rc), errno); err != nil {
		return err
	}
	l.id.listener = l // before the first request can come
	rc, errno = C.rdma_listen(l.id.id, backlog)
	if err := errnoFromCM("rdma_listen", int(rc), errno); err != nil {
		return err
	}
	l.addr = tcpAddr(l.id.local())
	return nil
}

func (l *listener) Addr() net.Addr { return l.addr }

// offer queues a request for Accept. Called from the event goroutine.
func (l *listener) offer(r *request) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.done {
		select {
		case l.pending <- r:
			return
		default:
			l.p.log.Warn("RDMA connection request refused: too many wait", "peer", r.RemoteAddr())
		}
	}
	r.Reject(nil)
}

// Accept takes the next request that is still alive.
func (l *listener) Accept(ctx context.Context) (rdma.ConnRequest, error) {
	for {
		select {
		case <-l.closed:
			return nil, net.ErrClosed
		default:
		}
		select {
		case <-l.closed:
			return nil, net.ErrClosed
		case <-l.lost:
			return nil, fmt.Errorf("listen verbs %s: %w: the device was removed; listen again when it is back", l.addr, rdma.ErrNoDevice)
		case <-ctx.Done():
			return nil, ctx.Err()
		case r := <-l.pending:
			if r.alive() {
				return r, nil
			}
		}
	}
}

// removed makes Accept fail: a listener on one device's address dies with the
// device. (A listener on every address does not, and never hears of it.)
func (l *listener) removed() { l.lose.Do(func() { close(l.lost) }) }

// Close stops listening.
func (l *listener) Close() error {
	l.mu.Lock()
	if l.done {
		l.mu.Unlock()
		return nil
	}
	l.done = true
	l.mu.Unlock()
	close(l.closed)
	l.id.destroy()
	for {
		select {
		case r := <-l.pending:
			r.Reject(nil)
		default:
			l.p.release(&l.p.live.listeners)
			return nil
		}
	}
}

// request implements rdma.ConnRequest.
type request struct {
	p             *provider
	id            *cmID
	dev           *device
	private       []byte
	local, remote net.Addr
	depth         struct{ responder, initiator int } // as the peer can have them
	timer         *time.Timer

	mu    sync.Mutex
	ended bool // answered, or timed out; guarded by mu
}

var _ rdma.ConnRequest = (*request)(nil)

func newRequest(p *provider, id *cmID, e cmEvent) (*request, error) {
	dev, err := p.deviceOf(id.id.verbs)
	if err != nil {
		return nil, err
	}
	r := &request{p: p, id: id, dev: dev, private: clip(e.private, rdma.MaxPrivateData), local: tcpAddr(id.local()), remote: tcpAddr(id.peer())}
	r.depth.responder, r.depth.initiator = e.responderResources, e.initiatorDepth
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, net.ErrClosed
	}
	p.live.requests++
	p.requests[r] = struct{}{}
	r.timer = time.AfterFunc(p.requestLife, func() { r.Reject(nil) })
	return r, nil
}

// gone uncounts a request whose id is another's, or destroyed.
func (r *request) gone() {
	r.p.mu.Lock()
	defer r.p.mu.Unlock()
	delete(r.p.requests, r)
	if r.p.live.requests--; r.p.live.requests == 0 {
		r.p.noRequest.Broadcast()
	}
}

func clip(b []byte, n int) []byte { return b[:min(len(b), n)] }

func (r *request) PrivateData() []byte  { return r.private }
func (r *request) RemoteAddr() net.Addr { return r.remote }
func (r *request) LocalAddr() net.Addr  { return r.local }
func (r *request) Device() rdma.Device  { return r.dev }

func (r *request) alive() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !r.ended
}

var errRequestEnded = errors.New("connection request was answered already, or waited longer than 10 s")

// end claims the request for one answer.
func (r *request) end() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return errRequestEnded
	}
	r.ended = true
	r.timer.Stop()
	return nil
}

// Reject refuses (rdma_reject(3)).
func (r *request) Reject(reason []byte) error {
	if len(reason) > rdma.MaxRejectReason {
		return fmt.Errorf("reject reason of %d bytes: %w: at most %d", len(reason), rdma.ErrInvalid, rdma.MaxRejectReason)
	}
	if err := r.end(); err != nil {
		return err
	}
	rc, errno := C.rdma_reject(r.id.id, unsafe.Pointer(unsafe.SliceData(reason)), C.uint8_t(len(reason)))
	r.id.destroy()
	r.gone()
	return errnoFromCM("rdma_reject", int(rc), errno)
}

// Accept completes the connection (rdma_accept(3)) and returns when the peer has
// confirmed it.
func (r *request) Accept(ctx context.Context, pd rdma.ProtectionDomain, opts rdma.ConnOptions, reply []byte) (rdma.Conn, error) {
	dom, err := checkConnect(r.dev, pd, reply)
	if err != nil {
		r.Reject(nil)
		return nil, err
	}
	if err := r.end(); err != nil {
		return nil, err
	}
	defer r.gone()
	c, err := newConn(r.id, r.dev, dom, opts)
	if err != nil {
		C.rdma_reject(r.id.id, nil, 0)
		r.id.destroy()
		return nil, fmt.Errorf("accept %s: %w", r.remote, err)
	}
	if err := c.accept(ctx, r, reply); err != nil {
		c.Close()
		return nil, fmt.Errorf("accept %s: %w", r.remote, err)
	}
	return c, nil
}

// checkConnect checks what Connect and Accept have in common.
func checkConnect(dev *device, pd rdma.ProtectionDomain, private []byte) (*domain, error) {
	dom, ok := pd.(*domain)
	if !ok || dom.d != dev {
		return nil, fmt.Errorf("protection domain is not of device %s: %w", dev.name, rdma.ErrInvalid)
	}
	if len(private) > rdma.MaxPrivateData {
		return nil, fmt.Errorf("private data of %d bytes: %w: at most %d", len(private), rdma.ErrInvalid, rdma.MaxPrivateData)
	}
	return dom, nil
}
