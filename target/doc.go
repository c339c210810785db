// SPDX-License-Identifier: Apache-2.0

// Package target is the side that owns the memory: exports, the frames that
// hold them, grants, sessions, and the control server.
//
// # Locks
//
// In this order: session.changing, export.mu, Server.mu, session.mu, stager.mu,
// pool.mu. None but changing is held over a wait. Registrations, which pin, are
// made under export.mu (domains), piece.mu and stager.mu (slabs of 16 MiB).
// changing is held while an epoch ends, that is, until its handlers have
// returned.
//
// # Life of a frame
//
//	free → filling → resident ⇄ granted → revoking → free
//
// A frame is granted in two steps: the grant is made, then its holder is told
// (the MAPPED is sent). Only grants that were told are asked back with REVOKE,
// so that a REVOKE never overtakes the grant.
//
// A frame leaves granted only when every holder has given it back or has lost
// its queue pairs. Time decides when queue pairs are destroyed, never that a
// frame is free.
package target
