// SPDX-License-Identifier: Apache-2.0

package target

import (
	"bufio"
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"rblk/dataset"
	"rblk/rdma/tcp"
	"rblk/wire"
)

// get is a plain GET without following anything.
func (r *running) get(path string, header ...string) (*http.Response, []byte) {
	r.t.Helper()
	req, err := http.NewRequestWithContext(within(r.t), "GET", "http://"+r.ControlAddrs()[0]+path, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	tr := &http.Transport{DisableKeepAlives: true, DisableCompression: true}
	resp, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return resp, body
}

// TestManifest: plain and compressed are the same; the ETag saves sending it.
func TestManifest(t *testing.T) {
	cfg := bigDataset(t, 1000)
	r := start(t, testOptions(t), datasets(cfg))
	plain, text := r.get("/v1/exports/big/manifest")
	m, err := dataset.Decode(text)
	if err != nil || m.NumFiles() != 1 {
		t.Fatalf("%v, %d files", err, m.NumFiles())
	}
	packed, small := r.get("/v1/exports/big/manifest", "Accept-Encoding", "zstd")
	if packed.Header.Get("Content-Encoding") != "zstd" {
		t.Errorf("encoding %q", packed.Header.Get("Content-Encoding"))
	}
	if again, err := dataset.Decompress(small, 1<<20); err != nil || !bytes.Equal(again, text) {
		t.Errorf("compressed differs: %v", err)
	}
	tag := plain.Header.Get("ETag")
	if resp, body := r.get("/v1/exports/big/manifest", "If-None-Match", tag); resp.StatusCode != http.StatusNotModified || len(body) != 0 {
		t.Errorf("with the ETag: %s", resp.Status)
	}
	putOld(t, cfg.Path, "more", []byte("x"))
	if _, err := r.Rescan(within(t), "big"); err != nil {
		t.Fatal(err)
	}
	if resp, _ := r.get("/v1/exports/big/manifest", "If-None-Match", tag); resp.StatusCode != 200 || resp.Header.Get("ETag") == tag {
		t.Errorf("after a rescan: %s", resp.Status)
	}
	if resp, _ := r.get("/v1/exports/none/manifest"); resp.StatusCode != 404 {
		t.Errorf("of nothing: %s", resp.Status)
	}
}

// TestEvents: what happens is told, to those who care, and the stream outlives
// the time that a request has to be read.
func TestEvents(t *testing.T) {
	opts := testOptions(t)
	opts.Keepalive = 20 * time.Millisecond
	opts.ReadTime = 100 * time.Millisecond
	r := start(t, opts, func(s *Server) error {
		return errors.Join(oneMemory(1<<20)(s), datasets(bigDataset(t, 1000))(s))
	})
	req, err := http.NewRequestWithContext(within(t), "GET", "http://"+r.ControlAddrs()[0]+"/v1/events?export=m", nil)
	if err != nil {
		t.Fatal(err)
	}
	tr := &http.Transport{DisableKeepAlives: true}
	resp, err := (&http.Client{Transport: tr}).Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	sc := bufio.NewScanner(resp.Body)
	next := func() (event string, e wire.Event) {
		t.Helper()
		for sc.Scan() {
			if v, ok := strings.CutPrefix(sc.Text(), "event: "); ok {
				event = v
			}
			if v, ok := strings.CutPrefix(sc.Text(), "data: "); ok {
				if err := json.Unmarshal([]byte(v), &e); err != nil {
					t.Fatal(err)
				}
				return event, e
			}
		}
		return "", e
	}
	for alive := 0; alive < 10 && sc.Scan(); { // 200 ms: twice ReadTime
		if sc.Text() == ": alive" {
			alive++
		}
	}
	if err := r.call("POST", "/v1/admin/exports/m/resize", AdminResize{2 << 20}, nil); err != nil {
		t.Fatal(err)
	}
	if event, e := next(); event != wire.EventResize || e.Export != "m" || e.Info.Size != 2<<20 {
		t.Errorf("got %s %+v, %v", event, e, sc.Err())
	}
	r.Drain()
	if event, _ := next(); event != wire.EventDrain {
		t.Errorf("got %s", event)
	}
	if sc.Scan(); sc.Scan() {
		t.Errorf("after the drain: %q", sc.Text())
	}
}

// TestResize: grow only; sessions see the new piece; a restart keeps it.
func TestResize(t *testing.T) {
	opts := testOptions(t)
	r := start(t, opts, oneMemory(1<<20))
	p := r.dial("m", wire.AccessWrite, 1)
	c := p.conns[0]
	c.write(c.mapRanges(wire.IntentWrite, ranges(0, 1)...)[0], 100, []byte("first"))
	if err := r.call("POST", "/v1/admin/exports/m/resize", AdminResize{3 << 20}, nil); err != nil {
		t.Fatal(err)
	}
	gs := c.mapRanges(wire.IntentWrite, ranges(1<<20-1, 2)...)
	if len(gs) != 2 || gs[1].Offset != 1<<20 || gs[1].Length != 2<<20 {
		t.Fatalf("grants %+v", gs)
	}
	c.write(gs[1], 3<<20-4, []byte("last"))
	if err := r.call("POST", "/v1/admin/exports/m/resize", AdminResize{1 << 20}, nil); err == nil || !strings.Contains(err.Error(), "grow") {
		t.Errorf("shrink: %v", err)
	}
	r.stop()
	s, err := New(within(t), opts)
	if err != nil {
		t.Fatal(err)
	}
	err = s.AddMemory(within(t), MemoryConfig{Name: "m", Size: 1 << 20})
	if err == nil || !strings.Contains(err.Error(), "3.0 MiB") || !strings.Contains(err.Error(), "resize") {
		t.Errorf("another size than it has: %v", err)
	}
	s.Close()
	r = start(t, opts, func(s *Server) error { return s.AddMemory(s.ctx, MemoryConfig{Name: "m", Size: 3 << 20}) })
	c = r.dial("m", wire.AccessRead, 1).conns[0]
	g := c.mapRanges(wire.IntentRead, ranges(0, 1)...)[0]
	if string(c.read(g, 100, 5)) != "first" || string(c.read(g, 3<<20-4, 4)) != "last" {
		t.Error("bytes are lost")
	}
}

// TestCrashInResize: a file that is longer than promised is cut back, not lost;
// one that is shorter is new.
func TestCrashInResize(t *testing.T) {
	opts := testOptions(t)
	r := start(t, opts, oneMemory(1<<20))
	c := r.dial("m", wire.AccessWrite, 1).conns[0]
	c.write(c.mapRanges(wire.IntentWrite, ranges(0, 1)...)[0], 0, []byte("kept"))
	r.stop()
	path := filepath.Join(opts.MemoryDir, "m.mem")
	if err := os.Truncate(path, 5<<20); err != nil {
		t.Fatal(err)
	}
	r = start(t, opts, oneMemory(1<<20))
	c = r.dial("m", wire.AccessRead, 1).conns[0]
	if got := c.read(c.mapRanges(wire.IntentRead, ranges(0, 1)...)[0], 0, 4); string(got) != "kept" {
		t.Errorf("got %q", got)
	}
	first := r.dial("m", wire.AccessRead, 1).reply.Export.Instance
	r.stop()
	if err := os.Truncate(path, 4096); err != nil {
		t.Fatal(err)
	}
	r = start(t, opts, oneMemory(1<<20))
	if r.dial("m", wire.AccessRead, 1).reply.Export.Instance == first {
		t.Error("memory that lost bytes kept its instance")
	}
}

// TestTwoServers: the second one on the same memory, state or port is refused
// in a line that says why, and harms nothing.
func TestTwoServers(t *testing.T) {
	opts := testOptions(t)
	opts.Listen = append(opts.Listen, "unix:"+filepath.Join(t.TempDir(), "control.sock"))
	r := start(t, opts, oneMemory(1<<20))
	mine := testOptions(t)
	expect := func(err error, words ...string) {
		t.Helper()
		if err == nil {
			t.Error("no error")
			return
		}
		for _, w := range words {
			if !strings.Contains(err.Error(), w) || strings.Contains(err.Error(), "\n") {
				t.Errorf("%q does not say %q in one line", err, w)
			}
		}
	}
	same := mine
	same.StateDir = opts.StateDir
	_, err := New(within(t), same)
	expect(err, "in use", "--state-dir")
	for _, addr := range r.ControlAddrs() {
		o := mine
		o.Listen = []string{addr}
		_, err := New(within(t), o)
		expect(err, addr, "in use", "--listen")
	}
	p, err := tcp.New(tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	o := mine
	o.Providers = []DataListen{{p, r.DataAddrs()[0].Addr}}
	_, err = New(within(t), o)
	expect(err, r.DataAddrs()[0].Addr, "in use", "--data-listen")
	s, err := New(within(t), mine)
	if err != nil {
		t.Fatal(err)
	}
	expect(s.AddMemory(within(t), MemoryConfig{Name: "m", Size: 1 << 20, Dir: opts.MemoryDir}), "in use by another rblkd")
	expect(s.AddMemory(within(t), MemoryConfig{Name: "a/b", Size: 1 << 20}), "a/b", "letters")
	expect(s.AddMemory(within(t), MemoryConfig{Name: "huge", Size: 1 << 50}), "room", "--memory-dir")
	s.Close()
	r.dial("m", wire.AccessRead, 1)
}

// TestUnixListener: only its owner may use it; a file that is no socket is not
// removed; a dead socket is.
func TestUnixListener(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control")
	if err := os.WriteFile(path, []byte("precious"), 0o644); err != nil {
		t.Fatal(err)
	}
	opts := testOptions(t)
	opts.Listen = []string{"unix:" + path}
	if _, err := New(within(t), opts); err == nil {
		t.Error("listens on a file")
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != "precious" {
		t.Fatalf("the file is gone: %v", err)
	}
	os.Remove(path)
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Bind(fd, &syscall.SockaddrUnix{Name: path}); err != nil {
		t.Fatal(err)
	}
	syscall.Close(fd) // a socket that a dead process left
	s, err := New(within(t), opts)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
}

// certificates makes a CA, a server's and a client's certificate.
func certificates(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	var caCert *x509.Certificate
	var caKey *ecdsa.PrivateKey
	for i, name := range []string{"ca", "server", "client"} {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		c := &x509.Certificate{
			SerialNumber: big.NewInt(int64(i + 1)), Subject: pkix.Name{CommonName: name},
			NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
			IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, BasicConstraintsValid: true,
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		}
		if i == 0 {
			c.IsCA, c.KeyUsage, c.ExtKeyUsage = true, x509.KeyUsageCertSign, nil
			caCert, caKey = c, key
		}
		der, err := x509.CreateCertificate(rand.Reader, c, caCert, &key.PublicKey, caKey)
		if err != nil {
			t.Fatal(err)
		}
		raw, err := x509.MarshalECPrivateKey(key)
		if err != nil {
			t.Fatal(err)
		}
		for suffix, block := range map[string]*pem.Block{"crt": {Type: "CERTIFICATE", Bytes: der}, "key": {Type: "EC PRIVATE KEY", Bytes: raw}} {
			if err := os.WriteFile(filepath.Join(dir, name+"."+suffix), pem.EncodeToMemory(block), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	return dir
}

// TestTLS: 1.3 with client certificates; plain HTTP to it is told so.
func TestTLS(t *testing.T) {
	dir := certificates(t)
	opts := testOptions(t)
	opts.TLSCert, opts.TLSKey, opts.TLSClientCA = filepath.Join(dir, "server.crt"), filepath.Join(dir, "server.key"), filepath.Join(dir, "ca.crt")
	r := start(t, opts, oneMemory(1<<20))
	addr := r.ControlAddrs()[0]
	if out := raw(t, addr, []byte("GET /v1/exports HTTP/1.1\r\nHost: x\r\n\r\n"), true); !strings.Contains(out, "400 Bad Request") || !strings.Contains(out, "HTTPS") {
		t.Errorf("plain HTTP: %q", out)
	}
	ca, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	mine, err := tls.LoadX509KeyPair(filepath.Join(dir, "client.crt"), filepath.Join(dir, "client.key"))
	if err != nil {
		t.Fatal(err)
	}
	get := func(conf *tls.Config) error {
		conf.RootCAs = roots
		c := &http.Client{Transport: &http.Transport{TLSClientConfig: conf, DisableKeepAlives: true}}
		resp, err := c.Get("https://" + addr + "/v1/status")
		if err == nil {
			resp.Body.Close()
		}
		return err
	}
	if err := get(&tls.Config{Certificates: []tls.Certificate{mine}}); err != nil {
		t.Errorf("with a client certificate: %v", err)
	}
	if err := get(&tls.Config{}); err == nil {
		t.Error("without a client certificate: let in")
	}
	if err := get(&tls.Config{Certificates: []tls.Certificate{mine}, MaxVersion: tls.VersionTLS12}); err == nil {
		t.Error("TLS 1.2: let in")
	}
	// A certificate that cannot be read leaves the old one in use.
	if err := os.WriteFile(opts.TLSCert, []byte("rubbish"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := r.Reload(); err == nil {
		t.Error("reload of rubbish: no error")
	}
	if err := get(&tls.Config{Certificates: []tls.Certificate{mine}}); err != nil {
		t.Errorf("after a failed reload: %v", err)
	}
}

// TestToken: everything but health needs it; it can be changed at run time.
func TestToken(t *testing.T) {
	opts := testOptions(t)
	opts.TokenFile = filepath.Join(t.TempDir(), "token")
	write := func(s string) {
		if err := os.WriteFile(opts.TokenFile, []byte(s+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("0123456789abcdef")
	r := start(t, opts, oneMemory(1<<20))
	for _, path := range []string{"/v1/exports", "/v1/status", "/metrics", "/v1/events"} {
		if err := r.call("GET", path, nil, nil); code(err) != wire.CodeUnauthorized {
			t.Errorf("%s without the token: %v", path, err)
		}
	}
	if err := r.call("GET", "/v1/exports", nil, nil, "Authorization", "Bearer 0123456789abcdef"); err != nil {
		t.Error(err)
	}
	for _, path := range []string{"/healthz", "/readyz"} {
		if resp, _ := r.get(path); resp.StatusCode != 200 {
			t.Errorf("%s: %s", path, resp.Status)
		}
	}
	write("fedcba9876543210")
	if err := r.Reload(); err != nil {
		t.Fatal(err)
	}
	if err := r.call("GET", "/v1/exports", nil, nil, "Authorization", "Bearer 0123456789abcdef"); code(err) != wire.CodeUnauthorized {
		t.Errorf("the old token: %v", err)
	}
	write("short")
	if err := r.Reload(); err == nil || !strings.Contains(err.Error(), "16") {
		t.Errorf("a short token: %v", err)
	}
}

// TestPlainBeyondLoopback is refused, with the mend.
func TestPlainBeyondLoopback(t *testing.T) {
	opts := testOptions(t)
	opts.Listen = []string{"0.0.0.0:0"}
	if _, err := New(within(t), opts); err == nil || !strings.Contains(err.Error(), "--tls-cert") || !strings.Contains(err.Error(), "--insecure") {
		t.Errorf("got %v", err)
	}
	opts.Insecure = true
	s, err := New(within(t), opts)
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
}

// TestBadBodies: JSON that is not what it should be; each has one line.
func TestBadBodies(t *testing.T) {
	r := start(t, testOptions(t), oneMemory(1<<20))
	for _, body := range []string{"", "{", "[]", `{"protocol":1,"nonsense":2}`, `{"protocol":1}{}`, `"` + strings.Repeat("x", 70_000) + `"`} {
		req, err := http.NewRequestWithContext(within(t), "POST", "http://"+r.ControlAddrs()[0]+"/v1/sessions", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		var e wire.Error
		if resp.StatusCode != 400 || json.Unmarshal(text, &e) != nil || e.Code != wire.CodeBadRequest || strings.Contains(e.Message, "\n") {
			t.Errorf("%.20q: %s %s", body, resp.Status, text)
		}
	}
}

// TestGarbage at both listeners, cut and whole, while a session works on.
func TestGarbage(t *testing.T) {
	r := start(t, testOptions(t), oneMemory(1<<20))
	p := r.dial("m", wire.AccessWrite, 1)
	c := p.conns[0]
	g := c.mapRanges(wire.IntentWrite, ranges(0, 1)...)[0]
	noise := make([]byte, 100_000)
	rand.Read(noise)
	for i, addr := range []string{r.ControlAddrs()[0], r.DataAddrs()[0].Addr} {
		for _, stream := range [][]byte{{0}, []byte("GET / HT"), noise, nil, bytes.Repeat([]byte("A: b\r\n"), 10_000)} {
			raw(t, addr, stream, len(stream) > 1000)
			c.write(g, uint64(i), []byte("works on"))
			if got := c.read(g, uint64(i), 8); string(got) != "works on" {
				t.Fatalf("after %.10q: %q", stream, got)
			}
		}
	}
}

// TestAdmin: exports come and go at run time.
func TestAdmin(t *testing.T) {
	r := start(t, testOptions(t), oneMemory(1<<20))
	dir := t.TempDir()
	for _, a := range []AdminExport{{Name: "n", Memory: &AdminMemory{Size: 1 << 20}}, {Name: "d", Dataset: &AdminDataset{Path: dir}}} {
		if err := r.call("POST", "/v1/admin/exports", a, nil); err != nil {
			t.Errorf("%s: %v", a.Name, err)
		}
		if err := r.call("POST", "/v1/admin/exports", a, nil); err == nil || !strings.Contains(err.Error(), "exists") {
			t.Errorf("%s again: %v", a.Name, err)
		}
	}
	var list wire.ExportList
	if err := r.call("GET", "/v1/exports", nil, &list); err != nil || len(list.Exports) != 4 {
		t.Errorf("%v %+v", err, list)
	}
	for _, a := range []AdminExport{{Name: "x"}, {Name: "../x", Memory: &AdminMemory{Size: 1}}, {Name: "x", Memory: &AdminMemory{}}, {Name: "x", Dataset: &AdminDataset{Path: "/nonexistent"}}} {
		if err := r.call("POST", "/v1/admin/exports", a, nil); code(err) != wire.CodeBadRequest {
			t.Errorf("%+v: %v", a, err)
		}
	}
	if err := r.call("POST", "/v1/admin/exports/m/rescan", nil, nil); err == nil {
		t.Error("rescan of memory")
	}
	if _, text := r.get("/metrics"); !bytes.Contains(text, []byte(`rblk_target_frames{state="free"}`)) || !bytes.Contains(text, []byte(`rblk_target_grants{export="m"}`)) {
		t.Errorf("metrics:\n%s", text)
	}
	if err := r.call("POST", "/v1/admin/drain", nil, nil); err != nil {
		t.Error(err)
	}
	if err := r.stop(); err != nil {
		t.Error(err)
	}
}

// TestCheck finds what serve would stumble over, beside a living server.
func TestCheck(t *testing.T) {
	opts := testOptions(t)
	r := start(t, opts, oneMemory(1<<20))
	p, err := tcp.New(tcp.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	levels := func(fs []Finding) map[string]Level {
		m := map[string]Level{}
		for _, f := range fs {
			m[f.Name] = f.Level
			if strings.Contains(f.Detail, "\n") || f.Detail == "" {
				t.Errorf("%s: %q", f.Name, f.Detail)
			}
		}
		return m
	}
	good := testOptions(t)
	good.Providers = []DataListen{{p, "127.0.0.1:0"}}
	for name, l := range levels(Check(within(t), good, []MemoryConfig{{Name: "x", Size: 1 << 20}}, []DatasetConfig{{"d", t.TempDir()}})) {
		if l == Bad {
			t.Errorf("%s: %s", name, l)
		}
	}
	bad := good
	bad.Listen = r.ControlAddrs()
	bad.TLSCert = "/nonexistent.crt"
	got := levels(Check(within(t), bad, []MemoryConfig{{Name: "x", Size: 1 << 50}}, []DatasetConfig{{"d", "/nonexistent"}}))
	for _, name := range []string{"memory x", "dataset d", "security", "control " + bad.Listen[0]} {
		if got[name] != Bad {
			t.Errorf("%s: %q", name, got[name])
		}
	}
}

// TestPeerProviderGone: providers are counted back to zero after many sessions
// that came and went in every way.
func TestPeerProviderGone(t *testing.T) {
	r := start(t, testOptions(t), oneMemory(1<<20))
	fds := func() int {
		names, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(names)
	}
	churn := func() {
		for i := range 10 {
			p := r.dial("m", wire.AccessRead, 2)
			switch i % 3 {
			case 0:
				if err := r.call("DELETE", "/v1/sessions/"+p.reply.Session, nil, nil, SecretHeader, p.reply.Secret); err != nil {
					t.Fatal(err)
				}
			case 1:
				p.conns[0].sendRaw([]byte{1, 2, 3})
			}
			p.close()
		}
		eventually(t, "connections are gone", func() bool {
			for _, s := range r.Status().Sessions {
				if s.Connections > 0 {
					return false
				}
			}
			return true
		})
	}
	churn()
	before := fds()
	churn()
	churn()
	eventually(t, "descriptors are back", func() bool { return fds() <= before })
}
