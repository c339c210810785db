// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"rblk/internal/need"
)

// TestMountCommand: mount(8) by type and by fstab, with the options that
// belong to others, and umount(8).
func TestMountCommand(t *testing.T) {
	need.Program(t, "mount.fuse3", "fuse3")
	tg := serve(t, "--memory", "scratch=8MiB")
	dir := t.TempDir()
	const options = "ro,noatime,nofail,_netdev,noauto,user,x-systemd.automount,cache=16MiB"
	fstab := filepath.Join(t.TempDir(), "fstab")
	line := tg.uri("scratch") + " " + dir + " fuse.rmount " + options + " 0 0\n"
	if err := os.WriteFile(fstab, []byte(line), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, mount := range []string{
		"mount -t fuse.rmount " + tg.uri("scratch") + " " + dir + " -o " + options,
		"mount -T " + fstab + " " + dir,
	} {
		out, err := installed(mount + " && stat -c %s " + dir + "/scratch && grep ' " + dir + " ' /proc/mounts && umount " + dir)
		if err != nil {
			t.Fatalf("%s: %v\n%s", mount, err, out)
		}
		for _, want := range []string{"8388608", "fuse.rmount", "ro,", "nosuid", "nodev", "noatime"} {
			if !strings.Contains(out, want) {
				t.Errorf("%s: no %q in\n%s", mount, want, out)
			}
		}
	}
	out, err := installed("mount -t fuse.rmount " + tg.uri("nosuch") + " " + dir)
	if err == nil || !strings.Contains(out, "nosuch") {
		t.Errorf("mounting what does not exist: %v, %s", err, out)
	}
}

// installed runs a script where our binaries are in /usr/local/bin: mount(8)
// looks for them in no other place than the usual ones. The mounts of the
// script are its own.
func installed(script string) (string, error) {
	cmd := exec.Command("unshare", "-m", "--propagation", "private", "sh", "-ec",
		"mount --bind "+bin+" /usr/local/bin\n"+script)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// TestMountTwice: a live mount is refused, and stays as it is.
func TestMountTwice(t *testing.T) {
	tg := serve(t, "--memory", "scratch=8MiB")
	dir := mount(t, tg.uri("scratch"), "ro")
	oneLine(t, run(t, "rmount", tg.uri("scratch"), dir, "-o", "ro"), 1, dir, "already", "umount")
	if _, err := os.Stat(filepath.Join(dir, "scratch")); err != nil {
		t.Error(err)
	}
}

// TestForeground: -f stays until the mount ends, and ends well.
func TestForeground(t *testing.T) {
	need.FUSE(t)
	tg := serve(t, "--memory", "scratch=8MiB")
	for name, end := range map[string]func(dir string, p *os.Process) error{
		"umount":  func(dir string, _ *os.Process) error { return exec.Command("umount", dir).Run() },
		"SIGTERM": func(_ string, p *os.Process) error { return p.Signal(syscall.SIGTERM) },
	} {
		dir := t.TempDir()
		cmd := exec.Command(filepath.Join(bin, "rmount"), tg.uri("scratch"), dir, "-f", "-o", "metrics=127.0.0.1:0")
		var errs syncBuffer
		cmd.Stderr = &errs
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the mount", func() bool { return mounted(t, dir) && run(t, "rmount", "stat", dir).code == 0 })
		if err := end(dir, cmd.Process); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := cmd.Wait(); err != nil {
			t.Errorf("%s: rmount -f: %v\n%s", name, err, &errs)
		}
		if mounted(t, dir) {
			t.Errorf("%s: still mounted", name)
		}
	}
}

// TestSIGTERMDeadTarget: a mount whose target is frozen and whose readers are
// blocked ends on SIGTERM, and its readers with it.
func TestSIGTERMDeadTarget(t *testing.T) {
	tg := serve(t, "--memory", "scratch=8MiB")
	dir := mount(t, tg.uri("scratch"), "cache=none")
	f, err := os.Open(filepath.Join(dir, "scratch"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	pid := daemonPID(t, dir)
	tg.cmd.Process.Signal(syscall.SIGSTOP)
	defer tg.cmd.Process.Signal(syscall.SIGCONT)
	read := make(chan error, 1)
	go func() {
		_, err := unix.Pread(int(f.Fd()), make([]byte, 4096), 1<<20)
		for errors.Is(err, syscall.EINTR) {
			_, err = unix.Pread(int(f.Fd()), make([]byte, 4096), 1<<20)
		}
		read <- err
	}()
	start := time.Now()
	defer func() { t.Logf("ended after %v", time.Since(start)) }()
	syscall.Kill(pid, syscall.SIGTERM)
	eventually(t, "the daemon's end", func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		return err != nil || bytes.Contains(stat, []byte(") Z "))
	})
	if err := <-read; err == nil {
		t.Error("a read from a frozen target succeeded")
	}
	if mounted(t, dir) {
		t.Error("still mounted")
	}
}

// TestMetrics: the mount's own counters.
func TestMetrics(t *testing.T) {
	tg := serve(t, "--memory", "scratch=8MiB")
	addr := freePort(t)
	dir := mount(t, tg.uri("scratch"), "ro", "metrics="+addr)
	if _, err := os.ReadFile(filepath.Join(dir, "scratch")); err != nil {
		t.Fatal(err)
	}
	resp, err := http.Get("http://" + addr + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	for _, want := range []string{"rblk_cache_fetched_bytes_total", "rblk_cache_served_bytes_total", "rblk_cache_hits_total", "rblk_session_state"} {
		if err != nil || !bytes.Contains(text, []byte(want)) {
			t.Errorf("no %s: %v", want, err)
		}
	}
}

// freePort is an address that nobody listens on.
func freePort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}
