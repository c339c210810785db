// SPDX-License-Identifier: Apache-2.0

package cache

// Stats counts since New, except gauges.
type Stats struct {
	Hits, Misses, Evictions                          uint64 // blocks of 64 KiB that were asked for, or went
	FetchedBytes                                     uint64 // over the wire
	ServedBytes                                      uint64 // to the front end
	WrittenBytes                                     uint64
	ReadaheadIssued, ReadaheadUsed, ReadaheadWasted  uint64 // bytes
	Stalls                                           uint64 // reads that waited for a fetch
	Frames, FramesUsed, FramesInFlight, FramesPinned int64  // gauges: frames of 4 KiB; transfers; reserved frames
	Size                                             int64  // bytes of frames
	Streams                                          int64
	Tier                                             TierStats
}

// Stats is a snapshot of the counters.
func (v *Volume) Stats() Stats {
	st := Stats{
		FetchedBytes:    v.fetched.Load(),
		WrittenBytes:    v.written.Load(),
		ReadaheadIssued: v.ahead.issued.Load(),
		Stalls:          v.stalls.Load(),
		Frames:          v.pool.mapped() / pageSize,
		FramesUsed:      v.pool.used.Load(),
		FramesInFlight:  v.inFlight.Load(),
		FramesPinned:    v.gate.reserved() * slabPages,
		Size:            v.target.Load() * pageSize,
		Streams:         v.ahead.active(),
		Tier:            v.tier.stats(),
	}
	for i := range v.shards {
		s := &v.shards[i]
		s.mu.Lock()
		st.Hits += s.hits
		st.Misses += s.misses
		st.Evictions += s.evictions
		st.ServedBytes += s.served
		st.ReadaheadUsed += s.aheadUsed
		st.ReadaheadWasted += s.aheadWasted
		s.mu.Unlock()
	}
	return st
}
