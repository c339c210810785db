// SPDX-License-Identifier: Apache-2.0

package nbd

import (
	"fmt"
	"io"

	"rblk/volume"
)

// request is one command of a client.
type request struct {
	flags  uint16
	cmd    command
	cookie uint64
	offset uint64
	length uint64
	refuse errno // not OK: answered with this, nothing is done
}

// Sizes of a request's header.
const (
	requestSize    = 28
	requestExtSize = 32
)

// parseRequest decodes a header of requestSize or requestExtSize bytes.
func parseRequest(b []byte, extended bool) (request, error) {
	magic := uint32(magicRequest)
	if extended {
		magic = magicRequestExt
	}
	if be.Uint32(b) != magic {
		return request{}, fmt.Errorf("%w: bad request magic %#x", ErrProtocol, be.Uint32(b))
	}
	q := request{
		flags:  be.Uint16(b[4:]),
		cmd:    command(be.Uint16(b[6:])),
		cookie: be.Uint64(b[8:]),
		offset: be.Uint64(b[16:]),
	}
	if extended {
		q.length = be.Uint64(b[24:])
	} else {
		q.length = uint64(be.Uint32(b[24:]))
	}
	return q, nil
}

// payload is how many bytes follow the header.
func (q *request) payload(extended bool) uint64 {
	if q.cmd == cmdWrite || extended && q.flags&cfPayloadLen != 0 {
		return q.length
	}
	return 0
}

// commandFlags are the flags that each command may carry beside FUA, and the
// transmission flag that must have been advertised for it.
var commandFlags = map[command]struct{ allowed, needs uint16 }{
	cmdRead:        {cfDF, tfHasFlags},
	cmdWrite:       {cfPayloadLen, tfHasFlags},
	cmdFlush:       {0, tfSendFlush},
	cmdTrim:        {0, tfSendTrim},
	cmdCache:       {0, tfSendCache},
	cmdWriteZeroes: {cfNoHole | cfFastZero, tfSendWriteZeroes},
	cmdBlockStatus: {cfReqOne, tfHasFlags},
}

// check decides whether q can be done: the right error, or OK. tf are the
// connection's transmission flags.
func (q *request) check(g volume.Geometry, tf uint16, extended, allocation bool) errno {
	c, known := commandFlags[q.cmd]
	if !known {
		return errnoInval
	}
	writes := q.cmd == cmdWrite || q.cmd == cmdTrim || q.cmd == cmdWriteZeroes
	if writes && tf&tfReadOnly != 0 {
		return errnoPerm
	}
	allowed := c.allowed
	if tf&tfSendFUA != 0 {
		allowed |= cfFUA // valid with every command, says the protocol
	}
	if tf&tfSendDF == 0 {
		allowed &^= cfDF
	}
	if !extended {
		allowed &^= cfPayloadLen
	}
	if q.flags&^allowed != 0 || tf&c.needs == 0 || q.cmd == cmdBlockStatus && !allocation {
		return errnoInval
	}
	if q.cmd == cmdFlush {
		return errnoOK
	}
	return q.checkRange(g, writes)
}

// checkRange holds q against the volume's end, the block size and the limits.
func (q *request) checkRange(g volume.Geometry, writes bool) errno {
	size := uint64(max(0, g.Size))
	if q.length > size || q.offset > size-q.length {
		if writes && q.cmd != cmdTrim {
			return errnoNoSpace
		}
		return errnoInval
	}
	block := uint64(max(1, g.BlockSize))
	// The volume's last bytes may be less than a block.
	if q.length == 0 || q.offset%block != 0 || q.length%block != 0 && q.offset+q.length != size {
		return errnoInval
	}
	if q.cmd == cmdRead && q.length > maxPayload {
		if q.flags&cfDF != 0 {
			return errnoOverflow
		}
		return errnoInval
	}
	return errnoOK
}

// discard skips a payload that will not be used. One that is too large to be
// worth reading ends the connection.
func discard(r io.Reader, n uint64) error {
	if n > 2*maxPayload {
		return fmt.Errorf("%w: payload of %d bytes, at most %d", ErrProtocol, n, maxPayload)
	}
	_, err := io.CopyN(io.Discard, r, int64(n))
	return err
}
