// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"rblk/rdma"
)

const patience = 30 * time.Second

// target listens and accepts everybody, with a region that peers may read.
type target struct {
	testing.TB
	ctx   context.Context
	side  *side
	l     rdma.Listener
	conns chan rdma.Conn
}

func newTarget(t testing.TB, opts Options) *target {
	t.Helper()
	t.Cleanup(func() { goleak.VerifyNone(t) })
	p, err := New(opts)
	if err != nil {
		t.Fatal(err)
	}
	devs, _ := p.Devices()
	pd, err := devs[0].NewDomain()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 4*patience)
	tg := &target{TB: t, ctx: ctx, side: &side{p: p, pd: pd, mem: mapMem(t, 1<<20)}, conns: make(chan rdma.Conn, 1000)}
	tg.side.mr, err = pd.Register(tg.side.mem, rdma.AccessLocalWrite|rdma.AccessRemoteRead|rdma.AccessRemoteWrite)
	if err != nil {
		t.Fatal(err)
	}
	if tg.l, err = p.Listen(ctx, "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			q, err := tg.l.Accept(ctx)
			if err != nil {
				return
			}
			if c, err := q.Accept(ctx, pd, rdma.ConnOptions{ReadDepth: 4}, nil); err == nil {
				tg.conns <- c
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		tg.l.Close()
		<-done
		close(tg.conns)
		for c := range tg.conns {
			c.Close()
		}
		tg.side.mr.Deregister()
		for _, f := range []func() error{pd.Close, p.Close} {
			if err := f(); err != nil {
				t.Error(err)
			}
		}
	})
	return tg
}

// dial connects properly, with the same provider.
func (tg *target) dial() rdma.Conn {
	tg.Helper()
	r, err := tg.side.p.Resolve(tg.ctx, tg.l.Addr().String())
	if err != nil {
		tg.Fatal(err)
	}
	c, err := r.Connect(tg.ctx, tg.side.pd, rdma.ConnOptions{}, nil)
	if err != nil {
		tg.Fatal(err)
	}
	tg.Cleanup(func() { c.Close() })
	return c
}

// raw opens a bare socket to the target.
func (tg *target) raw() net.Conn {
	tg.Helper()
	c, err := net.Dial("tcp", tg.l.Addr().String())
	if err != nil {
		tg.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(patience))
	return c
}

// works checks that c still carries READs.
func (tg *target) works(c rdma.Conn) {
	tg.Helper()
	wr := rdma.WorkRequest{
		ID: 1, Op: rdma.OpRead, Flags: rdma.WRSignaled, Local: []rdma.Segment{rdma.Seg(tg.side.mr, 1<<19, 4096)},
		Remote: rdma.RemoteAddr{Addr: tg.side.mr.Addr(), RKey: tg.side.mr.RKey()},
	}
	if n, err := c.Post([]rdma.WorkRequest{wr}); n != 1 {
		tg.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(tg.ctx, patience)
	defer cancel()
	var wc [1]rdma.Completion
	if n, err := c.Wait(ctx, wc[:]); n != 1 || wc[0].Status != rdma.StatusOK {
		tg.Fatalf("%+v, %v", wc[0], err)
	}
}

// dropped checks that the target ends the connection, and drains what it sent.
func dropped(t testing.TB, c net.Conn) {
	t.Helper()
	if _, err := io.Copy(io.Discard, c); errors.Is(err, context.DeadlineExceeded) || isTimeout(err) {
		t.Fatal("the connection was not dropped")
	}
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

// TestGarbageAtListener: peers that send one byte, garbage, half a hello or
// nothing are dropped, while another connection works and new ones come in.
func TestGarbageAtListener(t *testing.T) {
	tg := newTarget(t, Options{HandshakeTime: time.Second, HalfOpen: 16})
	good := tg.dial()
	hello := (&greeting{version: helloVersion, reads: 4}).encode(helloSize)
	rnd := rand.New(rand.NewPCG(1, 2))
	random := make([]byte, 4096)
	for i := range random {
		random[i] = byte(rnd.Uint32())
	}
	var crowd []net.Conn
	for name, bytes := range map[string][]byte{
		"nothing": nil, "one byte": hello[:1], "one byte of garbage": {0}, "random": random,
		"cut hello": hello[:helloSize-1], "http": []byte("GET / HTTP/1.1\r\nHost: x\r\n\r\n" + strings.Repeat("x", 100)),
		"long data": func() []byte { h := append([]byte(nil), hello...); h[16] = 57; return h }(),
	} {
		c := tg.raw()
		if _, err := c.Write(bytes); err != nil {
			t.Fatal(name, err)
		}
		crowd = append(crowd, c)
	}
	tg.works(good)
	for _, c := range crowd {
		dropped(t, c)
		c.Close()
	}
	// A crowd that stalls does not keep a proper peer out.
	crowd = nil
	for range 40 {
		c := tg.raw()
		crowd = append(crowd, c)
		c.Write(hello[:10])
	}
	tg.works(tg.dial())
	tg.works(good)
	for _, c := range crowd {
		dropped(t, c)
		c.Close()
	}
}

// TestSlowHello: a hello that comes byte by byte is a hello.
func TestSlowHello(t *testing.T) {
	tg := newTarget(t, Options{})
	c := tg.raw()
	defer c.Close()
	c.(*net.TCPConn).SetNoDelay(true)
	for _, b := range (&greeting{version: helloVersion, reads: 4}).encode(helloSize) {
		if _, err := c.Write([]byte{b}); err != nil {
			t.Fatal(err)
		}
	}
	reply := make([]byte, replySize)
	if _, err := io.ReadFull(c, reply); err != nil {
		t.Fatal(err)
	}
	if g, err := decodeGreeting(reply); err != nil || g.result != resultAccepted {
		t.Fatalf("%+v, %v", g, err)
	}
}

// shake does the handshake on a bare socket.
func (tg *target) shake() net.Conn {
	tg.Helper()
	c := tg.raw()
	if _, err := c.Write((&greeting{version: helloVersion, reads: 4}).encode(helloSize)); err != nil {
		tg.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, replySize)); err != nil {
		tg.Fatal(err)
	}
	return c
}

func frameBytes(h header, payload ...byte) []byte {
	var b [headerSize]byte
	h.put(&b)
	return append(b[:], payload...)
}

// TestHostileFrames: a peer that has shaken hands and then lies loses its
// connection, and nothing else happens.
func TestHostileFrames(t *testing.T) {
	tg := newTarget(t, Options{})
	good := tg.dial()
	at, key := tg.side.mr.Addr(), tg.side.mr.RKey()
	many := func(n int, h header) (b []byte) {
		for i := range n {
			h.seq = uint64(i)
			b = append(b, frameBytes(h)...)
		}
		return b
	}
	for name, b := range map[string][]byte{
		"zeros":                  make([]byte, 64),
		"unknown type":           frameBytes(header{typ: 99}),
		"unknown flags":          frameBytes(header{typ: frameSend, flags: 0x80}),
		"4 GiB write":            frameBytes(header{typ: frameWrite, length: 1<<32 - 1, addr: at, rkey: key}),
		"1 GiB write":            frameBytes(header{typ: frameWrite, length: maxMessage, addr: at, rkey: key}),
		"write past the end":     frameBytes(header{typ: frameWrite, length: 2, addr: at + 1<<20 - 1, rkey: key}, 1, 2),
		"write around the end":   frameBytes(header{typ: frameWrite, length: 2, addr: 1<<64 - 1, rkey: key}, 1, 2),
		"huge send":              frameBytes(header{typ: frameSend, length: maxMessage}),
		"read of a wrong key":    frameBytes(header{typ: frameReadReq, length: 1, addr: at, rkey: key + 1}),
		"request out of order":   frameBytes(header{typ: frameReadReq, length: 1, addr: at, rkey: key, seq: 7}),
		"answer to nothing":      frameBytes(header{typ: frameReadResp, length: 4}, 1, 2, 3, 4),
		"ack of nothing":         frameBytes(header{typ: frameAck}),
		"ack of the far future":  frameBytes(header{typ: frameAck, seq: 1<<64 - 1}),
		"nak of nothing":         frameBytes(header{typ: frameNak, status: rdma.StatusRemoteAccess}),
		"more reads than agreed": many(64, header{typ: frameReadReq, length: 1 << 20, addr: at, rkey: key}),
		"ack with a key":         frameBytes(header{typ: frameAck, rkey: 1}),
		"send with an address":   frameBytes(header{typ: frameSend, addr: 1}),
		"half a header":          frameBytes(header{typ: frameSend})[:17],
		"half a payload":         frameBytes(header{typ: frameWrite, length: 1000, addr: at, rkey: key}, 1, 2, 3),
	} {
		before := append([]byte(nil), tg.side.mem[1<<20-16:]...)
		c := tg.shake()
		if _, err := c.Write(b); err != nil {
			t.Fatal(name, err)
		}
		c.(*net.TCPConn).CloseWrite()
		dropped(t, c)
		c.Close()
		tg.works(good)
		if string(before) != string(tg.side.mem[1<<20-16:]) {
			t.Fatal(name, "memory was touched")
		}
	}
}

// TestRandomFrames throws random and cut streams behind a good handshake.
func TestRandomFrames(t *testing.T) {
	tg := newTarget(t, Options{})
	good := tg.dial()
	rnd := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		c := tg.shake()
		b := make([]byte, rnd.IntN(300))
		for i := range b {
			b[i] = byte(rnd.Uint32())
		}
		if len(b) > 0 {
			b[0] = byte(1 + rnd.IntN(6)) // past the first check
		}
		c.Write(b)
		c.(*net.TCPConn).CloseWrite()
		dropped(t, c)
		c.Close()
	}
	tg.works(good)
}

// liar accepts one connection as a listener that speaks the protocol by hand.
func liar(t *testing.T, reply []byte, then func(net.Conn)) (addr string, done chan struct{}) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done = make(chan struct{})
	go func() {
		defer close(done)
		defer l.Close()
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(patience))
		io.ReadFull(c, make([]byte, helloSize))
		c.Write(reply)
		if then != nil {
			then(c)
		}
	}()
	return l.Addr().String(), done
}

// TestOtherProtocol: the dialing side says clearly what it met.
func TestOtherProtocol(t *testing.T) {
	s := newSide(t, 4096, rdma.AccessLocalWrite)
	s.c = nopConn{}
	defer s.close(t)
	other := (&greeting{version: helloVersion + 1, result: resultVersion}).encode(replySize)
	for _, tt := range []struct {
		name  string
		reply []byte
		want  error
		words string
	}{
		{"another version", other, rdma.ErrProtocol, "version 2"},
		{"http", []byte("HTTP/1.1 400 Bad Request\r\n\r\n"), rdma.ErrProtocol, "check host and port"},
		{"one byte", []byte{'x'}, rdma.ErrProtocol, "check host and port"},
		{"random", []byte(strings.Repeat("\x17\x03", 200)), rdma.ErrProtocol, "check host and port"},
		{"nothing", nil, rdma.ErrBroken, "closed during the handshake"},
		{"cut", other[:40], rdma.ErrBroken, "closed during the handshake"},
		{"nonsense", (&greeting{version: helloVersion, result: 77}).encode(replySize), rdma.ErrProtocol, "greeting"},
	} {
		addr, done := liar(t, tt.reply, nil)
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		r, err := s.p.Resolve(ctx, addr)
		if err != nil {
			t.Fatal(err)
		}
		_, err = r.Connect(ctx, s.pd, rdma.ConnOptions{}, nil)
		if !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.words) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", tt.name, err)
		}
		cancel()
		<-done
	}
}

type nopConn struct{ rdma.Conn }

func (nopConn) Close() error { return nil }

// TestLyingListener: answers that cannot be true break the connection, flush
// every request once, and corrupt nothing.
func TestLyingListener(t *testing.T) {
	accept := (&greeting{version: helloVersion, result: resultAccepted, reads: 4}).encode(replySize)
	for name, answer := range map[string][]byte{
		"wrong length":        frameBytes(header{typ: frameReadResp, length: 4}, 1, 2, 3, 4),
		"second before first": frameBytes(header{typ: frameReadResp, length: 4096, seq: 1}),
		"ack of a read":       frameBytes(header{typ: frameAck, seq: 1}),
		"ack of the unsent":   frameBytes(header{typ: frameAck, seq: 9}),
		"nak of the unsent":   frameBytes(header{typ: frameNak, seq: 9, status: rdma.StatusGeneral}),
		"nak of the second":   frameBytes(header{typ: frameNak, seq: 1, status: rdma.StatusGeneral}),
		"nak with status ok":  frameBytes(header{typ: frameNak}),
		"half an answer":      frameBytes(header{typ: frameReadResp, length: 4096}, 1, 2, 3, 4),
		"garbage":             []byte(strings.Repeat("garbage!", 100)),
		"nothing":             nil,
	} {
		s := newSide(t, 1<<16, rdma.AccessLocalWrite)
		addr, done := liar(t, accept, func(c net.Conn) {
			io.ReadFull(c, make([]byte, 2*headerSize))
			c.Write(answer)
			c.(*net.TCPConn).CloseWrite()
			io.Copy(io.Discard, c)
		})
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		r, err := s.p.Resolve(ctx, addr)
		if err != nil {
			t.Fatal(err)
		}
		if s.c, err = r.Connect(ctx, s.pd, rdma.ConnOptions{SendDepth: 4}, nil); err != nil {
			t.Fatal(err)
		}
		var wrs []rdma.WorkRequest
		for i := range uint64(2) {
			wrs = append(wrs, rdma.WorkRequest{ID: i, Op: rdma.OpRead, Flags: rdma.WRSignaled, Local: []rdma.Segment{rdma.Seg(s.mr, i*4096, 4096)}})
		}
		if n, err := s.c.Post(wrs); n != 2 {
			t.Fatal(err)
		}
		got := 0
		wc := make([]rdma.Completion, 8)
		for {
			n, err := s.c.Wait(ctx, wc)
			for _, c := range wc[:n] {
				if c.ID != uint64(got) || c.Status == rdma.StatusOK {
					t.Fatalf("%s: completion %+v", name, c)
				}
				got++
			}
			if err != nil {
				if !errors.Is(err, rdma.ErrBroken) {
					t.Fatalf("%s: %v", name, err)
				}
				break
			}
		}
		if got != 2 {
			t.Fatalf("%s: %d completions", name, got)
		}
		s.close(t)
		cancel()
		<-done
	}
}

// TestLastWords: a refusal that came in before the peer closed is reported, even
// if this side has met the closed socket in the meantime.
func TestLastWords(t *testing.T) {
	accept := (&greeting{version: helloVersion, result: resultAccepted, reads: 4}).encode(replySize)
	for _, manual := range []bool{true, false} {
		s := newSide(t, 1<<16, rdma.AccessLocalWrite)
		addr, done := liar(t, accept, func(c net.Conn) {
			io.ReadFull(c, make([]byte, headerSize))
			c.Write(frameBytes(header{typ: frameNak, status: rdma.StatusRemoteAccess}))
		})
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		r, err := s.p.Resolve(ctx, addr)
		if err != nil {
			t.Fatal(err)
		}
		if s.c, err = r.Connect(ctx, s.pd, rdma.ConnOptions{ManualProgress: manual}, nil); err != nil {
			t.Fatal(err)
		}
		post := func(id uint64) bool {
			n, _ := s.c.Post([]rdma.WorkRequest{{ID: id, Op: rdma.OpRead, Flags: rdma.WRSignaled, Local: []rdma.Segment{rdma.Seg(s.mr, 0, 8)}}})
			return n == 1
		}
		if !post(0) {
			t.Fatal("not posted")
		}
		<-done
		posted := uint64(1)
		for posted < 5 && post(posted) {
			posted++
		}
		completed(t, s.c, 0, rdma.StatusRemoteAccess)
		for i := uint64(1); i < posted; i++ {
			completed(t, s.c, i, rdma.StatusFlushed)
		}
		var wc [1]rdma.Completion
		if _, err := s.c.Wait(ctx, wc[:]); !errors.Is(err, rdma.StatusRemoteAccess.Err()) {
			t.Fatal(err)
		}
		s.close(t)
		cancel()
	}
}
