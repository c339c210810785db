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
	"net/netip"
	"sync"
	"time"
	"unsafe"

	"rblk/rdma"
)

// resolveTimeout bounds address and route resolution where ctx does not: ARP or
// a subnet manager that says nothing for so long will not.
const resolveTimeout = 10 * time.Second

// route implements rdma.Route.
type route struct {
	p    *provider
	id   *cmID
	dev  *device
	peer netip.AddrPort

	mu    sync.Mutex
	ended bool // guarded by mu
}

var _ rdma.Route = (*route)(nil)

// Resolve finds device and path (rdma_resolve_addr(3), rdma_resolve_route(3)).
// A name with several addresses is tried address by address.
func (p *provider) Resolve(ctx context.Context, addr string) (rdma.Route, error) {
	ips, port, err := lookupHost(ctx, addr)
	if err != nil {
		return nil, err
	}
	if len(ips) == 0 {
		return nil, fmt.Errorf("resolve verbs %q: %w: a host is needed", addr, rdma.ErrInvalid)
	}
	var errs []error
	for _, ip := range ips {
		r, err := p.resolve(ctx, netip.AddrPortFrom(ip, port))
		if err == nil {
			return r, nil
		}
		errs = append(errs, fmt.Errorf("resolve verbs %s: %w", netip.AddrPortFrom(ip, port), err))
		if ctx.Err() != nil {
			break
		}
	}
	return nil, errors.Join(errs...)
}

func (p *provider) resolve(ctx context.Context, ap netip.AddrPort) (*route, error) {
	ch, err := p.channel()
	if err != nil {
		return nil, err
	}
	if err := p.hold(&p.live.routes); err != nil {
		return nil, err
	}
	id, err := ch.create()
	if err != nil {
		p.release(&p.live.routes)
		return nil, err
	}
	r := &route{p: p, id: id, peer: ap}
	if err := r.find(ctx); err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}

func (r *route) find(ctx context.Context) error {
	var src *C.struct_sockaddr
	var ssSrc, ssDst C.struct_sockaddr_storage
	if a := r.p.opts.SourceAddr; a.IsValid() {
		if a.Is4() != r.peer.Addr().Is4() {
			return fmt.Errorf("%w: source address %s is of the other family", rdma.ErrNoDevice, a)
		}
		src = sockaddr(netip.AddrPortFrom(a, 0), &ssSrc)
	}
	if tos := C.uint8_t(r.p.opts.TOS); tos != 0 {
		rc, errno := C.rdma_set_option(r.id.id, C.RDMA_OPTION_ID, C.RDMA_OPTION_ID_TOS, unsafe.Pointer(&tos), 1)
		if err := errnoFromCM("rdma_set_option", int(rc), errno); err != nil {
			return err
		}
	}
	rc, errno := C.rdma_resolve_addr(r.id.id, src, sockaddr(r.peer, &ssDst), millis(ctx, resolveTimeout))
	if err := errnoFromCM("rdma_resolve_addr", int(rc), errno); err != nil {
		return err
	}
	if _, err := r.id.await(ctx, "rdma_resolve_addr", C.RDMA_CM_EVENT_ADDR_RESOLVED); err != nil {
		return err
	}
	rc, errno = C.rdma_resolve_route(r.id.id, millis(ctx, resolveTimeout))
	if err := errnoFromCM("rdma_resolve_route", int(rc), errno); err != nil {
		return err
	}
	if _, err := r.id.await(ctx, "rdma_resolve_route", C.RDMA_CM_EVENT_ROUTE_RESOLVED); err != nil {
		return err
	}
	var err error
	r.dev, err = r.p.deviceOf(r.id.id.verbs)
	return err
}

func (r *route) Device() rdma.Device { return r.dev }

// end claims the route for Connect or Close.
func (r *route) end() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	was := r.ended
	r.ended = true
	return !was
}

// Close gives the route up.
func (r *route) Close() error {
	if r.end() {
		r.id.destroy()
		r.p.release(&r.p.live.routes)
	}
	return nil
}

// Connect connects (rdma_connect(3), rdma_establish(3)).
func (r *route) Connect(ctx context.Context, pd rdma.ProtectionDomain, opts rdma.ConnOptions, private []byte) (rdma.Conn, error) {
	dom, err := checkConnect(r.dev, pd, private)
	if err != nil {
		r.Close()
		return nil, err
	}
	if !r.end() {
		return nil, net.ErrClosed
	}
	defer r.p.release(&r.p.live.routes)
	c, err := newConn(r.id, r.dev, dom, opts)
	if err != nil {
		r.id.destroy()
		return nil, fmt.Errorf("connect %s: %w", r.peer, err)
	}
	if err := c.connect(ctx, private); err != nil {
		return nil, fmt.Errorf("connect %s: %w", r.peer, err)
	}
	return c, nil
}
