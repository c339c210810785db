// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"testing"
	"time"

	"rblk/rdma/rdmatest"
)

func TestConformance(t *testing.T) {
	rdmatest.Run(t, func(tb testing.TB) rdmatest.Pair {
		// Two providers, as on two machines.
		const life = 2 * time.Second // short, for the test that waits it out
		a, err := New(Options{})
		if err != nil {
			tb.Fatal(err)
		}
		b, err := New(Options{HandshakeTime: life})
		if err != nil {
			tb.Fatal(err)
		}
		return rdmatest.Pair{Active: a, Passive: b, Listen: "127.0.0.1:0", BigRegion: true, RequestLife: life}
	})
}
