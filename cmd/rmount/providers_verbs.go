// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo && verbs

package main

import (
	"log/slog"

	"rblk/rdma"
	"rblk/rdma/verbs"
)

func init() {
	verbsTransport := transport{
		name: "verbs",
		open: func(log *slog.Logger) (rdma.Provider, error) { return verbs.New(verbs.Options{Logger: log}) },
	}
	// Preferred where it works.
	transports = append([]transport{verbsTransport}, transports...)
}
