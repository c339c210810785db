// SPDX-License-Identifier: Apache-2.0

package nbd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"testing"
	"time"

	"go.uber.org/goleak"

	"rblk/cache"
	"rblk/cache/cachetest"
	"rblk/volume"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	testSize = 4 << 20
	patience = 30 * time.Second
)

// client is a raw client over a pipe of a socket.
type client struct {
	t    *testing.T
	conn net.Conn
	done chan error
	src  *cachetest.Source
}

// dial serves one connection and says hello.
func dial(t *testing.T, readOnly bool, opts Options) *client {
	t.Helper()
	src := cachetest.NewSource(testSize, cachetest.Options{Geometry: func(g *volume.Geometry) { g.ReadOnly = readOnly }})
	src.Fill(1)
	vol, err := cache.New(src, cache.Options{Size: 128 << 20})
	if err != nil {
		t.Fatal(err)
	}
	srv, err := NewServer([]*Export{{Name: "vol", Volume: vol}}, opts)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &client{t: t, done: make(chan error, 1), src: src}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		conn, err := l.Accept()
		if err == nil {
			err = srv.ServeConn(ctx, conn)
		}
		c.done <- err
	}()
	if c.conn, err = net.Dial("tcp", l.Addr().String()); err != nil {
		t.Fatal(err)
	}
	c.conn.SetDeadline(time.Now().Add(patience))
	t.Cleanup(func() {
		cancel()
		c.conn.Close()
		l.Close()
		vol.Close()
	})
	hello := c.read(18)
	if be.Uint64(hello) != magicInit || be.Uint64(hello[8:]) != magicOption || be.Uint16(hello[16:]) != flagFixedNewstyle|flagNoZeroes {
		t.Fatalf("hello %x", hello)
	}
	c.write(be.AppendUint32(nil, flagFixedNewstyle|flagNoZeroes))
	return c
}

func (c *client) read(n int) []byte {
	c.t.Helper()
	b := make([]byte, n)
	if _, err := io.ReadFull(c.conn, b); err != nil {
		c.t.Fatalf("read: %v", err)
	}
	return b
}

func (c *client) write(b []byte) {
	c.t.Helper()
	if _, err := c.conn.Write(b); err != nil {
		c.t.Fatalf("write: %v", err)
	}
}

// option sends one and reads replies to the last.
func (c *client) option(opt option, data []byte) (types []uint32, last []byte) {
	c.t.Helper()
	b := be.AppendUint64(nil, magicOption)
	b = be.AppendUint32(b, uint32(opt))
	b = be.AppendUint32(b, uint32(len(data)))
	c.write(append(b, data...))
	for {
		h := c.read(20)
		if be.Uint64(h) != magicOptionReply || option(be.Uint32(h[8:])) != opt {
			c.t.Fatalf("option reply %x", h)
		}
		typ := be.Uint32(h[12:])
		types = append(types, typ)
		last = c.read(int(be.Uint32(h[16:])))
		if typ == repAck || typ&repErr != 0 {
			return types, last
		}
	}
}

func goData(name string) []byte {
	b := be.AppendUint32(nil, uint32(len(name)))
	b = append(b, name...)
	b = be.AppendUint16(b, 1)
	return be.AppendUint16(b, infoBlockSize)
}

// start goes into transmission.
func (c *client) start() {
	c.t.Helper()
	if types, last := c.option(optGo, goData("vol")); types[len(types)-1] != repAck {
		c.t.Fatalf("GO: %x %q", types, last)
	}
}

func (c *client) request(flags uint16, cmd command, cookie, off uint64, n uint32, payload []byte) {
	c.t.Helper()
	b := be.AppendUint32(nil, magicRequest)
	b = be.AppendUint16(b, flags)
	b = be.AppendUint16(b, uint16(cmd))
	b = be.AppendUint64(b, cookie)
	b = be.AppendUint64(b, off)
	c.write(append(be.AppendUint32(b, n), payload...))
}

// simple reads a simple reply.
func (c *client) simple(cookie uint64, n int) (errno, []byte) {
	c.t.Helper()
	h := c.read(16)
	if be.Uint32(h) != magicReply || be.Uint64(h[8:]) != cookie {
		c.t.Fatalf("reply %x", h)
	}
	no := errno(be.Uint32(h[4:]))
	if no != errnoOK {
		return no, nil
	}
	return no, c.read(n)
}

func (c *client) content(off, n int) []byte {
	b := make([]byte, n)
	c.src.Peek(int64(off), b)
	return b
}

func TestReadWrite(t *testing.T) {
	c := dial(t, false, Options{})
	c.start()
	data := bytes.Repeat([]byte("abcd"), 5000)
	c.request(0, cmdWrite, 1, 8192, uint32(len(data)), data)
	if no, _ := c.simple(1, 0); no != errnoOK {
		t.Fatal(no)
	}
	if !bytes.Equal(c.content(8192, len(data)), data) {
		t.Error("the volume does not have what was written")
	}
	c.request(0, cmdRead, 2, 4096, 32768, nil)
	if no, got := c.simple(2, 32768); no != errnoOK || !bytes.Equal(got, c.content(4096, 32768)) {
		t.Errorf("read: errno %d, or other bytes", no)
	}
	c.request(0, cmdFlush, 3, 0, 0, nil)
	if no, _ := c.simple(3, 0); no != errnoOK {
		t.Errorf("flush: %d", no)
	}
	c.request(0, cmdDisc, 4, 0, 0, nil)
	if err := <-c.done; err != nil {
		t.Errorf("after DISC: %v", err)
	}
}

// TestManyInFlight: replies come in any order, each once, with its own bytes.
func TestManyInFlight(t *testing.T) {
	c := dial(t, true, Options{})
	c.start()
	const n = 500
	go func() {
		for i := range n {
			b := be.AppendUint32(nil, magicRequest)
			b = be.AppendUint32(b, uint32(cmdRead))
			b = be.AppendUint64(b, uint64(i))
			b = be.AppendUint64(b, uint64(i*7919%1000*4096))
			if _, err := c.conn.Write(be.AppendUint32(b, 4096)); err != nil {
				return
			}
		}
	}()
	seen := map[uint64]bool{}
	for range n {
		h := c.read(16)
		i := be.Uint64(h[8:])
		if be.Uint32(h) != magicReply || be.Uint32(h[4:]) != 0 || i >= n || seen[i] {
			t.Fatalf("reply %x", h)
		}
		seen[i] = true
		if !bytes.Equal(c.read(4096), c.content(int(i)*7919%1000*4096, 4096)) {
			t.Fatalf("request %d got other bytes", i)
		}
	}
}

// TestRefusals: each gets the protocol's own error, and the next valid request
// on the same connection succeeds.
func TestRefusals(t *testing.T) {
	ok := func(c *client) {
		t.Helper()
		c.request(0, cmdRead, 99, 0, 512, nil)
		if no, got := c.simple(99, 512); no != errnoOK || !bytes.Equal(got, c.content(0, 512)) {
			t.Errorf("a valid read after a refused request: errno %d, or other bytes", no)
		}
	}
	for _, q := range []struct {
		name     string
		readOnly bool
		flags    uint16
		cmd      command
		off      uint64
		n        uint32
		payload  int
		want     errno
	}{
		{"read at the end", false, 0, cmdRead, testSize, 512, 0, errnoInval},
		{"read over the end", false, 0, cmdRead, testSize - 512, 1024, 0, errnoInval},
		{"read wrapping", false, 0, cmdRead, ^uint64(0) - 511, 1024, 0, errnoInval},
		{"read of nothing", false, 0, cmdRead, 0, 0, 0, errnoInval},
		{"read too long", false, 0, cmdRead, 0, maxPayload + 512, 0, errnoInval},
		{"write over the end", false, 0, cmdWrite, testSize - 512, 1024, 1024, errnoNoSpace},
		{"write too long", false, 0, cmdWrite, 0, maxPayload + 512, maxPayload + 512, errnoNoSpace},
		{"write read-only", true, 0, cmdWrite, 0, 512, 512, errnoPerm},
		{"trim read-only", true, 0, cmdTrim, 0, 512, 0, errnoPerm},
		{"unknown command", false, 0, 77, 0, 512, 0, errnoInval},
		{"unknown flag", false, 1 << 9, cmdRead, 0, 512, 0, errnoInval},
		{"DF not offered", false, cfDF, cmdRead, 0, 512, 0, errnoInval},
		{"status not negotiated", false, 0, cmdBlockStatus, 0, 512, 0, errnoInval},
	} {
		t.Run(q.name, func(t *testing.T) {
			c := dial(t, q.readOnly, Options{})
			c.start()
			c.request(q.flags, q.cmd, 5, q.off, q.n, make([]byte, q.payload))
			if no, _ := c.simple(5, 0); no != q.want {
				t.Errorf("errno %d, want %d", no, q.want)
			}
			ok(c)
		})
	}
}

// TestBrokenProtocol: what cannot go on is closed.
func TestBrokenProtocol(t *testing.T) {
	c := dial(t, false, Options{})
	c.start()
	c.write(make([]byte, requestSize))
	if err := <-c.done; !errors.Is(err, ErrProtocol) {
		t.Errorf("bad magic: %v", err)
	}
	c = dial(t, false, Options{})
	c.start()
	c.request(0, cmdWrite, 1, 0, 4096, make([]byte, 100))
	c.conn.Close()
	if err := <-c.done; err == nil {
		t.Error("a client that left in the middle of a write ended well")
	}
	if !bytes.Equal(c.content(0, 100), pattern(100)) {
		t.Error("half a write was applied")
	}
}

// pattern is what Fill(1) puts at the beginning.
func pattern(n int) []byte {
	b := make([]byte, n)
	cachetest.Pattern(b, 1)
	return b
}

func TestHandshake(t *testing.T) {
	c := dial(t, false, Options{})
	for _, o := range []struct {
		name string
		opt  option
		data []byte
		want uint32
	}{
		{"unknown option", 4711, nil, repErrUnsup},
		{"list with data", optList, []byte{1}, repErrInvalid},
		{"unknown export", optGo, goData("nope"), repErrUnknown},
		{"cut data", optInfo, []byte{0, 0}, repErrInvalid},
		{"name longer than data", optInfo, []byte{0, 0, 1, 0, 'x'}, repErrInvalid},
		{"too much data", optInfo, make([]byte, maxOption+1), repErrTooBig},
		{"no certificate", optStartTLS, nil, repErrPolicy},
		{"context without structured replies", optSetMeta, goData("vol"), repErrInvalid},
	} {
		if types, _ := c.option(o.opt, o.data); types[len(types)-1] != o.want {
			t.Errorf("%s: %x, want %x", o.name, types, o.want)
		}
	}
	if types, _ := c.option(optList, nil); fmt.Sprint(types) != fmt.Sprint([]uint32{repServer, repAck}) {
		t.Errorf("LIST: %x", types)
	}
	c.start() // after all that
	c.request(0, cmdRead, 1, 0, 512, nil)
	if no, got := c.simple(1, 512); no != errnoOK || !bytes.Equal(got, c.content(0, 512)) {
		t.Errorf("read: errno %d", no)
	}
}

// TestExtendedHeaders: 64-bit requests and chunks; no client of this machine
// speaks them, so this one does.
func TestExtendedHeaders(t *testing.T) {
	c := dial(t, false, Options{})
	if types, _ := c.option(optExtendedHeaders, nil); types[0] != repAck {
		t.Fatal(types)
	}
	query := be.AppendUint32(nil, 3)
	query = append(query, "vol"...)
	query = be.AppendUint32(query, 1)
	query = be.AppendUint32(query, uint32(len(baseAllocation)))
	if types, _ := c.option(optSetMeta, append(query, baseAllocation...)); types[0] != repMetaContext {
		t.Fatal(types)
	}
	c.start()
	send := func(flags uint16, cmd command, off, n uint64, payload []byte) (typ uint16, body []byte) {
		t.Helper()
		b := be.AppendUint32(nil, magicRequestExt)
		b = be.AppendUint16(b, flags)
		b = be.AppendUint16(b, uint16(cmd))
		b = be.AppendUint64(b, 9)
		b = be.AppendUint64(b, off)
		c.write(append(be.AppendUint64(b, n), payload...))
		h := c.read(32)
		if be.Uint32(h) != magicReplyChunkExt || be.Uint16(h[4:]) != chunkDone || be.Uint64(h[8:]) != 9 || be.Uint64(h[16:]) != off {
			t.Fatalf("chunk %x", h)
		}
		return be.Uint16(h[6:]), c.read(int(be.Uint64(h[24:])))
	}
	if typ, _ := send(cfPayloadLen, cmdWrite, 512, 5, []byte("hello")); typ != chunkNone {
		t.Errorf("write: chunk %d", typ)
	}
	if typ, body := send(cfDF, cmdRead, 512, 512, nil); typ != chunkOffsetData || string(body[8:13]) != "hello" || be.Uint64(body) != 512 {
		t.Errorf("read: chunk %d %x", typ, body)
	}
	typ, body := send(0, cmdBlockStatus, 0, testSize, nil)
	if typ != chunkBlockStatusExt || be.Uint32(body) != allocationID || be.Uint32(body[4:]) != 1 || be.Uint64(body[8:]) != testSize {
		t.Errorf("status: chunk %d %x", typ, body)
	}
	if typ, body := send(0, cmdRead, testSize, 1, nil); typ != chunkError || errno(be.Uint32(body)) != errnoInval {
		t.Errorf("beyond the end: chunk %d %x", typ, body)
	}
}

func TestErrnosAreComplete(t *testing.T) {
	for _, s := range volume.Sentinels() {
		found := false
		for _, e := range errnos {
			found = found || e.err == s
		}
		if !found {
			t.Errorf("%v has no number", s)
		}
	}
	if toErrno(nil) != errnoOK || toErrno(errors.New("x")) != errnoIO || toErrno(fmt.Errorf("w: %w", volume.ErrNoSpace)) != errnoNoSpace {
		t.Error("mapping")
	}
}

func FuzzRequest(f *testing.F) {
	f.Add(be.AppendUint32(nil, magicRequest), false)
	g := volume.Geometry{Size: testSize, BlockSize: 512, CanZero: true, CanDiscard: true, CanFlush: true}
	f.Fuzz(func(t *testing.T, b []byte, extended bool) {
		b = append(b, make([]byte, requestExtSize)...)[:requestExtSize]
		q, err := parseRequest(b, extended)
		if err != nil {
			return
		}
		for _, tf := range []uint16{(&Export{}).flags(g, true), (&Export{ReadOnly: true}).flags(g, false)} {
			if q.check(g, tf, extended, true) != errnoOK || q.cmd == cmdFlush {
				continue
			}
			if q.length == 0 || q.length > testSize || q.offset > testSize-q.length {
				t.Errorf("%+v passed the check", q)
			}
		}
	})
}

func FuzzMeta(f *testing.F) {
	f.Add([]byte{0, 0, 0, 1, 'x', 0, 0, 0, 0})
	f.Fuzz(func(_ *testing.T, b []byte) {
		parseMeta(b)
		cutString(b)
	})
}

// TestDiscBehindWork: DISC right behind other requests; they are answered, and
// the connection ends, whoever of its workers sees the end first.
func TestDiscBehindWork(t *testing.T) {
	for range 100 {
		c := dial(t, false, Options{})
		c.start()
		var b []byte
		for i := range 4 {
			b = be.AppendUint32(b, magicRequest)
			b = be.AppendUint32(b, uint32(cmdRead))
			b = be.AppendUint64(b, uint64(i))
			b = be.AppendUint64(b, 0)
			b = be.AppendUint32(b, 512)
		}
		b = be.AppendUint32(b, magicRequest)
		b = be.AppendUint32(b, uint32(cmdDisc))
		c.write(append(b, make([]byte, 20)...))
		c.read(4 * (16 + 512))
		select {
		case err := <-c.done:
			if err != nil {
				t.Fatal(err)
			}
		case <-time.After(patience):
			t.Fatal("the connection does not end")
		}
	}
}
