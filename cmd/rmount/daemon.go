// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"syscall"

	"github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"
)

// A mount's daemon is this program started again in a session of its own. It
// says what goes wrong on its standard error, which leads to the parent, until
// the mount is usable; then it writes one byte to the descriptor that
// readyEnv names, and the parent leaves with status 0.
const readyEnv = "RBLK_READY_FD"

// exitStatus is an error that has been reported already, and the status to
// exit with.
type exitStatus int

func (e exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// inDaemon tells whether this process was started by spawnDaemon.
func inDaemon() bool { return os.Getenv(readyEnv) != "" }

// spawnDaemon starts this program with the same arguments as a daemon, and
// waits until its mount is usable or it has failed, in which case the error is
// an exitStatus. When ctx ends first the daemon is told to end as well.
func spawnDaemon(ctx context.Context) error {
	ready, theirs, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("starting the daemon: %w", err)
	}
	defer ready.Close()
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), readyEnv+"=3") // the first of ExtraFiles
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	complaints, err := cmd.StderrPipe()
	if err == nil {
		err = cmd.Start()
	}
	theirs.Close()
	if err != nil {
		return fmt.Errorf("starting the daemon: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { cmd.Process.Signal(syscall.SIGTERM) })
	defer stop()
	copied := make(chan struct{})
	go func() {
		defer close(copied)
		io.Copy(os.Stderr, complaints)
	}()
	if n, _ := ready.Read(make([]byte, 1)); n == 1 {
		<-copied // the daemon closed its end before it said that it is ready
		return cmd.Process.Release()
	}
	<-copied
	return daemonFailed(cmd.Wait())
}

// daemonFailed is the error for a daemon that ended before its mount was
// usable: its own words have been passed on.
func daemonFailed(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.Exited() {
		return exitStatus(exit.ExitCode())
	}
	if err == nil {
		err = errors.New("it ended")
	}
	return fmt.Errorf("the daemon did not come up: %w", err)
}

// announceReady tells whoever waits that the mount is usable: the parent, and
// systemd for a Type=notify unit. The daemon lets go of everything of its
// parent's.
func announceReady() error {
	if _, err := daemon.SdNotify(true, daemon.SdNotifyReady); err != nil {
		return fmt.Errorf("telling systemd: %w", err)
	}
	if !inDaemon() {
		return nil
	}
	fd, err := strconv.Atoi(os.Getenv(readyEnv))
	if err != nil {
		return fmt.Errorf("%s: %w", readyEnv, err)
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	for _, std := range []int{0, 1, 2} {
		if err := unix.Dup3(int(null.Fd()), std, 0); err != nil {
			return fmt.Errorf("detaching: %w", err)
		}
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	ready := os.NewFile(uintptr(fd), "ready")
	defer ready.Close()
	_, err = ready.Write([]byte{1})
	return err
}
