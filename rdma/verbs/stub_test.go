// SPDX-License-Identifier: Apache-2.0

//go:build !linux || !cgo || !verbs

package verbs

import (
	"errors"
	"strings"
	"testing"

	"rblk/rdma"
)

func TestStubNamesThePackages(t *testing.T) {
	_, err := New(Options{})
	if !errors.Is(err, rdma.ErrUnsupported) || !strings.Contains(err.Error(), "libibverbs-dev") || !strings.Contains(err.Error(), "librdmacm-dev") {
		t.Fatalf("New: %v", err)
	}
}
