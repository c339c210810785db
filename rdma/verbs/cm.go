// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo && verbs

package verbs

/*
#include <netinet/in.h>
#include "shim.h"
*/
import "C"

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"rblk/rdma"
)

// cmChannel is the connection manager's event channel, and the goroutine that
// hands each event to the id that it concerns.
type cmChannel struct {
	p    *provider
	ch   *C.struct_rdma_event_channel
	fd   *eventFD
	done chan struct{}

	mu   sync.Mutex
	next uint64           // last handle given out; never reused; guarded by mu
	ids  map[uint64]*cmID // guarded by mu
}

func newCMChannel(p *provider) (*cmChannel, error) {
	ch, errno := C.rdma_create_event_channel()
	if ch == nil {
		return nil, fmt.Errorf("%w: %w (is there an adapter, and is rdma_ucm loaded? modprobe rdma_ucm)", rdma.ErrNoDevice, errnoFromPtr("rdma_create_event_channel", true, errno))
	}
	fd, err := newEventFD(int(ch.fd), "rdma-cm")
	if err != nil {
		C.rdma_destroy_event_channel(ch)
		return nil, err
	}
	c := &cmChannel{p: p, ch: ch, fd: fd, done: make(chan struct{}), ids: map[uint64]*cmID{}}
	go c.run()
	return c, nil
}

func (ch *cmChannel) close() {
	ch.fd.close()
	<-ch.done
	C.rdma_destroy_event_channel(ch.ch)
}

func (ch *cmChannel) run() {
	defer close(ch.done)
	for {
		var ev C.struct_rblk_cm_event
		var rc C.int
		var errno error
		err := ch.fd.wait(func(uintptr) bool {
			rc, errno = C.rblk_cm_next(ch.ch, &ev)
			return rc != 0
		})
		if errors.Is(err, os.ErrClosed) {
			return
		}
		if err == nil {
			err = errnoFromCM("rdma_get_cm_event", int(rc), errno)
		}
		if err != nil {
			// Nothing will be heard of any connection again.
			ch.p.event(slog.LevelError, Event{Kind: "cm_channel_dead"}, "err", err)
			for _, c := range ch.conns() {
				c.die(err)
			}
			return
		}
		ch.handle(&ev)
	}
}

// cmEvent is an event as the waiting side of a set-up sees it.
type cmEvent struct {
	kind                               uint32
	status                             int
	responderResources, initiatorDepth int
	private                            []byte
}

func (ch *cmChannel) handle(ev *C.struct_rblk_cm_event) {
	e := cmEvent{
		kind:               uint32(ev._type),
		status:             int(ev.status),
		responderResources: int(ev.responder_resources),
		initiatorDepth:     int(ev.initiator_depth),
		private:            C.GoBytes(unsafe.Pointer(&ev.private_data[0]), C.int(ev.private_len)),
	}
	id := ch.lookup(uint64(ev.handle))
	if e.kind == C.RDMA_CM_EVENT_CONNECT_REQUEST {
		ch.request(id, ev.id, e)
		return
	}
	if id == nil {
		return // destroyed meanwhile
	}
	switch e.kind {
	case C.RDMA_CM_EVENT_DISCONNECTED:
		id.broke(rdma.ErrDisconnected)
	case C.RDMA_CM_EVENT_DEVICE_REMOVAL:
		ch.p.event(slog.LevelWarn, Event{Kind: "device_removal"})
		id.broke(fmt.Errorf("device removed: %w", unix.ENODEV))
		if id.listener != nil {
			id.listener.removed()
		}
	case C.RDMA_CM_EVENT_ADDR_CHANGE:
		ch.p.event(slog.LevelWarn, Event{Kind: "address_change"})
		id.broke(fmt.Errorf("address moved to another device: %w", unix.EADDRNOTAVAIL))
	case C.RDMA_CM_EVENT_TIMEWAIT_EXIT:
		return
	}
	select {
	case id.events <- e:
	default: // nobody sets this id up any more
	}
}

// request hands a new id to its listener, or drops it.
func (ch *cmChannel) request(listenID *cmID, cid *C.struct_rdma_cm_id, e cmEvent) {
	if listenID == nil || listenID.listener == nil {
		C.rdma_destroy_id(cid) // rejects it
		return
	}
	id := ch.adopt(cid)
	r, err := newRequest(ch.p, id, e)
	if err != nil {
		ch.p.log.Warn("RDMA connection request dropped", "err", err)
		id.destroy()
		return
	}
	listenID.listener.offer(r)
}

// create makes a new id (rdma_create_id(3)).
func (ch *cmChannel) create() (*cmID, error) {
	id := ch.enrol()
	rc, errno := C.rblk_cm_create(ch.ch, C.uint64_t(id.handle), &id.id)
	if err := errnoFromCM("rdma_create_id", int(rc), errno); err != nil {
		ch.forget(id)
		return nil, err
	}
	return id, nil
}

// adopt takes over an id that came with a request.
func (ch *cmChannel) adopt(cid *C.struct_rdma_cm_id) *cmID {
	id := ch.enrol()
	id.id = cid
	C.rblk_cm_set_handle(cid, C.uint64_t(id.handle))
	return id
}

// setupEvents is more than the events that one set-up can see.
const setupEvents = 8

func (ch *cmChannel) enrol() *cmID {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	ch.next++
	id := &cmID{ch: ch, handle: ch.next, events: make(chan cmEvent, setupEvents)}
	ch.ids[id.handle] = id
	return id
}

func (ch *cmChannel) forget(id *cmID) {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	delete(ch.ids, id.handle)
}

func (ch *cmChannel) lookup(handle uint64) *cmID {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	return ch.ids[handle]
}

// conns lists the connections alive.
func (ch *cmChannel) conns() []*conn {
	ch.mu.Lock()
	defer ch.mu.Unlock()
	var out []*conn
	for _, id := range ch.ids {
		if c := id.conn.Load(); c != nil {
			out = append(out, c)
		}
	}
	return out
}

// connOf finds the connection that a queue pair's or completion queue's context
// names.
func (p *provider) connOf(handle uint64) *conn {
	p.mu.Lock()
	ch := p.cm
	p.mu.Unlock()
	if ch == nil || handle == 0 {
		return nil
	}
	if id := ch.lookup(handle); id != nil {
		return id.conn.Load()
	}
	return nil
}

// cmID is an rdma_cm_id with the handle by which events find it. Its owner is a
// listener, a request, a route or a connection, in turn; the owner destroys it.
type cmID struct {
	ch     *cmChannel
	id     *C.struct_rdma_cm_id
	handle uint64
	events chan cmEvent // for whoever sets the id up

	listener *listener            // set before rdma_listen
	conn     atomic.Pointer[conn] // set before rdma_connect or rdma_accept
}

func (id *cmID) broke(cause error) {
	if c := id.conn.Load(); c != nil {
		c.die(cause)
	}
}

// destroy ends the id; it waits for nothing, since events are acknowledged at
// once (rdma_destroy_id(3)).
func (id *cmID) destroy() {
	id.ch.forget(id)
	C.rdma_destroy_id(id.id)
}

// await waits for an event of one of the kinds wanted; every other event of a
// set-up is its failure.
func (id *cmID) await(ctx context.Context, op string, want ...uint32) (cmEvent, error) {
	select {
	case e := <-id.events:
		for _, k := range want {
			if e.kind == k && e.status == 0 {
				return e, nil
			}
		}
		return e, eventError(op, e)
	case <-ctx.Done():
		return cmEvent{}, ctx.Err()
	}
}

// InfiniBand CM reject reasons (IBTA 12.6.7.2), which rdma_cm hands through as
// a positive event status.
const (
	rejectNoListener = 8 // invalid service id
	rejectConsumer   = 28
)

// eventError is the failure that an unexpected event means.
func eventError(op string, e cmEvent) error {
	switch e.kind {
	case C.RDMA_CM_EVENT_REJECTED:
		// InfiniBand pads reasons with zeros. iWARP says ECONNRESET for the
		// peer's refusal, ECONNREFUSED where nobody listens.
		reason := trimZeros(e.private)
		switch {
		case e.status == rejectNoListener, e.status == -int(unix.ECONNREFUSED) && len(reason) == 0:
			return fmt.Errorf("%s: nobody listens there: %w", op, unix.ECONNREFUSED)
		case e.status == rejectConsumer, e.status < 0:
			return &rdma.RejectError{Reason: reason}
		}
		return fmt.Errorf("%s: connection manager refused (reason %d): %w", op, e.status, unix.ECONNREFUSED)
	case C.RDMA_CM_EVENT_DISCONNECTED:
		return fmt.Errorf("%s: %w", op, rdma.ErrDisconnected)
	case C.RDMA_CM_EVENT_UNREACHABLE:
		if e.status == 0 || e.status > 0 {
			return fmt.Errorf("%s: %w", op, unix.ETIMEDOUT)
		}
	case C.RDMA_CM_EVENT_DEVICE_REMOVAL:
		return fmt.Errorf("%s: %w: device removed", op, rdma.ErrNoDevice)
	}
	return errnoFromEvent(op, e.status)
}

func trimZeros(b []byte) []byte {
	for len(b) > 0 && b[len(b)-1] == 0 {
		b = b[:len(b)-1]
	}
	return b
}

// local and peer are the id's addresses.
func (id *cmID) local() netip.AddrPort { return id.addr(0) }
func (id *cmID) peer() netip.AddrPort  { return id.addr(1) }

func (id *cmID) addr(peer C.int) netip.AddrPort {
	var ss C.struct_sockaddr_storage
	C.rblk_cm_addr(id.id, peer, &ss)
	if ss.ss_family == unix.AF_INET6 {
		sa := (*unix.RawSockaddrInet6)(unsafe.Pointer(&ss))
		ip := netip.AddrFrom16(sa.Addr)
		if sa.Scope_id != 0 {
			ip = ip.WithZone(zoneName(sa.Scope_id))
		}
		return netip.AddrPortFrom(ip.Unmap(), ntohs(sa.Port))
	}
	sa := (*unix.RawSockaddrInet4)(unsafe.Pointer(&ss))
	return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), ntohs(sa.Port))
}

func zoneName(index uint32) string {
	if i, err := net.InterfaceByIndex(int(index)); err == nil {
		return i.Name
	}
	return strconv.Itoa(int(index))
}

// ntohs turns a port from network to host order, and back.
func ntohs(p uint16) uint16 {
	b := (*[2]byte)(unsafe.Pointer(&p))
	return uint16(b[0])<<8 | uint16(b[1])
}

// sockaddr fills ss and returns it as C wants it.
func sockaddr(ap netip.AddrPort, ss *C.struct_sockaddr_storage) *C.struct_sockaddr {
	if ip := ap.Addr(); ip.Is4() {
		sa := (*unix.RawSockaddrInet4)(unsafe.Pointer(ss))
		*sa = unix.RawSockaddrInet4{Family: unix.AF_INET, Port: ntohs(ap.Port()), Addr: ip.As4()}
	} else {
		sa := (*unix.RawSockaddrInet6)(unsafe.Pointer(ss))
		*sa = unix.RawSockaddrInet6{Family: unix.AF_INET6, Port: ntohs(ap.Port()), Addr: ip.As16(), Scope_id: scopeOf(ip.Zone())}
	}
	return (*C.struct_sockaddr)(unsafe.Pointer(ss))
}

func scopeOf(zone string) uint32 {
	if zone == "" {
		return 0
	}
	if i, err := net.InterfaceByName(zone); err == nil {
		return uint32(i.Index)
	}
	n, _ := strconv.ParseUint(zone, 10, 32)
	return uint32(n)
}

// lookupHost resolves the host of addr to addresses; an empty host gives none.
func lookupHost(ctx context.Context, addr string) ([]netip.Addr, uint16, error) {
	host, service, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, 0, err
	}
	port, err := net.DefaultResolver.LookupPort(ctx, "tcp", service)
	if err != nil {
		return nil, 0, err
	}
	if host == "" {
		return nil, uint16(port), nil
	}
	ips, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	if err != nil {
		return nil, 0, err
	}
	for i := range ips {
		ips[i] = ips[i].Unmap()
	}
	return ips, uint16(port), nil
}

// millis is what is left of ctx in the unit of rdma_resolve_*, at most limit.
func millis(ctx context.Context, limit time.Duration) C.int {
	if deadline, ok := ctx.Deadline(); ok {
		limit = min(limit, time.Until(deadline))
	}
	return C.int(min(max(limit.Milliseconds(), 1), math.MaxInt32))
}
