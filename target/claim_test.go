// SPDX-License-Identifier: Apache-2.0

package target

import (
	"sync"
	"testing"

	"rblk/wire"
)

// TestClaimHandover: from the moment on that others can claim an export, the
// end of its last writer touches the state directory no more: it would take its
// successor's claim away.
func TestClaimHandover(t *testing.T) {
	r := start(t, testOptions(t), addMemory)
	e := r.export("m")
	stop := make(chan struct{})
	var watcher sync.WaitGroup
	watcher.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			e.mu.Lock()
			if e.writer == nil {
				if rec, ok := r.state.loadClaim("m"); ok {
					t.Errorf("nobody writes, and the claim of %s is still to be dropped", rec.Session)
				}
			}
			e.mu.Unlock()
		}
	})
	for range 50 {
		reply, err := r.open(request("m", wire.AccessWrite, 1))
		if err != nil {
			t.Fatal(err)
		}
		if err := r.call("DELETE", "/v1/sessions/"+reply.Session, nil, nil, "Rblk-Secret", reply.Secret); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	watcher.Wait()
}
