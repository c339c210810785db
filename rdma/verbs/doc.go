// SPDX-License-Identifier: Apache-2.0

// Package verbs is the rdma provider for adapters: InfiniBand, RoCE and iWARP,
// in hardware or in software (rxe, siw), through libibverbs and librdmacm. It
// is the only cgo of this project, fenced behind shim.h: Go hands integers and
// C memory to C, never a Go pointer that C keeps, and C never calls Go.
//
// It is built with the tag "verbs" (the Makefile sets it when the headers are
// there). Without it, [New] says which packages to install.
//
// # Descriptors instead of threads
//
// Three kinds of event descriptor sit in Go's network poller, so that waiting
// costs no thread: the rdma_cm event channel (one for each provider), the
// asynchronous event descriptor (one for each device) and the completion
// channel (one for each connection). The first two have a goroutine each, that
// the provider ends. The third is read by whoever is in Conn.Wait, so a
// completion wakes its waiter directly. Events are acknowledged inside the call
// that takes them: no destroy call ever waits for a slow reader.
//
// # Teardown
//
// ibv and rdma_cm objects are destroyed in this order; each step needs the one
// before it:
//
//  1. queue pair: set to the error state, disconnected, destroyed. From here
//     the adapter touches no buffer of the connection.
//  2. completion queue, when no Poll or Wait is inside it any more
//  3. completion channel
//  4. rdma_cm id (its events are acknowledged already)
//  5. shared receive queue
//  6. memory regions
//  7. protection domain
//  8. rdma_cm event channel, after its goroutine has ended
//  9. device context, after its goroutine has ended
//
// Steps 1–4 are Conn.Close. Parents count their children and answer
// rdma.ErrBusy before they would break the order.
//
// # Requests that the adapter forgets
//
// When a queue pair fails, adapters complete what is outstanding with a flush
// error; rxe does not always. A connection therefore keeps its own ring of
// outstanding requests. When a connection is dead and the adapter has reported
// nothing for flushGrace, Poll and Wait destroy the queue pair, and only then
// report the rest as flushed: each request completes exactly once, and never
// before its buffer is free.
package verbs
