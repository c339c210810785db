// SPDX-License-Identifier: Apache-2.0

package nbd

import (
	"context"
	"errors"

	"rblk/volume"
)

// errno is an error value of the protocol. The set is closed: clients map the
// rest to EINVAL.
type errno uint32

const (
	errnoOK       errno = 0
	errnoPerm     errno = 1
	errnoIO       errno = 5
	errnoInval    errno = 22
	errnoNoSpace  errno = 28
	errnoOverflow errno = 75
	errnoNotSup   errno = 95
	errnoShutdown errno = 108
)

// errnos is the one place where a volume's failure becomes a number.
var errnos = []struct {
	err error
	no  errno
}{
	{volume.ErrReadOnly, errnoPerm},
	{volume.ErrRange, errnoInval},
	{volume.ErrNoSpace, errnoNoSpace},
	{volume.ErrUnsupported, errnoNotSup},
	{volume.ErrClosed, errnoShutdown},
	{volume.ErrAway, errnoIO},
	{volume.ErrFenced, errnoIO},
	{volume.ErrInstanceChanged, errnoIO},
	{volume.ErrStale, errnoIO},
	{volume.ErrIO, errnoIO},
	{volume.ErrUnknownOutcome, errnoIO},
	{context.Canceled, errnoShutdown},
	{context.DeadlineExceeded, errnoIO},
}

// toErrno maps err; what is in no row is an input/output error.
func toErrno(err error) errno {
	if err == nil {
		return errnoOK
	}
	for _, e := range errnos {
		if errors.Is(err, e.err) {
			return e.no
		}
	}
	return errnoIO
}
