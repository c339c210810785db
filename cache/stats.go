// SPDX-License-Identifier: Apache-2.0

package cache

import "time"

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

// StreamStats is a stream as read-ahead sees it now.
type StreamStats struct {
	Kind          string // forward, backward, strided
	Position      int64  // where its next read is expected
	Window        int64  // bytes to be read ahead
	ReadSize      int64  // bytes of a read
	Stride        int64  // of a strided one, in bytes
	Reads, Stalls uint64 // that read-ahead was told of; those that waited
	Idle          time.Duration
}

var directions = [...]string{forward: "forward", backward: "backward", strided: "strided"}

// Streams are the streams that are read ahead, in no order.
func (v *Volume) Streams() []StreamStats {
	r := &v.ahead
	r.mu.Lock()
	defer r.mu.Unlock()
	out := make([]StreamStats, 0, len(r.det.streams))
	for _, st := range r.det.streams {
		out = append(out, StreamStats{
			Kind: directions[st.dir], Position: st.pos, Window: st.window, ReadSize: st.size, Stride: st.step,
			Reads: st.reads, Stalls: st.stalls, Idle: time.Since(st.used),
		})
	}
	return out
}
