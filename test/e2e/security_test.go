// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"rblk/internal/need"
)

// authority signs certificates into a directory.
type authority struct {
	t    *testing.T
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	next int64
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t, dir: t.TempDir()}
	a.key, a.cert = a.sign("ca", &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign})
	return a
}

// sign makes NAME.pem and NAME.key.
func (a *authority) sign(name string, c *x509.Certificate) (*ecdsa.PrivateKey, *x509.Certificate) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	a.next++
	c.SerialNumber, c.Subject = big.NewInt(a.next), pkix.Name{CommonName: name}
	c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	parent, signer := c, key
	if a.cert != nil {
		parent, signer = a.cert, a.key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, signer)
	if err != nil {
		a.t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		a.t.Fatal(err)
	}
	a.write(name+".pem", "CERTIFICATE", der)
	a.write(name+".key", "PRIVATE KEY", secret)
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return key, cert
}

func (a *authority) write(name, kind string, der []byte) {
	a.t.Helper()
	text := pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
	if err := os.WriteFile(a.path(name), text, 0o600); err != nil {
		a.t.Fatal(err)
	}
}

func (a *authority) path(name string) string { return filepath.Join(a.dir, name) }

// TestTLS: a certificate makes the control plane HTTPS; who does not know its
// authority, speaks plain HTTP, or lacks a demanded client certificate is told
// so in one line.
func TestTLS(t *testing.T) {
	a := newAuthority(t)
	a.sign("target", &x509.Certificate{IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	a.sign("node", &x509.Certificate{ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	server := []string{"--memory", "scratch=8MiB", "--tls-cert", a.path("target.pem"), "--tls-key", a.path("target.key")}
	tg := serve(t, server...)
	ca := "tls-ca=" + a.path("ca.pem")
	if ls := must(t, "rmount", "ls", tg.uri(""), "-o", ca); !strings.Contains(ls, "scratch") {
		t.Errorf("ls over TLS: %s", ls)
	}
	oneLine(t, run(t, "rmount", "ls", tg.uri("")), 1, "TLS", "tls-ca")
	stranger := newAuthority(t)
	oneLine(t, run(t, "rmount", "ls", tg.uri(""), "-o", "tls-ca="+stranger.path("ca.pem")), 1, "certificate")

	both := serve(t, append(server, "--tls-client-ca", a.path("ca.pem"))...)
	node := ca + ",tls-cert=" + a.path("node.pem") + ",tls-key=" + a.path("node.key")
	dir := mount(t, both.uri("scratch"), node)
	if _, err := os.ReadFile(filepath.Join(dir, "scratch")); err != nil {
		t.Error(err)
	}
	oneLine(t, run(t, "rmount", "ls", both.uri(""), "-o", ca), 1, "tls-cert")
}

// TestToken: without the bearer token nothing is answered but the health.
func TestToken(t *testing.T) {
	dir := t.TempDir()
	good, bad := filepath.Join(dir, "good"), filepath.Join(dir, "bad")
	for path, text := range map[string]string{good: "0123456789abcdef0123\n", bad: "0123456789abcdef0124\n"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	tg := serve(t, "--memory", "scratch=8MiB", "--token-file", good)
	must(t, "rmount", "ls", tg.uri(""), "-o", "token-file="+good)
	oneLine(t, run(t, "rmount", "ls", tg.uri("")), 1, "token-file")
	oneLine(t, run(t, "rmount", "ls", tg.uri(""), "-o", "token-file="+bad), 1, "token")
	oneLine(t, run(t, "rmount", "ls", tg.uri("")+"?token=0123456789abcdef0123"), 2, "token-file")
}

// TestPlainBeyondLoopback: refused before anything listens.
func TestPlainBeyondLoopback(t *testing.T) {
	dir := t.TempDir()
	r := run(t, "rblkd", "serve", "--listen", "0.0.0.0:0", "--data-listen", "127.0.0.1:0", "--state-dir", dir, "--memory-dir", dir)
	oneLine(t, r, 1, "--tls-cert", "--insecure")
}

// TestMemlock: a limit too low is named with the need and the mend.
func TestMemlock(t *testing.T) {
	need.Root(t)
	dir, err := os.MkdirTemp("/dev/shm", "rblk-e2e-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	const nobody = 65534
	prog := filepath.Join(dir, "rblkd")
	text, err := os.ReadFile(filepath.Join(bin, "rblkd"))
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{os.Chmod(dir, 0o777), os.WriteFile(prog, text, 0o755)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command("/bin/bash", "-c", "ulimit -l 64 && exec \"$0\" \"$@\"", prog, "serve", "--listen", "127.0.0.1:0", "--data-listen", "127.0.0.1:0",
		"--state-dir", filepath.Join(dir, "s"), "--memory-dir", filepath.Join(dir, "m"), "--memory", "scratch=1MiB")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}, Pdeathsig: syscall.SIGKILL}
	cmd.Dir = "/"
	var stderr syncBuffer
	cmd.Stderr = &stderr
	err = cmd.Run()
	if cmd.ProcessState == nil {
		t.Fatal(err)
	}
	oneLine(t, result{cmd.ProcessState.ExitCode(), "", stderr.String()}, 1, "scratch", "1.0 MiB", "64 KiB", "LimitMEMLOCK", "ulimit -l")
}
