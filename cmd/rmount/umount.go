// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"rblk/fuse"
)

// daemonTime is how long umount waits for the daemon to end its session, so
// that what is mounted next finds the export free.
const daemonTime = 5 * time.Second

// newUmountCommand is `rmount umount`.
func newUmountCommand() *cobra.Command {
	var lazy, force bool
	cmd := &cobra.Command{
		Use:   "umount DIR",
		Short: "Unmount, also what a dead daemon has left behind",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			mode := fuse.Clean
			switch {
			case force:
				mode = fuse.Force
			case lazy:
				mode = fuse.Lazy
			}
			return umount(cmd.Context(), args[0], mode)
		},
	}
	cmd.Flags().BoolVarP(&lazy, "lazy", "l", false, "take the mount out of the tree now; it ends with its last user")
	cmd.Flags().BoolVarP(&force, "force", "f", false, "end the mount whoever uses it; calls under way fail")
	return cmd
}

// umount unmounts what is mounted at path. It never looks into the mount: its
// daemon may be dead, or its target.
func umount(ctx context.Context, path string, mode fuse.Mode) error {
	dir, err := fuse.MountPath(path)
	if err != nil {
		return err
	}
	info, mounted, err := fuse.FindMount(dir)
	switch {
	case err != nil:
		return err
	case !mounted:
		return fmt.Errorf("%s: nothing is mounted here", dir)
	case info.Type != fuse.FSType:
		return fmt.Errorf("%s: this is a mount of type %s, not of rmount (umount %s)", dir, info.Type, dir)
	}
	daemon := findDaemon(dir)
	defer daemon.close()
	err = fuse.Unmount(ctx, dir, mode)
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("%s: in use (fuser -vm %s shows by whom; --lazy or --force unmounts all the same)", dir, dir)
	}
	if err != nil {
		return err
	}
	if mode != fuse.Lazy {
		daemon.wait(ctx, daemonTime)
	}
	return nil
}

// process is another process, or none.
type process struct{ pidfd int }

// findDaemon is the daemon of the mount at dir, if it answers.
func findDaemon(dir string) process {
	st, err := readStatus(dir)
	if err != nil {
		return process{-1}
	}
	fd, err := unix.PidfdOpen(st.PID, 0)
	if err != nil {
		return process{-1}
	}
	return process{fd}
}

// wait waits until the process has ended.
func (p process) wait(ctx context.Context, limit time.Duration) {
	if p.pidfd < 0 {
		return
	}
	// Steps, so that ctx is looked at; the process's end is seen at once.
	const step = 200 * time.Millisecond
	for deadline := time.Now().Add(limit); time.Now().Before(deadline) && ctx.Err() == nil; {
		fds := []unix.PollFd{{Fd: int32(p.pidfd), Events: unix.POLLIN}}
		if n, _ := unix.Poll(fds, int(step.Milliseconds())); n > 0 {
			return
		}
	}
}

func (p process) close() {
	if p.pidfd >= 0 {
		unix.Close(p.pidfd)
	}
}
