// SPDX-License-Identifier: Apache-2.0

package fuse

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// probeTime bounds the look at a mount that may hang.
const probeTime = 2 * time.Second

// PreparePoint makes sure that dir (as MountPath gives it) can be mounted on,
// and takes away mounts of ours whose daemon is dead, of which it returns the
// last. Its errors name the mend.
func PreparePoint(ctx context.Context, dir string, nonEmpty bool) (dead Info, err error) {
	for {
		info, mounted, err := FindMount(dir)
		if err != nil {
			return dead, err
		}
		if !mounted || !strings.HasPrefix(info.Type, "fuse") {
			break
		}
		gone, err := isDead(dir)
		switch {
		case err != nil:
			return dead, err
		case !gone && info.Type == FSType:
			return dead, fmt.Errorf("%s: %s is mounted here already (rmount umount %s)", dir, info.Source, dir)
		case !gone:
			return dead, checkPoint(dir, nonEmpty)
		case info.Type != FSType:
			return dead, fmt.Errorf("%s: holds a dead mount of type %s (umount -l %s)", dir, info.Type, dir)
		}
		if err := Unmount(ctx, dir, Lazy); err != nil {
			return dead, fmt.Errorf("removing the dead mount: %w", err)
		}
		dead = info
	}
	return dead, checkPoint(dir, nonEmpty)
}

// isDead tells whether the daemon of the mount at dir is gone. A mount that
// does not answer in time counts as live.
func isDead(dir string) (bool, error) {
	answer := make(chan error, 1)
	go func() {
		var st unix.Statfs_t // not stat: that may be answered from a cache
		answer <- unix.Statfs(dir, &st)
	}()
	timer := time.NewTimer(probeTime)
	defer timer.Stop()
	select {
	case err := <-answer:
		if err == nil {
			return false, nil
		}
		if errors.Is(err, unix.ENOTCONN) || errors.Is(err, unix.ECONNABORTED) {
			return true, nil
		}
		return false, fmt.Errorf("%s: %w", dir, err)
	case <-timer.C:
		return false, nil
	}
}

func checkPoint(dir string, nonEmpty bool) error {
	st, err := os.Lstat(dir)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("%s: mount point does not exist (mkdir -p %s)", dir, dir)
	case err != nil:
		return fmt.Errorf("mount point: %w", err)
	case !st.IsDir():
		return fmt.Errorf("%s: mount point is not a directory", dir)
	case nonEmpty:
		return nil
	}
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("mount point: %w", err)
	}
	defer d.Close()
	if _, err := d.Readdirnames(1); err == nil {
		return fmt.Errorf("%s: mount point is not empty (use another, or -o nonempty to hide what is in it)", dir)
	} else if !errors.Is(err, io.EOF) {
		return fmt.Errorf("mount point: %w", err)
	}
	return nil
}
