// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// roleEnv makes this test binary play the daemon that spawnDaemon starts.
const roleEnv = "RBLK_TEST_ROLE"

func TestMain(m *testing.M) {
	if inDaemon() {
		os.Exit(playDaemon(os.Getenv(roleEnv)))
	}
	goleak.VerifyTestMain(m)
}

func playDaemon(role string) int {
	switch role {
	case "good":
		io.WriteString(os.Stderr, "a warning\n")
		if err := announceReady(); err != nil {
			return 1
		}
		var st unix.Stat_t
		if err := unix.Fstat(2, &st); err != nil || unix.Major(st.Rdev) != 1 || unix.Minor(st.Rdev) != 3 {
			os.Remove(os.Getenv("RBLK_TEST_PROOF")) // standard error still leads somewhere
		}
		os.WriteFile(os.Getenv("RBLK_TEST_PROOF"), []byte("alive"), 0o600)
		return 0
	case "bad":
		io.WriteString(os.Stderr, "rmount: it went wrong\n")
		return 1
	case "usage":
		return 2
	case "killed":
		unix.Kill(os.Getpid(), unix.SIGKILL)
	case "slow":
		<-make(chan int) // until a signal
	}
	return 3
}

// stderr runs f with standard error in a file, and returns what came there.
func stderr(t *testing.T, f func()) string {
	t.Helper()
	file, err := os.Create(filepath.Join(t.TempDir(), "stderr"))
	if err != nil {
		t.Fatal(err)
	}
	old := os.Stderr
	os.Stderr = file
	f()
	os.Stderr = old
	file.Close()
	text, err := os.ReadFile(file.Name())
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestSpawnDaemon(t *testing.T) {
	proof := filepath.Join(t.TempDir(), "proof")
	t.Setenv("RBLK_TEST_PROOF", proof)
	for _, c := range []struct {
		role string
		want error
		says string
	}{
		{"good", nil, "a warning\n"},
		{"bad", exitStatus(1), "rmount: it went wrong\n"},
		{"usage", exitStatus(2), ""},
	} {
		t.Setenv(roleEnv, c.role)
		says := stderr(t, func() {
			if err := spawnDaemon(t.Context()); err != c.want {
				t.Errorf("%s: %v, want %v", c.role, err, c.want)
			}
		})
		if says != c.says {
			t.Errorf("%s: said %q, want %q", c.role, says, c.says)
		}
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if b, _ := os.ReadFile(proof); string(b) == "alive" {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the daemon did not live on")
		}
	}
	t.Setenv(roleEnv, "killed")
	if err := spawnDaemon(t.Context()); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Errorf("killed: %v", err)
	}
	t.Setenv(roleEnv, "slow")
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // as by Ctrl-C: the daemon must not stay behind
	if err := spawnDaemon(ctx); err == nil {
		t.Error("slow: no error")
	}
}

func TestStatusSocket(t *testing.T) {
	run := filepath.Join(t.TempDir(), "run")
	t.Setenv("RBLK_RUN", run)
	want := mountStatus{Source: "rblk://host/x", Mountpoint: "/mnt/x", PID: 42, State: "reconnecting"}
	discard := slog.New(slog.DiscardHandler)
	if err := os.MkdirAll(run, 0o755); err != nil {
		t.Fatal(err)
	}
	stale := filepath.Join(run, socketName("/mnt/x")) // as a dead daemon leaves it
	if err := os.WriteFile(stale, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := serveStatus("/mnt/x", func() mountStatus { return want }, discard)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		got, err := askStatus(stale)
		if err != nil || got.Source != want.Source || got.PID != want.PID || got.State != want.State {
			t.Errorf("%+v, %v", got, err)
		}
	}
	s.close()
	if _, err := askStatus(stale); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after close: %v", err)
	}
	if _, err := readStatus("/mnt/x"); err == nil || !strings.Contains(err.Error(), "not a mount") {
		t.Errorf("no mount there: %v", err)
	}
	long := "/" + strings.Repeat("very/long/", 100)
	if len(socketName(long)) > 40 {
		t.Error("the socket's name grows with the mount point's")
	}
}

func TestRunDirs(t *testing.T) {
	t.Setenv("RBLK_RUN", "")
	t.Setenv("XDG_RUNTIME_DIR", "/xdg")
	if got := runDirs(0); len(got) != 1 || got[0] != "/run/rblk" {
		t.Errorf("root: %v", got)
	}
	if got := runDirs(1234567); got[0] != "/run/user/1234567/rblk" {
		t.Errorf("another user: %v", got)
	}
}

func TestUmountErrors(t *testing.T) {
	dir := t.TempDir()
	if err := umount(t.Context(), dir, 0); err == nil || !strings.Contains(err.Error(), "nothing is mounted") {
		t.Errorf("no mount: %v", err)
	}
	if err := umount(t.Context(), "/proc", 0); err == nil || !strings.Contains(err.Error(), "type proc") {
		t.Errorf("another's mount: %v", err)
	}
}

func TestOpenLog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	log, c, err := openLog(path, slog.LevelInfo, false)
	if err != nil {
		t.Fatal(err)
	}
	log.Debug("no")
	log.Info("yes", "key", "value")
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	text, err := os.ReadFile(path)
	if err != nil || !strings.Contains(string(text), "msg=yes key=value") || strings.Contains(string(text), "msg=no") {
		t.Errorf("%q, %v", text, err)
	}
	for _, bad := range []string{"relative", "/no/such/dir/log"} {
		if _, _, err := openLog(bad, slog.LevelInfo, false); err == nil || !strings.Contains(err.Error(), "log="+bad) {
			t.Errorf("%s: %v", bad, err)
		}
	}
	for _, where := range []string{"", "none"} {
		if _, _, err := openLog(where, slog.LevelInfo, false); err != nil {
			t.Errorf("log=%s: %v", where, err)
		}
	}
}

func TestLineHandler(t *testing.T) {
	var lines []string
	log := slog.New(newLineHandler(slog.LevelInfo, func(l slog.Level, line string) error {
		lines = append(lines, l.String()+" "+line)
		return nil
	}))
	log.With("a", 1).WithGroup("g").Warn("one", "b", "two\nlines")
	log.Debug("dropped")
	log.Error("three")
	want := []string{`WARN msg=one a=1 g.b="two\nlines"`, "ERROR msg=three"}
	if len(lines) != 2 || lines[0] != want[0] || lines[1] != want[1] {
		t.Errorf("%q, want %q", lines, want)
	}
}
