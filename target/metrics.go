// SPDX-License-Identifier: Apache-2.0

package target

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"rblk/wire"
)

// metrics is what /metrics shows.
type metrics struct {
	registry       *prometheus.Registry
	opened         prometheus.Counter
	reopened       prometheus.Counter
	refusedTokens  prometheus.Counter
	protocolErrors prometheus.Counter
	ops            *prometheus.CounterVec   // completions, by op and status
	requests       *prometheus.HistogramVec // time to the answer, by message
	fills          prometheus.Histogram
	filled         prometheus.Counter
}

// messageNames are the metric labels of requests that may take time.
var messageNames = map[wire.Type]string{
	wire.TypeMap: "map", wire.TypeCommit: "commit", wire.TypeFlush: "flush", wire.TypeDiscard: "discard", wire.TypeZero: "zero", wire.TypeDrop: "drop",
}

// answered notes how long a request took.
func (m *metrics) answered(typ wire.Type, start time.Time) {
	m.requests.WithLabelValues(messageNames[typ]).Observe(time.Since(start).Seconds())
}

// fill notes a read of n bytes from a store.
func (m *metrics) fill(n int, start time.Time) {
	m.fills.Observe(time.Since(start).Seconds())
	m.filled.Add(float64(n))
}

// latencies from 10 µs (memory) to 20 s (a disk that is asleep), in seconds.
var latencies = prometheus.ExponentialBuckets(10e-6, 4, 11)

func newMetrics(s *Server) *metrics {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	m := &metrics{
		registry:       prometheus.NewRegistry(),
		opened:         counter("rblk_target_sessions_opened_total", "Sessions opened."),
		reopened:       counter("rblk_target_sessions_reopened_total", "Sessions re-opened by initiators that had lost their connections."),
		refusedTokens:  counter("rblk_target_connect_tokens_refused_total", "Data connections refused for their token."),
		protocolErrors: counter("rblk_target_protocol_errors_total", "Connections ended because the peer broke the protocol."),
	}
	m.ops = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "rblk_rdma_ops_total", Help: "Completions of the target's own requests: messages sent and received."}, []string{"op", "status"})
	m.requests = prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "rblk_target_request_seconds", Help: "Time from a message to its answer.", Buckets: latencies}, []string{"message"})
	m.fills = prometheus.NewHistogram(prometheus.HistogramOpts{Name: "rblk_target_fill_seconds", Help: "Time to read an extent from its store.", Buckets: latencies})
	m.filled = counter("rblk_target_filled_bytes_total", "Bytes of extents read from stores.")
	m.registry.MustRegister(m.ops, m.requests, m.fills, m.filled, m.opened, m.reopened, m.refusedTokens, m.protocolErrors,
		prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "rblk_target_revokes_total", Help: "REVOKE rounds."}, func() float64 { return float64(s.revokes.Load()) }),
		&stateCollector{s}, collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

var (
	descSessions = prometheus.NewDesc("rblk_target_sessions", "Open sessions.", []string{"export"}, nil)
	descConns    = prometheus.NewDesc("rblk_target_connections", "Data connections.", []string{"export"}, nil)
	descGrants   = prometheus.NewDesc("rblk_target_grants", "Frames granted to sessions.", []string{"export"}, nil)
	descFrames   = prometheus.NewDesc("rblk_target_frames", "Frames by state.", []string{"state"}, nil)
	descSize     = prometheus.NewDesc("rblk_target_export_bytes", "Size of an export.", []string{"export", "kind"}, nil)
	descChanged  = prometheus.NewDesc("rblk_target_dataset_changed_files_total", "Reads refused because the file changed since the scan.", []string{"export"}, nil)
)

// stateCollector reads the server's state when it is asked.
type stateCollector struct{ s *Server }

func (c *stateCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descSessions, descConns, descGrants, descFrames, descSize, descChanged} {
		ch <- d
	}
}

func (c *stateCollector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v int, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
	}
	sessions, conns, grants := map[string]int{}, map[string]int{}, map[string]int{}
	for _, x := range c.s.sessionList() {
		x.mu.Lock()
		sessions[x.exp.name]++
		conns[x.exp.name] += len(x.conns)
		grants[x.exp.name] += len(x.grants)
		x.mu.Unlock()
	}
	for _, e := range c.s.list() {
		i := e.info()
		gauge(descSessions, sessions[e.name], e.name)
		gauge(descConns, conns[e.name], e.name)
		gauge(descGrants, grants[e.name], e.name)
		ch <- prometheus.MustNewConstMetric(descSize, prometheus.GaugeValue, float64(i.Size), e.name, i.Kind)
		if d, ok := e.content.(*data); ok {
			ch <- prometheus.MustNewConstMetric(descChanged, prometheus.CounterValue, float64(d.changed.Load()), e.name)
		}
	}
	fs := c.s.framesStatus()
	for state, n := range map[string]int{"free": fs.Free, "filling": fs.Filling, "resident": fs.Resident, "granted": fs.Granted, "revoking": fs.Revoking} {
		gauge(descFrames, n, state)
	}
}
