// SPDX-License-Identifier: Apache-2.0

package rdmatest

import (
	"bytes"
	"context"
	"errors"
	"math"
	"net"
	"sync"
	"time"

	"rblk/rdma"
)

// refused checks a failed completion.
func (r *rig) refused(c rdma.Completion, id uint64, want rdma.Status) {
	r.Helper()
	if c.ID != id || c.Status == rdma.StatusOK || c.Status != want && !r.pair.LooseStatus {
		r.Fatalf("completion %d %v, want %d %v", c.ID, c.Status, id, want)
	}
}

// flushed checks that all are flushed requests with those ids, in order.
func flushed(s *side, all []rdma.Completion, ids ...uint64) {
	s.Helper()
	if len(all) != len(ids) {
		s.Fatalf("%s: %d completions %+v, want %d", s.name, len(all), all, len(ids))
	}
	for i, c := range all {
		if c.ID != ids[i] || c.Status != rdma.StatusFlushed && !(s.pair.LooseStatus && c.Status != rdma.StatusOK) {
			s.Fatalf("%s: completion %d %v, want %d flushed", s.name, c.ID, c.Status, ids[i])
		}
	}
}

// testRefusals: every access that the keys do not allow breaks the connection
// and touches nothing.
func testRefusals(r *rig) {
	const n = 64
	cases := []struct {
		name string
		op   rdma.Opcode
		at   func(l *link) rdma.RemoteAddr
	}{
		{"read past the end", rdma.OpRead, func(l *link) rdma.RemoteAddr { return l.b.at(regionSize - n + 1) }},
		{"write past the end", rdma.OpWrite, func(l *link) rdma.RemoteAddr { return l.b.at(regionSize - n + 1) }},
		{"read at the end", rdma.OpRead, func(l *link) rdma.RemoteAddr { return l.b.at(regionSize) }},
		{"write before the start", rdma.OpWrite, func(l *link) rdma.RemoteAddr {
			a := l.b.at(0)
			a.Addr--
			return a
		}},
		{"read around the address space", rdma.OpRead, func(l *link) rdma.RemoteAddr {
			return rdma.RemoteAddr{Addr: math.MaxUint64 - n/2, RKey: l.b.mr.RKey()}
		}},
		{"write with a wrong key", rdma.OpWrite, func(l *link) rdma.RemoteAddr {
			a := l.b.at(0)
			a.RKey ^= 0x5a5a00
			return a
		}},
		{"read with a wrong key", rdma.OpRead, func(l *link) rdma.RemoteAddr {
			a := l.b.at(0)
			a.RKey ^= 0x5a5a00
			return a
		}},
		{"read without remote read", rdma.OpRead, func(l *link) rdma.RemoteAddr {
			return l.other(l.b.pd, rdma.AccessLocalWrite|rdma.AccessRemoteWrite)
		}},
		{"write without remote write", rdma.OpWrite, func(l *link) rdma.RemoteAddr {
			return l.other(l.b.pd, rdma.AccessRemoteRead)
		}},
		{"read of local memory", rdma.OpRead, func(l *link) rdma.RemoteAddr { return l.other(l.b.pd, 0) }},
		{"read of another domain", rdma.OpRead, func(l *link) rdma.RemoteAddr {
			return l.other(l.domain(l.b.pd.Device()), allAccess)
		}},
		{"write of another domain", rdma.OpWrite, func(l *link) rdma.RemoteAddr {
			return l.other(l.domain(l.b.pd.Device()), allAccess)
		}},
		{"read of an ended region", rdma.OpRead, func(l *link) rdma.RemoteAddr {
			mr, err := l.b.pd.Register(l.memory(4096), allAccess)
			l.must(err, "register")
			a := rdma.RemoteAddr{Addr: mr.Addr(), RKey: mr.RKey()}
			l.closes("region", mr.Deregister)
			return a
		}},
	}
	for _, tt := range cases {
		if r.pair.Siw && (tt.name == "read without remote read" || tt.name == "read of local memory") {
			continue
		}
		l := r.connect(linkOptions{})
		at := tt.at(l)
		fill(l.a.mem, 1)
		fill(l.b.mem, 2)
		before := bytes.Clone(l.b.mem)
		// What is posted before succeeds, the culprit fails, the rest is flushed.
		// Without the fences a WRITE may overtake the READ before it.
		behind := l.a.writeWR(3, l.b, 0, 0, 5000)
		behind.Flags |= rdma.WRFence
		l.a.post(
			l.a.readWR(1, l.b, 0, 500_000, 100_000),
			rdma.WorkRequest{ID: 2, Op: tt.op, Flags: rdma.WRFence, Local: l.a.seg(0, n), Remote: at},
			behind,
			l.a.readWR(4, l.b, 0, 0, 5000),
		)
		if r.pair.IWARP {
			l.endsUntouched(tt.name, before)
			continue
		}
		l.a.expect(1)
		c := l.a.next()
		if c.ID != 2 || c.Status == rdma.StatusOK || c.Status != rdma.StatusRemoteAccess && !r.pair.LooseStatus {
			l.Fatalf("%s: completion %d %v, want 2 %v", tt.name, c.ID, c.Status, rdma.StatusRemoteAccess)
		}
		flushed(l.a, l.a.rest(), 3, 4)
		err := l.a.dies()
		if !r.pair.LooseStatus && !errors.Is(err, rdma.StatusRemoteAccess.Err()) {
			l.Errorf("%s: error %v does not name the status", tt.name, err)
		}
		l.b.dies()
		if !bytes.Equal(l.b.mem, before) {
			l.Fatalf("%s: the memory was touched", tt.name)
		}
	}
}

// endsUntouched: on iWARP the WRITEs may have succeeded as far as TCP knows, and
// a READ under way may have been lost with the connection; but the READ behind
// the culprit fails, and nothing has changed.
func (l *link) endsUntouched(name string, before []byte) {
	l.Helper()
	if l.pair.Siw {
		// Its terminate message may be stuck until there is more to send.
		select {
		case <-l.a.conn.Done():
		case <-time.After(time.Second):
			l.a.conn.Disconnect()
		}
	}
	for _, c := range l.a.rest() {
		if c.ID == 4 && c.Status == rdma.StatusOK {
			l.Fatalf("%s: the READ behind it succeeded", name)
		}
	}
	l.a.dies()
	l.b.dies()
	if !bytes.Equal(l.b.mem, before) {
		l.Fatalf("%s: the memory was touched", name)
	}
}

// other is the address of a new region of pd with that access.
func (l *link) other(pd rdma.ProtectionDomain, access rdma.Access) rdma.RemoteAddr {
	mr := l.register(pd, l.memory(4096), access)
	return rdma.RemoteAddr{Addr: mr.Addr(), RKey: mr.RKey()}
}

// testFlushOnError: a failure flushes all that is outstanding, sends and
// receives, once; then Poll, Wait and Post tell the end.
func testFlushOnError(r *rig) {
	l := r.connect(linkOptions{receives: 5})
	bad := l.a.readWR(3, l.b, 0, 0, 8)
	bad.Remote.RKey ^= 0x00fff0
	quiet := l.a.writeWR(5, l.b, 0, 0, 8)
	quiet.Flags = 0
	l.a.post(l.a.writeWR(1, l.b, 0, 0, 8), l.a.readWR(2, l.b, 0, 0, 8), bad, l.a.readWR(4, l.b, 0, 0, 8), quiet)
	l.a.expect(1)
	l.a.expect(2)
	r.refused(l.a.next(), 3, rdma.StatusRemoteAccess)
	all := l.a.rest()
	var sends, recvs []rdma.Completion
	for _, c := range all {
		if c.ID >= 4 && len(sends) < 2 && c.ID == uint64(4+len(sends)) && len(recvs) == 0 || len(recvs) == 5 {
			sends = append(sends, c)
		} else {
			recvs = append(recvs, c)
		}
	}
	flushed(l.a, sends, 4, 5)
	flushed(l.a, recvs, 0, 1, 2, 3, 4)
	flushed(l.b, l.b.rest(), 0, 1, 2, 3, 4)
	var wc [4]rdma.Completion
	if n, err := l.a.conn.Poll(wc[:]); n != 0 || !errors.Is(err, rdma.ErrBroken) {
		l.Errorf("Poll of a dead connection: %d, %v", n, err)
	}
	if n, err := l.a.conn.Wait(r.ctx, wc[:]); n != 0 || !errors.Is(err, rdma.ErrBroken) {
		l.Errorf("Wait on a dead connection: %d, %v", n, err)
	}
	if n, err := l.a.conn.Post([]rdma.WorkRequest{l.a.readWR(1, l.b, 0, 0, 8)}); n != 0 || !errors.Is(err, rdma.ErrBroken) {
		l.Errorf("Post to a dead connection: %d, %v", n, err)
	}
	if n, err := l.a.conn.PostRecv([]rdma.RecvRequest{recvAt(l.a.mr, 0)}); n != 0 || !errors.Is(err, rdma.ErrBroken) {
		l.Errorf("PostRecv to a dead connection: %d, %v", n, err)
	}
}

// testInvalidRequests: what is malformed is refused by Post with its place in
// the batch, and the connection is unharmed.
func testInvalidRequests(r *rig) {
	l := r.connect(linkOptions{})
	good := l.a.readWR(1, l.b, 0, 0, 8)
	with := func(change func(*rdma.WorkRequest)) rdma.WorkRequest {
		wr := good
		wr.Local = append([]rdma.Segment(nil), good.Local...)
		change(&wr)
		return wr
	}
	readOnly := l.register(l.a.pd, l.memory(4096), rdma.AccessRemoteRead)
	foreign := l.register(l.domain(l.a.pd.Device()), l.memory(4096), allAccess)
	ended, err := l.a.pd.Register(l.memory(4096), allAccess)
	l.must(err, "register")
	old := rdma.Seg(ended, 0, 8)
	l.closes("region", ended.Deregister)
	for name, bad := range map[string]rdma.WorkRequest{
		"opcode":            with(func(wr *rdma.WorkRequest) { wr.Op = rdma.OpRecv }),
		"no opcode":         with(func(wr *rdma.WorkRequest) { wr.Op = rdma.OpInvalid }),
		"too many segments": with(func(wr *rdma.WorkRequest) { wr.Local = make([]rdma.Segment, l.a.conn.Info().Segments+1) }),
		"inline READ":       with(func(wr *rdma.WorkRequest) { wr.Flags |= rdma.WRInline }),
		"long inline": with(func(wr *rdma.WorkRequest) {
			wr.Op, wr.Flags, wr.Local = rdma.OpSend, rdma.WRInline, l.a.seg(0, l.a.conn.Info().Inline+1)
		}),
		"unknown lkey":       with(func(wr *rdma.WorkRequest) { wr.Local[0].LKey ^= 0xff00 }),
		"lkey of old region": with(func(wr *rdma.WorkRequest) { wr.Local[0] = old }),
		"foreign lkey":       with(func(wr *rdma.WorkRequest) { wr.Local[0] = rdma.Seg(foreign, 0, 8) }),
		"segment past end":   with(func(wr *rdma.WorkRequest) { wr.Local[0].Addr += regionSize - 7 }),
		"segment wraps":      with(func(wr *rdma.WorkRequest) { wr.Local[0].Addr = math.MaxUint64 - 3 }),
		"READ into read-only memory": with(func(wr *rdma.WorkRequest) {
			wr.Local[0] = rdma.Seg(readOnly, 0, 8)
		}),
	} {
		n, err := l.a.conn.Post([]rdma.WorkRequest{good, bad, good})
		if n != 1 || !errors.Is(err, rdma.ErrInvalid) {
			l.Errorf("%s: took %d: %v; want 1 and ErrInvalid", name, n, err)
			continue
		}
		l.a.expect(1)
	}
	// Reading from read-only memory is what it is for.
	l.a.post(with(func(wr *rdma.WorkRequest) { wr.Op, wr.Local[0] = rdma.OpWrite, rdma.Seg(readOnly, 0, 8) }))
	l.a.expect(1)
	rr := rdma.RecvRequest{ID: 1, Local: []rdma.Segment{rdma.Seg(readOnly, 0, 8)}}
	if n, err := l.a.conn.PostRecv([]rdma.RecvRequest{rr}); n != 0 || !errors.Is(err, rdma.ErrInvalid) {
		l.Errorf("receive into read-only memory: %d, %v", n, err)
	}
	if _, err := l.a.pd.Register(nil, allAccess); err == nil {
		l.Error("empty memory was registered")
	}
	if mr, err := l.a.pd.Register(l.memory(4096), rdma.AccessRemoteWrite); err == nil {
		l.Error("remote write was registered without local write")
		_ = mr.Deregister()
	}
}

// testCancelWait: a context ends Wait and loses nothing.
func testCancelWait(r *rig) {
	l := r.connect(linkOptions{receives: 1})
	var wc [1]rdma.Completion
	for i := range uint64(10) {
		ctx, cancel := context.WithCancel(r.ctx)
		if i%2 == 0 {
			cancel()
		} else {
			time.AfterFunc(time.Millisecond, cancel)
		}
		n, err := l.a.conn.Wait(ctx, wc[:])
		if n != 0 || !errors.Is(err, context.Canceled) {
			l.Fatalf("cancelled Wait: %d, %v", n, err)
		}
		cancel()
		l.a.post(l.a.readWR(i, l.b, 0, 0, 100))
		l.a.expect(i)
	}
	// The same context over many waits, then its end in the middle of one.
	ctx, cancel := context.WithCancel(r.ctx)
	for i := range uint64(50) {
		l.a.post(l.a.readWR(i, l.b, 0, 0, 100))
		if n, err := l.a.conn.Wait(ctx, wc[:]); n != 1 || wc[0].ID != i {
			l.Fatalf("Wait: %d, %v", n, err)
		}
	}
	timer := time.AfterFunc(time.Millisecond, cancel)
	defer timer.Stop()
	if n, err := l.a.conn.Wait(ctx, wc[:]); n != 0 || !errors.Is(err, context.Canceled) {
		l.Fatalf("cancelled Wait: %d, %v", n, err)
	}
	dead, stop := context.WithTimeout(r.ctx, time.Millisecond)
	defer stop()
	if n, err := l.a.conn.Wait(dead, wc[:]); n != 0 || !errors.Is(err, context.DeadlineExceeded) {
		l.Fatalf("Wait past its deadline: %d, %v", n, err)
	}
	l.read(0, 0, 5000)
}

// testCloseInFlight: after Close the network holds no buffer.
func testCloseInFlight(r *rig) {
	const size = 64 << 10
	for range 8 {
		l := r.connect(linkOptions{receives: 2})
		fill(l.b.mem, 1)
		var wrs []rdma.WorkRequest
		for i := range uint64(14) {
			wrs = append(wrs, l.a.readWR(i, l.b, i*size, i*size, size))
		}
		l.a.post(wrs...)
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() { l.closes("connection in flight", l.a.conn.Close) })
		}
		wg.Wait()
		fill(l.a.mem, 2)
		mine := bytes.Clone(l.a.mem)
		var wc [1]rdma.Completion
		if n, err := l.a.conn.Poll(wc[:]); n != 0 || !errors.Is(err, net.ErrClosed) {
			l.Fatalf("Poll after Close: %d, %v", n, err)
		}
		if n, err := l.a.conn.Wait(r.ctx, wc[:]); n != 0 || !errors.Is(err, net.ErrClosed) {
			l.Fatalf("Wait after Close: %d, %v", n, err)
		}
		if n, err := l.a.conn.Post(wrs[:1]); n != 0 || err == nil {
			l.Fatalf("Post after Close: %d, %v", n, err)
		}
		l.b.dies() // by now the peer has given up, too
		l.same(l.a.mem, mine)
	}
	// A Wait that is under way ends.
	l := r.connect(linkOptions{})
	ended := make(chan error, 1)
	go func() {
		var wc [1]rdma.Completion
		_, err := l.a.conn.Wait(context.Background(), wc[:])
		ended <- err
	}()
	l.closes("connection with a waiter", l.a.conn.Close)
	select {
	case err := <-ended:
		if !errors.Is(err, net.ErrClosed) && !errors.Is(err, rdma.ErrBroken) {
			l.Fatalf("Wait at Close: %v", err)
		}
	case <-time.After(r.pair.Patience):
		l.Fatal("Wait hangs after Close")
	}
}

func testPeerCloses(r *rig) {
	l := r.connect(linkOptions{receives: 2})
	l.read(0, 0, 100)
	l.closes("peer", l.b.conn.Close)
	// Requests that follow the peer's end fail, by Post or by completion.
	_, _ = l.a.conn.Post([]rdma.WorkRequest{l.a.readWR(1, l.b, 0, 0, 8)})
	for _, c := range l.a.rest() {
		if c.Status == rdma.StatusOK {
			l.Fatalf("completion %d is ok after the peer's end", c.ID)
		}
	}
	if err := l.a.dies(); !errors.Is(err, rdma.ErrDisconnected) {
		l.Fatalf("error %v does not match ErrDisconnected", err)
	}
}

func testDisconnect(r *rig) {
	l := r.connect(linkOptions{receives: 3})
	if err := l.a.conn.Err(); err != nil {
		l.Fatalf("Err of a living connection: %v", err)
	}
	l.a.conn.Disconnect()
	l.a.conn.Disconnect()
	flushed(l.a, l.a.rest(), 0, 1, 2)
	flushed(l.b, l.b.rest(), 0, 1, 2)
	for _, s := range []*side{l.a, l.b} {
		if err := s.dies(); !errors.Is(err, rdma.ErrDisconnected) {
			l.Fatalf("%s: error %v does not match ErrDisconnected", s.name, err)
		}
	}
}

// testDeregisterInUse: Deregister ends a peer's access at once, whatever is
// under way, and the memory is the owner's again.
func testDeregisterInUse(r *rig) {
	const size = 128 << 10
	for _, op := range []rdma.Opcode{rdma.OpRead, rdma.OpWrite} {
		l := r.connect(linkOptions{active: rdma.ConnOptions{SendDepth: 16}})
		mem := l.memory(size)
		mr, err := l.b.pd.Register(mem, allAccess)
		l.must(err, "register")
		at := rdma.RemoteAddr{Addr: mr.Addr(), RKey: mr.RKey()}
		fill(l.a.mem, 1)
		started := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			ctx, cancel := contextOf(r)
			defer cancel()
			var wc [4]rdma.Completion
			for i := 0; ; i++ {
				wr := rdma.WorkRequest{ID: uint64(i), Op: op, Flags: rdma.WRSignaled, Local: l.a.seg(0, size), Remote: at}
				if _, err := l.a.conn.Post([]rdma.WorkRequest{wr}); err != nil {
					return
				}
				if i < 8 {
					continue
				}
				if i == 8 {
					close(started)
				}
				if _, err := l.a.conn.Wait(ctx, wc[:]); err != nil {
					if !errors.Is(err, rdma.ErrBroken) {
						r.Errorf("wait: %v", err)
					}
					return
				}
			}
		})
		<-started
		l.closes("region in use", mr.Deregister)
		fill(mem, 2)
		mine := bytes.Clone(mem)
		wg.Wait()
		l.a.dies()
		l.b.dies()
		if !r.pair.Siw {
			l.same(mem, mine)
		}
	}
}
