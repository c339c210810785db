// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo && verbs

package main

import (
	"log/slog"
	"net"

	"rblk/rdma"
	"rblk/rdma/verbs"
	"rblk/wire"
)

func init() {
	transports = append(transports, transport{
		name: "verbs",
		port: wire.DefaultVerbsPort,
		open: func(log *slog.Logger) (rdma.Provider, error) { return verbs.New(verbs.Options{Logger: log}) },
		auto: verbsLeadThere,
	})
}

// verbsLeadThere: there is a device, and host is more than this machine: an
// adapter does not serve the loopback address.
func verbsLeadThere(p rdma.Provider, host string) bool {
	if ip := net.ParseIP(host); host == "localhost" || (ip != nil && ip.IsLoopback()) {
		return false
	}
	devs, err := p.Devices()
	return err == nil && len(devs) > 0
}
