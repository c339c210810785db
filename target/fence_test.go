// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"rblk/rdma"
	"rblk/rdma/tcp"
	"rblk/wire"
)

// slowProvider holds connections back between the moment that their queue pair
// works and the moment that the target hears of it, as a lost "ready to use" of
// a verbs connection does.
type slowProvider struct {
	rdma.Provider
	slow atomic.Bool
	held chan struct{} // one token for each connection held
	gate chan struct{}
}

type slowListener struct {
	rdma.Listener
	p *slowProvider
}

type slowRequest struct {
	rdma.ConnRequest
	p *slowProvider
}

func (p *slowProvider) Listen(ctx context.Context, addr string) (rdma.Listener, error) {
	l, err := p.Provider.Listen(ctx, addr)
	return &slowListener{l, p}, err
}

func (l *slowListener) Accept(ctx context.Context) (rdma.ConnRequest, error) {
	q, err := l.Listener.Accept(ctx)
	if err != nil {
		return nil, err
	}
	return &slowRequest{q, l.p}, nil
}

func (q *slowRequest) Accept(ctx context.Context, pd rdma.ProtectionDomain, opts rdma.ConnOptions, reply []byte) (rdma.Conn, error) {
	c, err := q.ConnRequest.Accept(ctx, pd, opts, reply)
	if err != nil || !q.p.slow.Load() {
		return c, err
	}
	q.p.held <- struct{}{}
	select {
	case <-q.p.gate:
		return c, nil
	case <-ctx.Done():
		c.Close()
		return nil, ctx.Err()
	}
}

// startSlow is start with a slowProvider.
func startSlow(t *testing.T, opts Options, add func(*Server) error) (*running, *slowProvider) {
	t.Helper()
	inner, err := tcp.New(tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	p := &slowProvider{Provider: inner, held: make(chan struct{}, 8), gate: make(chan struct{})}
	return startOver(t, p, opts, add), p
}

// arriving opens a session of two connections, of which the target has not yet
// heard that the second one works.
func arriving(t *testing.T, r *running, p *slowProvider) *peer {
	t.Helper()
	reply, err := r.open(request("m", wire.AccessWrite, 2))
	if err != nil {
		t.Fatal(err)
	}
	second := reply.Tokens[1]
	reply.Tokens = reply.Tokens[:1]
	a := r.join(reply)
	p.slow.Store(true)
	c, err := a.connect(second)
	if err != nil {
		t.Fatal(err)
	}
	a.conns = append(a.conns, c)
	<-p.held
	p.slow.Store(false)
	return a
}

func addMemory(s *Server) error {
	return s.AddMemory(context.Background(), MemoryConfig{Name: "m", Size: 1 << 20})
}

// TestFenceArriving: a connection whose queue pair works already, although the
// target has not heard of it, does not outlive the end of its epoch either.
func TestFenceArriving(t *testing.T) {
	for _, how := range []string{"force", "reopen", "delete"} {
		t.Run(how, func(t *testing.T) {
			r, p := startSlow(t, testOptions(t), addMemory)
			a := arriving(t, r, p)
			g := a.conns[0].mapRanges(wire.IntentWrite, ranges(0, 1<<20)...)[0]
			var next *peer
			switch how {
			case "force":
				req := request("m", wire.AccessWrite, 1)
				req.Force = true
				reply, err := r.open(req)
				if err != nil {
					t.Fatal(err)
				}
				next = r.join(reply)
			case "reopen":
				req := request("m", wire.AccessWrite, 1)
				req.Reopen = &wire.Reopen{Session: a.reply.Session, Epoch: a.reply.Epoch, Secret: a.reply.Secret}
				reply, err := r.open(req)
				if err != nil {
					t.Fatal(err)
				}
				next = r.join(reply)
			case "delete":
				if err := r.call("DELETE", "/v1/sessions/"+a.reply.Session, nil, nil, "Rblk-Secret", a.reply.Secret); err != nil {
					t.Fatal(err)
				}
				next = r.dial("m", wire.AccessWrite, 1)
			}
			ng := next.conns[0].mapRanges(wire.IntentWrite, ranges(0, 1<<20)...)[0]
			next.conns[0].write(ng, 0, []byte("new"))
			c := a.conns[1]
			copy(c.data(), "old")
			seg := rdma.Seg(c.mr, uint64(len(c.mem)-peerData), 3)
			err := c.post(rdma.WorkRequest{Op: rdma.OpWrite, Local: []rdma.Segment{seg}, Remote: rdma.RemoteAddr{Addr: g.Addr, RKey: g.RKeys[0]}})
			if err == nil {
				id := c.posted
				done := func() bool { _, ok := c.ended[id]; return ok }
				c.pump(done)
				if st, ok := c.ended[id]; ok && st == rdma.StatusOK {
					t.Error("a WRITE of the old epoch succeeded after its end")
				}
			}
			if got := string(next.conns[0].read(ng, 0, 3)); got != "new" {
				t.Errorf("memory holds %q after the old epoch's end, want %q", got, "new")
			}
			close(p.gate)
			time.Sleep(10 * time.Millisecond) // the late one may still be taken for one of the new epoch
			r.Server.mu.Lock()
			for _, x := range r.Server.sessions {
				x.mu.Lock()
				if len(x.conns) != 1 {
					t.Errorf("session has %d connections, want 1", len(x.conns))
				}
				x.mu.Unlock()
			}
			r.Server.mu.Unlock()
		})
	}
}
