// SPDX-License-Identifier: Apache-2.0

// Package target is the side that owns the memory: exports, the frames that
// hold them, grants, sessions, and the control server.
//
// # Locks
//
// In this order: Server.mu, export.mu, session.mu, stager.mu, pool.mu. None is
// held over I/O, over a wait, or over a call to a provider that can block,
// except export.mu over registrations.
//
// # Life of a frame
//
//	free → filling → resident ⇄ granted → revoking → free
//
// A frame leaves granted only when every holder has given it back or has lost
// its queue pairs. Time decides when queue pairs are destroyed, never that a
// frame is free.
package target
