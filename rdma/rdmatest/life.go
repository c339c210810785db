// SPDX-License-Identifier: Apache-2.0

package rdmatest

import (
	"bytes"
	"context"
	"errors"
	"net"
	"time"

	"rblk/rdma"
)

// connectTo makes a link to a side that shares its domain and memory with
// others.
func (r *rig) connectTo(listener rdma.Listener, store *side, passive rdma.ConnOptions) *link {
	r.Helper()
	route := r.resolve(listener)
	lk := &link{rig: r, a: r.newSide("active", r.domain(route.Device()))}
	lk.b = &side{rig: r, name: "passive", pd: store.pd, mr: store.mr, mem: store.mem}
	accepted := make(chan rdma.Conn, 1)
	passive.ManualProgress = r.manual
	go func() {
		defer close(accepted)
		q, err := listener.Accept(r.ctx)
		if err != nil {
			return
		}
		c, err := q.Accept(r.ctx, store.pd, passive, nil)
		if err == nil {
			accepted <- c
		}
	}()
	c, err := route.Connect(r.ctx, lk.a.pd, rdma.ConnOptions{ManualProgress: r.manual}, nil)
	r.must(err, "connect")
	lk.a.adopt(c, false)
	bc, ok := <-accepted
	if !ok {
		r.Fatal("not accepted")
	}
	lk.b.adopt(bc, true)
	return lk
}

func testInfo(r *rig) {
	for _, d := range []rdma.Device{device(r, r.pair.Active), device(r, r.pair.Passive)} {
		info := d.Info()
		if info.Name == "" || info.Transport == "" {
			r.Errorf("device without name or transport: %+v", info)
		}
	}
	l := r.connect(linkOptions{active: rdma.ConnOptions{SendDepth: 20, RecvDepth: 10, ReadDepth: 3, Segments: 2, Inline: 32}})
	info := l.a.conn.Info()
	if info.SendDepth < 20 || info.RecvDepth < 10 || info.ReadDepth < 1 || info.ReadDepth > 3 || info.Segments < 2 && !r.pair.IWARP {
		r.Errorf("negotiated %+v", info)
	}
	if info.LocalAddr == nil || info.RemoteAddr == nil || info.Device == nil {
		r.Errorf("addresses or device missing: %+v", info)
	}
	// Beyond a limit is clamped, not an error.
	l = r.connect(linkOptions{active: rdma.ConnOptions{ReadDepth: 1 << 20, Inline: 1 << 20, Segments: 1 << 20}})
	l.read(0, 0, 100)
}

func testPrivateData(r *rig) {
	listener := r.listen()
	for _, n := range []int{0, 1, rdma.MaxPrivateData} {
		ask, reply := make([]byte, n), make([]byte, n)
		for i := range n {
			ask[i], reply[i] = byte(i+1), byte(200-i)
		}
		route := r.resolve(listener)
		apd, bpd := r.domain(route.Device()), r.domain(device(r, r.pair.Passive))
		seen := make(chan []byte, 1)
		go func() {
			defer close(seen)
			q, err := listener.Accept(r.ctx)
			if err != nil {
				return
			}
			data := bytes.Clone(q.PrivateData())
			if q.RemoteAddr() == nil || q.LocalAddr() == nil || q.Device() == nil {
				r.Error("request without addresses or device")
			}
			c, err := q.Accept(r.ctx, bpd, rdma.ConnOptions{}, reply)
			if err != nil {
				r.Errorf("accept: %v", err)
				return
			}
			r.later(func() { r.closes("passive connection", c.Close) })
			seen <- data
		}()
		c, err := route.Connect(r.ctx, apd, rdma.ConnOptions{}, ask)
		r.must(err, "connect")
		got := <-seen
		r.closes("active connection", c.Close)
		samePadded(r, "request", got, ask)
		samePadded(r, "acceptance", c.Info().PrivateData, reply)
	}
	route := r.resolve(listener)
	if _, err := route.Connect(r.ctx, r.domain(route.Device()), rdma.ConnOptions{}, make([]byte, rdma.MaxPrivateData+1)); !errors.Is(err, rdma.ErrInvalid) {
		r.Errorf("too much private data: %v", err)
	}
}

// samePadded compares private data, which may have gained zeros at its end.
func samePadded(r *rig, what string, got, want []byte) {
	r.Helper()
	if len(got) < len(want) || !bytes.Equal(got[:len(want)], want) || len(bytes.Trim(got[len(want):], "\x00")) != 0 {
		r.Errorf("private data of the %s: %x, want %x", what, got, want)
	}
}

func testReject(r *rig) {
	listener := r.listen()
	for _, reason := range []string{"", "no such export", string(bytes.Repeat([]byte("x"), rdma.MaxRejectReason))} {
		go func() {
			if q, err := listener.Accept(r.ctx); err == nil {
				if err := q.Reject([]byte(reason)); err != nil {
					r.Errorf("reject: %v", err)
				}
			}
		}()
		route := r.resolve(listener)
		_, err := route.Connect(r.ctx, r.domain(route.Device()), rdma.ConnOptions{}, nil)
		var reject *rdma.RejectError
		if !errors.As(err, &reject) {
			r.Fatalf("connect: %v, want a RejectError", err)
		}
		samePadded(r, "rejection", reject.Reason, []byte(reason))
	}
}

func testRequestLeftAlone(r *rig) {
	listener := r.listen()
	route := r.resolve(listener)
	ctx, cancel := context.WithTimeout(r.ctx, r.pair.RequestLife+r.pair.Patience)
	defer cancel()
	held := make(chan rdma.ConnRequest, 1)
	go func() {
		q, _ := listener.Accept(ctx)
		held <- q
	}()
	c, err := route.Connect(ctx, r.domain(route.Device()), rdma.ConnOptions{}, nil)
	if err == nil {
		r.closes("connection", c.Close)
		r.Fatal("connected without an acceptance")
	}
	if ctx.Err() != nil {
		r.Fatalf("a request left alone was not ended: %v", err)
	}
	q := <-held
	if q == nil {
		r.Fatal("no request")
	}
	if c, err := q.Accept(r.ctx, r.domain(q.Device()), rdma.ConnOptions{}, nil); err == nil {
		// Some adapters notice later.
		r.closes("late connection", c.Close)
	}
	_ = q.Reject(nil)
}

func testRequestEndsOnce(r *rig) {
	l := r.listen()
	route := r.resolve(l)
	bpd := r.domain(device(r, r.pair.Passive))
	done := make(chan rdma.Conn, 1)
	go func() {
		defer close(done)
		q, err := l.Accept(r.ctx)
		if err != nil {
			return
		}
		c, err := q.Accept(r.ctx, bpd, rdma.ConnOptions{}, nil)
		if err != nil {
			r.Errorf("accept: %v", err)
			return
		}
		if _, err := q.Accept(r.ctx, bpd, rdma.ConnOptions{}, nil); err == nil {
			r.Error("accepted twice")
		}
		_ = q.Reject([]byte("late")) // must do nothing
		done <- c
	}()
	s := r.newSide("active", r.domain(route.Device()))
	c, err := route.Connect(r.ctx, s.pd, rdma.ConnOptions{}, nil)
	r.must(err, "connect")
	s.adopt(c, false)
	bc, ok := <-done
	if !ok {
		r.Fatal("not accepted")
	}
	r.later(func() { r.closes("passive connection", bc.Close) })
	if err := c.Err(); err != nil {
		r.Fatalf("the connection did not survive a late Reject: %v", err)
	}
}

func testListenerCloses(r *rig) {
	listener := r.listen()
	lk := r.connectTo(listener, r.newSide("passive", r.domain(device(r, r.pair.Passive))), rdma.ConnOptions{})
	ctx, cancel := context.WithCancel(r.ctx)
	cancel()
	if _, err := listener.Accept(ctx); !errors.Is(err, context.Canceled) {
		r.Errorf("Accept with an ended context: %v", err)
	}
	waiting := make(chan error, 1)
	go func() {
		_, err := listener.Accept(r.ctx)
		waiting <- err
	}()
	r.closes("listener", listener.Close)
	select {
	case err := <-waiting:
		if !errors.Is(err, net.ErrClosed) {
			r.Errorf("Accept at Close: %v", err)
		}
	case <-time.After(r.pair.Patience):
		r.Fatal("Accept hangs after Close")
	}
	if _, err := listener.Accept(r.ctx); !errors.Is(err, net.ErrClosed) {
		r.Errorf("Accept after Close: %v", err)
	}
	lk.read(0, 0, 1000) // connections live on
}

func testNobodyListens(r *rig) {
	listener := r.listen()
	addr := r.pair.Dial(listener.Addr())
	r.closes("listener", listener.Close)
	ctx, cancel := contextOf(r)
	defer cancel()
	route, err := r.pair.Active.Resolve(ctx, addr)
	if err != nil {
		return
	}
	if c, err := route.Connect(ctx, r.domain(route.Device()), rdma.ConnOptions{}, nil); err == nil {
		r.closes("connection", c.Close)
		r.Fatal("connected to nobody")
	}
	if ctx.Err() != nil {
		r.Fatal("connecting to nobody is not refused")
	}
	if _, err := r.pair.Active.Resolve(ctx, "no port here"); err == nil {
		r.Error("resolved an address without a port")
	}
}

func testConnectCancelled(r *rig) {
	listener := r.listen() // and nobody accepts
	pd := r.domain(device(r, r.pair.Active))
	for _, after := range []time.Duration{0, 20 * time.Millisecond} {
		ctx, cancel := context.WithTimeout(r.ctx, after)
		route, err := r.pair.Active.Resolve(r.ctx, r.pair.Dial(listener.Addr()))
		r.must(err, "resolve")
		if c, err := route.Connect(ctx, pd, rdma.ConnOptions{}, nil); err == nil {
			r.closes("connection", c.Close)
			r.Error("connected without an acceptance")
		} else if !errors.Is(err, context.DeadlineExceeded) {
			r.Errorf("Connect at its deadline: %v", err)
		}
		cancel()
	}
}

// testTeardownOrder: a parent with children says ErrBusy.
func testTeardownOrder(r *rig) {
	busy := func(what string, f func() error) {
		r.Helper()
		if err := f(); !errors.Is(err, rdma.ErrBusy) {
			r.Errorf("%s: %v, want ErrBusy", what, err)
		}
	}
	p := r.pair.Passive
	l, err := p.Listen(r.ctx, r.pair.Listen)
	r.must(err, "listen")
	busy("provider with a listener", p.Close)
	route, err := r.pair.Active.Resolve(r.ctx, r.pair.Dial(l.Addr()))
	r.must(err, "resolve")
	busy("provider with a route", r.pair.Active.Close)
	r.closes("route", route.Close)
	r.closes("route, again", route.Close)
	r.closes("listener", l.Close)

	pd := r.domain(device(r, p))
	busy("provider with a domain", p.Close)
	mr, err := pd.Register(r.memory(4096), allAccess)
	r.must(err, "register")
	busy("domain with a region", pd.Close)
	r.closes("region", mr.Deregister)
	r.closes("domain", pd.Close)
	if _, err := pd.Register(r.memory(4096), allAccess); err == nil {
		r.Error("registered in a closed domain")
	}

	lk := r.connect(linkOptions{})
	r.closes("region", lk.b.mr.Deregister)
	busy("domain with a connection", lk.b.pd.Close)
	lk.a.conn.Disconnect()
	lk.b.dies()
	busy("domain with a dead connection", lk.b.pd.Close)
	r.closes("connection", lk.b.conn.Close)
	r.closes("domain", lk.b.pd.Close)
}

// testKeys: keys of ended regions do not come back soon, and do not count up.
func testKeys(r *rig) {
	pd := r.domain(device(r, r.pair.Passive))
	mem := r.memory(4096)
	last := uint32(0)
	for i := range 500 {
		mr, err := pd.Register(mem, allAccess)
		r.must(err, "register")
		if i > 0 && mr.RKey() == last {
			r.Fatalf("key %#x was given out twice in a row", last)
		}
		if mr.Addr() != addressOf(mem) || mr.Len() != 4096 || mr.Access() != allAccess || len(mr.Bytes()) != 4096 {
			r.Fatalf("region tells %#x+%d %v", mr.Addr(), mr.Len(), mr.Access())
		}
		last = mr.RKey()
		r.closes("region", mr.Deregister)
	}
}
