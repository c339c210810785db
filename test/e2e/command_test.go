// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

func decode(t testing.TB, text string, into any) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), into); err != nil {
		t.Fatalf("not JSON: %v\n%s", err, text)
	}
}

// TestPutGet: a file travels to a memory export and back.
func TestPutGet(t *testing.T) {
	tg := serve(t, "--memory", "scratch=8MiB")
	dir := t.TempDir()
	want := noise(3, 8<<20-4097)
	in, out := filepath.Join(dir, "in"), filepath.Join(dir, "out")
	if err := os.WriteFile(in, want, 0o644); err != nil {
		t.Fatal(err)
	}
	must(t, "rmount", "put", in, tg.uri("scratch"))
	must(t, "rmount", "get", tg.uri("scratch"), out)
	got, err := os.ReadFile(out)
	if err != nil || len(got) != 8<<20 || !bytes.Equal(got[:len(want)], want) {
		t.Fatalf("got %d bytes back, %v", len(got), err)
	}
	big := filepath.Join(dir, "big")
	if err := os.WriteFile(big, make([]byte, 8<<20+1), 0o644); err != nil {
		t.Fatal(err)
	}
	oneLine(t, run(t, "rmount", "put", big, tg.uri("scratch")), 1, "scratch")
}

// TestGetTree: a dataset is copied as a tree, without a mount.
func TestGetTree(t *testing.T) {
	src := oddTree(t)
	tg := serve(t, "--dataset", "odd="+src)
	dst := filepath.Join(t.TempDir(), "copy")
	must(t, "rmount", "get", tg.uri("odd"), dst)
	sameTree(t, src, dst)
}

// TestLsStatStatus: what people and scripts ask.
func TestLsStatStatus(t *testing.T) {
	tg := serve(t, "--memory", "scratch=8MiB", "--dataset", "odd="+oddTree(t))
	ls := must(t, "rmount", "ls", tg.uri(""))
	for _, want := range []string{"scratch", "memory", "odd", "dataset"} {
		if !strings.Contains(ls, want) {
			t.Errorf("ls does not say %q:\n%s", want, ls)
		}
	}
	var st map[string]any
	decode(t, must(t, "rmount", "stat", "--json", tg.uri("scratch")), &st)
	var status struct {
		Exports []struct {
			Name string
			Size int64
		}
	}
	decode(t, must(t, "rblkd", "status", "--json", "--control", tg.control), &status)
	if len(status.Exports) != 2 {
		t.Errorf("status has %d exports, want 2", len(status.Exports))
	}
	for _, args := range [][]string{{"rmount", "version"}, {"rblkd", "version"}} {
		if out := must(t, args[0], args[1:]...); !strings.Contains(out, "tcp") {
			t.Errorf("%v does not name its providers: %q", args, out)
		}
	}
	must(t, "rmount", "check")
	must(t, "rblkd", "check", "--memory", "m=1MiB")
}

// TestBench: its figures are there and are figures.
func TestBench(t *testing.T) {
	tg := serve(t, "--memory", "scratch=8MiB")
	var b map[string]any
	decode(t, must(t, "rmount", "bench", tg.uri("scratch"), "--rw", "randread", "--bs", "4KiB", "--depth", "4", "--time", "300ms", "--json"), &b)
	if len(b) == 0 {
		t.Error("bench --json is empty")
	}
}

// TestBenchDeadTarget: a measurement whose target dies ends, and says why.
func TestBenchDeadTarget(t *testing.T) {
	tg := serve(t, "--memory", "scratch=8MiB")
	killed := make(chan struct{})
	go func() {
		defer close(killed)
		time.Sleep(500 * time.Millisecond) // in the middle of it
		tg.cmd.Process.Kill()
	}()
	r := run(t, "rmount", "bench", tg.uri("scratch"), "--time", "2s")
	<-killed
	tg.wait()
	oneLine(t, r, 1, "went away")
}

// TestStatDeadTarget: the status of a mount whose target is frozen comes at
// once, since it asks the mount's own daemon only.
func TestStatDeadTarget(t *testing.T) {
	tg := serve(t, "--memory", "scratch=8MiB")
	dir := mount(t, tg.uri("scratch"))
	tg.cmd.Process.Signal(syscall.SIGSTOP)
	defer tg.cmd.Process.Signal(syscall.SIGCONT)
	var st map[string]any
	decode(t, must(t, "rmount", "stat", "--json", dir), &st)
	must(t, "rmount", "umount", dir)
}

// TestEndpoints: health, readiness, metrics, drain.
func TestEndpoints(t *testing.T) {
	tg := serve(t, "--memory", "scratch=8MiB")
	get := func(path string) (int, string) {
		t.Helper()
		resp, err := http.Get("http://" + tg.control + path)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(body)
	}
	for _, path := range []string{"/healthz", "/readyz"} {
		if code, body := get(path); code != 200 {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
	if code, body := get("/metrics"); code != 200 || !strings.Contains(body, "rblk_target_grants") {
		t.Errorf("/metrics: %d, without rblk_target_grants", code)
	}
	must(t, "rblkd", "drain", "--control", tg.control)
	tg.wait()
	if !tg.cmd.ProcessState.Success() {
		t.Errorf("drained daemon: %v", tg.cmd.ProcessState)
	}
}

// TestConfigFile: the same from YAML; an unknown key is refused by name, place
// and nearest key.
func TestConfigFile(t *testing.T) {
	src := oddTree(t)
	dir := t.TempDir()
	good := filepath.Join(dir, "good.yaml")
	text := "memory:\n  scratch:\n    size: 8MiB\ndataset:\n  odd:\n    path: " + src + "\n"
	if err := os.WriteFile(good, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	tg := serve(t, "--config", good)
	ls := must(t, "rmount", "ls", tg.uri(""))
	if !strings.Contains(ls, "scratch") || !strings.Contains(ls, "odd") {
		t.Errorf("exports of the file:\n%s", ls)
	}
	bad := filepath.Join(dir, "bad.yaml")
	if err := os.WriteFile(bad, []byte("memory:\n  scratch:\n    sise: 8MiB\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	r := run(t, "rblkd", "serve", "--config", bad, "--listen", "127.0.0.1:0", "--data-listen", "127.0.0.1:0")
	oneLine(t, r, 2, "bad.yaml", "sise", "size", "3")
}

// TestBadInput: one line that names the mend, the right exit status.
func TestBadInput(t *testing.T) {
	tg := serve(t, "--memory", "scratch=8MiB")
	full := t.TempDir()
	if err := os.WriteFile(filepath.Join(full, "f"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	base := []string{"serve", "--listen", "127.0.0.1:0", "--data-listen", "127.0.0.1:0", "--state-dir", t.TempDir()}
	for _, c := range []struct {
		name  string
		prog  string
		args  []string
		code  int
		wants []string
	}{
		{"unknown export", "rmount", []string{tg.uri("scrath"), t.TempDir()}, 1, []string{"scrath"}},
		{"mount point missing", "rmount", []string{tg.uri("scratch"), "/nonexistent/dir"}, 1, []string{"/nonexistent/dir"}},
		{"mount point not empty", "rmount", []string{tg.uri("scratch"), full}, 1, []string{full, "empty"}},
		{"unknown option", "rmount", []string{tg.uri("scratch"), t.TempDir(), "-o", "chache=1MiB"}, 2, []string{"chache", "cache"}},
		{"wrong size suffix", "rblkd", append(base[:len(base):len(base)], "--memory", "m=1GiBB"), 2, []string{"1GiBB", "MiB"}},
		{"unreadable dataset", "rblkd", append(base[:len(base):len(base)], "--dataset", "d=/nonexistent/dir"), 1, []string{"/nonexistent/dir"}},
		{"control port in use", "rblkd", []string{"serve", "--listen", tg.control, "--data-listen", "127.0.0.1:0", "--state-dir", t.TempDir(), "--memory-dir", t.TempDir(), "--memory", "m=1MiB"}, 1, []string{tg.control}},
		{"no source", "rmount", []string{"ls"}, 2, nil},
		{"unknown command", "rblkd", []string{"frobnicate"}, 2, []string{"frobnicate"}},
		{"nobody listens", "rmount", []string{"ls", "rblk://127.0.0.1:1/"}, 1, []string{"127.0.0.1:1"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			oneLine(t, run(t, c.prog, c.args...), c.code, c.wants...)
		})
	}
	if ls := must(t, "rmount", "ls", tg.uri("")); !strings.Contains(ls, "scratch") {
		t.Errorf("the daemon was harmed:\n%s", ls)
	}
}

// TestGarbage: a byte, a cut line and noise at each listener, while a mount
// goes on.
func TestGarbage(t *testing.T) {
	tg := serve(t, "--memory", "scratch=8MiB")
	path := filepath.Join(mount(t, tg.uri("scratch"), "cache=none"), "scratch")
	var status struct {
		Data []struct{ Provider, Addr string }
	}
	decode(t, must(t, "rblkd", "status", "--json", "--control", tg.control), &status)
	addrs := []string{tg.control}
	for _, d := range status.Data {
		if d.Provider == "tcp" {
			addrs = append(addrs, d.Addr)
		}
	}
	if len(addrs) < 2 {
		t.Fatalf("no data address in %v", status)
	}
	for _, addr := range addrs {
		for _, stream := range [][]byte{{0}, []byte("GET / HT"), noise(9, 100_000), nil} {
			conn, err := net.Dial("tcp", addr)
			if err != nil {
				t.Fatal(err)
			}
			conn.SetDeadline(time.Now().Add(patience))
			conn.Write(stream)
			if len(stream) > 1000 {
				io.Copy(io.Discard, conn) // until it throws us out
			}
			conn.Close()
		}
	}
	want := noise(4, 1<<20)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(want, 0); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(want))
	if _, err := f.ReadAt(got, 0); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("after garbage at the listeners: %v", err)
	}
}
