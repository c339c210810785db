// SPDX-License-Identifier: Apache-2.0

package main

import (
	"log/slog"

	"rblk/rdma"
	"rblk/rdma/tcp"
	"rblk/wire"
)

func init() {
	transports = append(transports, transport{
		name: "tcp",
		port: wire.DefaultTCPPort,
		open: func(log *slog.Logger) (rdma.Provider, error) { return tcp.New(tcp.Options{Logger: log}) },
		auto: func(rdma.Provider, string) bool { return true },
	})
}
