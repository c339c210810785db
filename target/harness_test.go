// SPDX-License-Identifier: Apache-2.0

package target

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"rblk/rdma"
	"rblk/rdma/tcp"
	"rblk/wire"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds every wait. It is no measure of speed: only a hang reaches it.
const patience = 30 * time.Second

func within(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// eventually waits until ok holds.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// logWriter passes the server's log on to the test's.
type logWriter struct{ t testing.TB }

func (w logWriter) Write(p []byte) (int, error) {
	w.t.Log(string(bytes.TrimSpace(p)))
	return len(p), nil
}

// running is a server under test.
type running struct {
	*Server
	t        testing.TB
	provider rdma.Provider
	stop     func() error // drains; its error is Serve's
}

// testOptions have directories of their own and free ports.
func testOptions(t testing.TB) Options {
	t.Helper()
	mem, err := os.MkdirTemp("/dev/shm", "rblk-target-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(mem) })
	return Options{
		Listen: []string{"127.0.0.1:0"}, StateDir: filepath.Join(t.TempDir(), "state"), MemoryDir: mem, Frames: 16 << 20,
		Logger: slog.New(slog.NewTextHandler(logWriter{t}, &slog.HandlerOptions{Level: slog.LevelWarn})),
	}
}

// start runs a server with the exports that add adds.
func start(t testing.TB, opts Options, add func(s *Server) error) *running {
	t.Helper()
	p, err := tcp.New(tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return startOver(t, p, opts, add)
}

// startOver is start over any provider.
func startOver(t testing.TB, p rdma.Provider, opts Options, add func(s *Server) error) *running {
	t.Helper()
	opts.Providers = []DataListen{{p, "127.0.0.1:0"}}
	s, err := New(within(t), opts)
	if err != nil {
		t.Fatal(err)
	}
	if err := add(s); err != nil {
		t.Fatal(err)
	}
	r := &running{Server: s, t: t, provider: p}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx) }()
	stopped := false
	r.stop = func() error {
		if stopped {
			return nil
		}
		stopped = true
		cancel()
		select {
		case err := <-served:
			// ErrBusy here would be a domain, region or connection left behind.
			return errors.Join(err, p.Close())
		case <-time.After(patience):
			return errors.New("Serve does not return")
		}
	}
	t.Cleanup(func() {
		if err := r.stop(); err != nil {
			t.Errorf("stop: %v", err)
		}
	})
	return r
}

// call sends a request to the control plane and decodes a good answer. The
// error is the target's own.
func (r *running) call(method, path string, body, into any, header ...string) error {
	r.t.Helper()
	var text io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			r.t.Fatal(err)
		}
		text = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(within(r.t), method, "http://"+r.ControlAddrs()[0]+path, text)
	if err != nil {
		r.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	tr := &http.Transport{DisableKeepAlives: true}
	resp, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	if resp.StatusCode >= 400 {
		e := &wire.Error{}
		if err := json.Unmarshal(answer, e); err != nil {
			return fmt.Errorf("%s: %s", resp.Status, answer)
		}
		return e
	}
	if into != nil {
		if err := json.Unmarshal(answer, into); err != nil {
			r.t.Fatalf("%s %s: %v: %s", method, path, err, answer)
		}
	}
	return nil
}

// code of a refusal; "" for success.
func code(err error) string {
	var e *wire.Error
	switch {
	case err == nil:
		return ""
	case errors.As(err, &e):
		return e.Code
	}
	return "no answer: " + err.Error()
}

func request(export, access string, conns int) wire.SessionRequest {
	return wire.SessionRequest{Protocol: wire.ProtocolVersion, Export: export, Access: access, Connections: conns,
		Client: wire.Client{Host: "testhost", Program: "target.test", PID: os.Getpid()}}
}

func (r *running) open(req wire.SessionRequest) (*wire.SessionReply, error) {
	r.t.Helper()
	reply := &wire.SessionReply{}
	err := r.call("POST", "/v1/sessions", req, reply)
	return reply, err
}

// peer is an initiator that does by hand what it is told.
type peer struct {
	t     testing.TB
	r     *running
	reply *wire.SessionReply
	prov  rdma.Provider
	pd    rdma.ProtectionDomain
	seq   uint64
	conns []*peerConn
	gone  bool
	told  map[uint64]bool // grants that it has been told of
}

// peerConn is one of its connections.
type peerConn struct {
	p        *peer
	conn     rdma.Conn
	accepted wire.Accepted
	mem      []byte
	mr       rdma.MemoryRegion
	recvs    int
	got      []received // taken from the connection, not yet asked for
	sends    int
	ended    map[uint64]rdma.Status // completions of sends, reads and writes
	posted   uint64
}

type received struct {
	h    wire.Header
	body []byte
}

const (
	peerSends = 64       // send slots
	peerData  = 64 << 10 // bytes for READ and WRITE
)

// dial opens a session with n connections.
func (r *running) dial(export, access string, n int) *peer {
	r.t.Helper()
	reply, err := r.open(request(export, access, n))
	if err != nil {
		r.t.Fatal(err)
	}
	return r.join(reply)
}

// join connects with the tokens of a reply.
func (r *running) join(reply *wire.SessionReply) *peer {
	r.t.Helper()
	prov, err := tcp.New(tcp.Options{})
	if err != nil {
		r.t.Fatal(err)
	}
	p := &peer{t: r.t, r: r, reply: reply, prov: prov, told: map[uint64]bool{}}
	r.t.Cleanup(p.close)
	for _, tok := range reply.Tokens {
		c, err := p.connect(tok)
		if err != nil {
			r.t.Fatal(err)
		}
		p.conns = append(p.conns, c)
	}
	return p
}

func (p *peer) close() {
	if p.gone {
		return
	}
	p.gone = true
	for _, c := range p.conns {
		c.close()
	}
	if p.pd != nil {
		p.pd.Close()
	}
	if err := p.prov.Close(); err != nil {
		p.t.Errorf("client provider: %v", err)
	}
}

// private is the private data for a token.
func private(tok wire.Token) []byte {
	c := wire.Connect{Version: wire.ProtocolVersion, Connection: uint16(tok.Connection)}
	b, err := hex.DecodeString(tok.Secret)
	if err != nil || copy(c.Token[:], b) != 32 {
		panic("bad token")
	}
	return c.Append(nil)
}

func (p *peer) connect(tok wire.Token) (*peerConn, error) { return p.connectWith(private(tok)) }

func (p *peer) connectWith(priv []byte) (*peerConn, error) {
	ctx := within(p.t)
	route, err := p.prov.Resolve(ctx, p.r.DataAddrs()[0].Addr)
	if err != nil {
		return nil, err
	}
	if p.pd == nil {
		if p.pd, err = route.Device().NewDomain(); err != nil {
			route.Close()
			return nil, err
		}
	}
	l := &p.r.limits
	c := &peerConn{p: p, recvs: l.Credits + l.TargetCredits, ended: map[uint64]rdma.Status{}}
	c.mem, err = unix.Mmap(-1, 0, (c.recvs+peerSends)*l.MaxMessage+peerData, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		route.Close()
		return nil, err
	}
	if c.mr, err = p.pd.Register(c.mem, rdma.AccessLocalWrite); err != nil {
		p.t.Fatal(err)
	}
	opts := rdma.ConnOptions{SendDepth: 256, RecvDepth: c.recvs}
	for i := range c.recvs {
		opts.Receives = append(opts.Receives, rdma.RecvRequest{ID: uint64(i), Local: []rdma.Segment{c.slot(i)}})
	}
	c.conn, err = route.Connect(ctx, p.pd, opts, priv)
	if err != nil {
		c.mr.Deregister()
		unix.Munmap(c.mem)
		return nil, err
	}
	if err := c.accepted.Parse(c.conn.Info().PrivateData); err != nil {
		p.t.Fatal(err)
	}
	return c, nil
}

func (c *peerConn) close() {
	c.conn.Close()
	c.mr.Deregister()
	unix.Munmap(c.mem)
}

func (c *peerConn) slot(i int) rdma.Segment {
	n := c.p.r.limits.MaxMessage
	return rdma.Seg(c.mr, uint64(i*n), uint32(n))
}

func (c *peerConn) data() []byte { return c.mem[len(c.mem)-peerData:] }

const workID = 1 << 32 // ids above are of posted work, below of receives

// sendRaw sends any bytes as a message.
func (c *peerConn) sendRaw(msg []byte) error {
	n := c.p.r.limits.MaxMessage
	off := (c.recvs + c.sends%peerSends) * n
	c.sends++
	copy(c.mem[off:off+n], msg)
	return c.post(rdma.WorkRequest{Op: rdma.OpSend, Local: []rdma.Segment{rdma.Seg(c.mr, uint64(off), uint32(len(msg)))}})
}

func (c *peerConn) post(wr rdma.WorkRequest) error {
	c.posted++
	wr.ID = workID + c.posted
	wr.Flags |= rdma.WRSignaled
	n, err := c.conn.Post([]rdma.WorkRequest{wr})
	if err == nil && n != 1 {
		err = errors.New("send queue full")
	}
	return err
}

// send sends a request and returns its number.
func (c *peerConn) send(encode func([]byte, wire.Header) []byte, typ wire.Type) uint64 {
	c.p.t.Helper()
	c.p.seq++
	if err := c.sendRaw(encode(nil, wire.Header{Type: typ, Seq: c.p.seq})); err != nil {
		c.p.t.Fatal(err)
	}
	return c.p.seq
}

// pump takes completions until ok holds; false when the connection is dead.
func (c *peerConn) pump(ok func() bool) bool {
	c.p.t.Helper()
	ctx := within(c.p.t)
	wc := make([]rdma.Completion, 16)
	for !ok() {
		n, err := c.conn.Wait(ctx, wc)
		if ctx.Err() != nil {
			c.p.t.Fatal("peer: nothing comes")
		}
		if err != nil {
			return false
		}
		for _, w := range wc[:n] {
			if w.ID >= workID {
				c.ended[w.ID-workID] = w.Status
				continue
			}
			if w.Status != rdma.StatusOK {
				continue
			}
			m := c.mem[int(w.ID)*c.p.r.limits.MaxMessage:][:w.Length]
			h, body, err := wire.ParseHeader(m)
			if err != nil {
				c.p.t.Fatalf("from target: %v", err)
			}
			c.got = append(c.got, received{h, bytes.Clone(body)})
			c.conn.PostRecv([]rdma.RecvRequest{{ID: w.ID, Local: []rdma.Segment{c.slot(int(w.ID))}}})
		}
	}
	return true
}

// recv takes the first message that want accepts.
func (c *peerConn) recv(want func(wire.Header) bool) (received, bool) {
	c.p.t.Helper()
	at := -1
	found := func() bool {
		for i, m := range c.got {
			if want(m.h) {
				at = i
				return true
			}
		}
		return false
	}
	if !c.pump(found) {
		return received{}, false
	}
	m := c.got[at]
	c.got = append(c.got[:at], c.got[at+1:]...)
	return m, true
}

// answer waits for the answer to a request.
func (c *peerConn) answer(seq uint64) received {
	c.p.t.Helper()
	m, ok := c.recv(func(h wire.Header) bool { return h.Type >= wire.TypeMapped && h.Seq == seq })
	if !ok {
		c.p.t.Fatalf("no answer: %v", c.conn.Err())
	}
	return m
}

// ask sends a request and returns the status of its answer.
func (c *peerConn) ask(encode func([]byte, wire.Header) []byte, typ wire.Type) wire.Status {
	c.p.t.Helper()
	return c.answer(c.send(encode, typ)).h.Status
}

func ranges(pairs ...uint64) []wire.Range {
	var rs []wire.Range
	for i := 0; i < len(pairs); i += 2 {
		rs = append(rs, wire.Range{Offset: pairs[i], Length: pairs[i+1]})
	}
	return rs
}

// mapRanges asks for grants.
func (c *peerConn) mapRanges(intent wire.Intent, rs ...wire.Range) []wire.Grant {
	c.p.t.Helper()
	m := wire.Map{Intent: intent, Ranges: rs}
	return c.grants(c.send(m.Append, wire.TypeMap))
}

func (c *peerConn) grants(seq uint64) []wire.Grant {
	c.p.t.Helper()
	var got wire.Mapped
	if err := got.Parse(c.answer(seq).body); err != nil {
		c.p.t.Fatal(err)
	}
	return got.Grants
}

func (c *peerConn) unmap(ids ...uint64) {
	c.p.t.Helper()
	m := wire.IDs{IDs: ids}
	if st := c.ask(m.Append, wire.TypeUnmap); st != wire.StatusOK {
		c.p.t.Fatalf("UNMAP: %v", st)
	}
}

// transfer moves n bytes at off of the volume, under g, and tells how it ended.
func (c *peerConn) transfer(op rdma.Opcode, g wire.Grant, off uint64, n int) rdma.Status {
	c.p.t.Helper()
	seg := rdma.Seg(c.mr, uint64(len(c.mem)-peerData), uint32(n))
	wr := rdma.WorkRequest{Op: op, Local: []rdma.Segment{seg}, Remote: rdma.RemoteAddr{Addr: g.Addr + off - g.Offset, RKey: g.RKeys[c.accepted.Device]}}
	if err := c.post(wr); err != nil {
		c.p.t.Fatal(err)
	}
	id := c.posted
	done := func() bool { _, ok := c.ended[id]; return ok }
	if !c.pump(done) && !done() {
		c.p.t.Fatalf("no completion: %v", c.conn.Err())
	}
	return c.ended[id]
}

func (c *peerConn) read(g wire.Grant, off uint64, n int) []byte {
	c.p.t.Helper()
	if st := c.transfer(rdma.OpRead, g, off, n); st != rdma.StatusOK {
		c.p.t.Fatalf("READ: %v", st)
	}
	return bytes.Clone(c.data()[:n])
}

func (c *peerConn) write(g wire.Grant, off uint64, p []byte) {
	c.p.t.Helper()
	copy(c.data(), p)
	if st := c.transfer(rdma.OpWrite, g, off, len(p)); st != rdma.StatusOK {
		c.p.t.Fatalf("WRITE: %v", st)
	}
}

// dead waits until the connection has ended.
func (c *peerConn) dead() {
	c.p.t.Helper()
	select {
	case <-c.conn.Done():
	case <-time.After(patience):
		c.p.t.Fatal("connection lives on")
	}
}

// raw opens a TCP connection, sends bytes and waits until it is thrown out or
// has nothing more to say.
func raw(t testing.TB, addr string, stream []byte, wait bool) string {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(patience))
	conn.Write(stream)
	if !wait {
		return ""
	}
	out, _ := io.ReadAll(conn)
	return string(out)
}
