// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"rblk/rdma"
	"rblk/rdma/tcp"
	"rblk/volume"
	"rblk/wire"
)

// fakeTarget says what a test wants to be said: answers of targets that do not
// exist yet, and of hostile ones.
type fakeTarget struct {
	t    *testing.T
	http *httptest.Server
	p    rdma.Provider
	l    rdma.Listener
	pd   rdma.ProtectionDomain
	mem  []byte
	mr   rdma.MemoryRegion
	wg   sync.WaitGroup
	end  context.CancelFunc

	// set before it is used
	export wire.ExportInfo
	edit   func(*wire.SessionReply)                     // of every answer
	status func(h wire.Header, body []byte) wire.Status // of Done, and of grants

	mu    sync.Mutex
	epoch uint64
	seen  []wire.Type // requests, less keepalives
	conns []rdma.Conn
}

const fakeSize = 8 << 20

func newFakeTarget(t *testing.T, export wire.ExportInfo) *fakeTarget {
	t.Helper()
	f := &fakeTarget{t: t, export: export}
	f.export.Name, f.export.Kind, f.export.Size, f.export.BlockSize, f.export.ExtentSize = "m", "file", fakeSize, 512, 1<<20
	f.export.Instance, f.export.Layout = "i", "i"
	var err error
	check := func() {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	f.mem, err = unix.Mmap(-1, 0, fakeSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	check()
	f.p, err = tcp.New(tcp.Options{})
	check()
	devs, err := f.p.Devices()
	check()
	f.pd, err = devs[0].NewDomain()
	check()
	f.mr, err = f.pd.Register(f.mem, rdma.AccessLocalWrite|rdma.AccessRemoteRead|rdma.AccessRemoteWrite)
	check()
	ctx, cancel := context.WithCancel(context.Background())
	f.end = cancel
	f.l, err = f.p.Listen(ctx, "127.0.0.1:0")
	check()
	f.wg.Go(func() { f.accept(ctx) })
	f.http = httptest.NewServer(http.HandlerFunc(f.control))
	t.Cleanup(f.close)
	return f
}

func (f *fakeTarget) close() {
	f.end()
	f.http.Close()
	f.l.Close()
	f.cut()
	f.wg.Wait()
	f.mr.Deregister()
	if err := errors.Join(f.pd.Close(), f.p.Close(), unix.Munmap(f.mem)); err != nil {
		f.t.Error(err)
	}
}

// cut breaks all connections.
func (f *fakeTarget) cut() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.conns {
		c.Disconnect()
	}
}

func (f *fakeTarget) control(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		w.WriteHeader(http.StatusNoContent)
		return
	}
	var req wire.SessionRequest
	if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
		f.t.Error(err)
	}
	f.mu.Lock()
	f.epoch++
	reply := wire.SessionReply{
		Protocol: wire.ProtocolVersion, Session: "s", Epoch: f.epoch, Secret: strings.Repeat("00", 32), Export: f.export,
		Data: []wire.DataAddress{{Provider: "tcp", Addr: f.l.Addr().String()}},
		Limits: wire.Limits{MaxConnections: 16, MaxMessage: wire.MaxMessage, Credits: 4, TargetCredits: 4, MaxGrants: 64, SendDepth: 32, ReadDepth: 8,
			KeepaliveMS: 5000, DeadMS: 15000, RevokeMS: 5000},
	}
	f.mu.Unlock()
	for i := range req.Connections {
		reply.Tokens = append(reply.Tokens, wire.Token{Connection: i, Secret: strings.Repeat("ab", 32)})
	}
	if f.edit != nil {
		f.edit(&reply)
	}
	json.NewEncoder(w).Encode(reply)
}

func (f *fakeTarget) accept(ctx context.Context) {
	for {
		req, err := f.l.Accept(ctx)
		if err != nil {
			return
		}
		f.wg.Go(func() { f.serve(ctx, req) })
	}
}

// serve answers one connection's messages.
func (f *fakeTarget) serve(ctx context.Context, req rdma.ConnRequest) {
	var hello wire.Connect
	if err := hello.Parse(req.PrivateData()); err != nil {
		f.t.Error(err)
	}
	const slots = 16
	buf, err := unix.Mmap(-1, 0, 2*slots*wire.MaxMessage, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		f.t.Error(err)
		return
	}
	defer unix.Munmap(buf)
	mr, err := f.pd.Register(buf, rdma.AccessLocalWrite)
	if err != nil {
		f.t.Error(err)
		return
	}
	defer mr.Deregister()
	slot := func(i int) rdma.RecvRequest {
		return rdma.RecvRequest{ID: uint64(i), Local: []rdma.Segment{rdma.Seg(mr, uint64(i*wire.MaxMessage), wire.MaxMessage)}}
	}
	opts := rdma.ConnOptions{RecvDepth: slots}
	for i := range slots {
		opts.Receives = append(opts.Receives, slot(i))
	}
	acc := wire.Accepted{Version: wire.ProtocolVersion, Connection: hello.Connection, Credits: 4, TargetCredits: 4, MaxMessage: wire.MaxMessage}
	c, err := req.Accept(ctx, f.pd, opts, acc.Append(nil))
	if err != nil {
		return
	}
	defer c.Close()
	f.mu.Lock()
	f.conns = append(f.conns, c)
	f.mu.Unlock()
	var wcs [8]rdma.Completion
	for next := 0; ; {
		n, err := c.Wait(ctx, wcs[:])
		if err != nil {
			return
		}
		for _, wc := range wcs[:n] {
			if wc.Op != rdma.OpRecv || wc.Status != rdma.StatusOK {
				continue
			}
			at := int(wc.ID) * wire.MaxMessage
			h, body, err := wire.ParseHeader(buf[at : at+int(wc.Length)])
			if err != nil {
				f.t.Error(err)
				return
			}
			out := (slots + next) * wire.MaxMessage
			next = (next + 1) % slots
			b := f.reply(h, body, buf[out:out:out+wire.MaxMessage])
			c.PostRecv([]rdma.RecvRequest{slot(int(wc.ID))})
			if len(b) > 0 {
				c.Post([]rdma.WorkRequest{{Op: rdma.OpSend, Flags: rdma.WRSignaled, Local: []rdma.Segment{rdma.Seg(mr, uint64(out), uint32(len(b)))}}})
			}
		}
	}
}

func (f *fakeTarget) reply(h wire.Header, body, b []byte) []byte {
	st := wire.StatusOK
	if h.Type != wire.TypeKeepalive {
		f.mu.Lock()
		f.seen = append(f.seen, h.Type)
		f.mu.Unlock()
		if f.status != nil {
			st = f.status(h, body)
		}
	}
	if st == sayNothing {
		return nil
	}
	if h.Type != wire.TypeMap {
		return (&wire.Done{}).Append(b, wire.Header{Type: wire.TypeDone, Seq: h.Seq, Status: st})
	}
	var m wire.Map
	if err := m.Parse(body); err != nil {
		f.t.Error(err)
	}
	var out wire.Mapped
	for _, r := range m.Ranges {
		g := wire.Grant{ID: h.Seq<<8 | uint64(len(out.Grants)), Offset: r.Offset, Length: r.Length, Addr: f.mr.Addr() + r.Offset, Status: st, RKeys: []uint32{f.mr.RKey()}}
		if st != wire.StatusOK {
			g.RKeys, g.ID, g.Addr = nil, 0, 0
		}
		if st == sayElsewhere {
			g = wire.Grant{ID: 1, Offset: 1 << 40, Length: 1, RKeys: []uint32{1}}
		}
		out.Grants = append(out.Grants, g)
	}
	return out.Append(b, wire.Header{Type: wire.TypeMapped, Seq: h.Seq})
}

// Statuses that are none: no answer, and one about another range.
const sayNothing, sayElsewhere = wire.Status(1000), wire.Status(1001)

func (f *fakeTarget) count(t wire.Type) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, x := range f.seen {
		if x == t {
			n++
		}
	}
	return n
}

func (f *fakeTarget) dial(options string) (*Volume, error) {
	src, err := ParseSource("rblk://" + addrOf(f.http) + "/m")
	if err == nil {
		src, err = src.WithOptions(options)
	}
	if err != nil {
		f.t.Fatal(err)
	}
	p, err := tcp.New(tcp.Options{})
	if err != nil {
		f.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	v, err := Dial(ctx, src, DialOptions{Providers: []rdma.Provider{p}, Logger: testLogger()})
	f.t.Cleanup(func() {
		if v != nil {
			v.Close()
		}
		if err := p.Close(); err != nil {
			f.t.Error(err)
		}
	})
	return v, err
}

func (f *fakeTarget) mustDial(options string) *Volume {
	f.t.Helper()
	v, err := f.dial(options)
	if err != nil {
		f.t.Fatal(err)
	}
	return v
}

// TestCommit: a write is acknowledged by the answer of a COMMIT behind it, on
// every lane layout, with many more operations than credits.
func TestCommit(t *testing.T) {
	for _, options := range []string{"connections=1", "", "connections=5"} {
		f := newFakeTarget(t, wire.ExportInfo{NeedsCommit: true, CanFUA: true, CanFlush: true})
		var mu sync.Mutex
		fua := 0
		f.status = func(h wire.Header, body []byte) wire.Status {
			if h.Type == wire.TypeCommit {
				var rs wire.Ranges
				if err := rs.Parse(body); err != nil {
					t.Error(err)
				}
				mu.Lock()
				defer mu.Unlock()
				for _, r := range rs.Ranges {
					if h.Flags == wire.FlagFUA {
						fua++
					}
					// The bytes are there before the COMMIT.
					if p := f.mem[r.Offset : r.Offset+r.Length]; bytes.Count(p, p[:1]) != len(p) || p[0] == 0 {
						t.Errorf("COMMIT of %v came before its bytes", r)
					}
				}
			}
			return wire.StatusOK
		}
		v := f.mustDial(options)
		const n = 200
		mem := arenaOf(t, v, n*512)
		var wg sync.WaitGroup
		ops := make([]*volume.Op, n)
		for i := range ops {
			p := mem[i*512 : (i+1)*512]
			for j := range p {
				p[j] = byte(1 + i%255)
			}
			ops[i] = &volume.Op{Kind: volume.OpWrite, Lane: volume.LaneWrite, FUA: i%10 == 0, Offset: int64(i * 512), Mem: p, Done: func(o *volume.Op) {
				if o.Err != nil {
					t.Error(o.Err)
				}
				wg.Done()
			}}
		}
		wg.Add(n)
		v.Submit(ops)
		wg.Wait()
		if err := v.Flush(context.Background()); err != nil {
			t.Error(err)
		}
		mu.Lock()
		if fua != n/10 || f.count(wire.TypeCommit) != n || f.count(wire.TypeFlush) != 1 {
			t.Errorf("%q: %d FUA, %d COMMITs, %d FLUSHes", options, fua, f.count(wire.TypeCommit), f.count(wire.TypeFlush))
		}
		mu.Unlock()
		if !bytes.Equal(f.mem[:len(mem)], mem) {
			t.Errorf("%q: bytes differ", options)
		}
		v.Close()
	}
}

// TestCommitFails: its verdict is its operation's alone; a lost answer is got
// again by WRITE and COMMIT under a fresh grant.
func TestCommitFails(t *testing.T) {
	f := newFakeTarget(t, wire.ExportInfo{NeedsCommit: true})
	var mu sync.Mutex
	lost := 2
	f.status = func(h wire.Header, body []byte) wire.Status {
		mu.Lock()
		defer mu.Unlock()
		var rs wire.Ranges
		if h.Type != wire.TypeCommit || rs.Parse(body) != nil {
			return wire.StatusOK
		}
		switch {
		case rs.Ranges[0].Offset == 512:
			return wire.StatusNoSpace
		case rs.Ranges[0].Offset == 1024 && lost == 2:
			lost--
			return wire.StatusNotGranted
		case rs.Ranges[0].Offset == 1024 && lost == 1:
			lost--
			go f.cut()
			return sayNothing
		}
		return wire.StatusOK
	}
	v := f.mustDial("")
	mem := arenaOf(t, v, 4096)
	for off, want := range map[int64]error{0: nil, 512: volume.ErrNoSpace, 1024: nil} {
		if err := do(t, v, volume.OpWrite, off, mem[:512]); !errors.Is(err, want) {
			t.Errorf("at %d: %v, want %v", off, err, want)
		}
	}
	if n := f.count(wire.TypeMap); n < 3 || v.Counters().Reconnects != 2 {
		t.Errorf("%d MAPs, %d reconnects: the replay went under the old grant", n, v.Counters().Reconnects)
	}
}

// TestBackPressure: a target that has no frame now is asked again, and nothing
// fails.
func TestBackPressure(t *testing.T) {
	f := newFakeTarget(t, wire.ExportInfo{})
	var mu sync.Mutex
	no := []wire.Status{wire.StatusAgain, wire.StatusQuota, wire.StatusDraining, wire.StatusAgain}
	f.status = func(h wire.Header, _ []byte) wire.Status {
		mu.Lock()
		defer mu.Unlock()
		if h.Type != wire.TypeMap || len(no) == 0 {
			return wire.StatusOK
		}
		st := no[0]
		no = no[1:]
		return st
	}
	v := f.mustDial("")
	mem := arenaOf(t, v, 4096)
	if err := do(t, v, volume.OpRead, 0, mem); err != nil {
		t.Error(err)
	}
	if n := f.count(wire.TypeMap); n != 5 {
		t.Errorf("%d MAPs, want 5", n)
	}
	// A large operation asks for all that it lacks in one MAP.
	big := arenaOf(t, v, 5<<20)
	if err := do(t, v, volume.OpRead, 2<<20, big); err != nil {
		t.Error(err)
	}
	if n := f.count(wire.TypeMap); n != 6 {
		t.Errorf("%d MAPs, want 6", n)
	}
}

// TestStatuses: every refusal is one sentinel.
func TestStatuses(t *testing.T) {
	f := newFakeTarget(t, wire.ExportInfo{CanZero: true, CanDiscard: true})
	var mu sync.Mutex
	var say wire.Status
	f.status = func(wire.Header, []byte) wire.Status { mu.Lock(); defer mu.Unlock(); return say }
	v := f.mustDial("")
	mem := arenaOf(t, v, 4096)
	for st := wire.StatusRange; st <= wire.StatusDraining; st++ {
		if passing(st) || st == wire.StatusNotGranted {
			continue
		}
		mu.Lock()
		say = st
		mu.Unlock()
		for _, err := range []error{
			do(t, v, volume.OpRead, 0, mem), do(t, v, volume.OpWrite, 0, mem), v.Zero(context.Background(), 0, 512), v.Discard(context.Background(), 0, 512),
		} {
			n := 0
			for _, s := range volume.Sentinels() {
				if errors.Is(err, s) {
					n++
				}
			}
			if n != 1 {
				t.Errorf("%v: %v matches %d sentinels", st, err, n)
			}
		}
	}
}

// TestSharedOutcome: a write of a shared session that was cut off is not
// written again.
func TestSharedOutcome(t *testing.T) {
	f := newFakeTarget(t, wire.ExportInfo{NeedsCommit: true})
	f.status = func(h wire.Header, _ []byte) wire.Status {
		if h.Type == wire.TypeCommit {
			go f.cut()
			return sayNothing
		}
		return wire.StatusOK
	}
	v := f.mustDial("shared")
	mem := arenaOf(t, v, 4096)
	if err := do(t, v, volume.OpWrite, 0, mem[:512]); !errors.Is(err, volume.ErrUnknownOutcome) {
		t.Errorf("cut off: %v", err)
	}
	if err := do(t, v, volume.OpRead, 0, mem[:512]); err != nil {
		t.Error(err)
	}
}

// TestHostileTarget: answers that make no sense are refused, with one line, and
// nothing is left behind.
func TestHostileTarget(t *testing.T) {
	for name, edit := range map[string]func(*wire.SessionReply){
		"no tokens":      func(r *wire.SessionReply) { r.Tokens = nil },
		"twice":          func(r *wire.SessionReply) { r.Tokens[1].Connection = 0 },
		"short token":    func(r *wire.SessionReply) { r.Tokens[0].Secret = hex.EncodeToString([]byte("x")) },
		"index":          func(r *wire.SessionReply) { r.Tokens[0].Connection = -1 },
		"size":           func(r *wire.SessionReply) { r.Export.Size = 1<<63 - 1 },
		"credits":        func(r *wire.SessionReply) { r.Limits.Credits = 0 },
		"many credits":   func(r *wire.SessionReply) { r.Limits.Credits = 1 << 30 },
		"other credits":  func(r *wire.SessionReply) { r.Limits.Credits = 5 },
		"keepalive":      func(r *wire.SessionReply) { r.Limits.KeepaliveMS = -1 },
		"huge keepalive": func(r *wire.SessionReply) { r.Limits.KeepaliveMS = 1 << 62 },
		"no data":        func(r *wire.SessionReply) { r.Data = nil },
		"bad address":    func(r *wire.SessionReply) { r.Data[0].Addr = "\x00:x:" },
		"protocol":       func(r *wire.SessionReply) { r.Protocol = 7 },
	} {
		f := newFakeTarget(t, wire.ExportInfo{})
		f.edit = edit
		if _, err := f.dial(""); err == nil || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v, want one line", name, err)
		}
	}
}

// TestMapOfNothing: an answer to MAP that is about something else ends the
// epoch; it is not asked again and again.
func TestMapOfNothing(t *testing.T) {
	f := newFakeTarget(t, wire.ExportInfo{})
	f.status = func(h wire.Header, _ []byte) wire.Status {
		if h.Type == wire.TypeMap && f.count(wire.TypeMap) == 1 {
			return sayElsewhere
		}
		return wire.StatusOK
	}
	v := f.mustDial("")
	mem := arenaOf(t, v, 512)
	if err := do(t, v, volume.OpRead, 0, mem); err != nil {
		t.Error(err)
	}
	if n := f.count(wire.TypeMap); n != 2 || v.Counters().Reconnects != 1 {
		t.Errorf("%d MAPs, %d reconnects", n, v.Counters().Reconnects)
	}
}

// TestDeadAddress: a data address that leads nowhere leaves time for the one
// behind it.
func TestDeadAddress(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0") // takes connections and says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	f := newFakeTarget(t, wire.ExportInfo{})
	f.edit = func(r *wire.SessionReply) {
		r.Data = slices.Insert(r.Data, 0, wire.DataAddress{Provider: "tcp", Addr: silent.Addr().String()})
	}
	f.mustDial("connections=2")
}
