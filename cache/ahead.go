// SPDX-License-Identifier: Apache-2.0

package cache

import "sync/atomic"

type stream struct{ wasted atomic.Bool }

type readahead struct {
	unread atomic.Int64 // pages read ahead, in flight or not yet read
	issued atomic.Uint64
}

func (r *readahead) init(v *Volume, mode Readahead)                     {}
func (r *readahead) touched(st *stream, off int64, n int, stalled bool) {}
func (r *readahead) missed(off int64, n int)                            {}
func (r *readahead) landed(f *flight)                                   {}
func (r *readahead) prefetch(off, n int64)                              {}
func (r *readahead) active() int64                                      { return 0 }
