// SPDX-License-Identifier: Apache-2.0

package faulty_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"rblk/rdma"
	"rblk/rdma/faulty"
	"rblk/rdma/rdmatest"
	"rblk/rdma/tcp"
)

const (
	patience  = 30 * time.Second
	handshake = 2 * time.Second // short: tests wait it out
)

func newTCP(t testing.TB) rdma.Provider {
	t.Helper()
	p, err := tcp.New(tcp.Options{HandshakeTime: handshake})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestConformance: a layer without faults changes nothing, and neither does one
// whose rules match nothing.
func TestConformance(t *testing.T) {
	for name, rules := range map[string][]*faulty.Rule{
		"none":  nil,
		"quiet": {{Match: func(*rdma.WorkRequest) bool { return false }, Do: faulty.Cut()}},
	} {
		t.Run(name, func(t *testing.T) {
			rdmatest.Run(t, func(tb testing.TB) rdmatest.Pair {
				p := faulty.Wrap(newTCP(tb), rules...)
				return rdmatest.Pair{Active: p, Passive: p, Listen: "127.0.0.1:0", RequestLife: handshake, NoChild: true}
			})
		})
	}
}

// rig is an active side with faults on a passive side without.
type rig struct {
	*testing.T
	ctx      context.Context
	p        *faulty.Provider
	target   rdma.Provider
	listener rdma.Listener
	pd, tpd  rdma.ProtectionDomain
	mr, tmr  rdma.MemoryRegion
	accepted chan rdma.Conn
}

const size = 1 << 16

func newRig(t *testing.T) *rig {
	ignore := goleak.IgnoreCurrent()
	t.Cleanup(func() { goleak.VerifyNone(t, ignore) })
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	t.Cleanup(cancel)
	r := &rig{T: t, ctx: ctx, p: faulty.Wrap(newTCP(t)), target: newTCP(t), accepted: make(chan rdma.Conn, 1000)}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	var err error
	domain := func(p rdma.Provider) (rdma.ProtectionDomain, rdma.MemoryRegion) {
		devs, err := p.Devices()
		must(err)
		pd, err := devs[0].NewDomain()
		must(err)
		mem, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
		must(err)
		mr, err := pd.Register(mem, rdma.AccessLocalWrite|rdma.AccessRemoteRead|rdma.AccessRemoteWrite)
		must(err)
		t.Cleanup(func() {
			must(mr.Deregister())
			must(unix.Munmap(mem))
			must(pd.Close())
			must(p.Close())
		})
		return pd, mr
	}
	r.pd, r.mr = domain(r.p)
	r.tpd, r.tmr = domain(r.target)
	r.listener, err = r.target.Listen(ctx, "127.0.0.1:0")
	must(err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			q, err := r.listener.Accept(ctx)
			if err != nil {
				return
			}
			if c, err := q.Accept(ctx, r.tpd, rdma.ConnOptions{}, nil); err == nil {
				r.accepted <- c
			}
		}
	}()
	t.Cleanup(func() {
		must(r.listener.Close())
		<-done
		close(r.accepted)
		for c := range r.accepted { // those no test has taken
			must(c.Close())
		}
	})
	return r
}

func (r *rig) tryDial() (rdma.Conn, error) {
	route, err := r.p.Resolve(r.ctx, r.listener.Addr().String())
	if err != nil {
		r.Fatal(err)
	}
	return route.Connect(r.ctx, r.pd, rdma.ConnOptions{SendDepth: 16}, nil)
}

// dial connects; both ends are closed with the test.
func (r *rig) dial() (active, passive rdma.Conn) {
	r.Helper()
	a, err := r.tryDial()
	if err != nil {
		r.Fatal(err)
	}
	b := <-r.accepted
	r.Cleanup(func() {
		for _, c := range []rdma.Conn{a, b} {
			if err := c.Close(); err != nil {
				r.Error(err)
			}
		}
	})
	return a, b
}

func (r *rig) wr(id uint64, op rdma.Opcode) rdma.WorkRequest {
	return rdma.WorkRequest{
		ID: id, Op: op, Flags: rdma.WRSignaled, Local: []rdma.Segment{rdma.Seg(r.mr, id*8, 8)},
		Remote: rdma.RemoteAddr{Addr: r.tmr.Addr() + id*8, RKey: r.tmr.RKey()},
	}
}

func (r *rig) post(c rdma.Conn, wrs ...rdma.WorkRequest) {
	r.Helper()
	if n, err := c.Post(wrs); n != len(wrs) || err != nil {
		r.Fatalf("posted %d of %d: %v", n, len(wrs), err)
	}
}

// expect waits for completions with those statuses, ids counting up from first.
func (r *rig) expect(c rdma.Conn, first uint64, statuses ...rdma.Status) {
	r.Helper()
	for i, s := range statuses {
		var wc [1]rdma.Completion
		ctx, cancel := context.WithTimeout(r.ctx, patience)
		n, err := c.Wait(ctx, wc[:])
		cancel()
		if n != 1 || wc[0].ID != first+uint64(i) || wc[0].Status != s {
			r.Fatalf("completion %d %v (%d, %v), want %d %v", wc[0].ID, wc[0].Status, n, err, first+uint64(i), s)
		}
	}
}

// nothing checks that no completion is there.
func (r *rig) nothing(c rdma.Conn) {
	r.Helper()
	ctx, cancel := context.WithTimeout(r.ctx, 20*time.Millisecond)
	defer cancel()
	var wc [1]rdma.Completion
	if n, err := c.Wait(ctx, wc[:]); n != 0 || !errors.Is(err, context.DeadlineExceeded) {
		r.Fatalf("completion %+v (%d, %v)", wc[0], n, err)
	}
}

func (r *rig) end(c rdma.Conn) {
	r.Helper()
	var wc [1]rdma.Completion
	if n, err := c.Wait(r.ctx, wc[:]); n != 0 || !errors.Is(err, rdma.ErrBroken) {
		r.Fatalf("completion %+v (%d, %v) behind the last", wc[0], n, err)
	}
}

const (
	ok       = rdma.StatusOK
	flush    = rdma.StatusFlushed
	noAccess = rdma.StatusRemoteAccess
)

func TestHold(t *testing.T) {
	r := newRig(t)
	g := new(faulty.Gate)
	rule := &faulty.Rule{Op: rdma.OpWrite, Skip: 1, Times: 1, Do: faulty.Hold(g)}
	r.p.Add(rule)
	a, _ := r.dial()
	r.post(a, r.wr(1, rdma.OpWrite), r.wr(2, rdma.OpWrite), r.wr(3, rdma.OpRead))
	r.expect(a, 1, ok)
	r.nothing(a)
	if g.Held() != 1 || r.p.Acted(rule) != 1 {
		t.Fatalf("%d held, acted %d times", g.Held(), r.p.Acted(rule))
	}
	r.post(a, r.wr(4, rdma.OpRead))
	g.Open()
	r.expect(a, 2, ok, ok, ok)
	r.p.Remove(rule)
}

func TestHoldIsBounded(t *testing.T) {
	r := newRig(t)
	g := new(faulty.Gate)
	r.p.Add(&faulty.Rule{Times: 1, Do: faulty.Hold(g)})
	a, _ := r.dial()
	posted := uint64(0)
	for {
		n, err := a.Post([]rdma.WorkRequest{r.wr(posted, rdma.OpRead)})
		if err != nil {
			t.Fatal(err)
		}
		if n == 0 {
			break
		}
		if posted++; posted > 1000 {
			t.Fatal("no back-pressure")
		}
	}
	g.Open()
	for i := range posted {
		r.expect(a, i, ok)
	}
}

func TestDelay(t *testing.T) {
	r := newRig(t)
	r.p.Add(&faulty.Rule{Op: rdma.OpRead, Do: faulty.Delay(5 * time.Millisecond)})
	a, _ := r.dial()
	r.post(a, r.wr(1, rdma.OpRead), r.wr(2, rdma.OpRead), r.wr(3, rdma.OpWrite))
	r.expect(a, 1, ok, ok, ok)
}

// TestLateWrite: the WRITE of a closed connection comes after a newer one of
// another connection, unless the peer has destroyed the queue pair.
func TestLateWrite(t *testing.T) {
	for _, fenced := range []bool{false, true} {
		r := newRig(t)
		g := new(faulty.Gate)
		r.p.Add(&faulty.Rule{Conn: 1, Op: rdma.OpWrite, Times: 1, Do: faulty.HoldLate(g)})
		old, oldPeer := r.dial()
		copy(r.mr.Bytes()[8:], "old data")
		r.post(old, r.wr(1, rdma.OpWrite))
		if err := old.Close(); err != nil {
			t.Fatal(err)
		}
		if fenced {
			if err := oldPeer.Close(); err != nil {
				t.Fatal(err)
			}
		}
		a, _ := r.dial()
		copy(r.mr.Bytes()[8:], "new data")
		r.post(a, r.wr(1, rdma.OpWrite))
		r.expect(a, 1, ok)
		g.Open()
		if err := r.p.Quiesce(r.ctx); err != nil {
			t.Fatal(err)
		}
		want := "old data"
		if fenced {
			want = "new data"
		}
		if got := string(r.tmr.Bytes()[8:16]); got != want {
			t.Fatalf("fenced %v: memory holds %q, want %q", fenced, got, want)
		}
	}
}

func TestCut(t *testing.T) {
	r := newRig(t)
	r.p.Add(&faulty.Rule{SkipByte: 16, Times: 1, Do: faulty.Cut()})
	a, b := r.dial()
	r.post(a, r.wr(1, rdma.OpRead))
	r.expect(a, 1, ok)
	r.post(a, r.wr(2, rdma.OpRead))
	r.expect(a, 2, ok)
	r.post(a, r.wr(3, rdma.OpRead))
	r.expect(a, 3, flush)
	r.end(a)
	<-b.Done()
	// A later connection is whole.
	a, _ = r.dial()
	r.post(a, r.wr(1, rdma.OpRead))
	r.expect(a, 1, ok)
	r.p.CutAll()
	r.end(a)
}

func TestFail(t *testing.T) {
	r := newRig(t)
	g := new(faulty.Gate)
	r.p.Add(&faulty.Rule{Match: func(wr *rdma.WorkRequest) bool { return wr.ID == 1 }, Do: faulty.Hold(g)})
	r.p.Add(&faulty.Rule{Match: func(wr *rdma.WorkRequest) bool { return wr.ID == 2 }, Do: faulty.Fail(rdma.StatusRetryExceeded)})
	a, _ := r.dial()
	r.post(a, r.wr(1, rdma.OpRead), r.wr(2, rdma.OpRead), r.wr(3, rdma.OpRead))
	g.Open()
	var wc [1]rdma.Completion
	if n, err := a.Wait(r.ctx, wc[:]); n != 1 || wc[0].ID != 1 {
		t.Fatalf("%+v, %v", wc[0], err)
	} // ok or flushed: it was under way
	r.expect(a, 2, rdma.StatusRetryExceeded, flush)
	r.end(a)
	if n, err := a.Post([]rdma.WorkRequest{r.wr(4, rdma.OpRead)}); n != 0 || !errors.Is(err, rdma.ErrBroken) {
		t.Fatalf("post: %d, %v", n, err)
	}
}

func TestWrongKey(t *testing.T) {
	r := newRig(t)
	r.p.Add(&faulty.Rule{Op: rdma.OpWrite, Times: 1, Do: faulty.WrongKey()})
	a, _ := r.dial()
	r.post(a, r.wr(1, rdma.OpRead), r.wr(2, rdma.OpWrite), r.wr(3, rdma.OpRead))
	r.expect(a, 1, ok, noAccess, flush)
	r.end(a)
}

func TestFreeze(t *testing.T) {
	r := newRig(t)
	g := new(faulty.Gate)
	r.p.Add(&faulty.Rule{Skip: 1, Times: 1, Do: faulty.Freeze(g)})
	a, b := r.dial()
	r.post(a, r.wr(1, rdma.OpRead), r.wr(2, rdma.OpRead))
	r.nothing(a) // not even what came before
	g.Open()
	r.expect(a, 1, ok, ok)
	// A frozen connection can be closed.
	h := new(faulty.Gate)
	r.p.Add(&faulty.Rule{Do: faulty.Freeze(h)})
	r.post(a, r.wr(3, rdma.OpRead))
	waited := make(chan error, 1)
	go func() {
		var wc [1]rdma.Completion
		_, err := a.Wait(r.ctx, wc[:])
		waited <- err
	}()
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	if err := <-waited; err == nil {
		t.Fatal("Wait of a closed connection")
	}
	<-b.Done()
}

func TestRefuseConnect(t *testing.T) {
	r := newRig(t)
	mine := errors.New("mine")
	r.p.Add(&faulty.Rule{On: faulty.OnConnect, Times: 2, Do: faulty.Refuse(mine)})
	for range 2 {
		if _, err := r.tryDial(); !errors.Is(err, mine) {
			t.Fatal(err)
		}
	}
	r.dial()
}

func TestRejectAndIgnore(t *testing.T) {
	r := newRig(t)
	l, err := r.p.Listen(r.ctx, "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	r.p.Add(&faulty.Rule{On: faulty.OnRequest, Times: 1, Do: faulty.Reject("go away")})
	r.p.Add(&faulty.Rule{On: faulty.OnRequest, Times: 1, Do: faulty.Ignore()})
	ctx, cancel := context.WithCancel(r.ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if _, err := l.Accept(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("Accept: %v", err)
		}
	}()
	for i := range 2 {
		route, err := r.target.Resolve(r.ctx, l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		_, err = route.Connect(r.ctx, r.tpd, rdma.ConnOptions{}, nil)
		var reject *rdma.RejectError
		if err == nil || i == 0 && (!errors.As(err, &reject) || string(reject.Reason) != "go away") {
			t.Errorf("connect %d: %v", i, err)
		}
	}
	cancel()
	<-done
}
