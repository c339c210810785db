// SPDX-License-Identifier: Apache-2.0

package cachetest

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"go.uber.org/goleak"

	"rblk/volume"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func transfer(t *testing.T, s *Source, op *volume.Op) error {
	t.Helper()
	if op.Done == nil {
		op.Done = func(*volume.Op) {}
	}
	s.Submit([]*volume.Op{op})
	return s.Await(context.Background(), op)
}

func TestReadWaitsForOverlappingWrite(t *testing.T) {
	s := NewSource(1<<20, Options{Latency: time.Millisecond, Jitter: time.Millisecond})
	defer s.Close()
	a, err := s.NewArena(1 << 16)
	if err != nil {
		t.Fatal(err)
	}
	w, r := a.Bytes()[:4096], a.Bytes()[4096:8192]
	for i := range 50 {
		for j := range w {
			w[j] = byte(i)
		}
		wop := &volume.Op{Kind: volume.OpWrite, Lane: volume.LaneWrite, Mem: w, Done: func(*volume.Op) {}}
		s.Submit([]*volume.Op{wop})
		if err := transfer(t, s, &volume.Op{Mem: r}); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(w, r) {
			t.Fatalf("round %d: read passed the write", i)
		}
		if err := s.Await(context.Background(), wop); err != nil {
			t.Fatal(err)
		}
	}
}

func TestFaultAndHoldAndClose(t *testing.T) {
	s := NewSource(1<<20, Options{})
	a, err := s.NewArena(1 << 16)
	if err != nil {
		t.Fatal(err)
	}
	s.SetFault(func(op *volume.Op) error { return volume.ErrAway })
	if err := transfer(t, s, &volume.Op{Mem: a.Bytes()[:1]}); !errors.Is(err, volume.ErrAway) {
		t.Fatalf("got %v", err)
	}
	s.SetFault(nil)
	s.Hold()
	op := &volume.Op{Mem: a.Bytes()[:1], Done: func(*volume.Op) {}}
	s.Submit([]*volume.Op{op})
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := s.Await(ctx, op); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
	if s.Waiting() != 1 {
		t.Fatal("the op did not wait")
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(op.Err, volume.ErrClosed) {
		t.Fatalf("got %v", op.Err)
	}
	if c := s.Counters(); c.Arenas != 0 || c.InFlight != 0 {
		t.Fatalf("left over: %+v", c)
	}
}
