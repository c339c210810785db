// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// stats counts what a volume has done.
type stats struct {
	once       sync.Once
	ops        [kindFlush + 1][2]atomic.Uint64 // by kind, and whether it failed
	bytes      [kindFlush + 1]atomic.Uint64
	reconnects atomic.Uint64
	latency    *prometheus.HistogramVec
	observers  [kindFlush + 1]prometheus.Observer
}

func (s *stats) init() {
	s.latency = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "rblk_op_seconds", Help: "Time from submission to the end of an operation.",
		// From a fast fabric's round trip to a reconnect.
		Buckets: prometheus.ExponentialBuckets(4e-6, 4, 12),
	}, []string{"op"})
	for k := range s.observers {
		s.observers[k] = s.latency.WithLabelValues(kind(k).String())
	}
}

func (s *stats) note(x *op, err error) {
	s.once.Do(s.init)
	failed := 0
	if err != nil {
		failed = 1
	}
	s.ops[x.kind][failed].Add(1)
	if err == nil {
		s.bytes[x.kind].Add(uint64(x.n))
	}
	s.observers[x.kind].Observe(time.Since(x.start).Seconds())
}

// Counters is a snapshot of what a volume has done.
type Counters struct {
	Reads, Writes, Failed uint64
	ReadBytes, WriteBytes uint64
	Reconnects            uint64
	Grants                int
}

// Counters of the volume since Dial.
func (v *Volume) Counters() Counters {
	c := Counters{
		Reads: v.stats.ops[kindRead][0].Load(), Writes: v.stats.ops[kindWrite][0].Load(),
		ReadBytes: v.stats.bytes[kindRead].Load(), WriteBytes: v.stats.bytes[kindWrite].Load(), Reconnects: v.stats.reconnects.Load(),
	}
	for k := range v.stats.ops {
		c.Failed += v.stats.ops[k][1].Load()
	}
	v.mu.Lock()
	e := v.cur
	v.mu.Unlock()
	if e != nil {
		c.Grants = e.table.len()
	}
	return c
}

var (
	descState      = prometheus.NewDesc("rblk_session_state", "0 connected, 1 reconnecting, 2 failed.", []string{"export"}, nil)
	descOps        = prometheus.NewDesc("rblk_rdma_ops_total", "Operations, by kind and result.", []string{"export", "op", "status"}, nil)
	descBytes      = prometheus.NewDesc("rblk_rdma_bytes_total", "Bytes moved, by kind.", []string{"export", "op"}, nil)
	descReconnects = prometheus.NewDesc("rblk_session_reconnects_total", "Times that lost connections were replaced.", []string{"export"}, nil)
	descGrants     = prometheus.NewDesc("rblk_session_grants", "Grants held.", []string{"export"}, nil)
)

// collector shows a volume's counters to Prometheus.
type collector struct{ v *Volume }

// Collector of the volume's metrics.
func (v *Volume) Collector() prometheus.Collector { return collector{v} }

func (c collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descState, descOps, descBytes, descReconnects, descGrants} {
		ch <- d
	}
	c.v.stats.once.Do(c.v.stats.init)
	c.v.stats.latency.Describe(ch)
}

func (c collector) Collect(ch chan<- prometheus.Metric) {
	v, name := c.v, c.v.src.Export
	state, _ := v.State()
	ch <- prometheus.MustNewConstMetric(descState, prometheus.GaugeValue, float64(state), name)
	for k := range v.stats.ops {
		for failed, status := range []string{"ok", "error"} {
			ch <- prometheus.MustNewConstMetric(descOps, prometheus.CounterValue, float64(v.stats.ops[k][failed].Load()), name, kind(k).String(), status)
		}
		ch <- prometheus.MustNewConstMetric(descBytes, prometheus.CounterValue, float64(v.stats.bytes[k].Load()), name, kind(k).String())
	}
	ch <- prometheus.MustNewConstMetric(descReconnects, prometheus.CounterValue, float64(v.stats.reconnects.Load()), name)
	ch <- prometheus.MustNewConstMetric(descGrants, prometheus.GaugeValue, float64(v.Counters().Grants), name)
	v.stats.latency.Collect(ch)
}
