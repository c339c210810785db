// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"rblk/initiator"
	"rblk/wire"
)

// dial opens src. A claim that the dead daemon of the mount which this one
// replaces has left behind is taken over.
func (m *mounter) dial(ctx context.Context, src initiator.Source) (*initiator.Volume, error) {
	opts := initiator.DialOptions{Providers: m.providers, Logger: m.log}
	v, err := initiator.Dial(ctx, src, opts)
	var refusal *wire.Error
	if !errors.As(err, &refusal) || refusal.Code != wire.CodeBusy || !m.claimIsOurs(ctx, src) {
		return v, err
	}
	m.log.Warn("taking over the claim of the dead daemon that was mounted here", "export", src.Export)
	src.Force = true
	return initiator.Dial(ctx, src, opts)
}

// claimIsOurs tells whether the export's writer was the daemon of the dead mount
// that this one replaces: the same source at the same place, by a process of
// this host that is no more. All of that must hold, for to take over a claim is
// to cut its holder off.
func (m *mounter) claimIsOurs(ctx context.Context, src initiator.Source) bool {
	if m.replaced.Source != m.opts.fuse.Source {
		return false
	}
	list, err := exports(ctx, src)
	if err != nil || len(list) != 1 || list[0].Writer == nil {
		return false
	}
	host, err := os.Hostname()
	client := list[0].Writer.Client
	return err == nil && client.Host == host && hasEnded(client.PID)
}

// hasEnded tells whether a process is no more; one that only its parent has yet
// to hear of has ended.
func hasEnded(pid int) bool {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return errors.Is(err, unix.ESRCH)
	}
	defer unix.Close(fd)
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	return err == nil && n == 1
}
