// SPDX-License-Identifier: Apache-2.0

// Package e2e starts the real rblkd and rmount, with real mounts, and uses them
// as a person would.
package e2e

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"rblk/internal/need"
)

// patience bounds every wait of this package. It is no measure of speed: only
// a hang reaches it.
const patience = 60 * time.Second

var bin string // directory of the binaries under test

// TestMain builds the binaries with the race detector, so that a race in a
// daemon fails the run (GORACE makes it exit with a status of its own).
func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "rblk-e2e-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	bin = dir
	args := []string{"build", "-race", "-o", dir + "/"}
	if tags := os.Getenv("RBLK_TAGS"); tags != "" {
		args = append(args, "-tags", tags)
	}
	build := exec.Command("go", append(args, "rblk/cmd/rblkd", "rblk/cmd/rmount")...)
	build.Stderr = os.Stderr
	if err := build.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "e2e: build:", err)
		os.Exit(1)
	}
	os.Setenv("RBLK_RUN", filepath.Join(dir, "run"))
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

// target is a running rblkd.
type target struct {
	t       testing.TB
	args    []string
	cmd     *exec.Cmd
	stderr  *syncBuffer
	control string // host:port
	exited  chan struct{}
}

var readyLine = regexp.MustCompile(`control=(\S+)`)

// serve starts rblkd on free ports with directories of its own and waits until
// it is ready. The test's end drains it.
func serve(t testing.TB, args ...string) *target {
	t.Helper()
	need.Root(t)
	dir := t.TempDir()
	mem, err := os.MkdirTemp("/dev/shm", "rblk-e2e-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(mem) })
	tg := &target{t: t, args: append([]string{
		"serve", "--listen", "127.0.0.1:0", "--data-listen", "127.0.0.1:0",
		"--state-dir", filepath.Join(dir, "state"), "--memory-dir", mem,
	}, args...)}
	tg.start()
	t.Cleanup(tg.stop)
	return tg
}

// start runs the daemon with its arguments; after a first start the control
// address is pinned, so that a restarted target is found again.
func (tg *target) start() {
	tg.t.Helper()
	if tg.control != "" {
		for i, a := range tg.args {
			if a == "--listen" {
				tg.args[i+1] = tg.control
			}
		}
	}
	cmd := exec.Command(filepath.Join(bin, "rblkd"), tg.args...)
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		tg.t.Fatal(err)
	}
	stderr := &syncBuffer{}
	cmd.Stderr = stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		tg.t.Fatal(err)
	}
	tg.cmd, tg.stderr, tg.exited = cmd, stderr, make(chan struct{})
	ready := make(chan string, 1)
	go func() {
		sc := bufio.NewScanner(stdout)
		for sc.Scan() {
			if m := readyLine.FindStringSubmatch(sc.Text()); m != nil {
				select {
				case ready <- m[1]:
				default:
				}
			}
		}
		cmd.Wait()
		close(tg.exited)
	}()
	select {
	case tg.control = <-ready:
	case <-tg.exited:
		tg.t.Fatalf("rblkd ended early: %v\n%s", cmd.ProcessState, stderr)
	case <-time.After(patience):
		cmd.Process.Kill()
		tg.t.Fatalf("rblkd not ready\n%s", stderr)
	}
}

// kill is kill -9.
func (tg *target) kill() {
	tg.t.Helper()
	tg.cmd.Process.Kill()
	tg.wait()
}

// stop drains the daemon and checks that it ended well.
func (tg *target) stop() {
	tg.t.Helper()
	select {
	case <-tg.exited:
		return
	default:
	}
	tg.cmd.Process.Signal(syscall.SIGTERM)
	tg.wait()
	if !tg.cmd.ProcessState.Success() {
		tg.t.Errorf("rblkd: %v\n%s", tg.cmd.ProcessState, tg.stderr)
	}
}

func (tg *target) wait() {
	tg.t.Helper()
	select {
	case <-tg.exited:
	case <-time.After(patience):
		tg.cmd.Process.Kill()
		tg.t.Fatalf("rblkd does not end\n%s", tg.stderr)
	}
}

// uri of an export ("" for the root).
func (tg *target) uri(export string) string { return "rblk://" + tg.control + "/" + export }

// result of a command that has ended.
type result struct {
	code           int
	stdout, stderr string
}

// run runs one of our programs to its end.
func run(t testing.TB, name string, args ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var out, errb bytes.Buffer
	cmd := exec.CommandContext(ctx, filepath.Join(bin, name), args...)
	cmd.Stdout, cmd.Stderr = &out, &errb
	cmd.WaitDelay = 5 * time.Second
	err := cmd.Run()
	if ctx.Err() != nil {
		t.Fatalf("%s %s: did not end\n%s%s", name, strings.Join(args, " "), out.String(), errb.String())
	}
	if cmd.ProcessState == nil {
		t.Fatalf("%s: %v", name, err)
	}
	return result{cmd.ProcessState.ExitCode(), out.String(), errb.String()}
}

// must runs one of our programs and wants exit status 0; it returns stdout.
func must(t testing.TB, name string, args ...string) string {
	t.Helper()
	r := run(t, name, args...)
	if r.code != 0 {
		t.Fatalf("%s %s: exit %d\n%s%s", name, strings.Join(args, " "), r.code, r.stdout, r.stderr)
	}
	return r.stdout
}

// mount mounts source and returns the directory; the test's end unmounts it.
func mount(t testing.TB, source string, opts ...string) string {
	t.Helper()
	need.FUSE(t)
	dir := t.TempDir()
	mountAt(t, source, dir, opts...)
	return dir
}

func mountAt(t testing.TB, source, dir string, opts ...string) {
	t.Helper()
	args := []string{source, dir}
	if len(opts) > 0 {
		args = append(args, "-o", strings.Join(opts, ","))
	}
	must(t, "rmount", args...)
	t.Cleanup(func() {
		if mounted(t, dir) {
			must(t, "rmount", "umount", dir)
		}
	})
}

// mounted looks into the kernel's table; it never touches the mount itself.
func mounted(t testing.TB, dir string) bool {
	t.Helper()
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(table)) {
		if f := strings.Fields(line); len(f) > 4 && f[4] == dir {
			return true
		}
	}
	return false
}

// eventually waits until ok holds.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// oneLine checks that a refusal is what promise 6 says: non-zero, one line,
// naming the mend.
func oneLine(t testing.TB, r result, code int, wants ...string) {
	t.Helper()
	text := strings.TrimSpace(r.stderr)
	if r.code != code {
		t.Errorf("exit status %d, want %d\n%s", r.code, code, r.stderr)
	}
	if strings.Contains(text, "\n") || text == "" {
		t.Errorf("want one line on stderr, got %q", r.stderr)
	}
	for _, w := range wants {
		if !strings.Contains(text, w) {
			t.Errorf("stderr %q does not say %q", text, w)
		}
	}
}

// syncBuffer is a bytes.Buffer for a process that writes while a test reads.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

var _ io.Writer = (*syncBuffer)(nil)

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}
