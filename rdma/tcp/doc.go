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
// both have stopped. For the same reason a request ends only when it has been
// answered and the writer has let go of it: an answer may come in, or be made
// up, while the system call that sends the request is still under way.
//
// # Copies
//
// There are none in user space, but for two kinds of bytes: a WRITE's or SEND's
// first bytes that arrive together with their header (at most spillSize less a
// header), and READ responses that were guessed wrong (see incoming.guess),
// which happens when a message or an ACK comes in between. Both save a system
// call.
//
// # Deregistering
//
// Deregister takes the key away, then asks every connection of the domain
// whether it touches the memory, and waits. One that still does after a second
// is broken; the memory is free when it has let go, not when time has passed.
// Posted receives are looked up anew when a message comes, so they do not hold a
// region back.
//
// # Detecting death
//
// TCP's keepalive and TCP_USER_TIMEOUT break a connection whose peer's machine is
// gone after some 20 s. Protocols above need their own, faster, keepalive. With
// ManualProgress the end is noticed in Poll and Wait only.
package tcp
