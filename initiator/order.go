// SPDX-License-Identifier: Apache-2.0

package initiator

// order keeps what overlaps in order: a read waits for unfinished changes of its
// range, and so does a change. Its fields are guarded by Volume.mu.
type order struct {
	changes []*op // unfinished ones, oldest first
}

// enter notes x and tells whether it may start; if not, leave of what it waits
// for will hand it out.
func (o *order) enter(x *op) bool {
	if x.kind == kindFlush {
		return true
	}
	for _, c := range o.changes {
		if c.overlaps(x) {
			c.followers = append(c.followers, x)
			x.blockers++
		}
	}
	if x.changes() {
		o.changes = append(o.changes, x)
	}
	return x.blockers == 0
}

// leave forgets x and appends to ready what may start now.
func (o *order) leave(x *op, ready []*op) []*op {
	if x.changes() {
		for i, c := range o.changes {
			if c == x {
				o.changes = append(o.changes[:i], o.changes[i+1:]...)
				break
			}
		}
	}
	for _, f := range x.followers {
		f.blockers--
		if f.blockers == 0 {
			ready = append(ready, f)
		}
	}
	x.followers = x.followers[:0]
	return ready
}
