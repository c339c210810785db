// SPDX-License-Identifier: Apache-2.0

package cache

import "github.com/prometheus/client_golang/prometheus"

// metric is one number of Stats under its Prometheus name.
type metric struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	of   func(*Stats) float64
}

func counter(name, help string, of func(*Stats) uint64) metric {
	return metric{prometheus.NewDesc(name, help, []string{"export"}, nil), prometheus.CounterValue,
		func(s *Stats) float64 { return float64(of(s)) }}
}

func gauge(name, help string, of func(*Stats) int64) metric {
	return metric{prometheus.NewDesc(name, help, []string{"export"}, nil), prometheus.GaugeValue,
		func(s *Stats) float64 { return float64(of(s)) }}
}

var metrics = []metric{
	counter("rblk_cache_hits_total", "Blocks of 64 KiB that were asked for and were there.", func(s *Stats) uint64 { return s.Hits }),
	counter("rblk_cache_misses_total", "Blocks of 64 KiB that were asked for and were not there in full.", func(s *Stats) uint64 { return s.Misses }),
	counter("rblk_cache_evictions_total", "Blocks that made room for others.", func(s *Stats) uint64 { return s.Evictions }),
	counter("rblk_cache_fetched_bytes_total", "Bytes read over the wire.", func(s *Stats) uint64 { return s.FetchedBytes }),
	counter("rblk_cache_served_bytes_total", "Bytes given to the front end.", func(s *Stats) uint64 { return s.ServedBytes }),
	counter("rblk_cache_written_bytes_total", "Bytes written through.", func(s *Stats) uint64 { return s.WrittenBytes }),
	counter("rblk_cache_stalls_total", "Reads that waited for a fetch.", func(s *Stats) uint64 { return s.Stalls }),
	counter("rblk_readahead_issued_bytes_total", "Bytes that were read ahead.", func(s *Stats) uint64 { return s.ReadaheadIssued }),
	counter("rblk_readahead_used_bytes_total", "Bytes that were read ahead and then read.", func(s *Stats) uint64 { return s.ReadaheadUsed }),
	counter("rblk_readahead_wasted_bytes_total", "Bytes that were read ahead and evicted unread.", func(s *Stats) uint64 { return s.ReadaheadWasted }),
	counter("rblk_tier_hit_bytes_total", "Bytes read from the tier on local disk.", func(s *Stats) uint64 { return s.Tier.HitBytes }),
	counter("rblk_tier_written_bytes_total", "Bytes written to the tier on local disk.", func(s *Stats) uint64 { return s.Tier.WrittenBytes }),
	counter("rblk_tier_corrupt_blocks_total", "Blocks of the tier whose checksum was wrong; they were fetched again.", func(s *Stats) uint64 { return s.Tier.Corrupt }),
	counter("rblk_tier_errors_total", "Input/output errors of the tier; reads went to the target instead.", func(s *Stats) uint64 { return s.Tier.Errors }),
	gauge("rblk_tier_bytes", "Bytes that the tier holds.", func(s *Stats) int64 { return s.Tier.Bytes }),
	gauge("rblk_cache_frames", "Frames of 4 KiB that are registered.", func(s *Stats) int64 { return s.Frames }),
	gauge("rblk_cache_frames_used", "Frames that hold or receive data.", func(s *Stats) int64 { return s.FramesUsed }),
	gauge("rblk_cache_frames_pinned", "Frames that are reserved by views, buffers and transfers.", func(s *Stats) int64 { return s.FramesPinned }),
	gauge("rblk_cache_transfers_in_flight", "Transfers from the target under way.", func(s *Stats) int64 { return s.FramesInFlight }),
	gauge("rblk_cache_size_bytes", "Size of the cache as configured.", func(s *Stats) int64 { return s.Size }),
	gauge("rblk_readahead_streams", "Streams that are read ahead.", func(s *Stats) int64 { return s.Streams }),
}

// Collector is a prometheus.Collector over the volumes that list returns at
// each scrape; the label is the export's name. It reads the cache's own
// counters alone, so it answers when the target is dead.
type Collector struct{ list func() []*Volume }

var _ prometheus.Collector = (*Collector)(nil)

// NewCollector makes a Collector.
func NewCollector(list func() []*Volume) *Collector { return &Collector{list} }

// Describe implements prometheus.Collector.
func (c *Collector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range metrics {
		ch <- m.desc
	}
}

// Collect implements prometheus.Collector. Volumes of one export name are
// summed.
func (c *Collector) Collect(ch chan<- prometheus.Metric) {
	sums := map[string][]float64{}
	for _, v := range c.list() {
		st := v.Stats()
		sum := sums[v.export]
		if sum == nil {
			sum = make([]float64, len(metrics))
			sums[v.export] = sum
		}
		for i, m := range metrics {
			sum[i] += m.of(&st)
		}
	}
	for export, sum := range sums {
		for i, m := range metrics {
			ch <- prometheus.MustNewConstMetric(m.desc, m.kind, sum[i], export)
		}
	}
}
