// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"bytes"
	"context"
	"io"
	"net"
	"testing"

	"golang.org/x/sys/unix"

	"rblk/rdma"
)

// TestDeregisterBreaksSlowPeer: a peer that asks for bytes and does not take
// them holds Deregister for the grace only. Then the memory can be unmapped.
func TestDeregisterBreaksSlowPeer(t *testing.T) {
	tg := newTarget(t, Options{})
	good := tg.dial()
	mem, err := unix.Mmap(-1, 0, 64<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	mr, err := tg.side.pd.Register(mem, rdma.AccessLocalWrite|rdma.AccessRemoteRead|rdma.AccessRemoteWrite)
	if err != nil {
		t.Fatal(err)
	}
	defer (<-tg.conns).Close() // good's
	reader := tg.shake()
	defer reader.Close()
	reading := <-tg.conns
	defer reading.Close()
	reader.Write(frameBytes(header{typ: frameReadReq, length: 64 << 20, addr: mr.Addr(), rkey: mr.RKey()}))
	// One byte has come: the rest is under way, more than any socket buffers.
	if _, err := io.ReadFull(reader, make([]byte, headerSize+1)); err != nil {
		t.Fatal(err)
	}
	writer := tg.shake()
	defer writer.Close()
	writing := <-tg.conns
	defer writing.Close()
	writer.Write(frameBytes(header{typ: frameWrite, length: 64 << 20, addr: mr.Addr(), rkey: mr.RKey()}, 'x'))
	awaitByte(tg, good, mr)
	if err := mr.Deregister(); err != nil {
		t.Fatal(err)
	}
	if err := unix.Munmap(mem); err != nil {
		t.Fatal(err)
	}
	<-reading.Done()
	<-writing.Done()
	tg.works(good)
}

// awaitByte returns when the first byte of mr is written.
func awaitByte(tg *target, c rdma.Conn, mr rdma.MemoryRegion) {
	tg.Helper()
	got := tg.side.mem[1<<19:][:1]
	for got[0] = 0; got[0] != 'x'; {
		wr := rdma.WorkRequest{
			Op: rdma.OpRead, Flags: rdma.WRSignaled, Local: []rdma.Segment{rdma.Seg(tg.side.mr, 1<<19, 1)},
			Remote: rdma.RemoteAddr{Addr: mr.Addr(), RKey: mr.RKey()},
		}
		ctx, cancel := context.WithTimeout(tg.ctx, patience)
		var wc [1]rdma.Completion
		if n, err := c.Post([]rdma.WorkRequest{wr}); n != 1 {
			tg.Fatal(err)
		}
		if n, err := c.Wait(ctx, wc[:]); n != 1 || wc[0].Status != rdma.StatusOK {
			tg.Fatal(wc[0], err)
		}
		cancel()
	}
}

// TestReceiveOfEndedRegion: a message for a receive whose region has ended
// touches nothing and breaks the connection; of a shared queue, too.
func TestReceiveOfEndedRegion(t *testing.T) {
	for _, shared := range []bool{false, true} {
		x, y := newSide(t, 4096, rdma.AccessLocalWrite), newSide(t, 4096, rdma.AccessLocalWrite)
		var opts rdma.ConnOptions
		var queue rdma.ReceiveQueue
		if shared {
			srq, err := y.pd.NewSharedReceiveQueue(4)
			if err != nil {
				t.Fatal(err)
			}
			defer y.p.Close()
			defer y.pd.Close()
			defer srq.Close()
			opts.SharedReceive, queue = srq, srq
		}
		link(t, x, y, rdma.ConnOptions{}, opts)
		if queue == nil {
			queue = y.c
		}
		mem := mapMem(t, 4096)
		mr, err := y.pd.Register(mem, rdma.AccessLocalWrite)
		if err != nil {
			t.Fatal(err)
		}
		if n, err := queue.PostRecv([]rdma.RecvRequest{{ID: 3, Local: []rdma.Segment{rdma.Seg(mr, 0, 64)}}}); n != 1 {
			t.Fatal(err)
		}
		if err := mr.Deregister(); err != nil {
			t.Fatal(err)
		}
		fillWith(x.mem, 'x')
		if n, err := x.c.Post([]rdma.WorkRequest{{ID: 1, Op: rdma.OpSend, Flags: rdma.WRSignaled, Local: []rdma.Segment{rdma.Seg(x.mr, 0, 64)}}}); n != 1 {
			t.Fatal(err)
		}
		completed(t, y.c, 3, rdma.StatusLocalProtection)
		completed(t, x.c, 1, rdma.StatusRemoteOperation)
		if bytes.ContainsRune(mem, 'x') {
			t.Fatal("the memory of an ended region was written")
		}
		x.close(t)
		y.c.Close()
		y.mr.Deregister()
	}
}

// TestEarlyAck: an answer to a WRITE whose bytes are still being sent does not
// give its buffer back before the writer is done with it.
func TestEarlyAck(t *testing.T) {
	const size = 32 << 20 // more than sockets buffer
	accept := (&greeting{version: helloVersion, result: resultAccepted, reads: 4}).encode(replySize)
	for _, depth := range []int{2, 3} {
		s := newSide(t, size, rdma.AccessLocalWrite)
		acked, goOn := make(chan struct{}), make(chan struct{})
		addr, done := liar(t, accept, func(c net.Conn) {
			io.ReadFull(c, make([]byte, headerSize))
			c.Write(frameBytes(header{typ: frameAck, seq: 0}))
			close(acked)
			<-goOn
			io.Copy(io.Discard, c)
		})
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		r, err := s.p.Resolve(ctx, addr)
		if err != nil {
			t.Fatal(err)
		}
		if s.c, err = r.Connect(ctx, s.pd, rdma.ConnOptions{SendDepth: depth}, nil); err != nil {
			t.Fatal(err)
		}
		wr := rdma.WorkRequest{ID: 1, Op: rdma.OpWrite, Flags: rdma.WRSignaled, Local: []rdma.Segment{rdma.Seg(s.mr, 0, size)}}
		if n, err := s.c.Post([]rdma.WorkRequest{wr}); n != 1 {
			t.Fatal(err)
		}
		<-acked
		var wc [4]rdma.Completion
		for range 1000 {
			if n, err := s.c.Poll(wc[:]); n != 0 || err != nil {
				t.Fatalf("%+v, %v: completed with its bytes unsent", wc[0], err)
			}
		}
		close(goOn)
		completed(t, s.c, 1, rdma.StatusOK)
		s.close(t)
		cancel()
		<-done
	}
}

// completed waits for a completion.
func completed(t testing.TB, c rdma.Conn, id uint64, s rdma.Status) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var wc [1]rdma.Completion
	if n, err := c.Wait(ctx, wc[:]); n != 1 || wc[0].ID != id || wc[0].Status != s {
		t.Fatalf("completion %d %v (%d, %v), want %d %v", wc[0].ID, wc[0].Status, n, err, id, s)
	}
}

func fillWith(b []byte, x byte) {
	for i := range b {
		b[i] = x
	}
}

// TestDeregisterHeldByOwnRequest: a region that this side's own request still
// names, against the rules, is let go by breaking the connection.
func TestDeregisterHeldByOwnRequest(t *testing.T) {
	accept := (&greeting{version: helloVersion, result: resultAccepted, reads: 4}).encode(replySize)
	s := newSide(t, 4096, rdma.AccessLocalWrite)
	goOn := make(chan struct{})
	addr, done := liar(t, accept, func(net.Conn) { <-goOn })
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	r, err := s.p.Resolve(ctx, addr)
	if err != nil {
		t.Fatal(err)
	}
	if s.c, err = r.Connect(ctx, s.pd, rdma.ConnOptions{}, nil); err != nil {
		t.Fatal(err)
	}
	mr, err := s.pd.Register(mapMem(t, 4096), rdma.AccessLocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := s.c.Post([]rdma.WorkRequest{{ID: 5, Op: rdma.OpRead, Local: []rdma.Segment{rdma.Seg(mr, 0, 8)}}}); n != 1 {
		t.Fatal(err)
	}
	if err := mr.Deregister(); err != nil {
		t.Fatal(err)
	}
	completed(t, s.c, 5, rdma.StatusFlushed)
	<-s.c.Done()
	close(goOn)
	<-done
	s.close(t)
}

// TestHalfAMessage: the receive that a cut message was going to is flushed, once.
func TestHalfAMessage(t *testing.T) {
	tg := newTarget(t, Options{})
	raw := tg.shake()
	c := <-tg.conns
	defer c.Close()
	for i := range uint64(2) {
		rr := rdma.RecvRequest{ID: i, Local: []rdma.Segment{rdma.Seg(tg.side.mr, i*64, 64)}}
		if n, err := c.PostRecv([]rdma.RecvRequest{rr}); n != 1 {
			t.Fatal(err)
		}
	}
	raw.Write(frameBytes(header{typ: frameSend, length: 64}, 1, 2, 3))
	raw.Close()
	completed(t, c, 0, rdma.StatusFlushed)
	completed(t, c, 1, rdma.StatusFlushed)
	var wc [1]rdma.Completion
	if n, err := c.Wait(tg.ctx, wc[:]); n != 0 || err == nil {
		t.Fatal(wc[0], err)
	}
}
