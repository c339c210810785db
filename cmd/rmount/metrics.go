// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
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
}

// serveMetrics listens on addr (HOST:PORT).
func serveMetrics(addr string, log *slog.Logger) (*metricsServer, error) {
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("metrics=%s: %w", addr, err)
	}
	s := &metricsServer{registry: prometheus.NewRegistry(), log: log}
	s.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.registry, promhttp.HandlerOpts{}))
	s.http = &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug)}
	s.running.Go(func() { s.http.Serve(l) })
	return s, nil
}

// add shows an opened export.
func (s *metricsServer) add(export string, v *initiator.Volume, c *cache.Volume) {
	for _, col := range []prometheus.Collector{v.Collector(), cacheCollector{export, c}} {
		if err := s.registry.Register(col); err != nil {
			s.log.Warn("metrics of the export are not shown", "export", export, "err", err)
		}
	}
}

func (s *metricsServer) close() {
	s.http.Close()
	s.running.Wait()
}

// cacheCollector shows a cache's counters.
type cacheCollector struct {
	export string
	cache  *cache.Volume
}

// cacheMetrics names every counter of cache.Stats that is shown.
var cacheMetrics = []struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	of   func(*cache.Stats) float64
}{
	{cacheDesc("rblk_cache_hits_total", "Reads answered from the cache."), prometheus.CounterValue, func(s *cache.Stats) float64 { return float64(s.Hits) }},
	{cacheDesc("rblk_cache_misses_total", "Reads that needed the target."), prometheus.CounterValue, func(s *cache.Stats) float64 { return float64(s.Misses) }},
	{cacheDesc("rblk_cache_evictions_total", "Blocks evicted."), prometheus.CounterValue, func(s *cache.Stats) float64 { return float64(s.Evictions) }},
	{cacheDesc("rblk_cache_fetched_bytes_total", "Bytes read over the wire."), prometheus.CounterValue, func(s *cache.Stats) float64 { return float64(s.FetchedBytes) }},
	{cacheDesc("rblk_cache_served_bytes_total", "Bytes given to the front end."), prometheus.CounterValue, func(s *cache.Stats) float64 { return float64(s.ServedBytes) }},
	{cacheDesc("rblk_cache_written_bytes_total", "Bytes written through."), prometheus.CounterValue, func(s *cache.Stats) float64 { return float64(s.WrittenBytes) }},
	{cacheDesc("rblk_cache_stalls_total", "Reads that waited for a transfer."), prometheus.CounterValue, func(s *cache.Stats) float64 { return float64(s.Stalls) }},
	{cacheDesc("rblk_readahead_issued_bytes_total", "Bytes read ahead."), prometheus.CounterValue, func(s *cache.Stats) float64 { return float64(s.ReadaheadIssued) }},
	{cacheDesc("rblk_readahead_used_bytes_total", "Bytes read ahead and then asked for."), prometheus.CounterValue, func(s *cache.Stats) float64 { return float64(s.ReadaheadUsed) }},
	{cacheDesc("rblk_readahead_wasted_bytes_total", "Bytes read ahead and evicted unread."), prometheus.CounterValue, func(s *cache.Stats) float64 { return float64(s.ReadaheadWasted) }},
	{cacheDesc("rblk_cache_size_bytes", "Memory for frames."), prometheus.GaugeValue, func(s *cache.Stats) float64 { return float64(s.Size) }},
}

func cacheDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, []string{"export"}, nil)
}

func (c cacheCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range cacheMetrics {
		ch <- m.desc
	}
}

func (c cacheCollector) Collect(ch chan<- prometheus.Metric) {
	st := c.cache.Stats()
	for _, m := range cacheMetrics {
		ch <- prometheus.MustNewConstMetric(m.desc, m.kind, m.of(&st), c.export)
	}
}
