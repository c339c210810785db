// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"errors"
	"fmt"
)

var (
	// ErrBroken: the connection is dead. Every error of a dead connection
	// matches it, beside its cause.
	ErrBroken = errors.New("connection broken")
	// ErrDisconnected: the peer, or this side, ended the connection.
	ErrDisconnected = errors.New("disconnected")
	// ErrInvalid: a malformed request (segments outside a region, a length
	// over the limit, an opcode the device lacks).
	ErrInvalid = errors.New("invalid work request")
	// ErrBusy: children are still alive.
	ErrBusy = errors.New("still in use")
	// ErrMemlock: the memlock limit forbids pinning.
	ErrMemlock = errors.New("memlock limit too low")
	// ErrTooLarge: beyond a limit of the device.
	ErrTooLarge = errors.New("beyond the device's limit")
	// ErrUnsupported: the device or build cannot do it.
	ErrUnsupported = errors.New("not supported")
	// ErrNoDevice: no device, or no route to the address through one.
	ErrNoDevice = errors.New("no RDMA device leads there")
	// ErrProtocol: the peer does not speak this transport's protocol or
	// version.
	ErrProtocol = errors.New("peer speaks another protocol")
)

// RejectError is a refusal by the peer's application.
type RejectError struct {
	Reason []byte // as given to ConnRequest.Reject
}

func (e *RejectError) Error() string { return fmt.Sprintf("rejected by peer: %q", e.Reason) }

// StatusError is a completion's failure as an error. Two of the same Status
// match under errors.Is.
type StatusError struct {
	Status Status
}

func (e *StatusError) Error() string { return e.Status.String() }

// Is matches another *StatusError with the same Status.
func (e *StatusError) Is(target error) bool {
	t, ok := target.(*StatusError)
	return ok && t.Status == e.Status
}
