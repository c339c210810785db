// SPDX-License-Identifier: Apache-2.0

package main

import "math/rand/v2"

// traces are what volumes are read like.
var traces = []struct {
	name string
	make func(n, objects int, seed uint64) []int64
}{
	{"Zipf 1.01", func(n, objects int, seed uint64) []int64 { return popular(n, objects, seed) }},
	{"scan + Zipf", scanAndZipf},
	{"loop", loop},
	{"shuffled epochs", epochs},
	{"moving hot set", moving},
}

func random(seed uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, 2)) }

// popular reads objects by popularity: metadata, indexes, databases. Keys are
// shuffled, so that neighbours have nothing in common.
func popular(n, objects int, seed uint64) []int64 {
	rng := random(seed)
	z := rand.NewZipf(rng, 1.01, 1, uint64(objects-1))
	name := rng.Perm(objects)
	trace := make([]int64, n)
	for i := range trace {
		trace[i] = int64(name[z.Uint64()])
	}
	return trace
}

// scanAndZipf is a hot set and, half of the time, somebody who reads everything
// once: a backup, a checksum run.
func scanAndZipf(n, objects int, seed uint64) []int64 {
	trace := popular(n, objects, seed)
	for i, at := 0, int64(objects); i < n; i += 2 {
		trace[i] = at
		at++
	}
	return trace
}

// loop reads everything in the same order again and again.
func loop(n, objects int, _ uint64) []int64 {
	trace := make([]int64, n)
	for i := range trace {
		trace[i] = int64(i % objects)
	}
	return trace
}

// epochs read everything once in an order of their own: training.
func epochs(n, objects int, seed uint64) []int64 {
	rng := random(seed)
	trace := make([]int64, 0, n+objects)
	for len(trace) < n {
		for _, k := range rng.Perm(objects) {
			trace = append(trace, int64(k))
		}
	}
	return trace[:n]
}

// moving is popularity whose favourites change slowly.
func moving(n, objects int, seed uint64) []int64 {
	trace := popular(n, objects, seed)
	for i := range trace {
		trace[i] = (trace[i] + int64(i/(n/20+1))*int64(objects)/7) % int64(objects)
	}
	return trace
}
