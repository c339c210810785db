// SPDX-License-Identifier: Apache-2.0

package nbd

import (
	"rblk/cache"
	"rblk/volume"
)

// Export is a volume under a name. Several connections share it.
type Export struct {
	Name        string // at most 4096 bytes
	Description string
	Volume      *cache.Volume
	ReadOnly    bool // serve read-only whatever the volume can do
}

// readOnly tells whether writes are refused.
func (e *Export) readOnly(g volume.Geometry) bool { return e.ReadOnly || g.ReadOnly }

// flags computes the transmission flags from what the volume can do. structured
// says whether the client asked for structured replies: only then may it ask
// for an unfragmented read.
func (e *Export) flags(g volume.Geometry, structured bool) uint16 {
	// CACHE is a hint to read ahead, which every cached volume takes.
	f := uint16(tfHasFlags | tfSendCache)
	if structured {
		f |= tfSendDF // a read is always answered by one chunk
	}
	if g.CanFlush {
		f |= tfSendFlush
	}
	if e.readOnly(g) {
		// Nothing is written through this export: every connection sees the
		// same bytes.
		return f | tfReadOnly | tfCanMultiConn
	}
	if g.CanFUA || g.CanFlush {
		f |= tfSendFUA // native, or a write with a FLUSH behind it
	}
	if g.CanDiscard {
		f |= tfSendTrim
	}
	if g.CanZero {
		// ZERO is a message without data, so it is always the fast way.
		f |= tfSendWriteZeroes | tfSendFastZero
	}
	if g.CanMultiConn {
		f |= tfCanMultiConn
	}
	return f
}

// blockSizes are the constraints to advertise and enforce: minimum, preferred,
// maximum. The minimum is the volume's write unit; preferred is a page, below
// which every layer under us does more work.
func blockSizes(g volume.Geometry) (lo, pref, hi uint32) {
	lo = uint32(max(1, g.BlockSize))
	return lo, max(lo, 4096), maxPayload
}
