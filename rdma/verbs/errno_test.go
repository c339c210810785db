// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo && verbs

package verbs

import (
	"errors"
	"syscall"
	"testing"
	"time"

	"rblk/rdma"
)

func TestErrnoFromRet(t *testing.T) {
	if err := errnoFromRet("x", 0); err != nil {
		t.Errorf("0: %v", err)
	}
	for _, rc := range []int{int(syscall.EBUSY), -int(syscall.EBUSY)} {
		if err := errnoFromRet("x", rc); !errors.Is(err, syscall.EBUSY) {
			t.Errorf("%d: %v, want EBUSY", rc, err)
		}
	}
}

func TestErrnoFromPtr(t *testing.T) {
	if err := errnoFromPtr("x", false, syscall.ENOMEM); err != nil {
		t.Errorf("a stale errno of a success counts: %v", err)
	}
	if err := errnoFromPtr("x", true, syscall.ENOMEM); !errors.Is(err, syscall.ENOMEM) {
		t.Errorf("%v, want ENOMEM", err)
	}
	if err := errnoFromPtr("x", true, nil); !errors.Is(err, syscall.EIO) {
		t.Errorf("NULL without errno: %v, want EIO", err)
	}
}

func TestErrnoFromCM(t *testing.T) {
	if err := errnoFromCM("x", 0, syscall.EAGAIN); err != nil {
		t.Errorf("a stale errno of a success counts: %v", err)
	}
	err := errnoFromCM("x", -1, syscall.ENODEV)
	if !errors.Is(err, syscall.ENODEV) || !errors.Is(err, rdma.ErrNoDevice) {
		t.Errorf("%v, want ENODEV and ErrNoDevice", err)
	}
}

func TestErrPoll(t *testing.T) {
	if err := errPoll(0); err != nil {
		t.Errorf("0: %v", err)
	}
	if err := errPoll(-7); !errors.Is(err, syscall.EIO) {
		t.Errorf("-7: %v; the number is not an errno", err)
	}
}

func TestErrnoFromEvent(t *testing.T) {
	for _, s := range []int{int(syscall.ETIMEDOUT), -int(syscall.ETIMEDOUT)} {
		if err := errnoFromEvent("x", s); !errors.Is(err, syscall.ETIMEDOUT) {
			t.Errorf("%d: %v", s, err)
		}
	}
	if err := errnoFromEvent("x", 0); err == nil {
		t.Error("an unexpected event without status is no error")
	}
}

func TestRegisterError(t *testing.T) {
	err := registerError(1<<30, syscall.EPERM)
	if !errors.Is(err, rdma.ErrMemlock) || !errors.Is(err, syscall.EPERM) {
		t.Errorf("EPERM: %v, want ErrMemlock", err)
	}
	if err := registerError(1, syscall.EFAULT); errors.Is(err, rdma.ErrMemlock) || !errors.Is(err, syscall.EFAULT) {
		t.Errorf("EFAULT: %v", err)
	}
}

func TestCodes(t *testing.T) {
	for d, want := range map[time.Duration]uint8{1: 1, 8192 * time.Nanosecond: 1, defaultAckTimeout: 16, time.Second: 18, time.Hour: 30, 10 * time.Hour: 31} {
		if got := ackTimeoutCode(d); got != want {
			t.Errorf("ackTimeoutCode(%v) = %d, want %d", d, got, want)
		}
	}
	for bytes, want := range map[int]uint32{256: 1, 1024: 3, 4096: 5, 0: 0, 1500: 0, 8192: 0} {
		if got := mtuCode(bytes); got != want {
			t.Errorf("mtuCode(%d) = %d, want %d", bytes, got, want)
		}
	}
	for d, want := range map[time.Duration]int{0: 7, -1: 7, 1: 1, rnrTimer: 1, rnrTimer + 1: 2, time.Hour: 6} {
		if got := rnrRetries(d); got != want {
			t.Errorf("rnrRetries(%v) = %d, want %d", d, got, want)
		}
	}
}

// TestRing: the ring never holds more than its depth, knows what is in it also
// when its numbers wrap, and flushes each request once.
func TestRing(t *testing.T) {
	var r ring
	r.init(3)
	for i := range uint64(10) {
		if r.holds(i) {
			t.Fatalf("holds %d before it entered", i)
		}
		*r.at(i) = outstanding{id: 100 + i, op: rdma.OpRead}
		r.tail.Add(1)
		if !r.holds(i) || r.used() != 1 || r.free() != 2 {
			t.Fatalf("%d: used %d, free %d", i, r.used(), r.free())
		}
		var wc [2]rdma.Completion
		if n := r.flush(wc[:]); n != 1 || wc[0].ID != 100+i || wc[0].Status != rdma.StatusFlushed {
			t.Fatalf("flush: %d, %+v", n, wc[0])
		}
		if r.holds(i) || r.used() != 0 {
			t.Fatalf("holds %d after it left", i)
		}
	}
}

func TestNewRefusesPathMTU(t *testing.T) {
	if _, err := New(Options{PathMTU: 1500}); err == nil {
		t.Fatal("path MTU 1500 was taken")
	}
}
