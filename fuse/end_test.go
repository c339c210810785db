// SPDX-License-Identifier: Apache-2.0

package fuse

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"rblk/internal/need"
)

// TestUnmount ends mounts that are idle, in use, and blocked on a dead target,
// in every way.
func TestUnmount(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	t.Run("idle", func(t *testing.T) {
		_, src, m, _ := usedVolume(t)
		if err := m.Unmount(ctx, Clean); err != nil {
			t.Fatal(err)
		}
		wait(t, src.closed, "the volume's end")
		if src.Counters().Flushes == 0 {
			t.Error("the volume was not flushed")
		}
	})
	t.Run("busy then lazy", func(t *testing.T) {
		dir, src, m, f := usedVolume(t)
		open(t, f, dir)
		if err := m.Unmount(ctx, Clean); !errors.Is(err, unix.EBUSY) {
			t.Fatalf("unmounting what is in use: %v", err)
		}
		if err := m.Unmount(ctx, Lazy); err != nil {
			t.Fatal(err)
		}
		if _, mounted, _ := FindMount(dir); mounted {
			t.Error("still in the tree")
		}
		if _, err := f.ReadAt(make([]byte, 10), 0); err != nil {
			t.Errorf("the open file after a lazy unmount: %v", err)
		}
		f.Close()
		wait(t, m.Done(), "the end with the last user")
		wait(t, src.closed, "the volume's end")
	})
	t.Run("busy then force", func(t *testing.T) {
		dir, src, m, f := usedVolume(t)
		open(t, f, dir)
		defer f.Close()
		if err := m.Unmount(ctx, Force); err != nil {
			t.Fatal(err)
		}
		if _, err := f.ReadAt(make([]byte, 10), 0); !errors.Is(err, syscall.ENOTCONN) {
			t.Errorf("the open file after a forced unmount: %v", err)
		}
		wait(t, src.closed, "the volume's end")
	})
	t.Run("blocked then close", func(t *testing.T) {
		dir, src, m, f := usedVolume(t)
		open(t, f, dir)
		defer f.Close()
		src.Hold()
		var calls sync.WaitGroup
		for range 5 {
			calls.Go(func() {
				if _, err := f.ReadAt(make([]byte, 10), 0); err == nil {
					t.Error("a blocked read succeeded")
				}
			})
		}
		eventually(t, "a blocked read", func() bool { return src.Waiting() > 0 })
		if err := m.Close(ctx); err != nil {
			t.Fatal(err)
		}
		calls.Wait()
		wait(t, src.closed, "the volume's end")
	})
	t.Run("from outside", func(t *testing.T) {
		dir, _, m, _ := usedVolume(t)
		if err := Unmount(ctx, dir, Clean); err != nil {
			t.Fatal(err)
		}
		if err := m.Wait(); err != nil {
			t.Error(err)
		}
	})
	t.Run("forced from outside", func(t *testing.T) {
		dir, _, m, f := usedVolume(t)
		open(t, f, dir)
		defer f.Close()
		if err := Unmount(ctx, dir, Force); err != nil {
			t.Fatal(err)
		}
		if err := m.Wait(); err != nil {
			t.Error(err)
		}
	})
}

// usedVolume mounts a volume whose file always goes to the server.
func usedVolume(t *testing.T) (dir string, src *source, m *Mount, f *os.File) {
	t.Helper()
	v, src := mustSource(t, pattern(volumeSize), nil)
	dir = mountPoint(t)
	m, err := MountExport(dir, &Export{Name: "vol", Volume: v, Direct: true}, Options{Source: "test"}, testLog(t))
	if err != nil {
		t.Fatal(err)
	}
	primePoll(t, dir+"/vol")
	return dir, src, m, new(os.File)
}

func open(t *testing.T, f *os.File, dir string) {
	t.Helper()
	o, err := os.OpenFile(dir+"/vol", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	*f = *o
}

// Other processes are this test binary, told by environment what to be.
const daemonEnv = "RBLK_TEST_MOUNT"

func init() {
	var err error
	switch {
	case os.Getenv(daemonEnv) != "":
		err = serveMount(os.Getenv(daemonEnv))
	case os.Getenv(mmapEnv) != "":
		err = mapVolume(os.Getenv(mmapEnv))
	case os.Getenv(benchEnv) != "":
		err = serveBench(os.Getenv(benchEnv))
	default:
		return
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(0)
}

// selfCommand is another process of this binary.
func selfCommand(t testing.TB, env, value string) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), env+"="+value)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Dir = "/"
	return cmd
}

// serveMount is the process that mounts a volume on dir, until its standard
// input ends.
func serveMount(dir string) error {
	v, _, err := newSource(pattern(volumeSize), nil)
	if err != nil {
		return err
	}
	m, err := MountExport(dir, &Export{Name: "vol", Volume: v}, Options{Source: "daemon,with\\odd name"}, discard)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	io.ReadAll(os.Stdin)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return m.Close(ctx)
}

// mountDaemon starts a process that mounts a volume on dir.
func mountDaemon(t *testing.T, dir string, as *syscall.Credential) (cmd *exec.Cmd, stop func() error) {
	t.Helper()
	cmd = selfCommand(t, daemonEnv, dir)
	cmd.SysProcAttr.Credential = as
	return cmd, startReady(t, cmd)
}

// startReady starts a process that says "ready" and then serves until its
// standard input ends.
func startReady(t testing.TB, cmd *exec.Cmd) (stop func() error) {
	t.Helper()
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if line, _ := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		cmd.Wait()
		t.Fatalf("instead of being ready: %s", line)
	}
	return func() error { in.Close(); return cmd.Wait() }
}

// TestDeadDaemon: a mount whose daemon was killed gives an error at once, is
// replaced by a new mount, and can be unmounted.
func TestDeadDaemon(t *testing.T) {
	dir := mountPoint(t)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for range 2 {
		cmd, _ := mountDaemon(t, dir, nil)
		if _, err := PreparePoint(ctx, dir, false); err == nil || !strings.Contains(err.Error(), "already") {
			t.Errorf("a live mount: %v", err)
		}
		cmd.Process.Kill()
		cmd.Wait()
		if _, err := os.ReadFile(dir + "/vol"); !errors.Is(err, syscall.ENOTCONN) {
			t.Errorf("reading from a dead mount: %v, want ENOTCONN", err)
		}
		if dead, err := PreparePoint(ctx, dir, false); err != nil || dead.Source != "daemon,with\\odd name" {
			t.Fatalf("replacing a dead mount: %+v, %v", dead, err)
		}
		if _, mounted, _ := FindMount(dir); mounted {
			t.Error("the dead mount is still there")
		}
	}
	cmd, _ := mountDaemon(t, dir, nil)
	cmd.Process.Kill()
	cmd.Wait()
	if err := Unmount(ctx, dir, Clean); err != nil {
		t.Fatalf("unmounting a dead mount: %v", err)
	}
}

// TestUnprivileged mounts and unmounts as nobody, through fusermount3.
func TestUnprivileged(t *testing.T) {
	need.Program(t, "fusermount3", "fuse3")
	dir := mountPoint(t)
	if st, err := os.Stat("/dev/fuse"); err != nil || st.Mode()&0o006 != 0o006 {
		need.Skip(t, "/dev/fuse open to everybody, as udev makes it (chmod 666 /dev/fuse)")
	}
	const nobody = 65534
	if err := os.Chown(dir, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	passable(t, dir)
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	passable(t, exe)
	cmd, stop := mountDaemon(t, dir, &syscall.Credential{Uid: nobody, Gid: nobody})
	info, mounted, err := FindMount(dir)
	if err != nil || !mounted || info.Type != FSType || info.Source != "daemon,with\\odd name" || info.UID != nobody {
		t.Errorf("mountinfo: %+v, %v, %v", info, mounted, err)
	}
	// Not even root comes in without allow_other.
	if _, err := os.ReadFile(dir + "/vol"); !errors.Is(err, os.ErrPermission) {
		t.Errorf("reading as root: %v, want EACCES", err)
	}
	cat := exec.Command("cat", dir+"/vol")
	cat.SysProcAttr = cmd.SysProcAttr
	if out, err := cat.Output(); err != nil || !slices.Equal(out, pattern(volumeSize)) {
		t.Errorf("reading as nobody: %d bytes, %v", len(out), err)
	}
	if err := stop(); err != nil {
		t.Errorf("the daemon's end: %v", err)
	}
	if _, mounted, _ := FindMount(dir); mounted {
		t.Error("still mounted")
	}
}

// passable lets everybody reach a path below the temporary directory.
func passable(t *testing.T, path string) {
	t.Helper()
	for dir := filepath.Dir(path); len(dir) > len(os.TempDir()); dir = filepath.Dir(dir) {
		if st, err := os.Stat(dir); err != nil || st.Mode()&0o1 == 0 {
			if err := os.Chmod(dir, 0o711); err != nil {
				need.Skip(t, "a path that another user can follow: "+err.Error())
			}
		}
	}
}

func TestPreparePoint(t *testing.T) {
	dir := mountPoint(t)
	file := dir + "/file"
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	for _, c := range []struct {
		path     string
		nonEmpty bool
		want     string
	}{
		{dir + "/none", false, "does not exist"},
		{file, false, "not a directory"},
		{dir, false, "not empty"},
		{dir, true, ""},
	} {
		_, err := PreparePoint(ctx, c.path, c.nonEmpty)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), c.path)) {
			t.Errorf("%s: %v, want %q", c.path, err, c.want)
		}
	}
}
