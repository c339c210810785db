// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"errors"
	"fmt"
	"strings"

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

// passing tells whether a status says only that the target cannot now.
func passing(s wire.Status) bool {
	return s == wire.StatusQuota || s == wire.StatusAgain || s == wire.StatusDraining
}

// statusError is a status as an error.
func statusError(s wire.Status) error {
	if err := statusErrors[s]; err != nil {
		return err
	}
	return fmt.Errorf("%w: the target answered: %v", volume.ErrIO, s)
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

// alternatives are the failures of several ways to one end, on one line.
type alternatives []error

func (a alternatives) Error() string {
	texts := make([]string, len(a))
	for i, err := range a {
		texts[i] = err.Error()
	}
	return strings.Join(texts, "; ")
}

func (a alternatives) Unwrap() []error { return a }

// joined is errs as one error.
func joined(errs []error) error {
	if len(errs) == 1 {
		return errs[0]
	}
	return alternatives(errs)
}

// code is the control plane's code in err, or "".
func code(err error) string {
	var e *wire.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}
