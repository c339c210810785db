// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"rblk/dataset"
	"rblk/wire"
)

// MaxManifest bounds a manifest, unpacked: ten million files take about half
// of it.
const MaxManifest = 4 << 30

// controlTime bounds one control request to one address, less the manifest and event streams.
// A target that re-opens a session may wait for its disk meanwhile.
const controlTime = 30 * time.Second

// Control talks to a target's control plane. Safe for concurrent use.
type Control struct {
	src    Source
	scheme string
	token  string
	client *http.Client
	tr     *http.Transport
	good   atomic.Int64 // index of the address that answered last
}

// NewControl makes a client for src; it does not connect yet.
func NewControl(src Source) (*Control, error) {
	c := &Control{src: src, scheme: "https"}
	tlsConf := &tls.Config{MinVersion: tls.VersionTLS13}
	if src.TLSCA != "" {
		pem, err := os.ReadFile(src.TLSCA)
		if err != nil {
			return nil, fmt.Errorf("tls-ca: %w", err)
		}
		tlsConf.RootCAs = x509.NewCertPool()
		if !tlsConf.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("tls-ca %s: no certificate in it (PEM)", src.TLSCA)
		}
	}
	if (src.TLSCert == "") != (src.TLSKey == "") {
		return nil, errors.New("tls-cert and tls-key belong together")
	}
	if src.TLSCert != "" {
		cert, err := tls.LoadX509KeyPair(src.TLSCert, src.TLSKey)
		if err != nil {
			return nil, fmt.Errorf("tls-cert: %w", err)
		}
		tlsConf.Certificates = []tls.Certificate{cert}
	}
	if src.TokenFile != "" {
		text, err := os.ReadFile(src.TokenFile)
		if err != nil {
			return nil, fmt.Errorf("token-file: %w", err)
		}
		c.token = strings.TrimSpace(string(text))
		if c.token == "" || strings.ContainsFunc(c.token, func(r rune) bool { return r <= ' ' || r > '~' }) {
			return nil, fmt.Errorf("token-file %s: want one line with the token, in printable ASCII", src.TokenFile)
		}
	}
	if src.TLSCA == "" && src.TLSCert == "" && (src.Insecure || plainAllowed(src.Addrs)) {
		c.scheme = "http"
	}
	c.tr = &http.Transport{
		TLSClientConfig:       tlsConf,
		DialContext:           c.dial,
		ResponseHeaderTimeout: controlTime,
		MaxIdleConnsPerHost:   2,
		IdleConnTimeout:       30 * time.Second,
		DisableCompression:    true,
	}
	// A target redirects nobody, and the token is for it alone.
	c.client = &http.Client{Transport: c.tr, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	return c, nil
}

// plainAllowed: plain HTTP is the default on this host only.
func plainAllowed(addrs []string) bool {
	for _, a := range addrs {
		if strings.HasPrefix(a, "unix:") {
			continue
		}
		host, _, _ := net.SplitHostPort(a)
		ip := net.ParseIP(host)
		if host != "localhost" && (ip == nil || !ip.IsLoopback()) {
			return false
		}
	}
	return true
}

func (c *Control) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	d := net.Dialer{Timeout: 10 * time.Second}
	if path, ok := strings.CutPrefix(c.src.Addrs[0], "unix:"); ok {
		return d.DialContext(ctx, "unix", path)
	}
	return d.DialContext(ctx, network, addr)
}

// Close drops idle connections.
func (c *Control) Close() { c.tr.CloseIdleConnections() }

// host is what a URL to addr says.
func host(addr string) string {
	if strings.HasPrefix(addr, "unix:") {
		return "localhost"
	}
	return strings.ReplaceAll(addr, "%", "%25") // of an IPv6 zone, RFC 6874
}

// do sends a request to the address that answered last, then to the others,
// and returns the first answer. An answer that is an error is a *wire.Error.
func (c *Control) do(ctx context.Context, method, path string, body any, header http.Header) (*http.Response, string, error) {
	var text []byte
	if body != nil {
		var err error
		if text, err = json.Marshal(body); err != nil {
			return nil, "", err
		}
	}
	var errs []error
	n := len(c.src.Addrs)
	first := int(c.good.Load())
	for i := range n {
		at := (first + i) % n
		addr := c.src.Addrs[at]
		req, err := http.NewRequestWithContext(ctx, method, c.scheme+"://"+host(addr)+path, bytes.NewReader(text))
		if err != nil {
			return nil, "", err
		}
		for k, v := range header {
			req.Header[k] = v
		}
		if c.token != "" {
			req.Header.Set("Authorization", "Bearer "+c.token)
		}
		resp, err := c.client.Do(req)
		if err != nil {
			errs = append(errs, hint(c.scheme, addr, err))
			continue
		}
		c.good.Store(int64(at))
		if resp.StatusCode >= 300 && resp.StatusCode != http.StatusNotModified {
			defer resp.Body.Close()
			return nil, addr, answered(c.scheme, addr, resp)
		}
		return resp, addr, nil
	}
	return nil, "", joined(errs)
}

// hint words a transport failure with its mend.
func hint(scheme, addr string, err error) error {
	var ue *url.Error
	if errors.As(err, &ue) {
		err = ue.Err
	}
	var op *net.OpError
	switch {
	case errors.Is(err, http.ErrSchemeMismatch):
		return fmt.Errorf("target %s does not speak TLS: say insecure if plain HTTP is what you want: %w", addr, err)
	case scheme == "http" && errors.Is(err, io.EOF):
		return fmt.Errorf("target %s hung up: if it speaks TLS, give tls-ca: %w", addr, err)
	case errors.As(err, &op) && op.Op == "remote error": // a TLS alert of the target
		return fmt.Errorf("target %s refuses the TLS handshake: if it wants a client certificate, give tls-cert and tls-key: %w", addr, err)
	}
	return fmt.Errorf("target %s: %w", addr, err)
}

// answered reads an error answer.
func answered(scheme, addr string, resp *http.Response) error {
	text, err := io.ReadAll(io.LimitReader(resp.Body, wire.MaxJSON))
	var e wire.Error
	if err == nil && json.Unmarshal(text, &e) == nil && e.Code != "" {
		return &e
	}
	line, _, _ := strings.Cut(strings.TrimSpace(string(text)), "\n")
	if scheme == "http" && strings.Contains(line, "HTTPS server") {
		return fmt.Errorf("target %s speaks TLS: give tls-ca (and leave insecure out)", addr)
	}
	return fmt.Errorf("target %s answered %s: %s", addr, resp.Status, line)
}

// call is do with a JSON answer.
func (c *Control) call(ctx context.Context, method, path string, body, into any, header http.Header) (addr string, err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(len(c.src.Addrs))*controlTime)
	defer cancel()
	resp, addr, err := c.do(ctx, method, path, body, header)
	if err != nil {
		return addr, err
	}
	defer resp.Body.Close()
	if into == nil {
		_, err = io.Copy(io.Discard, io.LimitReader(resp.Body, wire.MaxJSON))
		return addr, err
	}
	// An answer may list many exports: it is bounded, but not as a request is.
	err = json.NewDecoder(io.LimitReader(resp.Body, 64<<20)).Decode(into)
	if err != nil {
		return addr, fmt.Errorf("target %s: unreadable answer to %s %s: %w", addr, method, path, err)
	}
	return addr, nil
}

// Exports lists what the target exports.
func (c *Control) Exports(ctx context.Context) ([]wire.ExportInfo, error) {
	var list wire.ExportList
	if _, err := c.call(ctx, http.MethodGet, "/v1/exports", nil, &list, nil); err != nil {
		return nil, err
	}
	if err := wire.CheckVersion("target", list.Protocol); err != nil {
		return nil, err
	}
	return list.Exports, nil
}

// Open opens or re-opens a session; addr is the control address that answered.
func (c *Control) Open(ctx context.Context, req *wire.SessionRequest) (reply *wire.SessionReply, addr string, err error) {
	reply = &wire.SessionReply{}
	if addr, err = c.call(ctx, http.MethodPost, "/v1/sessions", req, reply, nil); err != nil {
		return nil, addr, err
	}
	if err := wire.CheckVersion("target", reply.Protocol); err != nil {
		return nil, addr, err
	}
	return reply, addr, nil
}

// Delete ends a session.
func (c *Control) Delete(ctx context.Context, id, secret string) error {
	_, err := c.call(ctx, http.MethodDelete, "/v1/sessions/"+url.PathEscape(id), nil, nil, http.Header{"Rblk-Secret": {secret}})
	return err
}

// Status asks the target how it is.
func (c *Control) Status(ctx context.Context) (*wire.TargetStatus, error) {
	st := &wire.TargetStatus{}
	_, err := c.call(ctx, http.MethodGet, "/v1/status", nil, st, nil)
	return st, err
}

// Manifest fetches a dataset's manifest; nil when it still is the one that
// digest names ("" for none).
func (c *Control) Manifest(ctx context.Context, export, digest string) (*dataset.Manifest, error) {
	h := http.Header{"Accept-Encoding": {"zstd"}}
	if digest != "" {
		h.Set("If-None-Match", `"`+digest+`"`)
	}
	resp, addr, err := c.do(ctx, http.MethodGet, "/v1/exports/"+url.PathEscape(export)+"/manifest", nil, h)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusNotModified {
		return nil, nil
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, MaxManifest+1))
	if err == nil && int64(len(text)) > MaxManifest {
		err = dataset.ErrTooLarge
	}
	if err == nil && resp.Header.Get("Content-Encoding") == "zstd" {
		text, err = dataset.Decompress(text, MaxManifest)
	}
	if err != nil {
		return nil, fmt.Errorf("target %s: manifest of %s: %w", addr, export, err)
	}
	m, err := dataset.Decode(text)
	if err != nil {
		return nil, fmt.Errorf("target %s: manifest of %s: %w", addr, export, err)
	}
	return m, nil
}

// Events follows the target's events about export ("" for all) until ctx ends,
// the stream breaks, or silence lasts longer than the target promises.
func (c *Control) Events(ctx context.Context, export string, silence time.Duration, f func(name string, e wire.Event)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	quiet := time.AfterFunc(silence, cancel)
	defer quiet.Stop()
	resp, addr, err := c.do(ctx, http.MethodGet, "/v1/events?export="+url.QueryEscape(export), nil, http.Header{"Accept": {"text/event-stream"}})
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	sc := bufio.NewScanner(resp.Body)
	sc.Buffer(nil, wire.MaxJSON)
	name := ""
	for sc.Scan() {
		quiet.Reset(silence)
		line := sc.Text()
		if v, ok := strings.CutPrefix(line, "event: "); ok {
			name = v
		} else if v, ok := strings.CutPrefix(line, "data: "); ok {
			var e wire.Event
			if err := json.Unmarshal([]byte(v), &e); err != nil {
				return fmt.Errorf("target %s: unreadable event: %w", addr, err)
			}
			f(name, e)
		}
	}
	if err := sc.Err(); err != nil {
		return fmt.Errorf("target %s: events: %w", addr, err)
	}
	return nil
}
