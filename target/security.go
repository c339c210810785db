// SPDX-License-Identifier: Apache-2.0

package target

import (
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"

	"rblk/wire"
)

// security is who may talk to the control plane. Its files are read again by
// load.
type security struct {
	opts *Options
	tls  *tls.Config // nil: plain HTTP; set once

	mu    sync.RWMutex
	cert  *tls.Certificate // guarded by mu
	token *[32]byte        // guarded by mu: sha256 of the bearer token; nil: none
}

func newSecurity(opts *Options) (*security, error) {
	s := &security{opts: opts}
	if err := s.load(); err != nil {
		return nil, err
	}
	if opts.TLSCert == "" {
		if opts.TLSClientCA != "" {
			return nil, errors.New("a client CA needs a certificate too: give --tls-cert and --tls-key")
		}
		return s, nil
	}
	s.tls = &tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: []string{"http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			s.mu.RLock()
			defer s.mu.RUnlock()
			return s.cert, nil
		},
	}
	if opts.TLSClientCA == "" {
		return s, nil
	}
	pem, err := os.ReadFile(opts.TLSClientCA)
	if err != nil {
		return nil, fmt.Errorf("client CA: %w", err)
	}
	s.tls.ClientCAs = x509.NewCertPool()
	if !s.tls.ClientCAs.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("client CA %s: no certificate in it (PEM)", opts.TLSClientCA)
	}
	s.tls.ClientAuth = tls.RequireAndVerifyClientCert
	return s, nil
}

// load reads certificate and token; on failure the old ones stay.
func (s *security) load() error {
	var cert *tls.Certificate
	if (s.opts.TLSCert == "") != (s.opts.TLSKey == "") {
		return errors.New("--tls-cert and --tls-key belong together")
	}
	if s.opts.TLSCert != "" {
		c, err := tls.LoadX509KeyPair(s.opts.TLSCert, s.opts.TLSKey)
		if err != nil {
			return fmt.Errorf("certificate: %w", err)
		}
		cert = &c
	}
	var token *[32]byte
	if s.opts.TokenFile != "" {
		text, err := os.ReadFile(s.opts.TokenFile)
		if err != nil {
			return fmt.Errorf("token file: %w", err)
		}
		t := strings.TrimSpace(string(text))
		if len(t) < 16 {
			return fmt.Errorf("token file %s: want at least 16 characters", s.opts.TokenFile)
		}
		sum := sha256.Sum256([]byte(t))
		token = &sum
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cert, s.token = cert, token
	return nil
}

// principal names who sends r: proven tells whether by a token or certificate.
func (s *security) principal(r *http.Request) (name string, proven bool, err error) {
	s.mu.RLock()
	token := s.token
	s.mu.RUnlock()
	name = "anonymous"
	if token != nil {
		given, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		sum := sha256.Sum256([]byte(given))
		if !ok || subtle.ConstantTimeCompare(sum[:], token[:]) != 1 {
			return "", false, &wire.Error{Code: wire.CodeUnauthorized, Message: "bearer token missing or wrong: give the target's token with token-file="}
		}
		name, proven = "token", true
	}
	if r.TLS != nil && len(r.TLS.PeerCertificates) > 0 {
		name, proven = "cert:"+r.TLS.PeerCertificates[0].Subject.String(), true
	}
	return name, proven, nil
}

// mayAdminister: admin requests come from this host, or are proven.
func mayAdminister(r *http.Request, proven bool) bool {
	if proven {
		return true
	}
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		return true // a Unix socket, whose permissions have decided
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

// allowPlain refuses plain HTTP that leaves the host.
func (s *security) allowPlain(addr net.Addr) error {
	a, ok := addr.(*net.TCPAddr)
	if s.tls != nil || s.opts.Insecure || !ok || a.IP.IsLoopback() {
		return nil
	}
	return fmt.Errorf("control address %s: plain HTTP beyond loopback: give --tls-cert and --tls-key, or say --insecure", addr)
}
