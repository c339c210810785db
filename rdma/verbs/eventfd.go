// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo && verbs

package verbs

import (
	"context"
	"errors"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// eventFD is an event descriptor of libibverbs or librdmacm in Go's network
// poller: a goroutine that waits on it holds no thread. It owns a duplicate of
// the descriptor, because the library closes its own.
type eventFD struct {
	file   *os.File
	raw    syscall.RawConn
	closed atomic.Bool
}

// newEventFD makes fd non-blocking and registers it.
func newEventFD(fd int, name string) (*eventFD, error) {
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	if err := unix.SetNonblock(dup, true); err != nil { // a property shared with fd
		unix.Close(dup)
		return nil, os.NewSyscallError("fcntl", err)
	}
	file := os.NewFile(uintptr(dup), name)
	raw, err := file.SyscallConn()
	if err != nil {
		file.Close()
		return nil, err
	}
	return &eventFD{file: file, raw: raw}, nil
}

// wait calls try until it returns true, sleeping between calls until the
// descriptor is readable. It returns early with os.ErrDeadlineExceeded after a
// kick, which stays in force until rearm, and with os.ErrClosed after close.
func (e *eventFD) wait(try func(fd uintptr) bool) error {
	err := e.raw.Read(try)
	if err != nil && e.closed.Load() {
		return os.ErrClosed // package os has an error of its own for it
	}
	return err
}

// kick makes a wait under way, or else the next one, return.
func (e *eventFD) kick() { e.file.SetReadDeadline(time.Unix(1, 0)) }

// rearm undoes kicks so far. The caller then looks at whatever the kicker had
// changed before it kicked; a later kick is not lost.
func (e *eventFD) rearm() { e.file.SetReadDeadline(time.Time{}) }

// kickAt has wait return at t.
func (e *eventFD) kickAt(t time.Time) { e.file.SetReadDeadline(t) }

// kickWhenDone kicks when ctx ends. The result undoes that.
func (e *eventFD) kickWhenDone(ctx context.Context) (stop func() bool) {
	if ctx.Done() == nil {
		return func() bool { return true }
	}
	return context.AfterFunc(ctx, e.kick)
}

func (e *eventFD) close() {
	e.closed.Store(true)
	e.file.Close()
}

// kicked tells whether wait ended for a kick.
func kicked(err error) bool { return errors.Is(err, os.ErrDeadlineExceeded) }
