// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"fmt"
	"sync"
)

// Budget bounds the memory of all Volumes that are opened with it. Each of them
// is guaranteed MinBudget when it opens and takes more as it fills, up to its
// own Size, while there is any; it gives back when it closes. A nil Budget is no
// bound.
type Budget struct {
	total int64

	mu   sync.Mutex
	used int64
}

// MinBudget is what one Volume takes at the least: operations under way need it.
const MinBudget int64 = (workingSize + minPiece - 1) / minPiece * minPiece

// NewBudget makes a Budget of total bytes, which must suffice for a Volume.
func NewBudget(total int64) (*Budget, error) {
	if total < MinBudget {
		return nil, fmt.Errorf("a cache budget of %d bytes is too small; one volume needs %d", total, MinBudget)
	}
	return &Budget{total: total}, nil
}

// take takes n bytes, or none.
func (b *Budget) take(n int64) bool {
	if b == nil {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.used+n > b.total {
		return false
	}
	b.used += n
	return true
}

func (b *Budget) give(n int64) {
	if b == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.used -= n
}

// Used is what the Volumes have taken.
func (b *Budget) Used() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.used
}
