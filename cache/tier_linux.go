// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

// lockFile takes f for this process, or fails at once.
func lockFile(f *os.File) error { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) }

// isFull is whether a write failed for want of room.
func isFull(err error) bool {
	return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.EFBIG)
}
