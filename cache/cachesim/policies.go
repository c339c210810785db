// SPDX-License-Identifier: Apache-2.0

package main

import (
	"container/heap"
	"container/list"

	"rblk/internal/s3fifo"
)

var policies = []struct {
	name string
	make func(size int) policy
}{
	{"rblk (S3-FIFO)", newS3FIFO},
	{"LRU", newLRU},
	{"CLOCK", newClock},
	{"SIEVE", newSieve},
	{"ARC", newARC},
}

// s3 is the policy of the cache itself.
type s3 struct {
	size  int
	at    map[int64]*object
	queue *s3fifo.Queue[object]
}

type object struct{ node s3fifo.Node[object] }

func newS3FIFO(size int) policy {
	return &s3{size, map[int64]*object{}, s3fifo.New[object]()}
}

func (c *s3) get(key int64) bool {
	if o := c.at[key]; o != nil {
		c.queue.Touch(&o.node)
		return true
	}
	if len(c.at) == c.size {
		n := c.queue.Victim(0, func(*object) bool { return true })
		delete(c.at, n.Key)
	}
	o := &object{}
	o.node.Value, o.node.Key = o, key
	c.at[key] = o
	c.queue.Insert(&o.node, 1)
	return false
}

// lru evicts what was asked for longest ago.
type lru struct {
	size  int
	at    map[int64]*list.Element
	order *list.List // newest in front
}

func newLRU(size int) policy { return &lru{size, map[int64]*list.Element{}, list.New()} }

func (c *lru) get(key int64) bool {
	if e := c.at[key]; e != nil {
		c.order.MoveToFront(e)
		return true
	}
	if len(c.at) == c.size {
		delete(c.at, c.order.Remove(c.order.Back()).(int64))
	}
	c.at[key] = c.order.PushFront(key)
	return false
}

// clock gives each object that was asked for a second round.
type clock struct {
	at   map[int64]int
	keys []int64
	used []bool
	size int
	hand int
}

func newClock(size int) policy { return &clock{at: map[int64]int{}, size: size} }

func (c *clock) get(key int64) bool {
	if i, ok := c.at[key]; ok {
		c.used[i] = true
		return true
	}
	if len(c.keys) < c.size {
		c.at[key] = len(c.keys)
		c.keys, c.used = append(c.keys, key), append(c.used, false)
		return false
	}
	for c.used[c.hand] {
		c.used[c.hand] = false
		c.hand = (c.hand + 1) % c.size
	}
	delete(c.at, c.keys[c.hand])
	c.at[key], c.keys[c.hand] = c.hand, key
	c.hand = (c.hand + 1) % c.size
	return false
}

// sieve is CLOCK whose survivors keep their place and whose new ones enter at
// the head (Zhang et al., NSDI 2024).
type sieve struct {
	size  int
	at    map[int64]*list.Element
	order *list.List // newest in front
	hand  *list.Element
}

type sieved struct {
	key  int64
	used bool
}

func newSieve(size int) policy {
	return &sieve{size: size, at: map[int64]*list.Element{}, order: list.New()}
}

func (c *sieve) get(key int64) bool {
	if e := c.at[key]; e != nil {
		e.Value.(*sieved).used = true
		return true
	}
	if len(c.at) == c.size {
		c.evict()
	}
	c.at[key] = c.order.PushFront(&sieved{key: key})
	return false
}

func (c *sieve) evict() {
	e := c.hand
	for {
		if e == nil {
			e = c.order.Back()
		}
		s := e.Value.(*sieved)
		if !s.used {
			break
		}
		s.used = false
		e = e.Prev()
	}
	c.hand = e.Prev()
	delete(c.at, c.order.Remove(e).(*sieved).key)
}

// arc balances recency and frequency by what it evicted in vain (Megiddo and
// Modha, FAST 2003): t1 and t2 hold objects, b1 and b2 their ghosts.
type arc struct {
	size, target   int
	t1, t2, b1, b2 *lru
}

func newARC(size int) policy {
	part := func() *lru { return newLRU(0).(*lru) }
	return &arc{size: size, t1: part(), t2: part(), b1: part(), b2: part()}
}

func (l *lru) push(key int64)     { l.at[key] = l.order.PushFront(key) }
func (l *lru) has(key int64) bool { return l.at[key] != nil }
func (l *lru) len() int           { return len(l.at) }

func (l *lru) remove(key int64) {
	l.order.Remove(l.at[key])
	delete(l.at, key)
}

func (l *lru) pop() int64 {
	key := l.order.Back().Value.(int64)
	l.remove(key)
	return key
}

func (c *arc) get(key int64) bool {
	switch {
	case c.t1.has(key):
		c.t1.remove(key)
		c.t2.push(key)
		return true
	case c.t2.has(key):
		c.t2.remove(key)
		c.t2.push(key)
		return true
	case c.b1.has(key):
		c.target = min(c.size, c.target+max(1, c.b2.len()/c.b1.len()))
		c.replace(false)
		c.b1.remove(key)
		c.t2.push(key)
		return false
	case c.b2.has(key):
		c.target = max(0, c.target-max(1, c.b1.len()/c.b2.len()))
		c.replace(true)
		c.b2.remove(key)
		c.t2.push(key)
		return false
	}
	if c.t1.len()+c.b1.len() == c.size {
		if c.t1.len() < c.size {
			c.b1.pop()
			c.replace(false)
		} else {
			c.t1.pop()
		}
	} else if all := c.t1.len() + c.t2.len() + c.b1.len() + c.b2.len(); all >= c.size {
		if all == 2*c.size {
			c.b2.pop()
		}
		c.replace(false)
	}
	c.t1.push(key)
	return false
}

// replace moves an object to the ghosts, if the cache is full.
func (c *arc) replace(inB2 bool) {
	if c.t1.len()+c.t2.len() < c.size {
		return
	}
	if n := c.t1.len(); n > 0 && (n > c.target || inB2 && n == c.target || c.t2.len() == 0) {
		c.b1.push(c.t1.pop())
	} else {
		c.b2.push(c.t2.pop())
	}
}

// belady is the ratio of hits of the policy that evicts what is asked for
// latest in the future: no policy hits more.
func belady(size int, trace []int64) float64 {
	next := make([]int, len(trace))
	seen := map[int64]int{}
	for i := len(trace) - 1; i >= 0; i-- {
		next[i] = len(trace) + i // never again
		if j, ok := seen[trace[i]]; ok {
			next[i] = j
		}
		seen[trace[i]] = i
	}
	in := map[int64]int{} // key → when it is asked for next
	var far farthest
	hits := 0
	for i, key := range trace {
		if _, ok := in[key]; ok {
			hits++
		} else if len(in) == size {
			for {
				top := heap.Pop(&far).(use)
				if in[top.key] == top.at {
					delete(in, top.key)
					break
				}
			}
		}
		in[key] = next[i]
		heap.Push(&far, use{key, next[i]})
	}
	return float64(hits) / float64(len(trace))
}

// use is when a key is asked for; entries that in no longer agrees with are
// void.
type use struct {
	key int64
	at  int
}

type farthest []use

func (h farthest) Len() int           { return len(h) }
func (h farthest) Less(i, j int) bool { return h[i].at > h[j].at }
func (h farthest) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *farthest) Push(x any)        { *h = append(*h, x.(use)) }
func (h *farthest) Pop() any {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}
