// SPDX-License-Identifier: Apache-2.0

// Cachesim compares eviction policies on synthetic traces: the code that the
// cache runs (internal/s3fifo) with LRU, CLOCK, SIEVE, ARC, and Belady's
// optimum, which knows the future. It prints a table in Markdown.
//
//	go run ./cache/cachesim [-n requests] [-objects number] [-seed number]
package main

import (
	"flag"
	"fmt"
	"io"
	"os"
)

func main() {
	n := flag.Int("n", 1_000_000, "requests of each trace")
	objects := flag.Int("objects", 100_000, "objects of each trace")
	seed := flag.Uint64("seed", 1, "of the random numbers")
	flag.Parse()
	if flag.NArg() > 0 || *n < 1 || *objects < 100 {
		fmt.Fprintln(os.Stderr, "cachesim: takes flags alone; -n of at least 1, -objects of at least 100")
		os.Exit(2)
	}
	run(os.Stdout, *n, *objects, *seed)
}

// shares of the objects that the cache holds.
var shares = []float64{0.01, 0.1, 0.25}

// run prints the table: hits in per cent.
func run(w io.Writer, n, objects int, seed uint64) {
	fmt.Fprint(w, "| trace | cache |")
	for _, p := range policies {
		fmt.Fprintf(w, " %s |", p.name)
	}
	fmt.Fprint(w, " Belady |\n|---|---:|")
	for range len(policies) + 1 {
		fmt.Fprint(w, "---:|")
	}
	fmt.Fprintln(w)
	for _, t := range traces {
		trace := t.make(n, objects, seed)
		for _, share := range shares {
			size := int(float64(objects) * share)
			fmt.Fprintf(w, "| %s | %.0f %% |", t.name, share*100)
			for _, p := range policies {
				fmt.Fprintf(w, " %.1f |", 100*ratio(p.make(size), trace))
			}
			fmt.Fprintf(w, " %.1f |\n", 100*belady(size, trace))
		}
	}
}

// policy is a cache of object names.
type policy interface {
	// get asks for key, brings it in if it is not there, and reports whether it
	// was.
	get(key int64) bool
}

func ratio(p policy, trace []int64) float64 {
	hits := 0
	for _, key := range trace {
		if p.get(key) {
			hits++
		}
	}
	return float64(hits) / float64(len(trace))
}
