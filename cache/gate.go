// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"sync"
	"sync/atomic"

	"rblk/volume"
)

// hand is one caller that may be touching frames, in gate.state; the low 32
// bits are reserved blocks.
const (
	hand      = int64(1) << 32
	blockMask = hand - 1
)

// gate is the back-pressure: whoever pins blocks first reserves, in one step,
// as many as it can possibly pin, and waits in line while the frames do not
// suffice. Nobody who holds frames waits for more, so nobody waits for ever;
// and since all that is pinned was reserved, a holder of a reservation always
// finds frames that are free or can be evicted. On the way in and out it is
// one atomic addition.
//
// It also counts the hands on frames, for Close: a caller that waits for the
// network alone takes its hand off (pause).
type gate struct {
	state  atomic.Int64
	limit  atomic.Int64 // blocks
	alert  atomic.Bool  // somebody wants to be told of what is given back
	closed atomic.Bool

	mu      sync.Mutex
	waiting []*waiter
	changed sync.Cond // of state, while closing
}

type waiter struct {
	blocks int64
	let    chan struct{} // closed with ok set
	ok     bool
}

func (g *gate) init(limit int64) {
	g.limit.Store(limit)
	g.changed.L = &g.mu
}

// enter reserves blocks and lays a hand on.
func (g *gate) enter(ctx context.Context, blocks int64) error {
	now := g.state.Add(hand + blocks)
	if !g.alert.Load() && now&blockMask <= g.limit.Load() {
		return nil
	}
	g.give(hand + blocks)
	return g.queue(ctx, blocks)
}

// queue is enter's slow path.
func (g *gate) queue(ctx context.Context, blocks int64) error {
	w := &waiter{blocks: blocks, let: make(chan struct{})}
	g.mu.Lock()
	if g.closed.Load() {
		g.mu.Unlock()
		return volume.ErrClosed
	}
	g.waiting = append(g.waiting, w)
	g.alert.Store(true)
	g.grant()
	g.mu.Unlock()
	select {
	case <-w.let:
	case <-ctx.Done():
		g.mu.Lock()
		defer g.mu.Unlock()
		if w.ok { // let in at the same moment
			g.state.Add(-hand - blocks)
		} else {
			for i, x := range g.waiting {
				if x == w {
					g.waiting = append(g.waiting[:i], g.waiting[i+1:]...)
					break
				}
			}
		}
		g.grant()
		g.changed.Broadcast()
		return ctx.Err()
	}
	if !w.ok {
		return volume.ErrClosed
	}
	return nil
}

// try reserves without waiting and without a hand, and leaves spare blocks to
// others.
func (g *gate) try(blocks, spare int64) bool {
	now := g.state.Add(blocks)
	if !g.alert.Load() && now&blockMask <= g.limit.Load()-spare {
		return true
	}
	g.give(blocks)
	return false
}

// reserve is for one who has a hand on and needs no frames: it keeps Close
// waiting after the hand has gone.
func (g *gate) reserve(n int64) { g.state.Add(n) }

// give takes back hands and blocks.
func (g *gate) give(n int64) {
	g.state.Add(-n)
	if g.alert.Load() {
		g.mu.Lock()
		g.grant()
		g.changed.Broadcast()
		g.mu.Unlock()
	}
}

// pause takes the caller's hand off while it waits for the network.
func (g *gate) pause() { g.give(hand) }

// resume lays it on again. After ErrClosed the frames must not be touched.
func (g *gate) resume() error {
	g.state.Add(hand)
	if g.closed.Load() {
		return volume.ErrClosed
	}
	return nil
}

// grant lets in whom there is room for, in the order of arrival. g.mu is held.
func (g *gate) grant() {
	if g.closed.Load() {
		for _, w := range g.waiting {
			close(w.let)
		}
		g.waiting = nil
		return // alert stays on
	}
	for len(g.waiting) > 0 {
		w := g.waiting[0]
		now := g.state.Add(hand + w.blocks)
		if now&blockMask > g.limit.Load() {
			g.state.Add(-hand - w.blocks)
			return
		}
		g.waiting = g.waiting[1:]
		w.ok = true
		close(w.let)
	}
	g.alert.Store(false)
}

// raise changes the limit.
func (g *gate) raise(limit int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.limit.Store(limit)
	if g.alert.Load() {
		g.grant()
	}
}

// close refuses everybody from now on and returns when no hand is on a frame.
func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed.Store(true)
	g.alert.Store(true)
	g.grant()
	for g.state.Load() >= hand {
		g.changed.Wait()
	}
}

// drain returns when nothing is reserved.
func (g *gate) drain() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.state.Load() != 0 {
		g.changed.Wait()
	}
}

func (g *gate) reserved() int64 { return g.state.Load() & blockMask }
