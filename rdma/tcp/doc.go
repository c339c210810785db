// SPDX-License-Identifier: Apache-2.0

// Package tcp is a software provider: the semantics of the verbs over TCP.
//
// The peer's provider, not its application, serves READ and WRITE straight from
// and to registered memory: outgoing bytes leave by writev from the region,
// incoming ones arrive by readv in the region. Keys, domain, bounds and access
// are checked for each request; a violation is answered with a NAK and breaks
// the connection on both sides.
//
// # Wire format
//
// A connection begins with a hello of each side (handshake.go), then carries
// frames of a 32-byte header and a payload (frame.go). READ_REQ, WRITE and SEND
// are requests, numbered from 0 in each direction; READ_RESP, ACK and NAK answer
// them, in order. An answer to request n also says that every request before n
// has been carried out. WRITE and SEND are acknowledged only where the
// requester waits for it.
//
// The bytes are neither encrypted nor authenticated: run it on a network that
// you trust, or inside a tunnel.
//
// # Goroutines
//
// One goroutine at a time reads the socket of a connection (in.go): one of its
// own, or, with ManualProgress, whoever is in Poll or Wait. One at a time writes
// it (out.go): whoever posts or answers, until the socket is full; then one
// goroutine carries on until the queue is empty, and ends.
//
// A broken connection gives its buffers back, as flushed completions, only when
// both have stopped.
package tcp
