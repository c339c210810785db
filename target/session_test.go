// SPDX-License-Identifier: Apache-2.0

package target

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"rblk/rdma"
	"rblk/wire"
)

func oneMemory(size int64) func(*Server) error {
	return func(s *Server) error {
		for _, name := range []string{"m", "other"} {
			if err := s.AddMemory(s.ctx, MemoryConfig{Name: name, Size: size}); err != nil {
				return err
			}
		}
		return nil
	}
}

// TestMemory: one grant for everything; what is written is read by another
// session, and by one after a restart.
func TestMemory(t *testing.T) {
	opts := testOptions(t)
	r := start(t, opts, oneMemory(4<<20))
	w := r.dial("m", wire.AccessWrite, 2)
	gs := w.conns[0].mapRanges(wire.IntentWrite, ranges(1<<20, 10)...)
	if len(gs) != 1 || gs[0].Offset != 0 || gs[0].Length != 4<<20 || gs[0].Status != wire.StatusOK {
		t.Fatalf("grants %+v", gs)
	}
	want := []byte("kept outside the process")
	w.conns[1].write(gs[0], 3<<20+1, want)
	instance := w.reply.Export.Instance

	ro := r.dial("m", wire.AccessRead, 1)
	g := ro.conns[0].mapRanges(wire.IntentRead, ranges(0, 1)...)[0]
	if got := ro.conns[0].read(g, 3<<20+1, len(want)); !bytes.Equal(got, want) {
		t.Errorf("another session reads %q", got)
	}
	if err := r.stop(); err != nil {
		t.Fatal(err)
	}
	r = start(t, opts, oneMemory(4<<20))
	again := r.dial("m", wire.AccessRead, 1)
	if again.reply.Export.Instance != instance {
		t.Error("a restart changed the instance")
	}
	g = again.conns[0].mapRanges(wire.IntentRead, ranges(0, 1)...)[0]
	if got := again.conns[0].read(g, 3<<20+1, len(want)); !bytes.Equal(got, want) {
		t.Errorf("after a restart: %q", got)
	}
}

// TestReach: no key reaches beyond its export and access mode.
func TestReach(t *testing.T) {
	r := start(t, testOptions(t), oneMemory(1<<20))
	grant := func(export, access string, intent wire.Intent) wire.Grant {
		p := r.dial(export, access, 1)
		return p.conns[0].mapRanges(intent, ranges(0, 1)...)[0]
	}
	rw := grant("m", wire.AccessWrite, wire.IntentWrite)
	ro := grant("m", wire.AccessRead, wire.IntentRead)
	other := grant("other", wire.AccessRead, wire.IntentRead)
	for _, c := range []struct {
		name string
		op   rdma.Opcode
		g    wire.Grant
	}{
		{"WRITE with a read-only session's key", rdma.OpWrite, ro},
		{"WRITE with the writer's key", rdma.OpWrite, rw},
		{"READ with the writer's key", rdma.OpRead, rw},
		{"READ of another export", rdma.OpRead, other},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := r.dial("m", wire.AccessRead, 1)
			copy(p.conns[0].data(), "overwritten")
			if st := p.conns[0].transfer(c.op, c.g, 0, 11); st != rdma.StatusRemoteAccess {
				t.Errorf("ended with %v", st)
			}
		})
	}
	p := r.dial("m", wire.AccessRead, 1)
	if got := p.conns[0].read(p.conns[0].mapRanges(wire.IntentRead, ranges(0, 1)...)[0], 0, 11); !bytes.Equal(got, make([]byte, 11)) {
		t.Errorf("bytes were touched: %q", got)
	}
	if gs := p.conns[0].mapRanges(wire.IntentWrite, ranges(0, 1)...); gs[0].Status != wire.StatusReadOnly {
		t.Errorf("MAP to write in a read-only session: %+v", gs)
	}
}

// TestRequests: what the messages answer.
func TestRequests(t *testing.T) {
	r := start(t, testOptions(t), oneMemory(3<<20))
	p := r.dial("m", wire.AccessWrite, 2)
	c := p.conns[0]
	g := c.mapRanges(wire.IntentWrite, ranges(0, 1)...)[0]
	c.write(g, 1<<20-2, []byte("1234"))
	one := func(off, n uint64) *wire.Ranges { return &wire.Ranges{Ranges: ranges(off, n)} }
	if st := p.conns[1].ask(one(1<<20-1, 2<<20).Append, wire.TypeZero); st != wire.StatusOK {
		t.Errorf("ZERO: %d", st)
	}
	if got := c.read(g, 1<<20-2, 4); string(got) != "1\x00\x00\x00" {
		t.Errorf("after ZERO: %q", got)
	}
	for _, want := range []struct {
		name   string
		encode func([]byte, wire.Header) []byte
		typ    wire.Type
		status wire.Status
	}{
		{"FLUSH", wire.AppendEmpty, wire.TypeFlush, wire.StatusOK},
		{"KEEPALIVE", wire.AppendEmpty, wire.TypeKeepalive, wire.StatusOK},
		{"DISCARD", one(0, 4096).Append, wire.TypeDiscard, wire.StatusOK},
		{"ZERO beyond the end", one(3<<20-1, 2).Append, wire.TypeZero, wire.StatusRange},
		{"COMMIT", one(0, 1).Append, wire.TypeCommit, wire.StatusUnsupported},
		{"UNMAP of nothing known", (&wire.IDs{IDs: []uint64{99}}).Append, wire.TypeUnmap, wire.StatusOK},
		{"DROP of oneself", (&wire.Drop{Connection: 0}).Append, wire.TypeDrop, wire.StatusProtocol},
		{"DROP of another", (&wire.Drop{Connection: 1}).Append, wire.TypeDrop, wire.StatusOK},
	} {
		if st := c.ask(want.encode, want.typ); st != want.status {
			t.Errorf("%s: status %d, want %d", want.name, st, want.status)
		}
	}
	p.conns[1].dead()
	if gs := c.mapRanges(wire.IntentWrite, ranges(3<<20, 1)...); gs[0].Status != wire.StatusRange {
		t.Errorf("MAP beyond the end: %+v", gs)
	}
}

// TestCredits: a peer at its limit is served for ever, one beyond it is not.
func TestCredits(t *testing.T) {
	r := start(t, testOptions(t), oneMemory(1<<20))
	p := r.dial("m", wire.AccessWrite, 1)
	c := p.conns[0]
	inFlight := 0
	for range 3000 {
		for inFlight < credits {
			c.send(wire.AppendEmpty, wire.TypeFlush)
			inFlight++
		}
		if _, ok := c.recv(func(h wire.Header) bool { return h.Type == wire.TypeDone }); !ok {
			t.Fatalf("an honest peer was thrown out: %v", c.conn.Err())
		}
		inFlight--
	}
}

// TestMalformed: a peer that sends rubbish loses its connection, and nobody
// else does.
func TestMalformed(t *testing.T) {
	r := start(t, testOptions(t), oneMemory(1<<20))
	good := r.dial("m", wire.AccessWrite, 1)
	head := func(typ wire.Type) []byte { return wire.AppendEmpty(nil, wire.Header{Type: typ, Seq: 1}) }
	cut := (&wire.Map{Intent: wire.IntentRead, Ranges: ranges(0, 1)}).Append(nil, wire.Header{Type: wire.TypeMap, Seq: 1})
	version := head(wire.TypeKeepalive)
	version[2] = 99
	for name, msg := range map[string][]byte{
		"one byte":                 {1},
		"empty":                    {},
		"noise":                    bytes.Repeat([]byte{0xa5, 0x17}, 1000),
		"cut MAP":                  cut[:len(cut)-3],
		"another version":          version,
		"unknown type":             head(77),
		"an answer to nothing":     (&wire.IDs{IDs: []uint64{1}}).Append(nil, wire.Header{Type: wire.TypeRevoked, Seq: 5}),
		"a target's request":       (&wire.IDs{IDs: []uint64{1}}).Append(nil, wire.Header{Type: wire.TypeRevoke, Seq: 5}),
		"two ranges of ZERO":       (&wire.Ranges{Ranges: ranges(0, 1, 5, 1)}).Append(nil, wire.Header{Type: wire.TypeZero, Seq: 1}),
		"FLUSH with a body":        (&wire.IDs{IDs: []uint64{1}}).Append(nil, wire.Header{Type: wire.TypeFlush, Seq: 1}),
		"KEEPALIVE longer than it": append(head(wire.TypeKeepalive), 0),
	} {
		t.Run(name, func(t *testing.T) {
			p := r.dial("m", wire.AccessRead, 1)
			if err := p.conns[0].sendRaw(msg); err != nil {
				t.Fatal(err)
			}
			p.conns[0].dead()
		})
	}
	t.Run("MAP on connection 1", func(t *testing.T) {
		p := r.dial("m", wire.AccessRead, 2)
		m := wire.Map{Intent: wire.IntentRead, Ranges: ranges(0, 1)}
		p.conns[1].send(m.Append, wire.TypeMap)
		p.conns[1].dead()
	})
	if st := good.conns[0].ask(wire.AppendEmpty, wire.TypeKeepalive); st != wire.StatusOK {
		t.Errorf("the good session: %v", st)
	}
}

// TestTokens: once, in time, for its connection.
func TestTokens(t *testing.T) {
	opts := testOptions(t)
	r := start(t, opts, oneMemory(1<<20))
	rejected := func(t *testing.T, p *peer, priv []byte, reason string) {
		t.Helper()
		c, err := p.connectWith(priv)
		var rej *rdma.RejectError
		if !errors.As(err, &rej) || !strings.HasPrefix(string(rej.Reason), reason) {
			t.Errorf("got %v, want a rejection: %s", err, reason)
		}
		if c != nil {
			c.close()
		}
	}
	p := r.dial("m", wire.AccessRead, 1)
	used := p.reply.Tokens[0]
	t.Run("used", func(t *testing.T) { rejected(t, p, private(used), wire.RejectToken) })
	t.Run("forged", func(t *testing.T) {
		rejected(t, p, private(wire.Token{Secret: strings.Repeat("ab", 32)}), wire.RejectToken)
	})
	t.Run("of another connection", func(t *testing.T) {
		reply, err := r.open(request("m", wire.AccessRead, 1))
		if err != nil {
			t.Fatal(err)
		}
		tok := reply.Tokens[0]
		tok.Connection = 1
		rejected(t, p, private(tok), wire.RejectToken)
	})
	t.Run("another version", func(t *testing.T) {
		b := private(used)
		b[4] = 9
		rejected(t, p, b, wire.RejectVersion)
	})
	t.Run("noise", func(t *testing.T) { rejected(t, p, bytes.Repeat([]byte{7}, 56), "") })
	t.Run("empty", func(t *testing.T) { rejected(t, p, nil, "") })
	t.Run("late", func(t *testing.T) {
		opts := testOptions(t)
		opts.TokenTime = time.Nanosecond
		r := start(t, opts, oneMemory(1<<20))
		reply, err := r.open(request("m", wire.AccessRead, 1))
		if err != nil {
			t.Fatal(err)
		}
		late := r.join(&wire.SessionReply{})
		rejected(t, late, private(reply.Tokens[0]), wire.RejectToken)
	})
	if st := p.conns[0].ask(wire.AppendEmpty, wire.TypeKeepalive); st != wire.StatusOK {
		t.Errorf("the good connection: %v", st)
	}
}

// TestMoreConnections: further tokens come against the secret only.
func TestMoreConnections(t *testing.T) {
	r := start(t, testOptions(t), oneMemory(1<<20))
	p := r.dial("m", wire.AccessRead, 1)
	path := "/v1/sessions/" + p.reply.Session + "/connections"
	var got wire.TokensReply
	if err := r.call("POST", path, wire.ConnectionsRequest{Epoch: 1, Secret: p.reply.Secret, Count: 2}, &got); err != nil || len(got.Tokens) != 2 {
		t.Fatalf("%v, %+v", err, got)
	}
	c, err := p.connect(got.Tokens[0])
	if err != nil || c.accepted.Connection != 1 {
		t.Fatalf("%v, %+v", err, c)
	}
	p.conns = append(p.conns, c)
	for name, req := range map[string]wire.ConnectionsRequest{
		wire.CodeUnknownSession: {Epoch: 1, Secret: strings.Repeat("00", 32), Count: 1},
		wire.CodeFenced:         {Epoch: 7, Secret: p.reply.Secret, Count: 1},
		wire.CodeLimit:          {Epoch: 1, Secret: p.reply.Secret, Count: 1 << 30},
	} {
		if err := r.call("POST", path, req, nil); code(err) != name {
			t.Errorf("got %v, want %s", err, name)
		}
	}
}

// TestClaims: one writer; force fences it, and it stays fenced.
func TestClaims(t *testing.T) {
	r := start(t, testOptions(t), oneMemory(1<<20))
	first := r.dial("m", wire.AccessWrite, 1)
	_, err := r.open(request("m", wire.AccessWrite, 1))
	if code(err) != wire.CodeBusy || !strings.Contains(err.Error(), "testhost") || !strings.Contains(err.Error(), fmt.Sprint(os.Getpid())) {
		t.Errorf("second writer: %v", err)
	}
	if _, err := r.open(request("m", wire.AccessShared, 1)); code(err) != wire.CodeBusy {
		t.Errorf("shared beside a writer: %v", err)
	}
	r.dial("m", wire.AccessRead, 1)
	g := first.conns[0].mapRanges(wire.IntentWrite, ranges(0, 1)...)[0]
	first.conns[0].write(g, 0, []byte("old"))

	req := request("m", wire.AccessWrite, 1)
	req.Force = true
	reply, err := r.open(req)
	if err != nil {
		t.Fatal(err)
	}
	first.conns[0].dead() // before the answer, not after it
	second := r.join(reply)
	g = second.conns[0].mapRanges(wire.IntentWrite, ranges(0, 1)...)[0]
	second.conns[0].write(g, 0, []byte("new"))
	again := request("m", wire.AccessWrite, 1)
	again.Reopen = &wire.Reopen{Session: first.reply.Session, Epoch: first.reply.Epoch, Secret: first.reply.Secret}
	if _, err := r.open(again); code(err) != wire.CodeFenced {
		t.Errorf("the fenced writer comes back: %v", err)
	}
	if err := r.call("DELETE", "/v1/sessions/"+second.reply.Session, nil, nil, SecretHeader, second.reply.Secret); err != nil {
		t.Fatal(err)
	}
	if _, err := r.open(again); code(err) != wire.CodeFenced {
		t.Errorf("the fenced writer comes back after its successor: %v", err)
	}
	a, b := r.dial("m", wire.AccessShared, 1), r.dial("m", wire.AccessShared, 1)
	if _, err := r.open(request("m", wire.AccessWrite, 1)); code(err) != wire.CodeBusy {
		t.Errorf("writer beside shared ones: %v", err)
	}
	if _, err := r.open(req); err != nil {
		t.Errorf("force: %v", err)
	}
	a.conns[0].dead()
	b.conns[0].dead()
}

// TestReopen: the old epoch's connections are dead before the answer; an old
// epoch is refused, unless its answer was lost.
func TestReopen(t *testing.T) {
	r := start(t, testOptions(t), oneMemory(1<<20))
	p := r.dial("m", wire.AccessWrite, 2)
	req := request("m", wire.AccessWrite, 1)
	req.Reopen = &wire.Reopen{Session: p.reply.Session, Epoch: 1, Secret: p.reply.Secret}
	reply, err := r.open(req)
	if err != nil || reply.Epoch != 2 || reply.Session != p.reply.Session || reply.Secret != p.reply.Secret {
		t.Fatalf("%v %+v", err, reply)
	}
	p.conns[0].dead()
	p.conns[1].dead()
	// The answer was lost: the same again.
	if reply, err = r.open(req); err != nil || reply.Epoch != 3 {
		t.Fatalf("lost answer: %v, epoch %d", err, reply.Epoch)
	}
	req.Reopen.Epoch = 2
	if reply, err = r.open(req); err != nil || reply.Epoch != 4 {
		t.Fatalf("second lost answer: %v, epoch %d", err, reply.Epoch)
	}
	// All answers since the last connection were lost.
	req.Reopen.Epoch = 1
	if reply, err = r.open(req); err != nil || reply.Epoch != 5 {
		t.Fatalf("third lost answer: %v, epoch %d", err, reply.Epoch)
	}
	r.join(reply)
	for name, re := range map[string]wire.Reopen{
		"old epoch":       {Session: p.reply.Session, Epoch: 1, Secret: p.reply.Secret},
		"before the last": {Session: p.reply.Session, Epoch: 4, Secret: p.reply.Secret},
		"epoch to come":   {Session: p.reply.Session, Epoch: 6, Secret: p.reply.Secret},
		"wrong secret":    {Session: p.reply.Session, Epoch: 5, Secret: strings.Repeat("11", 32)},
		"unknown session": {Session: strings.Repeat("1", 32), Epoch: 1, Secret: p.reply.Secret},
	} {
		req.Reopen = &re
		want := wire.CodeFenced
		if name == "wrong secret" {
			want = wire.CodeUnknownSession
		}
		if _, err := r.open(req); code(err) != want {
			t.Errorf("%s: %v, want %s", name, err, want)
		}
	}
	ro := request("m", wire.AccessRead, 1)
	ro.Reopen = &wire.Reopen{Session: strings.Repeat("1", 32), Epoch: 1, Secret: p.reply.Secret}
	if _, err := r.open(ro); code(err) != wire.CodeUnknownSession {
		t.Errorf("unknown reader: %v", err)
	}
}

// TestClaimOutlivesRestart: the last writer alone may come back in the time of
// grace, afterwards anybody; then it is fenced.
func TestClaimOutlivesRestart(t *testing.T) {
	opts := testOptions(t)
	r := start(t, opts, oneMemory(1<<20))
	p := r.dial("m", wire.AccessWrite, 1)
	back := request("m", wire.AccessWrite, 1)
	back.Reopen = &wire.Reopen{Session: p.reply.Session, Epoch: 1, Secret: p.reply.Secret}
	r.stop()

	r = start(t, opts, oneMemory(1<<20))
	if _, err := r.open(request("m", wire.AccessWrite, 1)); code(err) != wire.CodeBusy || !strings.Contains(err.Error(), "testhost") {
		t.Errorf("another writer in the time of grace: %v", err)
	}
	if _, err := r.open(request("m", wire.AccessShared, 1)); code(err) != wire.CodeBusy {
		t.Errorf("a shared one in the time of grace: %v", err)
	}
	reply, err := r.open(back)
	if err != nil || reply.Epoch != 2 {
		t.Fatalf("the last writer: %v", err)
	}
	r.join(reply)
	r.stop()

	opts.GraceTime = time.Nanosecond
	r = start(t, opts, oneMemory(1<<20))
	back.Reopen.Epoch = 2
	if _, err = r.open(back); err != nil {
		t.Fatalf("the last writer, late, and nobody was there: %v", err)
	}
	r.stop()
	r = start(t, opts, oneMemory(1<<20))
	r.dial("m", wire.AccessWrite, 1)
	back.Reopen.Epoch = 3
	if _, err := r.open(back); code(err) != wire.CodeFenced {
		t.Errorf("the last writer after somebody else: %v", err)
	}
	r.stop()

	// The content is lost: the claim on it means nothing.
	os.Remove(filepath.Join(opts.MemoryDir, "m.json"))
	r = start(t, opts, oneMemory(1<<20))
	if _, err := r.open(request("m", wire.AccessWrite, 1)); err != nil {
		t.Errorf("writer of new memory: %v", err)
	}
}

// TestLostContent: a writer of memory that was lost is told so.
func TestLostContent(t *testing.T) {
	opts := testOptions(t)
	r := start(t, opts, oneMemory(1<<20))
	p := r.dial("m", wire.AccessWrite, 1)
	r.stop()
	os.Remove(filepath.Join(opts.MemoryDir, "m.json"))
	r = start(t, opts, oneMemory(1<<20))
	req := request("m", wire.AccessWrite, 1)
	req.Reopen = &wire.Reopen{Session: p.reply.Session, Epoch: 1, Secret: p.reply.Secret}
	if _, err := r.open(req); code(err) != wire.CodeInstance {
		t.Errorf("got %v", err)
	}
}

// TestSilence: a silent connection is broken; a silent session ends, and its
// writer may come back as long as nobody else has written.
func TestSilence(t *testing.T) {
	opts := testOptions(t)
	opts.Dead = 50 * time.Millisecond
	opts.ClaimTime = 50 * time.Millisecond
	r := start(t, opts, oneMemory(1<<20))
	p := r.dial("m", wire.AccessWrite, 1)
	p.conns[0].dead()
	eventually(t, "the silent session ends", func() bool { return len(r.Status().Sessions) == 0 })
	req := request("m", wire.AccessWrite, 1)
	req.Reopen = &wire.Reopen{Session: p.reply.Session, Epoch: 1, Secret: p.reply.Secret}
	reply, err := r.open(req)
	if err != nil || reply.Epoch != 2 {
		t.Fatalf("it comes back: %v", err)
	}
	eventually(t, "it ends again", func() bool { return len(r.Status().Sessions) == 0 })
	if _, err := r.open(request("m", wire.AccessWrite, 1)); err != nil {
		t.Fatalf("another writer: %v", err)
	}
	req.Reopen.Epoch = 2
	if _, err := r.open(req); code(err) != wire.CodeFenced {
		t.Errorf("it comes back after another writer: %v", err)
	}
}

// TestLostAnswer: the same request with the same nonce replaces what nobody
// connected to.
func TestLostAnswer(t *testing.T) {
	r := start(t, testOptions(t), oneMemory(1<<20))
	req := request("m", wire.AccessWrite, 1)
	req.Nonce = hex.EncodeToString(make([]byte, 16))
	if _, err := r.open(req); err != nil {
		t.Fatal(err)
	}
	reply, err := r.open(req)
	if err != nil {
		t.Fatalf("the same again: %v", err)
	}
	r.join(reply)
	if _, err := r.open(req); code(err) != wire.CodeBusy {
		t.Errorf("the same again, after it was connected to: %v", err)
	}
}

// TestSessionRequests: bad ones, each with its code and one line.
func TestSessionRequests(t *testing.T) {
	opts := testOptions(t)
	opts.MaxSessions = 2
	r := start(t, opts, func(s *Server) error {
		if err := s.AddDataset(s.ctx, DatasetConfig{"d", t.TempDir()}); err != nil {
			return err
		}
		return oneMemory(1 << 20)(s)
	})
	for _, c := range []struct {
		want string
		edit func(*wire.SessionRequest)
	}{
		{wire.CodeUnknownExport, func(q *wire.SessionRequest) { q.Export = "mm" }},
		{wire.CodeVersion, func(q *wire.SessionRequest) { q.Protocol = 2 }},
		{wire.CodeFeature, func(q *wire.SessionRequest) { q.Features = []string{"teleport"} }},
		{wire.CodeBadRequest, func(q *wire.SessionRequest) { q.Access = "wo" }},
		{wire.CodeLimit, func(q *wire.SessionRequest) { q.Connections = 0 }},
		{wire.CodeLimit, func(q *wire.SessionRequest) { q.Connections = 17 }},
		{wire.CodeTransport, func(q *wire.SessionRequest) { q.Transports = []string{"carrier-pigeon"} }},
		{wire.CodeReadOnly, func(q *wire.SessionRequest) { q.Export, q.Access = "d", wire.AccessWrite }},
		{wire.CodeBadRequest, func(q *wire.SessionRequest) { q.Client.Host = strings.Repeat("x", 2000) }},
	} {
		req := request("m", wire.AccessRead, 1)
		c.edit(&req)
		_, err := r.open(req)
		if code(err) != c.want || strings.Contains(err.Error(), "\n") {
			t.Errorf("got %v, want %s", err, c.want)
		}
	}
	r.dial("m", wire.AccessRead, 1)
	w := r.dial("m", wire.AccessWrite, 1)
	force := request("m", wire.AccessWrite, 1)
	force.Force = true
	if _, err := r.open(force); code(err) != wire.CodeLimit {
		t.Errorf("beyond the limit: %v", err)
	}
	if st := w.conns[0].ask(wire.AppendEmpty, wire.TypeKeepalive); st != wire.StatusOK {
		t.Errorf("a refused request fenced the writer: %v", st)
	}
}
