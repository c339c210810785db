// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo && verbs

package verbs

import (
	"errors"
	"fmt"
	"syscall"

	"rblk/rdma"
)

// The verbs libraries have four error conventions. Each has one converter here,
// and nothing else looks at a raw return value.

// errnoFromRet converts calls that return 0 or a positive errno: ibv_post_send,
// ibv_modify_qp, ibv_destroy_*, ibv_dereg_mr, ibv_query_*, ibv_req_notify_cq.
func errnoFromRet(op string, rc int) error {
	if rc == 0 {
		return nil
	}
	if rc < 0 {
		rc = -rc // some drivers answer −errno against the manual page
	}
	return opError(op, syscall.Errno(rc))
}

// errnoFromPtr converts calls that return NULL and set errno: ibv_create_*,
// ibv_reg_mr, ibv_alloc_pd, ibv_open_device, rdma_create_event_channel.
func errnoFromPtr(op string, null bool, errno error) error {
	if !null {
		return nil
	}
	return opError(op, causeOf(errno))
}

// errnoFromCM converts calls that return 0 or −1 and set errno: rdma_*, and the
// shim's own.
func errnoFromCM(op string, rc int, errno error) error {
	if rc >= 0 {
		return nil
	}
	return opError(op, causeOf(errno))
}

// errPoll converts ibv_poll_cq, which answers a negative number and promises no
// errno.
func errPoll(n int) error {
	if n >= 0 {
		return nil
	}
	return opError("ibv_poll_cq", syscall.EIO)
}

// errnoFromEvent converts the status of an rdma_cm event: 0 or −errno.
func errnoFromEvent(op string, status int) error {
	switch {
	case status == 0:
		return opError(op, syscall.EIO)
	case status < 0:
		status = -status
	}
	return opError(op, syscall.Errno(status))
}

// causeOf is the errno that a failing call left; EIO where it left none.
func causeOf(errno error) syscall.Errno {
	var e syscall.Errno
	if errors.As(errno, &e) && e != 0 {
		return e
	}
	return syscall.EIO
}

// opError names the call. Errors that mean "no way there" match ErrNoDevice too.
func opError(op string, errno syscall.Errno) error {
	switch errno {
	case syscall.ENODEV, syscall.ENETUNREACH, syscall.EHOSTUNREACH, syscall.EADDRNOTAVAIL, syscall.ENXIO:
		return fmt.Errorf("%s: %w: %w", op, rdma.ErrNoDevice, errno)
	case syscall.EOPNOTSUPP, syscall.ENOSYS:
		return fmt.Errorf("%s: %w: %w", op, rdma.ErrUnsupported, errno)
	}
	return fmt.Errorf("%s: %w", op, errno)
}
