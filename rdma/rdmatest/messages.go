// SPDX-License-Identifier: Apache-2.0

package rdmatest

import (
	"bytes"
	"errors"
	"runtime"
	"time"

	"rblk/rdma"
)

// testMessages: SENDs arrive in order, each in the next receive, receives are
// posted again as they come.
func testMessages(r *rig) {
	const depth, total = 8, 400
	l := r.connect(linkOptions{receives: depth, active: rdma.ConnOptions{SendDepth: depth}})
	sent := uint64(0)
	post := func() {
		slot := sent % depth * recvSize
		n := int(sent*7) % (recvSize + 1)
		fill(l.a.mem[slot:slot+recvSize], sent)
		l.a.post(l.a.sendWR(sent, slot, n))
		sent++
	}
	for sent < depth {
		post()
	}
	buf := make([]byte, recvSize)
	for i := range uint64(total) {
		c := l.b.expect(i % depth)
		n := int(i*7) % (recvSize + 1)
		if int(c.Length) != n || c.Op != rdma.OpRecv {
			l.Fatalf("message %d: %v of %d bytes, want %d", i, c.Op, c.Length, n)
		}
		at := regionSize - (c.ID+1)*recvSize
		fill(buf, i)
		l.same(l.b.mem[at:at+uint64(n)], buf[:n])
		if n, err := l.b.conn.PostRecv([]rdma.RecvRequest{recvAt(l.b.mr, int(c.ID))}); n != 1 || err != nil {
			l.Fatalf("PostRecv: %d, %v", n, err)
		}
		l.a.expect(i)
		if sent < total {
			post()
		}
	}
}

// testReceivePostedLate: a message that finds no receive waits for one, and
// what was posted behind it waits with it.
func testReceivePostedLate(r *rig) {
	if r.pair.IWARP {
		return
	}
	l := r.connect(linkOptions{})
	for i := range uint64(5) {
		fill(l.a.mem[:recvSize], i)
		l.a.post(l.a.sendWR(1, 0, recvSize), l.a.writeWR(2, l.b, 0, 0, 100))
		// The receive follows after the message: a round trip the other way
		// shows that the connection lives meanwhile (auto progress only: a's
		// Wait would take the completions of its own requests).
		if n, err := l.b.conn.PostRecv([]rdma.RecvRequest{recvAt(l.b.mr, int(i))}); n != 1 || err != nil {
			l.Fatalf("PostRecv: %d, %v", n, err)
		}
		l.a.expect(1)
		l.a.expect(2)
		c := l.b.expect(i)
		at := regionSize - (i+1)*recvSize
		if c.Length != recvSize || !bytes.Equal(l.b.mem[at:at+recvSize], l.a.mem[:recvSize]) {
			l.Fatalf("message %d: %d bytes, or wrong ones", i, c.Length)
		}
	}
}

// testPolling: nothing but Poll on either side, and what came before a message
// that waits for a receive is answered all the same.
func testPolling(r *rig) {
	if r.pair.IWARP {
		return
	}
	l := r.connect(linkOptions{unserved: true})
	deadline := time.Now().Add(r.pair.Patience)
	poll := func(s *side, id uint64) {
		r.Helper()
		var wc [4]rdma.Completion
		for time.Now().Before(deadline) {
			for _, other := range []*side{l.a, l.b} {
				n, err := other.conn.Poll(wc[:1])
				r.must(err, other.name, ": poll")
				if n == 0 {
					continue
				}
				if other != s || wc[0].ID != id || wc[0].Status != rdma.StatusOK {
					r.Fatalf("%s: completion %+v, want %d of the %s side", other.name, wc[0], id, s.name)
				}
				return
			}
			runtime.Gosched()
		}
		r.Fatalf("%s: no completion %d in time", s.name, id)
	}
	for i := range uint64(20) {
		l.a.post(l.a.readWR(1, l.b, 0, 0, 50_000), l.a.sendWR(2, 0, 8))
		poll(l.a, 1)
		if n, err := l.b.conn.PostRecv([]rdma.RecvRequest{recvAt(l.b.mr, 0)}); n != 1 || err != nil {
			l.Fatalf("PostRecv: %d, %v", n, err)
		}
		// The message's two ends may be reported in either order.
		l.b.post(l.b.writeWR(3, l.a, 100_000+i, 0, 100))
		l.awaitBoth(map[string]map[uint64]bool{"active": {2: true}, "passive": {0: true, 3: true}}, deadline)
	}
}

// awaitBoth polls both sides until each has reported its ids.
func (l *link) awaitBoth(want map[string]map[uint64]bool, deadline time.Time) {
	l.Helper()
	var wc [4]rdma.Completion
	for len(want["active"])+len(want["passive"]) > 0 {
		if time.Now().After(deadline) {
			l.Fatalf("no completions of %v in time", want)
		}
		for _, s := range []*side{l.a, l.b} {
			n, err := s.conn.Poll(wc[:])
			l.must(err, s.name, ": poll")
			for _, c := range wc[:n] {
				if !want[s.name][c.ID] || c.Status != rdma.StatusOK {
					l.Fatalf("%s: completion %+v", s.name, c)
				}
				delete(want[s.name], c.ID)
			}
		}
		runtime.Gosched()
	}
}

func testReceiverNeverReady(r *rig) {
	l := r.connect(linkOptions{active: rdma.ConnOptions{RNRTimeout: 50 * time.Millisecond}})
	l.a.post(l.a.sendWR(1, 0, 8), l.a.sendWR(2, 0, 8))
	if r.pair.IWARP {
		endsWithout(l.a, 0)
		l.b.dies()
		return
	}
	r.refused(l.a.next(), 1, rdma.StatusRNRRetryExceeded)
	flushed(l.a, l.a.rest(), 2)
	l.a.dies()
	l.b.dies()
}

func testReceiveTooSmall(r *rig) {
	l := r.connect(linkOptions{receives: 2})
	fill(l.b.mem, 3)
	beside := bytes.Clone(l.b.mem[:regionSize-recvSize])
	l.a.post(l.a.sendWR(1, 0, recvSize+1), l.a.sendWR(2, 0, 1))
	r.refused(l.b.next(), 0, rdma.StatusLocalLength)
	if r.pair.IWARP {
		endsWithout(l.a, 2)
	} else {
		r.refused(l.a.next(), 1, rdma.StatusRemoteInvalidRequest)
		flushed(l.a, l.a.rest(), 2, 0, 1)
	}
	flushed(l.b, l.b.rest(), 1)
	l.same(l.b.mem[:len(beside)], beside)
	l.a.dies()
	l.b.dies()
}

// endsWithout takes the completions of two SENDs, 1 and 2, that iWARP may call
// a success, and of receives, which were flushed.
func endsWithout(s *side, receives int) {
	s.Helper()
	if all := s.rest(); len(all) != 2+receives {
		s.Fatalf("%s: %d completions %+v, want %d", s.name, len(all), all, 2+receives)
	}
	s.dies()
}

// testSharedReceive: one receive queue feeds two connections; each completion
// appears where its message came in.
func testSharedReceive(r *rig) {
	dev := device(r, r.pair.Passive)
	pd := r.domain(dev)
	if dev.Info().Caps&rdma.CapSharedReceive == 0 {
		if _, err := pd.NewSharedReceiveQueue(16); !errors.Is(err, rdma.ErrUnsupported) {
			r.Fatalf("shared receive queue on a device without: %v", err)
		}
		return
	}
	const depth = 16
	srq, err := pd.NewSharedReceiveQueue(depth)
	r.must(err, "shared receive queue")
	r.later(func() {
		r.closes("shared receive queue", srq.Close)
		r.closes("shared receive queue, again", srq.Close)
	})
	var sides [2]*side
	var links [2]*link
	listener := r.listen()
	store := r.newSide("passive", pd)
	for i := range sides {
		links[i] = r.connectTo(listener, store, rdma.ConnOptions{SharedReceive: srq})
		sides[i] = links[i].b
	}
	if err := srq.Close(); !errors.Is(err, rdma.ErrBusy) {
		r.Fatalf("closing a shared queue in use: %v", err)
	}
	if err := pd.Close(); !errors.Is(err, rdma.ErrBusy) {
		r.Fatalf("closing a domain in use: %v", err)
	}
	free := []int{}
	for i := range depth {
		free = append(free, i)
	}
	for round := range uint64(60) {
		for i, l := range links {
			// Late receives must wake the connection that waits for one.
			if !r.pair.IWARP {
				l.a.post(l.a.sendWR(round, 0, 1+i))
			}
			if n, err := srq.PostRecv([]rdma.RecvRequest{recvAt(store.mr, free[0])}); n != 1 || err != nil {
				r.Fatalf("PostRecv: %d, %v", n, err)
			}
			if r.pair.IWARP {
				l.a.post(l.a.sendWR(round, 0, 1+i))
			}
			c := sides[i].expect(uint64(free[0]))
			if int(c.Length) != 1+i {
				r.Fatalf("connection %d: %d bytes", i, c.Length)
			}
			free = append(free[1:], int(c.ID))
			l.a.expect(round)
		}
	}
	// A full queue is back-pressure (an adapter may round its depth up).
	var rrs []rdma.RecvRequest
	for i := range depth + 5 {
		rrs = append(rrs, recvAt(store.mr, i))
	}
	if n, err := srq.PostRecv(rrs); n < depth || err != nil {
		r.Fatalf("posted %d to a queue of %d: %v", n, depth, err)
	}
	// One connection's end leaves the queue to the other.
	r.closes("first", links[0].a.conn.Close)
	sides[0].dies()
	if all := sides[0].rest(); len(all) != 0 {
		r.Fatalf("%d completions for unused shared receives", len(all))
	}
	links[1].a.post(links[1].a.sendWR(1, 0, 1))
	sides[1].next()
	links[1].a.expect(1)
}
