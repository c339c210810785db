// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"rblk/wire"
)

// controlOf makes a client for addresses.
func controlOf(t *testing.T, options string, addrs ...string) *Control {
	t.Helper()
	src, err := ParseSource("rblk://" + strings.Join(addrs, ",") + "/e")
	if err == nil {
		src, err = src.WithOptions(options)
	}
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewControl(src)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func addrOf(s *httptest.Server) string { return s.Listener.Addr().String() }

func writeFile(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func listExports(w http.ResponseWriter, r *http.Request) {
	json.NewEncoder(w).Encode(wire.ExportList{Protocol: wire.ProtocolVersion, Exports: []wire.ExportInfo{{Name: r.Header.Get("Authorization")}}})
}

func TestControlTLS(t *testing.T) {
	s := httptest.NewUnstartedServer(http.HandlerFunc(listExports))
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	defer s.Close()
	ca := writeFile(t, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})))
	ctx := context.Background()
	list, err := controlOf(t, "tls-ca="+ca+",token-file="+writeFile(t, "sesame\n"), addrOf(s)).Exports(ctx)
	if err != nil || len(list) != 1 || list[0].Name != "Bearer sesame" {
		t.Errorf("%+v, %v", list, err)
	}
	// Each mistake is told with its mend.
	if _, err := controlOf(t, "", addrOf(s)).Exports(ctx); err == nil || !strings.Contains(err.Error(), "tls-ca") {
		t.Errorf("plain HTTP to a TLS port: %v", err)
	}
	plain := httptest.NewServer(http.HandlerFunc(listExports))
	defer plain.Close()
	if _, err := controlOf(t, "tls-ca="+ca, addrOf(plain)).Exports(ctx); err == nil || !strings.Contains(err.Error(), "does not speak TLS") {
		t.Errorf("TLS to a plain port: %v", err)
	}
}

// TestBadCredentials: unusable files are refused before anything is sent, and
// what is in them is not shown.
func TestBadCredentials(t *testing.T) {
	for options, say := range map[string]string{
		"token-file=/nonexistent":                        "token-file",
		"token-file=" + writeFile(t, " \n"):              "token-file",
		"token-file=" + writeFile(t, "se\ncret"):         "token-file",
		"tls-ca=" + writeFile(t, "secret"):               "no certificate",
		"tls-cert=/a":                                    "belong together",
		"tls-cert=" + writeFile(t, "x") + ",tls-key=/no": "tls-cert",
	} {
		src, err := ParseSource("rblk://127.0.0.1/e")
		if err == nil {
			src, err = src.WithOptions(options)
		}
		if err != nil {
			t.Fatal(err)
		}
		_, err = NewControl(src)
		if err == nil || !strings.Contains(err.Error(), say) || strings.Contains(err.Error(), "secret") {
			t.Errorf("%s: %v", options, err)
		}
	}
}

// TestAddresses: the second address serves when the first is dead, and is the
// first one asked from then on.
func TestAddresses(t *testing.T) {
	dead, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gone := dead.Addr().String()
	dead.Close()
	s := httptest.NewServer(http.HandlerFunc(listExports))
	defer s.Close()
	c := controlOf(t, "", gone, addrOf(s))
	if _, err := c.Exports(context.Background()); err != nil || c.good.Load() != 1 {
		t.Errorf("%v; good address: %d", err, c.good.Load())
	}
	s.Close()
	if _, err := c.Exports(context.Background()); err == nil || !strings.Contains(err.Error(), gone) || !strings.Contains(err.Error(), addrOf(s)) || strings.Contains(err.Error(), "\n") {
		t.Errorf("all dead: %v, want both named", err)
	}
}

func TestUnixControl(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: http.HandlerFunc(listExports)}
	go s.Serve(l)
	defer s.Close()
	src, err := ParseSource("rblk+unix:///e?socket=" + path)
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewControl(src)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Exports(context.Background()); err != nil {
		t.Error(err)
	}
}

// TestStrangeAnswers: no answer makes more of the client than one clear line.
func TestStrangeAnswers(t *testing.T) {
	for name, h := range map[string]http.HandlerFunc{
		"code": func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(409)
			json.NewEncoder(w).Encode(wire.Error{Code: wire.CodeBusy, Message: "busy it is"})
		},
		"redirect": func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, "http://127.0.0.1:1/", http.StatusTemporaryRedirect)
		},
		"html": func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(502)
			fmt.Fprint(w, "<html>\n<p>bad gateway")
		},
		"garbage": func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "\x00\xff{{") },
		"version": func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, `{"protocol": 99}`) },
		"cut":     func(w http.ResponseWriter, r *http.Request) { panic(http.ErrAbortHandler) },
	} {
		s := httptest.NewServer(h)
		c := controlOf(t, "", addrOf(s))
		_, err := c.Exports(context.Background())
		var e *wire.Error
		switch {
		case err == nil || strings.Contains(err.Error(), "\n"):
			t.Errorf("%s: %v", name, err)
		case name == "code" && (!errors.As(err, &e) || e.Code != wire.CodeBusy):
			t.Errorf("%s: %v is no *wire.Error", name, err)
		}
		if _, err := c.Manifest(context.Background(), "e", ""); err == nil {
			t.Errorf("%s: taken for a manifest", name)
		}
		c.Close()
		s.Close()
	}
}

// TestEventStream: events arrive, comments do not disturb, and silence ends it.
func TestEventStream(t *testing.T) {
	more := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, ": hello\n\nevent: resize\ndata: {\"export\": %q}\n\nevent: drain\ndata: {}\n\n", r.URL.Query().Get("export"))
		w.(http.Flusher).Flush()
		select {
		case <-more:
		case <-r.Context().Done():
		}
	}))
	defer s.Close()
	defer close(more)
	c := controlOf(t, "", addrOf(s))
	var got []string
	err := c.Events(context.Background(), "a&b", 200*time.Millisecond, func(name string, e wire.Event) { got = append(got, name+" "+e.Export) })
	if err == nil || strings.Join(got, ",") != "resize a&b,drain " {
		t.Errorf("%q, %v", got, err)
	}
}
