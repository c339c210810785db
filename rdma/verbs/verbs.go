// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo && verbs

package verbs

/*
#cgo LDFLAGS: -lrdmacm -libverbs
#include <stdlib.h>
#include "shim.h"
*/
import "C"

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"rblk/rdma"
)

// Built tells whether the provider is compiled in; `version` prints it.
const Built = true

// provider implements rdma.Provider.
type provider struct {
	opts Options
	log  *slog.Logger
	// requestLife is defaultRequestLife, but in tests.
	requestLife time.Duration

	mu      sync.Mutex
	closed  bool               // guarded by mu
	devices map[string]*device // by name; guarded by mu
	retired []*device          // removed, or replaced by a new one of that name; guarded by mu
	cm      *cmChannel         // made at first need; guarded by mu
	live    counts             // guarded by mu

	requests  map[*request]struct{} // not yet answered; guarded by mu
	noRequest sync.Cond             // live.requests has become 0; with mu
}

// counts is how many objects of each kind are alive; the suite demands zero.
type counts struct {
	listeners, routes, requests, domains, regions, shared, conns int
}

// busy tells whether something is alive that Close may not end by itself.
// Requests it may: it rejects them.
func (c counts) busy() bool {
	c.requests = 0
	return c != counts{}
}

// Live counts what is alive, by noun; the conformance suite looks at it.
func (p *provider) Live() map[string]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.live
	return map[string]int{"listeners": n.listeners, "routes": n.routes, "requests": n.requests,
		"domains": n.domains, "regions": n.regions, "shared receive queues": n.shared, "connections": n.conns}
}

var _ rdma.Provider = (*provider)(nil)

// New makes the provider. It succeeds without any device: Devices is then
// empty, and Listen and Resolve fail with rdma.ErrNoDevice.
func New(opts Options) (rdma.Provider, error) {
	// Lets destroy calls of a device that was unplugged succeed: its memory is
	// out of the adapter's reach, and only the library's own is left to free.
	if _, set := os.LookupEnv("RDMAV_ALLOW_DISASSOC_DESTROY"); !set {
		name, value := C.CString("RDMAV_ALLOW_DISASSOC_DESTROY"), C.CString("1")
		C.setenv(name, value, 1)
		C.free(unsafe.Pointer(name))
		C.free(unsafe.Pointer(value))
	}
	if mtu := opts.PathMTU; mtu != 0 && mtuCode(mtu) == 0 {
		return nil, fmt.Errorf("verbs: path MTU %d: must be 256, 512, 1024, 2048 or 4096", mtu)
	}
	opts = opts.withDefaults()
	p := &provider{opts: opts, log: opts.Logger, requestLife: defaultRequestLife, devices: map[string]*device{}, requests: map[*request]struct{}{}}
	p.noRequest.L = &p.mu
	return p, nil
}

func (p *provider) Name() string { return "verbs" }

// Devices lists the devices of this machine (ibv_get_device_list(3)), opening
// those that are new. Devices that cannot be opened are logged and left out.
func (p *provider) Devices() ([]rdma.Device, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, net.ErrClosed
	}
	found, err := p.scanLocked()
	if err != nil {
		return nil, err
	}
	out := make([]rdma.Device, len(found))
	for i, d := range found {
		out[i] = d
	}
	return out, nil
}

// scanLocked opens devices that have appeared and retires those that have gone.
func (p *provider) scanLocked() ([]*device, error) {
	var n C.int
	list, errno := C.ibv_get_device_list(&n)
	if list == nil {
		if causeOf(errno) == syscall.ENOSYS { // no kernel support at all
			return nil, nil
		}
		return nil, errnoFromPtr("ibv_get_device_list", true, errno)
	}
	defer C.ibv_free_device_list(list)
	seen := map[string]bool{}
	var out []*device
	for _, dev := range unsafe.Slice(list, int(n)) {
		name := C.GoString(C.ibv_get_device_name(dev))
		if p.opts.Device != "" && name != p.opts.Device {
			continue
		}
		seen[name] = true
		d := p.devices[name]
		if d != nil && d.gone.Load() {
			p.retireLocked(d)
			d = nil
		}
		if d == nil {
			var err error
			if d, err = p.openDevice(dev, name); err != nil {
				p.log.Warn("RDMA device cannot be used", "device", name, "err", err)
				continue
			}
			p.devices[name] = d
		}
		out = append(out, d)
	}
	for name, d := range p.devices {
		if !seen[name] {
			p.retireLocked(d)
		}
	}
	slices.SortFunc(out, func(a, b *device) int { return strings.Compare(a.name, b.name) })
	return out, nil
}

func (p *provider) retireLocked(d *device) {
	delete(p.devices, d.name)
	p.retired = append(p.retired, d)
}

// deviceOf finds the device behind a context that librdmacm opened. The context
// itself is librdmacm's; ours is of the same device.
func (p *provider) deviceOf(ctx *C.struct_ibv_context) (*device, error) {
	if ctx == nil {
		return nil, rdma.ErrNoDevice
	}
	name := C.GoString(C.ibv_get_device_name(ctx.device))
	p.mu.Lock()
	defer p.mu.Unlock()
	if d := p.devices[name]; d != nil && !d.gone.Load() {
		return d, nil
	}
	if p.closed {
		return nil, net.ErrClosed
	}
	if _, err := p.scanLocked(); err != nil {
		return nil, err
	}
	if d := p.devices[name]; d != nil {
		return d, nil
	}
	if p.opts.Device != "" && p.opts.Device != name {
		return nil, fmt.Errorf("%w: the way leads through %s, but device %s was asked for; set the source address to one of %[3]s's", rdma.ErrNoDevice, name, p.opts.Device)
	}
	return nil, fmt.Errorf("%w: %s cannot be opened", rdma.ErrNoDevice, name)
}

// channel returns the connection manager's event channel, made at first need.
func (p *provider) channel() (*cmChannel, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, net.ErrClosed
	}
	if p.cm == nil {
		ch, err := newCMChannel(p)
		if err != nil {
			return nil, err
		}
		p.cm = ch
	}
	return p.cm, nil
}

// hold counts an object that Close must wait for; ErrClosed after Close.
func (p *provider) hold(n *int) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return net.ErrClosed
	}
	*n++
	return nil
}

func (p *provider) release(n *int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	*n--
}

// Close ends the provider's goroutines and closes its devices.
func (p *provider) Close() error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil
	}
	if p.live.busy() {
		err := fmt.Errorf("verbs: close: %w: %+v", rdma.ErrBusy, p.live)
		p.mu.Unlock()
		return err
	}
	p.closed = true
	p.rejectAllLocked()
	devices := p.retired
	for _, d := range p.devices {
		devices = append(devices, d)
	}
	ch := p.cm
	p.mu.Unlock()

	var errs []error
	if ch != nil {
		ch.close()
	}
	for _, d := range devices {
		errs = append(errs, d.close())
	}
	return errors.Join(errs...)
}

// rejectAllLocked ends the requests that nobody has answered, and waits for
// those whose answer is under way.
func (p *provider) rejectAllLocked() {
	for r := range p.requests {
		go r.Reject(nil)
	}
	for p.live.requests > 0 {
		p.noRequest.Wait()
	}
}

// event reports an asynchronous event to log and metrics.
func (p *provider) event(level slog.Level, ev Event, attrs ...any) {
	p.log.Log(context.Background(), level, "RDMA event", append([]any{"event", ev.Kind, "device", ev.Device, "port", ev.Port}, attrs...)...)
	p.opts.OnEvent(ev)
}
