// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"fmt"

	"rblk/rdma"
	"rblk/wire"
)

// commitAll asks, behind the WRITEs just posted in slots, for their
// acknowledgement: one COMMIT for what follows each other of one operation, so
// that a failure is that operation's alone. Caller holds mu.
func (c *conn) commitAll(slots []int) {
	for len(slots) > 0 {
		x := c.flight[slots[0]].op
		n := 0
		for n < len(slots) && n < wire.MaxRanges && c.flight[slots[n]].op == x {
			n++
		}
		if c.flight[slots[0]].wr == rdma.OpWrite {
			c.commit(x, append([]int(nil), slots[:n]...))
		}
		slots = slots[n:]
	}
}

// commit queues the COMMIT of parts of x. Their slots, and the grants under
// them, are held until its answer: a part is placed and its buffer free only
// when both that and the WRITE's completion are there. Caller holds mu.
func (c *conn) commit(x *op, slots []int) {
	m := &wire.Ranges{}
	for _, i := range slots {
		p := &c.flight[i]
		p.waits++
		m.Ranges = append(m.Ranges, wire.Range{Offset: uint64(p.off), Length: uint64(len(p.mem))})
	}
	var flags uint16
	if x.fua {
		flags = wire.FlagFUA
	}
	c.outbox = append(c.outbox, c.numbered(wire.TypeCommit, flags, m.Append, func(h wire.Header, _ []byte) {
		c.committed(x, slots, h.Status)
	}))
}

// committed takes the answer of a COMMIT. A refusal that is no verdict on the
// bytes ends the epoch: the unit of replay is WRITE and COMMIT under a fresh
// grant, never COMMIT alone.
func (c *conn) committed(x *op, slots []int, st wire.Status) {
	switch {
	case st == wire.StatusNotGranted || passing(st):
		c.e.fail(fmt.Errorf("COMMIT was answered: %v", st))
		return
	case st != wire.StatusOK:
		x.fail(statusError(st))
	}
	for _, i := range slots {
		c.partStep(i)
	}
}
