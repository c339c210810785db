// SPDX-License-Identifier: Apache-2.0

// Package faulty puts a layer of faults over any provider, for tests of what
// stands on it. Without rules it passes everything through, and the
// conformance suite.
//
//	p := faulty.Wrap(provider)
//	gate := new(faulty.Gate)
//	p.Add(&faulty.Rule{Op: rdma.OpWrite, Times: 1, Do: faulty.HoldLate(gate)})
//
// Faults act on what this side posts and accepts; what a peer does with
// one-sided requests is beyond any layer, so wrap the provider whose requests
// are to suffer.
package faulty

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"rblk/rdma"
)

// Provider is a provider with faults.
type Provider struct {
	inner rdma.Provider
	late  sync.WaitGroup // connections that outlive their Close (HoldLate)

	mu    sync.Mutex
	rules []*Rule // guarded by mu; the first that matches acts
	made  int     // guarded by mu: connections so far
	conns []*Conn // guarded by mu: those not closed, in the order made
}

var _ rdma.Provider = (*Provider)(nil)

// Wrap puts the layer over p. Closing the wrapper closes p.
func Wrap(p rdma.Provider, rules ...*Rule) *Provider { return &Provider{inner: p, rules: rules} }

// Add appends a rule. It acts on what comes after.
func (p *Provider) Add(r *Rule) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rules = append(p.rules, r)
}

// Remove takes a rule away.
func (p *Provider) Remove(r *Rule) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rules = slices.DeleteFunc(p.rules, func(x *Rule) bool { return x == r })
}

// Acted is how often r has acted.
func (p *Provider) Acted(r *Rule) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return r.acted
}

// Conns lists the connections that are not closed, in the order made.
func (p *Provider) Conns() []*Conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.conns)
}

// CutAll breaks every connection there is.
func (p *Provider) CutAll() {
	for _, c := range p.Conns() {
		c.Disconnect()
	}
}

func (p *Provider) match(on Event, conn int, wr *rdma.WorkRequest) (Action, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range p.rules {
		if r.matches(on, conn, wr) {
			return r.Do, true
		}
	}
	return Action{}, false
}

// unmatch takes back what match counted for requests that were not taken.
func (p *Provider) unmatch(conn int, wrs []rdma.WorkRequest) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range wrs {
		for _, r := range p.rules {
			r.forget(conn, &wrs[i])
		}
	}
}

// quiet: there are no rules.
func (p *Provider) quiet() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.rules) == 0
}

// Live passes on what the provider below counts.
func (p *Provider) Live() map[string]int {
	if c, ok := p.inner.(interface{ Live() map[string]int }); ok {
		return c.Live()
	}
	return nil
}

func (p *Provider) Name() string { return p.inner.Name() }

func (p *Provider) Devices() ([]rdma.Device, error) {
	devs, err := p.inner.Devices()
	for i, d := range devs {
		devs[i] = &device{d, p}
	}
	return devs, err
}

// Quiesce waits until no connection outlives its Close: the late WRITEs whose
// gates are open have gone out.
func (p *Provider) Quiesce(ctx context.Context) error {
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.late.Wait()
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Close waits for what HoldLate holds: open its gates first.
func (p *Provider) Close() error {
	p.late.Wait()
	return p.inner.Close()
}

func (p *Provider) Listen(ctx context.Context, addr string) (rdma.Listener, error) {
	l, err := p.inner.Listen(ctx, addr)
	if err != nil {
		return nil, err
	}
	return &listener{l, p}, nil
}

func (p *Provider) Resolve(ctx context.Context, addr string) (rdma.Route, error) {
	r, err := p.inner.Resolve(ctx, addr)
	if err != nil {
		return nil, err
	}
	return &route{r, p}, nil
}

type device struct {
	rdma.Device
	p *Provider
}

func (d *device) NewDomain() (rdma.ProtectionDomain, error) {
	pd, err := d.Device.NewDomain()
	if err != nil {
		return nil, err
	}
	return &domain{pd, d}, nil
}

type domain struct {
	rdma.ProtectionDomain
	dev *device
}

func (d *domain) Device() rdma.Device { return d.dev }

// below is the domain under the layer; one of another provider is passed on, to
// be refused there.
func below(pd rdma.ProtectionDomain) rdma.ProtectionDomain {
	if d, ok := pd.(*domain); ok {
		return d.ProtectionDomain
	}
	return pd
}

type listener struct {
	rdma.Listener
	p *Provider
}

func (l *listener) Accept(ctx context.Context) (rdma.ConnRequest, error) {
	for {
		q, err := l.Listener.Accept(ctx)
		if err != nil {
			return nil, err
		}
		a, ok := l.p.match(OnRequest, 0, nil)
		switch {
		case ok && a.kind == doReject:
			if err := q.Reject(a.reason); err != nil {
				return nil, err
			}
		case ok && a.kind == doIgnore:
		default:
			return &request{q, l.p}, nil
		}
	}
}

type request struct {
	rdma.ConnRequest
	p *Provider
}

func (q *request) Device() rdma.Device { return &device{q.ConnRequest.Device(), q.p} }

func (q *request) Accept(ctx context.Context, pd rdma.ProtectionDomain, opts rdma.ConnOptions, reply []byte) (rdma.Conn, error) {
	c, err := q.ConnRequest.Accept(ctx, below(pd), opts, reply)
	if err != nil {
		return nil, err
	}
	return q.p.wrap(c, below(pd)), nil
}

type route struct {
	rdma.Route
	p *Provider
}

func (r *route) Device() rdma.Device { return &device{r.Route.Device(), r.p} }

func (r *route) Connect(ctx context.Context, pd rdma.ProtectionDomain, opts rdma.ConnOptions, private []byte) (rdma.Conn, error) {
	if a, ok := r.p.match(OnConnect, 0, nil); ok && a.kind == doRefuse {
		_ = r.Route.Close()
		return nil, fmt.Errorf("faulty: connect: %w", a.err)
	}
	c, err := r.Route.Connect(ctx, below(pd), opts, private)
	if err != nil {
		return nil, err
	}
	return r.p.wrap(c, below(pd)), nil
}

func (p *Provider) wrap(c rdma.Conn, pd rdma.ProtectionDomain) *Conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.made++
	w := &Conn{inner: c, p: p, pd: pd, number: p.made, kick: make(chan struct{}, 1)}
	p.conns = append(p.conns, w)
	return w
}

func (p *Provider) forget(c *Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conns = slices.DeleteFunc(p.conns, func(x *Conn) bool { return x == c })
}
