// SPDX-License-Identifier: Apache-2.0

// Package s3fifo is the S3-FIFO eviction policy (Yang et al., "FIFO queues are
// all you need for cache eviction", SOSP 2023) over weighted nodes that the
// caller embeds in its own objects: three queues, no list operation on a hit.
//
// New objects enter a small queue; those that were asked for again before they
// reach its end move to the main queue, the others leave and only their keys
// are remembered in the ghost queue. A key that comes back while it is a ghost
// enters the main queue at once. A scan therefore passes through the small
// queue and leaves the main queue alone.
package s3fifo

const (
	// smallShare of the weight belongs to the small queue: 1/10, the paper's
	// figure; from 1/20 to 1/5 its results hardly change, nor do those of
	// cache/cachesim.
	smallShare = 10
	// maxFreq caps the count of hits, so that a node that was popular once is
	// passed over at most this many times (the paper's two bits).
	maxFreq = 3
	// promoteFreq is how many hits in the small queue earn a place in the main
	// queue. The caller counts only true re-reads, so one is evidence enough.
	promoteFreq = 1
	// minGhosts keeps the ghost queue useful while the cache is nearly empty.
	minGhosts = 64
)

// where a node is.
const (
	nowhere = iota
	inSmall
	inMain
)

// Node is the policy's part of a cached object. The zero value is ready.
type Node[T any] struct {
	Value *T    // the object, set by the caller before Insert
	Key   int64 // its identity across evictions, likewise

	prev, next *Node[T]
	weight     int32
	freq       uint8
	where      uint8
}

// Weight is what Insert and Grow have summed up.
func (n *Node[T]) Weight() int64 { return int64(n.weight) }

// Queued is whether n is in a Queue.
func (n *Node[T]) Queued() bool { return n.where != nowhere }

// list is a ring with a sentinel; the newest node is root.next.
type list[T any] struct {
	root   Node[T]
	len    int
	weight int64
}

func (l *list[T]) init() { l.root.prev, l.root.next = &l.root, &l.root }

func (l *list[T]) push(n *Node[T]) {
	n.prev, n.next = &l.root, l.root.next
	n.prev.next, n.next.prev = n, n
	l.len++
	l.weight += int64(n.weight)
}

func (l *list[T]) remove(n *Node[T]) {
	n.prev.next, n.next.prev = n.next, n.prev
	n.prev, n.next = nil, nil
	l.len--
	l.weight -= int64(n.weight)
}

// Queue is the policy's state. It is not safe for concurrent use.
type Queue[T any] struct {
	small, main list[T]
	ghosts      ghosts
}

// New returns an empty Queue.
func New[T any]() *Queue[T] {
	q := &Queue[T]{}
	q.small.init()
	q.main.init()
	q.ghosts.at = map[int64]uint64{}
	return q
}

// Len is the number of nodes, Weight their sum.
func (q *Queue[T]) Len() int { return q.small.len + q.main.len }

// Weight of all nodes.
func (q *Queue[T]) Weight() int64 { return q.small.weight + q.main.weight }

// Insert adds n, which is in no Queue.
func (q *Queue[T]) Insert(n *Node[T], weight int32) {
	n.weight, n.freq = weight, 0
	if q.ghosts.take(n.Key) {
		n.where = inMain
		q.main.push(n)
		return
	}
	n.where = inSmall
	q.small.push(n)
}

// Touch tells that n was asked for again.
func (q *Queue[T]) Touch(n *Node[T]) {
	if n.freq < maxFreq {
		n.freq++
	}
}

// Grow adds delta to n's weight.
func (q *Queue[T]) Grow(n *Node[T], delta int32) {
	n.weight += delta
	switch n.where {
	case inSmall:
		q.small.weight += int64(delta)
	case inMain:
		q.main.weight += int64(delta)
	}
}

// Remove takes n out; its key is not remembered.
func (q *Queue[T]) Remove(n *Node[T]) {
	switch n.where {
	case inSmall:
		q.small.remove(n)
	case inMain:
		q.main.remove(n)
	}
	n.where = nowhere
}

// Victim takes out and returns the node that should go first among those for
// which evictable holds, or nil. The small queue may keep shelter of weight
// beyond its share (data that was read ahead and not yet read).
func (q *Queue[T]) Victim(shelter int64, evictable func(*T) bool) *Node[T] {
	if q.small.weight > q.Weight()/smallShare+shelter || q.main.len == 0 {
		if n := q.fromSmall(evictable); n != nil {
			return n
		}
	}
	if n := q.fromMain(evictable); n != nil {
		return n
	}
	return q.fromSmall(evictable)
}

// fromSmall moves the wanted ones at the old end to the main queue and returns
// the first of the rest.
func (q *Queue[T]) fromSmall(evictable func(*T) bool) *Node[T] {
	for n, steps := q.small.root.prev, q.small.len; steps > 0; steps-- {
		older := n.prev
		switch {
		case n.freq >= promoteFreq:
			q.small.remove(n)
			n.freq, n.where = 0, inMain
			q.main.push(n)
		case evictable(n.Value):
			q.Remove(n)
			q.ghosts.add(n.Key, max(q.Len(), minGhosts))
			return n
		}
		n = older
	}
	return nil
}

// fromMain gives those with hits another round, one hit less, and returns the
// first without. maxFreq rounds find one if any is evictable.
func (q *Queue[T]) fromMain(evictable func(*T) bool) *Node[T] {
	for n, steps := q.main.root.prev, q.main.len*(maxFreq+1); steps > 0; steps-- {
		if n == &q.main.root {
			n = n.prev
		}
		older := n.prev
		switch {
		case n.freq > 0:
			n.freq--
			q.main.remove(n)
			q.main.push(n)
		case evictable(n.Value):
			q.Remove(n)
			return n
		}
		n = older
	}
	return nil
}

// ghosts is a bounded FIFO of keys.
type ghosts struct {
	at   map[int64]uint64 // key → its sequence number in ring
	ring []ghost          // oldest at head; a slot whose number is not in at is void
	head int
	next uint64
}

type ghost struct {
	key int64
	seq uint64
}

// take reports whether key is a ghost, and forgets it.
func (g *ghosts) take(key int64) bool {
	_, ok := g.at[key]
	delete(g.at, key)
	return ok
}

// add remembers key and forgets the oldest beyond limit.
func (g *ghosts) add(key int64, limit int) {
	g.next++
	g.at[key] = g.next
	g.ring = append(g.ring, ghost{key, g.next})
	for len(g.at) > limit || len(g.ring)-g.head > 2*limit {
		old := g.ring[g.head]
		g.head++
		if g.at[old.key] == old.seq {
			delete(g.at, old.key)
		}
	}
	if g.head > len(g.ring)/2 {
		g.ring = append(g.ring[:0], g.ring[g.head:]...)
		g.head = 0
	}
}
