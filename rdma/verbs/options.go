// SPDX-License-Identifier: Apache-2.0

package verbs

import (
	"log/slog"
	"net/netip"
	"time"
)

// Options adjusts the provider. The zero value is right for most machines: the
// connection manager chooses device, GID, route and MTU.
type Options struct {
	// Logger gets device limits (once), asynchronous events and oddities.
	// Default: discarded.
	Logger *slog.Logger

	// OnEvent, when set, is told of every asynchronous event, for metrics. It
	// is called from the provider's own goroutines and must not block.
	OnEvent func(Event)

	// Device restricts the provider to one device by name ("mlx5_0"). Default:
	// every device.
	Device string

	// SourceAddr is the local address that connections leave from, which
	// decides device, port and GID where several lead to the peer. Default:
	// the routing table's choice.
	SourceAddr netip.Addr

	// TOS is the IP type of service, by which RoCE networks choose the
	// priority that is lossless (DSCP in its upper six bits). Default: 0.
	TOS uint8

	// PathMTU, in bytes (256, 512, 1024, 2048 or 4096), replaces the path MTU
	// that the connection manager found. Both ends must use the same.
	// Default: the connection manager's.
	PathMTU int

	// AckTimeout is how long the adapter waits for an acknowledgement before it
	// sends again; rounded up to 4.096 µs × 2^n. It retries RetryCount times
	// before it breaks the connection. Default: 268 ms: the connection
	// manager's own 4 s would let a dead peer go unnoticed for half a minute.
	AckTimeout time.Duration

	// RetryCount is 1–7; default 6. rxe (Linux 6.12) takes 7 for "for ever" and
	// would never notice a dead peer.
	RetryCount int

	// Spin is how long Wait polls before it sleeps where ConnOptions.Spin is
	// zero. Default 20 µs, about what a sleep and a wake-up cost; negative:
	// never.
	Spin time.Duration
}

// Event is something that happened to a device, a port or a connection beside
// its requests.
type Event struct {
	Device string // mlx5_0; empty when the connection manager does not say
	Port   int    // 0 when it does not concern a port
	Kind   string // a metric label: port_err, port_active, device_fatal, qp_fatal, disconnected, …
}
