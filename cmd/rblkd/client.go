// SPDX-License-Identifier: Apache-2.0

package main

import (
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
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"rblk/wire"
)

// controlFlags say how to reach a running rblkd.
type controlFlags struct {
	addr, ca, cert, key, token string
}

func (c *controlFlags) register(cmd *cobra.Command) {
	fs := cmd.Flags()
	fs.StringVar(&c.addr, "control", fmt.Sprintf("127.0.0.1:%d", wire.DefaultControlPort), "control plane of the running rblkd: `HOST:PORT`, https://HOST:PORT or unix:PATH")
	fs.StringVar(&c.ca, "tls-ca", "", "`FILE` of the CA that signed its certificate (then https)")
	fs.StringVar(&c.cert, "tls-cert", "", "client certificate `FILE`")
	fs.StringVar(&c.key, "tls-key", "", "client key `FILE`")
	fs.StringVar(&c.token, "token-file", "", "`FILE` with the bearer token")
}

// fromEnv takes what no flag said from RBLK_*.
func (c *controlFlags) fromEnv(fs *pflag.FlagSet, getenv func(string) string) {
	for _, name := range []string{"control", "tls-ca", "tls-cert", "tls-key", "token-file"} {
		f := fs.Lookup(name)
		if v := getenv(envName(name)); v != "" && !f.Changed {
			f.Value.Set(v) // a string takes anything
		}
	}
}

// client talks to the control plane of a running rblkd.
type client struct {
	http  *http.Client
	addr  string // for people
	base  string
	token string
}

// newClient makes a client of a command's control flags.
func newClient(cmd *cobra.Command, c *controlFlags) (*client, error) {
	c.fromEnv(cmd.Flags(), os.Getenv)
	cl := &client{addr: c.addr}
	tr := &http.Transport{}
	cl.http = &http.Client{Transport: tr}
	if path, ok := strings.CutPrefix(c.addr, "unix:"); ok {
		cl.base = "http://rblkd"
		tr.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", path)
		}
	} else {
		scheme, addr, ok := strings.Cut(c.addr, "://")
		if !ok {
			scheme, addr = "http", c.addr
			if c.ca != "" || c.cert != "" {
				scheme = "https"
			}
		}
		if _, _, err := net.SplitHostPort(addr); err != nil || (scheme != "http" && scheme != "https") {
			return nil, &usage{fmt.Errorf("--control %s: want HOST:PORT, https://HOST:PORT or unix:PATH", c.addr)}
		}
		cl.base = scheme + "://" + addr
	}
	if c.token != "" {
		text, err := os.ReadFile(c.token)
		if err != nil {
			return nil, fmt.Errorf("token file: %w", err)
		}
		cl.token = strings.TrimSpace(string(text))
	}
	var err error
	tr.TLSClientConfig, err = c.tls()
	return cl, err
}

func (c *controlFlags) tls() (*tls.Config, error) {
	conf := &tls.Config{MinVersion: tls.VersionTLS13}
	if c.ca != "" {
		pem, err := os.ReadFile(c.ca)
		if err != nil {
			return nil, fmt.Errorf("CA: %w", err)
		}
		conf.RootCAs = x509.NewCertPool()
		if !conf.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("CA %s: no certificate in it (PEM)", c.ca)
		}
	}
	if c.cert != "" {
		cert, err := tls.LoadX509KeyPair(c.cert, c.key)
		if err != nil {
			return nil, fmt.Errorf("client certificate: %w", err)
		}
		conf.Certificates = []tls.Certificate{cert}
	}
	return conf, nil
}

// answerTime bounds the requests that the target answers from memory.
const answerTime = 10 * time.Second

// do sends a request and decodes the answer into reply, when it is not nil.
func (c *client) do(ctx context.Context, method, path string, body, reply any) error {
	var text []byte
	if body != nil {
		var err error
		if text, err = json.Marshal(body); err != nil {
			return err
		}
	}
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, bytes.NewReader(text))
	if err != nil {
		return err
	}
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	defer c.http.CloseIdleConnections()
	resp, err := c.http.Do(req)
	if err != nil {
		return c.explain(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode >= 400 {
		return c.refused(resp)
	}
	if reply == nil {
		return nil
	}
	if err := json.NewDecoder(resp.Body).Decode(reply); err != nil {
		return fmt.Errorf("rblkd at %s: answer: %w", c.addr, err)
	}
	return nil
}

// refused is the target's own line.
func (c *client) refused(resp *http.Response) error {
	text, _ := io.ReadAll(io.LimitReader(resp.Body, wire.MaxJSON))
	var e wire.Error
	if json.Unmarshal(text, &e) == nil && e.Message != "" {
		return errors.New(e.Message)
	}
	return fmt.Errorf("rblkd at %s: %s: %s", c.addr, resp.Status, oneLine(string(text)))
}

// explain names the mend of a request that got no answer.
func (c *client) explain(err error) error {
	var unknownCA x509.UnknownAuthorityError
	switch {
	case errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ENOENT):
		return fmt.Errorf("no rblkd at %s: start it, or say where it is with --control", c.addr)
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("rblkd at %s does not answer", c.addr)
	case errors.As(err, &unknownCA):
		return fmt.Errorf("rblkd at %s: its certificate is not trusted: give its CA with --tls-ca", c.addr)
	}
	return fmt.Errorf("rblkd at %s: %w", c.addr, err)
}
