// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"rblk/cache"
	"rblk/initiator"
)

// metricsServer serves /metrics of one mount.
type metricsServer struct {
	registry *prometheus.Registry
	http     *http.Server
	running  sync.WaitGroup
	log      *slog.Logger

	mu     sync.Mutex
	caches []*cache.Volume // guarded by mu
}

// serveMetrics listens on addr (HOST:PORT).
func serveMetrics(addr string, log *slog.Logger) (*metricsServer, error) {
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("metrics=%s: %w", addr, err)
	}
	s := &metricsServer{registry: prometheus.NewRegistry(), log: log}
	s.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	s.registry.MustRegister(cache.NewCollector(s.list))
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.registry, promhttp.HandlerOpts{}))
	s.http = &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug)}
	s.running.Go(func() { s.http.Serve(l) })
	return s, nil
}

// list is every cache that is shown.
func (s *metricsServer) list() []*cache.Volume {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.caches)
}

// add shows an opened export.
func (s *metricsServer) add(export string, v *initiator.Volume, c *cache.Volume) {
	s.mu.Lock()
	s.caches = append(s.caches, c)
	s.mu.Unlock()
	if err := s.registry.Register(v.Collector()); err != nil {
		s.log.Warn("metrics of the session are not shown", "export", export, "err", err)
	}
}

func (s *metricsServer) close() {
	s.http.Close()
	s.running.Wait()
}
