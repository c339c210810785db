// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
)

// No policy hits more than the optimum, and a cache as large as the trace
// misses each object once.
func TestPolicies(t *testing.T) {
	const n, objects = 20_000, 1000
	for _, tr := range traces {
		trace := tr.make(n, objects, 1)
		distinct := map[int64]bool{}
		for _, k := range trace {
			distinct[k] = true
		}
		for _, p := range policies {
			for _, size := range []int{1, 10, 100, len(distinct)} {
				got, best := ratio(p.make(size), trace), belady(size, trace)
				if got > best {
					t.Errorf("%s on %s, size %d: %.4f, optimum %.4f", p.name, tr.name, size, got, best)
				}
				if all := float64(n-len(distinct)) / n; size == len(distinct) && got != all {
					t.Errorf("%s on %s: %.4f with everything cached, want %.4f", p.name, tr.name, got, all)
				}
			}
		}
	}
}

// The hot set survives a scan, as it does not with LRU.
func TestScanResistance(t *testing.T) {
	trace := scanAndZipf(200_000, 10_000, 1)
	s3, lru := ratio(newS3FIFO(1000), trace), ratio(newLRU(1000), trace)
	if s3 < lru*1.05 {
		t.Errorf("S3-FIFO %.3f, LRU %.3f", s3, lru)
	}
}

func TestTable(t *testing.T) {
	var b strings.Builder
	run(&b, 1000, 100, 1)
	if lines := strings.Count(b.String(), "\n"); lines != 2+len(traces)*len(shares) {
		t.Errorf("%d lines:\n%s", lines, &b)
	}
}
