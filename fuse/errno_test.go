// SPDX-License-Identifier: Apache-2.0

package fuse

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"syscall"
	"testing"

	"rblk/volume"
)

func TestErrnoTableIsComplete(t *testing.T) {
	for _, sentinel := range volume.Sentinels() {
		i := slices.IndexFunc(errnos, func(e struct {
			err   error
			errno syscall.Errno
		}) bool {
			return e.err == sentinel
		})
		if i < 0 {
			t.Errorf("no errno for %q", sentinel)
			continue
		}
		if got := errnoOf(fmt.Errorf("read: %w", sentinel)); got != errnos[i].errno || got == 0 {
			t.Errorf("%q wrapped: %v, want %v", sentinel, got, errnos[i].errno)
		}
	}
	if len(errnos) != len(volume.Sentinels()) {
		t.Errorf("%d errnos for %d sentinels", len(errnos), len(volume.Sentinels()))
	}
}

func TestErrnoOf(t *testing.T) {
	for _, c := range []struct {
		err  error
		want syscall.Errno
	}{
		{nil, 0},
		{context.Canceled, syscall.EINTR},
		{fmt.Errorf("read: %w", context.Canceled), syscall.EINTR},
		{context.DeadlineExceeded, syscall.ETIMEDOUT},
		{syscall.ESTALE, syscall.ESTALE},
		{fmt.Errorf("open: %w", syscall.EACCES), syscall.EACCES},
		{errors.Join(volume.ErrAway, syscall.ECONNREFUSED), syscall.EIO}, // the sentinel wins
		{io.ErrUnexpectedEOF, syscall.EIO},
	} {
		if got := errnoOf(c.err); got != c.want {
			t.Errorf("%v: %v, want %v", c.err, got, c.want)
		}
	}
}
