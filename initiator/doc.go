// SPDX-License-Identifier: Apache-2.0

// Package initiator is one authenticated session on one export: control plane,
// data connections, grants, lanes, reconnect. Its Volume is a volume.Source.
//
// # A session's life
//
//	         Dial                  connection lost
//	(start) ──────▶ connected ──────────────────────▶ reconnecting
//	                    ▲                                │  │
//	                    │ re-opened, all connections up, │  │ fenced, instance changed
//	                    └────────── work replayed ───────┘  ▼
//	                    Close, from anywhere ─────────▶ failed / closed
//
// An epoch is one set of connections. When one of them dies, all are closed,
// so that every buffer is this side's again; then the session is re-opened,
// which destroys the old queue pairs at the target; only then are new
// connections made and unfinished operations begun anew under fresh grants.
//
// # Who takes completions
//
// A connection has one leader at a time, who takes its completions and acts on
// all of them. Whoever waits for an operation (Await) becomes the leader of its
// connection when there is none, so that at depth 1 nobody has to be woken.
// Connections with traffic that nobody waits for (messages, read-ahead) are led
// by a goroutine of their own; it also steps in where nobody leads.
//
// # Locks
//
// Volume.mu, then conn.mu, then table.mu, then order.mu. None is held over a
// callback.
package initiator
