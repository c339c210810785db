// SPDX-License-Identifier: Apache-2.0

// Package rdma is remote direct memory access as Go programs see it: devices,
// protection domains, memory regions, reliably connected queue pairs, work
// requests and completions. The words and rules are those of the InfiniBand
// verbs (InfiniBand Architecture Specification, volume 1, chapters 10 and 11;
// the rdma-core manual pages ibv_*(3) and rdma_*(3)).
//
// The package itself moves no byte. A [Provider] does: rdma/verbs stands on
// libibverbs and librdmacm (InfiniBand, RoCE, iWARP), rdma/tcp is pure Go over
// TCP with the same one-sided semantics. Every provider passes the conformance
// suite in rdma/rdmatest, which is the executable form of the contracts below.
//
// # Ownership graph
//
//	Provider ─┬─ Device ─── ProtectionDomain ─┬─ MemoryRegion
//	          │                               ├─ SharedReceiveQueue
//	          │                               └─ Conn (queue pair + its completion queue)
//	          └─ Listener ─ ConnRequest ──Accept──┘
//	             Route ───────────────── Connect ─┘
//
// A parent cannot be closed while a child lives ([ErrBusy]). Tear down in this
// order: Conn, SharedReceiveQueue, MemoryRegion, ProtectionDomain, Listener,
// Provider.
//
// # Who owns a buffer
//
// From the moment that [Conn.Post] or PostRecv takes a request, the memory that
// its segments name belongs to the network. It comes back when the request's
// completion has been taken with Poll or Wait (an unsignaled request: when a
// later request of the same send queue has completed), or when [Conn.Close] has
// returned. A cancelled context never brings it back early.
//
// # Ordering
//
// On one connection requests start in the order posted and complete in that
// order. A SEND is received after every WRITE posted before it is placed in the
// peer's memory, and a READ sees every WRITE posted before it. The other way
// round there is no promise: a WRITE or SEND may take effect while READs posted
// before it are still under way, unless it carries [WRFence]. Two connections
// have no order between them. (IBTA 10.8.3.3, table of work request ordering.)
//
// # Errors
//
// A request that fails breaks its queue pair: its completion carries the
// reason, every other outstanding request completes with [StatusFlushed],
// exactly once, and the connection is dead. There is no repair; connect anew.
package rdma
