// SPDX-License-Identifier: Apache-2.0

package faulty_test

import (
	"bytes"
	"context"
	"errors"
	"testing"

	"rblk/rdma"
	"rblk/rdma/faulty"
)

// through connects by way of a proxy.
func (r *rig) through(p *faulty.Proxy) (rdma.Conn, error) {
	ctx, cancel := context.WithTimeout(r.ctx, patience)
	defer cancel()
	route, err := r.p.Resolve(ctx, p.Addr())
	if err != nil {
		r.Fatal(err)
	}
	return route.Connect(ctx, r.pd, rdma.ConnOptions{SendDepth: 16}, nil)
}

func (r *rig) proxy() *faulty.Proxy {
	p, err := faulty.NewProxy(r.listener.Addr().String())
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() {
		if err := p.Close(); err != nil {
			r.Error(err)
		}
	})
	return p
}

// TestCutAnywhere cuts the stream after every number of bytes: each request is
// reported once, in order, and what is reported as done is done.
func TestCutAnywhere(t *testing.T) {
	r := newRig(t)
	p := r.proxy()
	const hello, stream = 80, 3*32 + 8 + 2*32
	local, remote := r.mr.Bytes(), r.tmr.Bytes()
	for cut := int64(1); cut < hello+stream; cut += 3 {
		clear(local)
		clear(remote)
		copy(remote[8:], "12345678")
		copy(local[16:], "abcdefgh")
		p.Limit(cut)
		c, err := r.through(p)
		if err != nil {
			if cut > hello {
				t.Fatalf("cut at %d: connect: %v", cut, err)
			}
			p.Limit(-1)
			continue
		}
		n, _ := c.Post([]rdma.WorkRequest{r.wr(1, rdma.OpRead), r.wr(2, rdma.OpWrite), r.wr(3, rdma.OpRead), r.wr(4, rdma.OpRead), r.wr(5, rdma.OpRead)})
		next := uint64(1)
		for {
			var wc [8]rdma.Completion
			ctx, cancel := context.WithTimeout(r.ctx, patience)
			got, err := c.Wait(ctx, wc[:])
			cancel()
			for _, x := range wc[:got] {
				if x.ID != next {
					t.Fatalf("cut at %d: completion %d, want %d", cut, x.ID, next)
				}
				next++
				switch {
				case x.Status != ok:
				case x.ID == 1 && !bytes.Equal(local[8:16], []byte("12345678")),
					x.ID == 2 && !bytes.Equal(remote[16:24], []byte("abcdefgh")):
					t.Fatalf("cut at %d: request %d is reported done and is not", cut, x.ID)
				}
			}
			if err != nil {
				if !errors.Is(err, rdma.ErrBroken) {
					t.Fatalf("cut at %d: %v", cut, err)
				}
				break
			}
			if int(next) > n {
				c.Disconnect() // all went through before the cut
			}
		}
		if int(next) != n+1 {
			t.Fatalf("cut at %d: %d of %d requests reported", cut, next-1, n)
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		p.Limit(-1)
	}
}

func TestProxyStallAndRefuse(t *testing.T) {
	r := newRig(t)
	p := r.proxy()
	c, err := r.through(p)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}()
	p.Stall(true)
	r.post(c, r.wr(1, rdma.OpRead))
	r.nothing(c)
	p.Stall(false)
	r.expect(c, 1, ok)
	if up, down := p.Bytes(); up == 0 || down == 0 {
		t.Fatalf("%d bytes up, %d down", up, down)
	}
	p.Refuse(true)
	if _, err := r.through(p); err == nil {
		t.Fatal("connected through a proxy that refuses")
	}
	p.Stall(true)
	r.post(c, r.wr(2, rdma.OpRead))
	p.Cut()
	var wc [1]rdma.Completion
	if n, err := c.Wait(r.ctx, wc[:]); n != 1 || wc[0].Status == ok {
		t.Fatalf("%+v, %v", wc[0], err)
	}
	r.end(c)
}
