// SPDX-License-Identifier: Apache-2.0

package dataset

import (
	"time"

	"golang.org/x/sys/unix"
)

// Ident tells whether a file has changed: it has not while all of it is the
// same, before and after a read, on the open descriptor.
type Ident struct {
	Dev, Ino  uint64
	Size      int64
	MtimeSec  int64
	MtimeNsec int64
	CtimeSec  int64
	CtimeNsec int64
}

// IdentOf is the identity in st.
func IdentOf(st *unix.Stat_t) Ident {
	return Ident{uint64(st.Dev), st.Ino, st.Size, st.Mtim.Sec, st.Mtim.Nsec, st.Ctim.Sec, st.Ctim.Nsec}
}

func (id *Ident) inode() inode { return inode{id.Dev, id.Ino} }

// settleTime is the coarsest clock that a file system stamps changes with
// (FAT: 2 s; most others: the kernel's tick).
const settleTime = 2 * time.Second

// Settle is how long to wait, at the time now, before the file may be read: a
// write within the same tick as an earlier one leaves no trace in the identity,
// so a file that has just changed may change again unseen. Once the tick is
// over, every later write shows. The answer is 0 for a file that has rested, and
// for one whose change lies further in the future than a tick: then the file
// system has another clock, and nothing can be told. At most 2 × 2 s.
//
// This is how a file whose ctime lies close to the scan is looked at again
// before it is used: wait, compare the identity, read, compare.
func (id *Ident) Settle(now time.Time) time.Duration {
	age := now.Sub(time.Unix(id.CtimeSec, id.CtimeNsec))
	if age >= settleTime || age < -settleTime {
		return 0
	}
	return settleTime - age
}
