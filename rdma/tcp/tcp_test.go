// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"bytes"
	"context"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"rblk/rdma"
)

type side struct {
	p   rdma.Provider
	pd  rdma.ProtectionDomain
	mr  rdma.MemoryRegion
	c   rdma.Conn
	mem []byte
}

func mapMem(tb testing.TB, n int) []byte {
	m, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { unix.Munmap(m) })
	return m
}

func newSide(tb testing.TB, n int, access rdma.Access) *side {
	p, err := New(Options{})
	if err != nil {
		tb.Fatal(err)
	}
	devs, _ := p.Devices()
	pd, err := devs[0].NewDomain()
	if err != nil {
		tb.Fatal(err)
	}
	s := &side{p: p, pd: pd, mem: mapMem(tb, n)}
	s.mr, err = pd.Register(s.mem, access)
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

func (s *side) close(tb testing.TB) {
	s.c.Close()
	s.mr.Deregister()
	if err := s.pd.Close(); err != nil {
		tb.Error(err)
	}
	if err := s.p.Close(); err != nil {
		tb.Error(err)
	}
}

func connectPair(tb testing.TB, n int, manual bool) (a, b *side) {
	all := rdma.AccessLocalWrite | rdma.AccessRemoteRead | rdma.AccessRemoteWrite
	a, b = newSide(tb, n, all), newSide(tb, n, all)
	link(tb, a, b, rdma.ConnOptions{ReadDepth: 64, ManualProgress: manual}, rdma.ConnOptions{ReadDepth: 64})
	return a, b
}

// link connects a to b.
func link(tb testing.TB, a, b *side, active, passive rdma.ConnOptions) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	l, err := b.p.Listen(ctx, "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	defer l.Close()
	done := make(chan error, 1)
	go func() {
		req, err := l.Accept(ctx)
		if err == nil {
			b.c, err = req.Accept(ctx, b.pd, passive, []byte("yes"))
		}
		done <- err
	}()
	r, err := a.p.Resolve(ctx, l.Addr().String())
	if err != nil {
		tb.Fatal(err)
	}
	if a.c, err = r.Connect(ctx, a.pd, active, []byte("hello")); err != nil {
		tb.Fatal(err)
	}
	if err := <-done; err != nil {
		tb.Fatal(err)
	}
}

func TestReadWriteSend(t *testing.T) {
	for _, manual := range []bool{false, true} {
		a, b := connectPair(t, 4<<20, manual)
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		for i := range a.mem {
			a.mem[i] = byte(i * 7 >> 3)
		}
		want := bytes.Clone(a.mem)
		wc := make([]rdma.Completion, 16)
		n, err := a.c.Post([]rdma.WorkRequest{
			{ID: 1, Op: rdma.OpWrite, Local: []rdma.Segment{rdma.Seg(a.mr, 0, 4<<20)}, Remote: rdma.RemoteAddr{Addr: b.mr.Addr(), RKey: b.mr.RKey()}},
			{ID: 2, Op: rdma.OpRead, Flags: rdma.WRSignaled, Local: []rdma.Segment{rdma.Seg(a.mr, 0, 1<<20), rdma.Seg(a.mr, 2<<20, 1<<20)}, Remote: rdma.RemoteAddr{Addr: b.mr.Addr() + 1, RKey: b.mr.RKey()}},
		})
		if n != 2 || err != nil {
			t.Fatal(n, err)
		}
		n, err = a.c.Wait(ctx, wc)
		if n != 1 || err != nil || wc[0].ID != 2 || wc[0].Status != rdma.StatusOK {
			t.Fatal(n, err, wc[0])
		}
		if !bytes.Equal(b.mem, want) || !bytes.Equal(a.mem[:1<<20], want[1:1<<20+1]) || !bytes.Equal(a.mem[2<<20:3<<20], want[1<<20+1:2<<20+1]) {
			t.Fatal("bytes")
		}
		if _, err := b.c.PostRecv([]rdma.RecvRequest{{ID: 9, Local: []rdma.Segment{rdma.Seg(b.mr, 100, 50)}}}); err != nil {
			t.Fatal(err)
		}
		a.c.Post([]rdma.WorkRequest{{ID: 3, Op: rdma.OpSend, Flags: rdma.WRSignaled, Local: []rdma.Segment{rdma.Seg(a.mr, 5, 20)}}})
		if n, err = b.c.Wait(ctx, wc); n != 1 || err != nil || wc[0].ID != 9 || wc[0].Length != 20 {
			t.Fatal(n, err, wc[0])
		}
		if n, err = a.c.Wait(ctx, wc); n != 1 || err != nil || wc[0].ID != 3 {
			t.Fatal(n, err, wc[0])
		}
		a.c.Post([]rdma.WorkRequest{{ID: 4, Op: rdma.OpRead, Local: []rdma.Segment{rdma.Seg(a.mr, 5, 20)}, Remote: rdma.RemoteAddr{Addr: b.mr.Addr(), RKey: b.mr.RKey() + 1}}})
		if n, err = a.c.Wait(ctx, wc); n != 1 || err != nil || wc[0].ID != 4 || wc[0].Status != rdma.StatusRemoteAccess {
			t.Fatal(n, err, wc[0])
		}
		if n, err = a.c.Wait(ctx, wc); n != 0 || err == nil {
			t.Fatal(n, err, wc[0])
		}
		<-b.c.Done()
		a.close(t)
		b.close(t)
		cancel()
	}
}

// TestReadsIntoOnePlace: READs in flight that share their destination, with
// messages of the peer between their answers. A wrong guess of what comes next
// must not damage the messages.
func TestReadsIntoOnePlace(t *testing.T) {
	a, b := connectPair(t, 1<<20, true)
	defer b.close(t)
	defer a.close(t)
	ctx, cancel := context.WithTimeout(context.Background(), 60*time.Second)
	defer cancel()
	const rounds, slots, size = 3000, 16, 64
	message := func(i int) []byte { return bytes.Repeat([]byte{byte(i), byte(i >> 8), 0xa5, byte(i * 7)}, size/4) }
	recv := func(i int) rdma.RecvRequest {
		slot := i % slots
		return rdma.RecvRequest{ID: uint64(1000 + slot), Local: []rdma.Segment{rdma.Seg(a.mr, uint64(slot*size), size)}}
	}
	for i := range slots {
		if n, err := a.c.PostRecv([]rdma.RecvRequest{recv(i)}); n != 1 || err != nil {
			t.Fatal(n, err)
		}
	}
	go func() { // the peer sends as its own sends complete
		wc := make([]rdma.Completion, 1)
		for i := range rounds {
			copy(b.mem[4096:], message(i))
			b.c.Post([]rdma.WorkRequest{{Op: rdma.OpSend, Flags: rdma.WRSignaled, Local: []rdma.Segment{rdma.Seg(b.mr, 4096, size)}}})
			if _, err := b.c.Wait(ctx, wc); err != nil {
				return
			}
		}
	}()
	read := rdma.WorkRequest{ID: 1, Op: rdma.OpRead, Flags: rdma.WRSignaled, Local: []rdma.Segment{rdma.Seg(a.mr, 8192, size)},
		Remote: rdma.RemoteAddr{Addr: b.mr.Addr() + 65536, RKey: b.mr.RKey()}}
	wc := make([]rdma.Completion, 32)
	for range 8 {
		a.c.Post([]rdma.WorkRequest{read})
	}
	for got := 0; got < rounds; {
		n, err := a.c.Wait(ctx, wc)
		if err != nil {
			t.Fatal(err)
		}
		for i := range wc[:n] {
			if wc[i].ID == 1 {
				a.c.Post([]rdma.WorkRequest{read})
				continue
			}
			slot := int(wc[i].ID-1000) * size
			if !bytes.Equal(a.mem[slot:slot+size], message(got)) {
				t.Fatalf("message %d is damaged: %x", got, a.mem[slot:slot+size])
			}
			got++
			if k, err := a.c.PostRecv([]rdma.RecvRequest{recv(int(wc[i].ID) - 1000)}); k != 1 || err != nil {
				t.Fatal(k, err)
			}
		}
	}
}
