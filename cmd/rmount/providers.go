// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"

	"rblk/rdma"
)

func pid() int { return os.Getpid() }

// transport is a provider that this build has.
type transport struct {
	name string
	open func(log *slog.Logger) (rdma.Provider, error)
}

// transports are added by the providers_*.go files, the preferred one first.
var transports []transport

// missing says how to get a provider that this build lacks.
var missing = map[string]string{
	"verbs": "this rmount was built without verbs: install libibverbs-dev and librdmacm-dev and run make again",
}

func transportNames() []string {
	var names []string
	for _, t := range transports {
		names = append(names, t.name)
	}
	return names
}

// openProviders opens the transport asked for, or, for auto, all that work. The
// caller closes them.
func openProviders(name string, log *slog.Logger) ([]rdma.Provider, error) {
	var ps []rdma.Provider
	for _, t := range transports {
		if name != "auto" && name != t.name {
			continue
		}
		p, err := t.open(log)
		if err != nil && name != "auto" {
			return nil, fmt.Errorf("transport=%s: %w", name, err)
		}
		if err != nil {
			log.Info("transport is not usable", "transport", t.name, "err", err)
			continue
		}
		ps = append(ps, p)
	}
	if len(ps) > 0 {
		return ps, nil
	}
	if how := missing[name]; how != "" {
		return nil, fmt.Errorf("transport=%s: %s", name, how)
	}
	return nil, errors.New("no transport works here: rmount check tells why; there is " + strings.Join(transportNames(), ", "))
}

func closeProviders(ps []rdma.Provider, log *slog.Logger) {
	for _, p := range ps {
		if err := p.Close(); err != nil {
			log.Warn("transport does not close", "transport", p.Name(), "err", err)
		}
	}
}
