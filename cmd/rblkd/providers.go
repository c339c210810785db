// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"

	"rblk/rdma"
	"rblk/target"
)

// transport is a provider that this build has.
type transport struct {
	name string
	port int // default for data connections
	open func(log *slog.Logger) (rdma.Provider, error)
	// auto tells whether to listen on host when nobody asked for this
	// provider by name.
	auto func(p rdma.Provider, host string) bool
}

// transports are added by the providers_*.go files.
var transports []transport

// missing says how to get a provider that this build lacks.
var missing = map[string]string{
	"verbs": "this rblkd was built without verbs: install libibverbs-dev and librdmacm-dev and run make again",
}

// openData opens the providers and finds where they listen. The caller closes
// what it gets, also beside an error.
func openData(s *settings, log *slog.Logger) (listens []target.DataListen, err error) {
	asked, err := parseDataListen(s.dataListen)
	if err != nil {
		return nil, &usage{err}
	}
	for _, t := range transports {
		addrs, named := asked[t.name]
		if len(asked) > 0 && !named {
			continue
		}
		p, err := t.open(log)
		if err != nil {
			if !named {
				log.Info("transport is not usable", "transport", t.name, "err", err)
				continue
			}
			return listens, fmt.Errorf("transport %s: %w", t.name, err)
		}
		if !named {
			host := s.dataHost()
			if !t.auto(p, host) {
				p.Close()
				continue
			}
			addrs = []string{net.JoinHostPort(host, strconv.Itoa(t.port))}
		}
		for _, a := range addrs {
			listens = append(listens, target.DataListen{Provider: p, Addr: a})
		}
	}
	return listens, nil
}

// closeData closes every provider once.
func closeData(listens []target.DataListen) error {
	var errs []error
	for _, l := range listens {
		errs = append(errs, l.Provider.Close())
	}
	return errors.Join(errs...)
}

// parseDataListen sorts [PROVIDER=]HOST:PORT by provider.
func parseDataListen(values []string) (map[string][]string, error) {
	byName := map[string][]string{}
	for _, v := range values {
		name, addr, ok := strings.Cut(v, "=")
		if !ok {
			name, addr = "tcp", v
		}
		if _, _, err := net.SplitHostPort(addr); err != nil {
			return nil, fmt.Errorf("--data-listen %s: want [PROVIDER=]HOST:PORT, such as tcp=0.0.0.0:7471", v)
		}
		known := false
		for _, t := range transports {
			known = known || t.name == name
		}
		if !known {
			if how, ok := missing[name]; ok {
				return nil, fmt.Errorf("--data-listen %s: %s", v, how)
			}
			return nil, fmt.Errorf("--data-listen %s: unknown transport %q: there is %s", v, name, strings.Join(transportNames(), ", "))
		}
		byName[name] = append(byName[name], addr)
	}
	return byName, nil
}

func transportNames() []string {
	var names []string
	for _, t := range transports {
		names = append(names, t.name)
	}
	return names
}
