// SPDX-License-Identifier: Apache-2.0

package main

import (
	"log/slog"

	"rblk/rdma"
	"rblk/rdma/tcp"
)

func init() {
	transports = append(transports, transport{
		name: "tcp",
		open: func(log *slog.Logger) (rdma.Provider, error) { return tcp.New(tcp.Options{Logger: log}) },
	})
}
