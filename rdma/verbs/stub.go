// SPDX-License-Identifier: Apache-2.0

//go:build !linux || !cgo || !verbs

package verbs

import (
	"fmt"

	"rblk/rdma"
)

// Built tells whether the provider is compiled in; `version` prints it.
const Built = false

// New fails: this binary was built without the verbs provider.
func New(Options) (rdma.Provider, error) {
	return nil, fmt.Errorf("%w: this binary was built without verbs; install libibverbs-dev and librdmacm-dev (rdma-core-devel), then build again with make", rdma.ErrUnsupported)
}
