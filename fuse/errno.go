// SPDX-License-Identifier: Apache-2.0

package fuse

import (
	"context"
	"errors"
	"syscall"

	gofuse "github.com/hanwen/go-fuse/v2/fuse"

	"rblk/volume"
)

// errnos says how each way in which a volume fails looks to a program. It is
// the only such table of this front end, and complete over volume.Sentinels.
var errnos = []struct {
	err   error
	errno syscall.Errno
}{
	{volume.ErrAway, syscall.EIO},
	{volume.ErrFenced, syscall.EIO},
	{volume.ErrInstanceChanged, syscall.EIO},
	{volume.ErrReadOnly, syscall.EROFS},
	{volume.ErrRange, syscall.EINVAL},
	{volume.ErrStale, syscall.EIO},
	{volume.ErrIO, syscall.EIO},
	{volume.ErrNoSpace, syscall.ENOSPC},
	{volume.ErrUnsupported, syscall.EOPNOTSUPP},
	{volume.ErrUnknownOutcome, syscall.EIO},
	{volume.ErrClosed, syscall.ENOTCONN}, // as when the daemon is gone
}

// errnoOf is the errno for err: 0 for nil, EINTR for a cancelled request, the
// table's for a sentinel, the errno inside err otherwise, and EIO when there is
// none.
func errnoOf(err error) syscall.Errno {
	if err == nil {
		return 0
	}
	if errors.Is(err, context.Canceled) {
		return syscall.EINTR
	}
	for _, e := range errnos {
		if errors.Is(err, e.err) {
			return e.errno
		}
	}
	var errno syscall.Errno
	if errors.As(err, &errno) && errno != 0 {
		return errno
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return syscall.ETIMEDOUT
	}
	return syscall.EIO
}

func status(err error) gofuse.Status { return gofuse.Status(errnoOf(err)) }
