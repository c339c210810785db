// SPDX-License-Identifier: Apache-2.0

package rdma_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"rblk/rdma"
)

type region struct {
	rdma.MemoryRegion
	addr, n uint64
}

func (r region) Addr() uint64 { return r.addr }
func (r region) Len() uint64  { return r.n }
func (r region) LKey() uint32 { return 7 }

func TestSeg(t *testing.T) {
	mr := region{addr: 1 << 40, n: 5 << 30}
	if s := rdma.Seg(mr, 4<<30+1, 100); s != (rdma.Segment{Addr: 1<<40 + 4<<30 + 1, Length: 100, LKey: 7}) {
		t.Errorf("%+v", s)
	}
	rdma.Seg(mr, mr.n, 0)
	for _, bad := range []struct {
		off uint64
		n   uint32
	}{{mr.n, 1}, {mr.n - 1, 2}, {mr.n + 1, 0}, {1<<64 - 1, 2}} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("segment %d+%d of %d bytes", bad.off, bad.n, mr.n)
				}
			}()
			rdma.Seg(mr, bad.off, bad.n)
		}()
	}
}

func TestStatusErrors(t *testing.T) {
	if err := rdma.StatusOK.Err(); err != nil {
		t.Error(err)
	}
	for s := rdma.StatusLocalLength; s <= rdma.StatusGeneral; s++ {
		err := fmt.Errorf("wrapped: %w", s.Err())
		if !errors.Is(err, s.Err()) {
			t.Errorf("%v does not match itself", s)
		}
		if errors.Is(err, rdma.Status(s%9+1).Err()) {
			t.Errorf("%v matches another status", s)
		}
		if strings.Contains(s.String(), "(") {
			t.Errorf("status %d has no name", s)
		}
	}
	if got := rdma.Status(99).String(); got != "status(99)" {
		t.Error(got)
	}
	for op := rdma.OpInvalid; op <= rdma.OpWriteImm; op++ {
		if strings.Contains(op.String(), "(") {
			t.Errorf("opcode %d has no name", op)
		}
	}
	if got := rdma.Opcode(99).String(); got != "opcode(99)" {
		t.Error(got)
	}
	if got := (&rdma.RejectError{Reason: []byte("no\nway")}).Error(); strings.Contains(got, "\n") {
		t.Errorf("%q is not one line", got)
	}
}
