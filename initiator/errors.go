// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"errors"
	"fmt"

	"rblk/volume"
	"rblk/wire"
)

// statusErrors is what each status of the target means to the volume's users.
var statusErrors = map[wire.Status]error{
	wire.StatusRange:       volume.ErrRange,
	wire.StatusReadOnly:    volume.ErrReadOnly,
	wire.StatusStale:       volume.ErrStale,
	wire.StatusIO:          volume.ErrIO,
	wire.StatusNoSpace:     volume.ErrNoSpace,
	wire.StatusUnsupported: volume.ErrUnsupported,
	wire.StatusFenced:      volume.ErrFenced,
	wire.StatusInstance:    volume.ErrInstanceChanged,
}

// statusError is a status as an error.
func statusError(s wire.Status) error {
	if err := statusErrors[s]; err != nil {
		return err
	}
	return fmt.Errorf("%w: the target answered with status %d", volume.ErrIO, s)
}

// final tells whether an answer of the control plane ends the volume for good,
// and with which error.
func final(err error) error {
	var e *wire.Error
	if !errors.As(err, &e) {
		return nil
	}
	switch e.Code {
	case wire.CodeFenced:
		return fmt.Errorf("%w: %w", volume.ErrFenced, err)
	case wire.CodeInstance:
		return fmt.Errorf("%w: %w", volume.ErrInstanceChanged, err)
	}
	return nil
}

// code is the control plane's code in err, or "".
func code(err error) string {
	var e *wire.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}
