// SPDX-License-Identifier: Apache-2.0

package volume

import "errors"

// The ways in which a volume fails. Every error of a Source matches exactly one
// of these, beside its cause. Front ends map each to an errno in one table.
var (
	// ErrAway: the target cannot be reached and the soft time is over.
	ErrAway = errors.New("target is away")
	// ErrFenced: another initiator has taken the export over by force.
	ErrFenced = errors.New("fenced by another writer")
	// ErrInstanceChanged: the export's content was lost or replaced.
	ErrInstanceChanged = errors.New("content of the export has changed identity")
	// ErrReadOnly: a write to a read-only volume.
	ErrReadOnly = errors.New("volume is read-only")
	// ErrRange: beyond the end of the volume, negative, or misaligned.
	ErrRange = errors.New("range outside the volume or misaligned")
	// ErrStale: this range of a dataset changed or vanished at the target
	// since the scan.
	ErrStale = errors.New("data changed at the target since it was scanned")
	// ErrIO: the target's backing store failed for this range.
	ErrIO = errors.New("target input/output error")
	// ErrNoSpace: the target's backing store is full.
	ErrNoSpace = errors.New("no space left at the target")
	// ErrUnsupported: the volume cannot do this.
	ErrUnsupported = errors.New("operation not supported by the volume")
	// ErrUnknownOutcome: a write of a shared session was cut off and may or
	// may not have happened.
	ErrUnknownOutcome = errors.New("outcome of the write is unknown")
	// ErrClosed: the volume was closed.
	ErrClosed = errors.New("volume closed")
)

// Sentinels lists every sentinel, for tests that prove tables complete.
func Sentinels() []error {
	return []error{
		ErrAway, ErrFenced, ErrInstanceChanged, ErrReadOnly, ErrRange, ErrStale,
		ErrIO, ErrNoSpace, ErrUnsupported, ErrUnknownOutcome, ErrClosed,
	}
}
