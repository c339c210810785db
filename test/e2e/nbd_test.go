// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bufio"
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"rblk/internal/need"
)

// serveNBD starts `rmount nbd serve` on a Unix socket; the test's end stops it
// and wants it to end well.
func serveNBD(t *testing.T, args ...string) (socket string) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "nbd.sock")
	cmd := exec.Command(filepath.Join(bin, "rmount"), append([]string{"nbd", "serve", "--listen", "unix:" + socket}, args...)...)
	var stderr syncBuffer
	cmd.Stderr = &stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil {
			t.Errorf("rmount nbd serve: %v\n%s", err, &stderr)
		}
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || !strings.HasPrefix(line, "ready") {
		t.Fatalf("not ready: %q %v\n%s", line, err, &stderr)
	}
	return socket
}

// tool runs somebody else's program and wants it to succeed.
func tool(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command("timeout", append([]string{"60", name}, args...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// TestNBDLibnbd: nbdinfo sees what the volume can do; nbdcopy moves it both
// ways, over one and four connections.
func TestNBDLibnbd(t *testing.T) {
	need.Program(t, "nbdcopy", "libnbd-bin")
	tg := serve(t, "--memory", "scratch=32MiB")
	uri := "nbd+unix:///scratch?socket=" + serveNBD(t, tg.uri("scratch"))
	info := tool(t, "nbdinfo", "--list", uri)
	for _, want := range []string{`export="scratch"`, "export-size: 33554432", "can_flush: true", "can_fua: true", "can_trim: true", "can_zero: true",
		"can_multi_conn: true", "can_df: true", "can_cache: true", "is_read_only: false", "base:allocation"} {
		if !strings.Contains(info, want) {
			t.Errorf("nbdinfo does not say %q:\n%s", want, info)
		}
	}
	dir := t.TempDir()
	for i, conns := range []string{"1", "4"} {
		in, out := filepath.Join(dir, "in"+conns), filepath.Join(dir, "out"+conns)
		want := noise(uint64(20+i), 32<<20)
		if err := os.WriteFile(in, want, 0o644); err != nil {
			t.Fatal(err)
		}
		tool(t, "nbdcopy", "--connections", conns, "--flush", in, uri)
		tool(t, "nbdcopy", "--connections", conns, uri, out)
		if got, err := os.ReadFile(out); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s connections: %v, or other bytes", conns, err)
		}
	}
}

// TestNBDQemu: qemu-io writes patterns, zeroes and discards; qemu-img compares.
func TestNBDQemu(t *testing.T) {
	need.Program(t, "qemu-io", "qemu-utils")
	tg := serve(t, "--memory", "scratch=16MiB")
	uri := "nbd+unix:///scratch?socket=" + serveNBD(t, tg.uri("scratch"))
	script := []string{"-f", "raw"}
	for _, c := range []string{
		"write -P 0xa5 0 1M", "write -P 0x5a 1M 64k", "write -f -P 0x11 2M 4k", "write -z 512k 256k", "discard 768k 128k", "flush",
		"read -P 0xa5 0 512k", "read -P 0 512k 384k", "read -P 0xa5 896k 128k", "read -P 0x5a 1M 64k", "read -P 0x11 2M 4k", "aio_write -P 7 4M 1M", "aio_read -P 0 8M 1M", "aio_flush", "read -P 7 4M 1M",
	} {
		script = append(script, "-c", c)
	}
	out := tool(t, "qemu-io", append(script, uri)...)
	if strings.Contains(out, "Pattern verification failed") || strings.Contains(out, "failed") {
		t.Errorf("qemu-io:\n%s", out)
	}
	img := filepath.Join(t.TempDir(), "img")
	tool(t, "qemu-img", "convert", "-f", "raw", "-O", "raw", uri, img)
	if got := tool(t, "qemu-img", "compare", "-f", "raw", "-F", "raw", uri, img); !strings.Contains(got, "identical") {
		t.Error(got)
	}
}

// TestNBDFio: random reads and writes with verification at depth.
func TestNBDFio(t *testing.T) {
	fio := need.Program(t, "fio", "fio")
	if out, err := exec.Command(fio, "--enghelp=nbd").CombinedOutput(); err != nil || strings.Contains(string(out), "not found") {
		need.Skip(t, "fio with the nbd engine")
	}
	tg := serve(t, "--memory", "scratch=16MiB")
	uri := "nbd+unix:///scratch?socket=" + serveNBD(t, tg.uri("scratch"), "-o", "cache=1MiB")
	tool(t, fio, "--name=verify", "--ioengine=nbd", "--uri="+uri, "--rw=randwrite", "--bs=4k", "--size=16M", "--iodepth=32",
		"--verify=crc32c", "--do_verify=1", "--verify_fatal=1", "--verify_state_save=0", "--randrepeat=1")
}

// TestNBDTargetRestart: a copy goes on over a killed and restarted target.
func TestNBDTargetRestart(t *testing.T) {
	need.Program(t, "nbdcopy", "libnbd-bin")
	tg := serve(t, "--memory", "scratch=64MiB")
	uri := "nbd+unix:///scratch?socket=" + serveNBD(t, tg.uri("scratch"), "-o", "cache=none")
	in, out := filepath.Join(t.TempDir(), "in"), filepath.Join(t.TempDir(), "out")
	want := noise(30, 64<<20)
	if err := os.WriteFile(in, want, 0o644); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- exec.Command("timeout", "60", "nbdcopy", "--flush", in, uri).Run() }()
	time.Sleep(30 * time.Millisecond) // in the middle or not: both are right
	tg.kill()
	tg.start()
	if err := <-done; err != nil {
		t.Fatalf("copy over a killed target: %v", err)
	}
	tool(t, "nbdcopy", uri, out)
	if got, err := os.ReadFile(out); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%v, or other bytes", err)
	}
}

func TestNBDBadInput(t *testing.T) {
	tg := serve(t, "--memory", "scratch=8MiB")
	oneLine(t, run(t, "rmount", "nbd", "serve", tg.uri("scratch")), 2, "--listen")
	oneLine(t, run(t, "rmount", "nbd", "serve", tg.uri("scratch"), "--listen", "udp:1"), 2, "unix:PATH")
	oneLine(t, run(t, "rmount", "nbd", "serve", tg.uri("scrath"), "--listen", "unix:"+filepath.Join(t.TempDir(), "s")), 1, "scrath")
	oneLine(t, run(t, "rmount", "nbd", "serve", tg.uri("scratch"), "--listen", "unix:/nonexistent/dir/s"), 1, "/nonexistent/dir/s")
}
