// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"encoding/hex"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// body is what every message's type has.
type body interface {
	Append([]byte, Header) []byte
	Parse([]byte) error
}

type empty struct{}

func (empty) Append(dst []byte, h Header) []byte { return AppendEmpty(dst, h) }
func (empty) Parse(b []byte) error               { return ParseEmpty(b) }

func fresh(t Type) body {
	switch t {
	case TypeMap:
		return &Map{}
	case TypeMapped:
		return &Mapped{}
	case TypeUnmap, TypeRevoke, TypeRevoked:
		return &IDs{}
	case TypeCommit, TypeDiscard, TypeZero:
		return &Ranges{}
	case TypeDrop:
		return &Drop{}
	case TypeDone:
		return &Done{}
	default:
		return empty{}
	}
}

var samples = []struct {
	h Header
	m body
}{
	{Header{Type: TypeMap, Seq: 1}, &Map{IntentWrite, []Range{{0, 1}, {1 << 40, 1 << 33}}}},
	{Header{Type: TypeMapped, Seq: 2, Acked: 1}, &Mapped{[]Grant{
		{ID: 7, Offset: 4096, Length: 1 << 20, Addr: 1 << 46, RKeys: []uint32{1, 0xffffffff}},
		{Offset: 1, Length: 2, Status: StatusStale},
	}}},
	{Header{Type: TypeUnmap, Seq: 3}, &IDs{[]uint64{1, 1 << 63}}},
	{Header{Type: TypeRevoke, Seq: 1 << 60}, &IDs{[]uint64{9}}},
	{Header{Type: TypeCommit, Seq: 4, Flags: FlagFUA}, &Ranges{[]Range{{512, 512}}}},
	{Header{Type: TypeDrop, Seq: 5}, &Drop{3}},
	{Header{Type: TypeDone, Seq: 6, Status: StatusIO}, &Done{[16]byte{1, 15: 2}}},
	{Header{Type: TypeKeepalive, Seq: 7}, empty{}},
}

func TestRoundTrip(t *testing.T) {
	for _, s := range samples {
		msg := s.m.Append(nil, s.h)
		h, b, err := ParseHeader(msg)
		if err != nil {
			t.Fatalf("%d: %v", s.h.Type, err)
		}
		want := s.h
		want.Length = uint32(len(msg))
		if h != want {
			t.Errorf("header %+v, want %+v", h, want)
		}
		got := fresh(h.Type)
		if err := got.Parse(b); err != nil {
			t.Fatalf("%d: %v", h.Type, err)
		}
		if diff := cmp.Diff(s.m, got); diff != "" {
			t.Error(diff)
		}
		if m, ok := s.m.(*Mapped); ok && m.Size() != len(msg) {
			t.Errorf("Size %d, encoded %d", m.Size(), len(msg))
		}
		for cut := range len(msg) {
			if _, _, err := ParseHeader(msg[:cut]); err == nil {
				t.Errorf("%d cut to %d bytes: accepted", h.Type, cut)
			}
		}
	}
}

// TestGolden pins the bytes: a peer of the same version must read them.
func TestGolden(t *testing.T) {
	m := Map{IntentRead, []Range{{0x1000, 0x200}}}
	const want = "726b0101" + "38000000" + "0500000000000000" + "0300000000000000" + "00000000" + "00000000" +
		"01000000" + "01000000" + "0010000000000000" + "0002000000000000"
	if got := hex.EncodeToString(m.Append(nil, Header{Type: TypeMap, Seq: 5, Acked: 3})); got != want {
		t.Errorf("MAP\n got %s\nwant %s", got, want)
	}
	c := Connect{Version: 1, Connection: 2, Token: [32]byte{0: 0xaa, 31: 0xbb}}
	if got, want := hex.EncodeToString(c.Append(nil)), "72626c6b01000200aa"+strings.Repeat("00", 30)+"bb"; got != want {
		t.Errorf("Connect\n got %s\nwant %s", got, want)
	}
	a := Accepted{Version: 1, Device: 1, Connection: 2, Credits: 32, TargetCredits: 4, MaxMessage: 8192}
	if got, want := hex.EncodeToString(a.Append(nil)), "72626c6b01010200"+"20000400"+"00200000"; got != want {
		t.Errorf("Accepted\n got %s\nwant %s", got, want)
	}
}

func TestRefusals(t *testing.T) {
	good := func() []byte { return (&Map{IntentRead, []Range{{0, 1}}}).Append(nil, Header{Type: TypeMap, Seq: 1}) }
	for name, c := range map[string]struct {
		spoil func([]byte) []byte
		want  error
	}{
		"magic":    {func(b []byte) []byte { b[0]++; return b }, ErrMalformed},
		"version":  {func(b []byte) []byte { b[2] = 2; return b }, ErrVersion},
		"length+1": {func(b []byte) []byte { b[4]++; return b }, ErrShort},
		"trailing": {func(b []byte) []byte { return append(b, 0) }, ErrMalformed},
		"huge":     {func(b []byte) []byte { b[6] = 0xff; return b }, ErrLimit},
		"reserved": {func(b []byte) []byte { b[28] = 1; return b }, ErrMalformed},
		"flags":    {func(b []byte) []byte { b[27] = 1; return b }, ErrMalformed},
		"FUA":      {func(b []byte) []byte { b[26] = byte(FlagFUA); return b }, ErrMalformed},
		"type 0":   {func(b []byte) []byte { b[3] = 0; return b }, ErrMalformed},
		"type 9":   {func(b []byte) []byte { b[3] = 9; return b }, ErrMalformed},
		"status":   {func(b []byte) []byte { b[24] = byte(StatusIO); return b }, ErrMalformed},
		"seq 0":    {func(b []byte) []byte { b[8] = 0; return b }, ErrMalformed},
	} {
		if _, _, err := ParseHeader(c.spoil(good())); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	var m Map
	for name, ranges := range map[string][]Range{"empty range": {{5, 0}}, "wrapping range": {{^uint64(0), 2}}} {
		b := (&Map{IntentRead, ranges}).Append(nil, Header{Type: TypeMap, Seq: 1})[HeaderSize:]
		if err := m.Parse(b); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, spoil := range map[string]func([]byte){
		"intent 0": func(b []byte) { b[0] = 0 }, "intent 4": func(b []byte) { b[0] = 4 }, "reserved": func(b []byte) { b[2] = 1 },
		"count more": func(b []byte) { b[4]++ }, "count less": func(b []byte) { b[4]-- },
	} {
		b := good()[HeaderSize:]
		spoil(b)
		if err := m.Parse(b); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	many := (&Map{IntentRead, make([]Range, MaxRanges+1)}).Append(nil, Header{Type: TypeMap, Seq: 1})[HeaderSize:]
	if err := m.Parse(many); !errors.Is(err, ErrLimit) {
		t.Errorf("too many ranges: %v", err)
	}
}

// TestGrantRefusals: what a grant may not say.
func TestGrantRefusals(t *testing.T) {
	good := Grant{ID: 1, Offset: 0, Length: 1 << 20, Addr: 1 << 40, RKeys: []uint32{1}}
	encode := func(g Grant) []byte {
		return (&Mapped{[]Grant{g}}).Append(nil, Header{Type: TypeMapped, Seq: 1})[HeaderSize:]
	}
	var m Mapped
	if err := m.Parse(encode(good)); err != nil {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(*Grant){
		"empty":            func(g *Grant) { g.Length = 0 },
		"wrapping offset":  func(g *Grant) { g.Offset = ^uint64(0) },
		"wrapping address": func(g *Grant) { g.Addr = ^uint64(0) },
		"no key":           func(g *Grant) { g.RKeys = nil },
		"key of a refusal": func(g *Grant) { g.Status = StatusIO },
		"too many keys":    func(g *Grant) { g.RKeys = make([]uint32, MaxDevices+1) },
	} {
		g := good
		spoil(&g)
		if err := m.Parse(encode(g)); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for cut := range encode(good) {
		if err := m.Parse(encode(good)[:cut]); err == nil {
			t.Errorf("cut to %d bytes: accepted", cut)
		}
	}
}

// TestKeysAreKept: grants of one message outlive the parsing of the next.
func TestKeysAreKept(t *testing.T) {
	message := func(key uint32) []byte {
		return (&Mapped{[]Grant{{ID: 1, Length: 1, RKeys: []uint32{key}}, {ID: 2, Length: 1, RKeys: []uint32{key, key}}}}).
			Append(nil, Header{Type: TypeMapped, Seq: 1})[HeaderSize:]
	}
	var m Mapped
	if err := m.Parse(message(1)); err != nil {
		t.Fatal(err)
	}
	kept := append([]Grant(nil), m.Grants...)
	if err := m.Parse(message(2)); err != nil {
		t.Fatal(err)
	}
	_ = append(kept[0].RKeys, 9)
	if kept[0].RKeys[0] != 1 || kept[1].RKeys[0] != 1 || m.Grants[0].RKeys[0] != 2 {
		t.Errorf("keys %v %v, then %v", kept[0].RKeys, kept[1].RKeys, m.Grants[0].RKeys)
	}
}

// TestParseAllocates: decoding into used structs allocates nothing, but a
// MAPPED's keys.
func TestParseAllocates(t *testing.T) {
	for _, s := range samples {
		b := s.m.Append(nil, s.h)[HeaderSize:]
		into := fresh(s.h.Type)
		want := 0.0
		if s.h.Type == TypeMapped {
			want = 1
		}
		if n := testing.AllocsPerRun(100, func() { into.Parse(b) }); n != want {
			t.Errorf("%v: %v allocations, want %v", s.h.Type, n, want)
		}
	}
}

func TestNames(t *testing.T) {
	for typ := range 256 {
		if named := !strings.HasPrefix(Type(typ).String(), "message type"); named != Type(typ).known() {
			t.Errorf("type %d: named %v", typ, named)
		}
	}
	if len(statusNames) != int(StatusDraining)+1 || Status(99).String() != "status 99" {
		t.Error("a status has no name")
	}
}

// TestFits: the largest message of each kind is within MaxMessage.
func TestFits(t *testing.T) {
	for name, n := range map[string]int{
		"MAP":    len((&Map{IntentRead, make([]Range, MaxRanges)}).Append(nil, Header{})),
		"UNMAP":  len((&IDs{make([]uint64, MaxIDs)}).Append(nil, Header{})),
		"MAPPED": (&Mapped{slicesOf(Grant{RKeys: make([]uint32, MaxDevices)}, MaxGrants)}).Size(),
	} {
		if n > MaxMessage {
			t.Errorf("%s: %d bytes, at most %d", name, n, MaxMessage)
		}
	}
}

func slicesOf(g Grant, n int) []Grant {
	gs := make([]Grant, n)
	for i := range gs {
		gs[i] = g
	}
	return gs
}

func TestPrivateDataPadding(t *testing.T) {
	c := Connect{Version: 1, Connection: 1, Token: [32]byte{5}}
	var got Connect
	if err := got.Parse(append(c.Append(nil), make([]byte, 16)...)); err != nil || got != c {
		t.Errorf("padded with zeros: %+v, %v", got, err)
	}
	if err := got.Parse(append(c.Append(nil), 1)); !errors.Is(err, ErrMalformed) {
		t.Errorf("padded with ones: %v", err)
	}
}

func TestDecodeJSON(t *testing.T) {
	var r SessionRequest
	if err := DecodeJSON(strings.NewReader(`{"protocol":1,"export":"a"}`), &r); err != nil || r.Export != "a" {
		t.Fatal(r, err)
	}
	for _, bad := range []string{``, `{`, `[]`, `{"exprot":"a"}`, `{} {}`, `{"export":"` + strings.Repeat("x", MaxJSON) + `"}`} {
		var e *Error
		if err := DecodeJSON(strings.NewReader(bad), &r); !errors.As(err, &e) || e.Code != CodeBadRequest || strings.Contains(e.Message, "\n") {
			t.Errorf("%.40q: %v", bad, err)
		}
	}
}

func TestDecodeReply(t *testing.T) {
	var l ExportList
	if err := DecodeReply(strings.NewReader(`{"protocol":1,"news":1,"exports":[{"name":"a"}]}`), &l); err != nil || len(l.Exports) != 1 {
		t.Fatal(l, err)
	}
	pad := `{"exports":[]` + strings.Repeat(" ", MaxReply) + "}"
	for _, bad := range []string{``, `<html>`, `{} {}`, pad} {
		if err := DecodeReply(strings.NewReader(bad), &l); err == nil || strings.Contains(err.Error(), "\n") {
			t.Errorf("%.40q: %v", bad, err)
		}
	}
}

// TestComplaint: what the peer sent does not flood or break a log line.
func TestComplaint(t *testing.T) {
	var r SessionRequest
	err := DecodeJSON(strings.NewReader(`{"`+strings.Repeat("é\\u001b", 5000)+`":1}`), &r)
	if err == nil || len(err.Error()) > maxComplaint+50 || strings.ContainsAny(err.Error(), "\n\x1b") {
		t.Errorf("%d bytes: %.300q", len(err.Error()), err)
	}
}

func TestCheckVersion(t *testing.T) {
	if err := CheckVersion("target", ProtocolVersion); err != nil {
		t.Fatal(err)
	}
	for v, who := range map[int]string{0: "upgrade target", 99: "upgrade this side"} {
		if err := CheckVersion("target", v); err == nil || !strings.Contains(err.Error(), who) {
			t.Errorf("version %d: %v, want %q", v, err, who)
		}
	}
	if CheckFeatures([]string{"x"}, nil) == nil || CheckFeatures([]string{"x"}, []string{"x"}) != nil {
		t.Error("features")
	}
}

func FuzzMessage(f *testing.F) {
	for _, s := range samples {
		f.Add(s.m.Append(nil, s.h))
	}
	f.Fuzz(func(t *testing.T, msg []byte) {
		h, b, err := ParseHeader(msg)
		if err != nil {
			return
		}
		m := fresh(h.Type)
		if m.Parse(b) != nil {
			return
		}
		if again := m.Append(nil, h); !bytes.Equal(again, msg) {
			t.Errorf("type %d: decoded and encoded again differs\n%x\n%x", h.Type, msg, again)
		}
	})
}

// FuzzBody feeds every decoder whatever comes, past the header's checks, into a
// struct that is used again.
func FuzzBody(f *testing.F) {
	for _, s := range samples {
		f.Add(uint8(s.h.Type), s.m.Append(nil, s.h)[HeaderSize:])
	}
	used := map[Type]body{}
	for _, s := range samples {
		used[s.h.Type] = fresh(s.h.Type)
	}
	f.Fuzz(func(t *testing.T, typ uint8, b []byte) {
		m := used[Type(typ)]
		if m == nil {
			m = fresh(Type(typ))
		}
		if err := m.Parse(b); err != nil {
			if !errors.Is(err, ErrShort) && !errors.Is(err, ErrLimit) && !errors.Is(err, ErrMalformed) {
				t.Errorf("%v: %v", Type(typ), err)
			}
			return
		}
		if again := m.Append(nil, Header{Type: Type(typ), Seq: 1})[HeaderSize:]; !bytes.Equal(again, b) {
			t.Errorf("%v: decoded and encoded again differs\n%x\n%x", Type(typ), b, again)
		}
	})
}

func BenchmarkMapped(b *testing.B) {
	m := Mapped{slicesOf(Grant{ID: 1, Length: 1 << 20, RKeys: []uint32{1, 2}}, MaxGrants)}
	var buf []byte
	var into Mapped
	b.ReportAllocs()
	for b.Loop() {
		buf = m.Append(buf[:0], Header{Type: TypeMapped, Seq: 1})
		_, body, err := ParseHeader(buf)
		if err == nil {
			err = into.Parse(body)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
}

func FuzzPrivateData(f *testing.F) {
	f.Add((&Connect{Version: 1}).Append(nil))
	f.Add((&Accepted{Version: 1, Credits: 1, MaxMessage: MaxMessage}).Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		var c Connect
		if c.Parse(b) == nil && !bytes.Equal(c.Append(nil), b[:ConnectSize]) {
			t.Error("Connect")
		}
		var a Accepted
		if a.Parse(b) == nil && !bytes.Equal(a.Append(nil), b[:AcceptedSize]) {
			t.Error("Accepted")
		}
	})
}

func FuzzJSON(f *testing.F) {
	f.Add([]byte(`{"protocol":1,"export":"a","access":"rw","connections":3,"client":{"host":"h"}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		var r SessionRequest
		if err := DecodeJSON(bytes.NewReader(b), &r); err != nil {
			var e *Error
			if !errors.As(err, &e) {
				t.Errorf("%T", err)
			}
		}
	})
}
