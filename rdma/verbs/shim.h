// SPDX-License-Identifier: Apache-2.0
//
// What Go needs of libibverbs and librdmacm, without unions, bit fields, inline
// op tables and out-parameters on hot paths. Every structure here lives in C
// memory or on a caller's stack; none holds a Go pointer after a call returns.

#ifndef RBLK_SHIM_H
#define RBLK_SHIM_H

#include <stdint.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

// Requests in one call: enough that a doorbell and a call into C are noise.
#define RBLK_BATCH 32

// rblk_wr is one request of a batch; its segments are sge[first_sge …] there.
struct rblk_wr {
	uint64_t id;
	uint64_t remote_addr;
	uint32_t rkey;
	uint32_t imm; // host order
	uint32_t opcode; // enum ibv_wr_opcode; ignored for receives
	uint32_t flags; // enum ibv_send_flags
	uint32_t first_sge;
	uint32_t num_sge;
};

// rblk_batch is the memory through which one queue posts, reused for each call.
struct rblk_batch {
	uint32_t posted; // how many the last call handed over
	struct rblk_wr wr[RBLK_BATCH];
	struct ibv_send_wr send[RBLK_BATCH];
	struct ibv_recv_wr recv[RBLK_BATCH];
	struct ibv_sge sge[];
};

// rblk_batch_new returns a batch with room for segments in each request, or
// NULL. Ended with free().
struct rblk_batch *rblk_batch_new(unsigned segments);

// The post functions hand over the first n requests of b with one doorbell and
// set b->posted. They return 0 or a positive errno (ibv_post_send(3)).
int rblk_post_send(struct ibv_qp *qp, struct rblk_batch *b, unsigned n);
int rblk_post_recv(struct ibv_qp *qp, struct rblk_batch *b, unsigned n);
int rblk_post_srq(struct ibv_srq *srq, struct rblk_batch *b, unsigned n);

// rblk_wc is ibv_wc without its union.
struct rblk_wc {
	uint64_t id;
	uint32_t status;
	uint32_t opcode;
	uint32_t length;
	uint32_t imm; // host order
	uint32_t has_imm;
	uint32_t vendor_err;
};

// rblk_poll takes up to n (at most RBLK_BATCH) completions. Negative on failure,
// without errno (ibv_poll_cq(3)).
int rblk_poll(struct ibv_cq *cq, struct rblk_wc *out, int n);

// rblk_cq_event takes and acknowledges every event that waits on a completion
// channel: how many, or -1 with errno when the channel is broken.
int rblk_cq_events(struct ibv_comp_channel *ch);

// rblk_req_notify asks for an event at the next completion. 0 or errno.
int rblk_req_notify(struct ibv_cq *cq);

// rblk_cm_event is a copy of an rdma_cm event, which is acknowledged already.
struct rblk_cm_event {
	uint32_t type; // enum rdma_cm_event_type
	int32_t status; // 0, a negative errno, or a positive reject reason
	uint64_t handle; // context of the id (of a request: of its listener)
	struct rdma_cm_id *id; // of a request: the new id; else only for comparison
	uint32_t responder_resources;
	uint32_t initiator_depth;
	uint32_t private_len;
	uint8_t private_data[256];
};

// rblk_cm_next takes the next event: 1; 0 when there is none; -1 with errno.
int rblk_cm_next(struct rdma_event_channel *ch, struct rblk_cm_event *ev);

// rblk_cm_create makes an id whose events carry handle. -1 with errno.
int rblk_cm_create(struct rdma_event_channel *ch, uint64_t handle, struct rdma_cm_id **id);
void rblk_cm_set_handle(struct rdma_cm_id *id, uint64_t handle);

// rblk_cm_addr copies the local or the peer's address of an id.
void rblk_cm_addr(struct rdma_cm_id *id, int peer, struct sockaddr_storage *out);

// rblk_param is what a connection is set up with.
struct rblk_param {
	uint32_t responder_resources;
	uint32_t initiator_depth;
	uint32_t srq;
	uint32_t retry_count;
	uint32_t rnr_retry;
	uint32_t ack_timeout; // exponent; 0: the connection manager's
	uint32_t path_mtu; // enum ibv_mtu; 0: the connection manager's
	uint32_t min_rnr_timer; // code of IBTA table 45
};

// The queue pair's way through its states; the connection manager fills the
// attributes, p replaces some. 0, or -1 with errno. They do on iWARP, where the
// driver itself moves the queue pair, what is left to do there: nothing.
int rblk_qp_init(struct rdma_cm_id *id, struct ibv_qp *qp);
int rblk_qp_ready(struct rdma_cm_id *id, struct ibv_qp *qp, const struct rblk_param *p);
int rblk_qp_error(struct ibv_qp *qp); // 0 or a positive errno

int rblk_connect(struct rdma_cm_id *id, struct ibv_qp *qp, const struct rblk_param *p, const void *data, uint8_t len);
int rblk_accept(struct rdma_cm_id *id, struct ibv_qp *qp, const struct rblk_param *p, const void *data, uint8_t len);

struct ibv_cq *rblk_create_cq(struct ibv_context *ctx, int depth, uint64_t handle, struct ibv_comp_channel *ch);
struct ibv_qp *rblk_create_qp(struct ibv_pd *pd, struct ibv_cq *cq, struct ibv_srq *srq, uint64_t handle, struct ibv_qp_cap *cap);
struct ibv_srq *rblk_create_srq(struct ibv_pd *pd, unsigned depth, unsigned segments);
struct ibv_mr *rblk_reg_mr(struct ibv_pd *pd, uint64_t addr, size_t len, unsigned access);

// rblk_async is a copy of an asynchronous event, which is acknowledged already.
struct rblk_async {
	uint32_t type; // enum ibv_event_type
	uint32_t port; // of port events
	uint64_t handle; // of queue pair and completion queue events, else 0
};

// rblk_async_next takes the next event: 1; 0 when there is none; -1 with errno.
int rblk_async_next(struct ibv_context *ctx, struct rblk_async *ev);

int rblk_query_port(struct ibv_context *ctx, uint8_t port, struct ibv_port_attr *out);

#endif
