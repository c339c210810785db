// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo && verbs

package verbs

import (
	"log/slog"
	"time"
)

const (
	defaultAckTimeout = 268 * time.Millisecond
	defaultRetryCount = 6
	defaultSpin       = 20 * time.Microsecond
)

func (o Options) withDefaults() Options {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.OnEvent == nil {
		o.OnEvent = func(Event) {}
	}
	if o.AckTimeout <= 0 {
		o.AckTimeout = defaultAckTimeout
	}
	if o.RetryCount <= 0 || o.RetryCount > 7 {
		o.RetryCount = defaultRetryCount
	}
	if o.Spin == 0 {
		o.Spin = defaultSpin
	}
	return o
}

// ackTimeoutCode is the 5-bit exponent of 4.096 µs × 2^n that is at least d
// (IBTA 9.9.1.1: local ACK timeout). 0 would mean "forever".
func ackTimeoutCode(d time.Duration) uint8 {
	const unit = 4096 * time.Nanosecond
	for n := uint8(1); n < 31; n++ {
		if unit<<n >= d {
			return n
		}
	}
	return 31
}
