// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo && verbs

#include "shim.h"

#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

// Go preempts its threads with SIGURG. A signal in the middle of a call that
// sleeps in the kernel restarts the call, and drivers that had begun, such as
// siw with its TCP handshake, then refuse. Such calls run with signals blocked.
static void hold_signals(sigset_t *old)
{
	sigset_t all;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, old);
}

static void release_signals(const sigset_t *old)
{
	int e = errno;

	pthread_sigmask(SIG_SETMASK, old, NULL);
	errno = e;
}

#define UNINTERRUPTED(result, call) do { \
	sigset_t old_signals; \
	hold_signals(&old_signals); \
	result = call; \
	release_signals(&old_signals); \
} while (0)

struct rblk_batch *rblk_batch_new(unsigned segments)
{
	return calloc(1, sizeof(struct rblk_batch) + (size_t)RBLK_BATCH * segments * sizeof(struct ibv_sge));
}

int rblk_post_send(struct ibv_qp *qp, struct rblk_batch *b, unsigned n)
{
	struct ibv_send_wr *bad = NULL;
	int rc;

	for (unsigned i = 0; i < n; i++) {
		const struct rblk_wr *w = &b->wr[i];
		struct ibv_send_wr *s = &b->send[i];

		s->wr_id = w->id;
		s->next = i + 1 < n ? s + 1 : NULL;
		s->sg_list = &b->sge[w->first_sge];
		s->num_sge = (int)w->num_sge;
		s->opcode = w->opcode;
		s->send_flags = w->flags;
		s->imm_data = htonl(w->imm);
		s->wr.rdma.remote_addr = w->remote_addr;
		s->wr.rdma.rkey = w->rkey;
	}
	rc = ibv_post_send(qp, b->send, &bad);
	b->posted = rc == 0 ? n : bad ? (uint32_t)(bad - b->send) : 0;
	return rc;
}

static void chain_recv(struct rblk_batch *b, unsigned n)
{
	for (unsigned i = 0; i < n; i++) {
		const struct rblk_wr *w = &b->wr[i];
		struct ibv_recv_wr *r = &b->recv[i];

		r->wr_id = w->id;
		r->next = i + 1 < n ? r + 1 : NULL;
		r->sg_list = &b->sge[w->first_sge];
		r->num_sge = (int)w->num_sge;
	}
}

int rblk_post_recv(struct ibv_qp *qp, struct rblk_batch *b, unsigned n)
{
	struct ibv_recv_wr *bad = NULL;
	int rc;

	chain_recv(b, n);
	rc = ibv_post_recv(qp, b->recv, &bad);
	b->posted = rc == 0 ? n : bad ? (uint32_t)(bad - b->recv) : 0;
	return rc;
}

int rblk_post_srq(struct ibv_srq *srq, struct rblk_batch *b, unsigned n)
{
	struct ibv_recv_wr *bad = NULL;
	int rc;

	chain_recv(b, n);
	rc = ibv_post_srq_recv(srq, b->recv, &bad);
	b->posted = rc == 0 ? n : bad ? (uint32_t)(bad - b->recv) : 0;
	return rc;
}

int rblk_poll(struct ibv_cq *cq, struct rblk_wc *out, int n)
{
	struct ibv_wc wc[RBLK_BATCH];

	n = ibv_poll_cq(cq, n, wc);
	for (int i = 0; i < n; i++) {
		out[i].id = wc[i].wr_id;
		out[i].status = wc[i].status;
		out[i].opcode = wc[i].opcode;
		out[i].length = wc[i].byte_len;
		out[i].has_imm = wc[i].wc_flags & IBV_WC_WITH_IMM;
		out[i].imm = ntohl(wc[i].imm_data);
		out[i].vendor_err = wc[i].vendor_err;
	}
	return n;
}

int rblk_cq_events(struct ibv_comp_channel *ch)
{
	int n = 0;

	for (;;) {
		struct ibv_cq *cq;
		void *context;

		if (ibv_get_cq_event(ch, &cq, &context)) {
			if (errno == EAGAIN || errno == EINTR)
				return n;
			return -1;
		}
		ibv_ack_cq_events(cq, 1);
		n++;
	}
}

int rblk_req_notify(struct ibv_cq *cq)
{
	return ibv_req_notify_cq(cq, 0);
}

int rblk_cm_next(struct rdma_event_channel *ch, struct rblk_cm_event *ev)
{
	struct rdma_cm_event *e;
	const struct rdma_conn_param *p;

	if (rdma_get_cm_event(ch, &e))
		return errno == EAGAIN || errno == EINTR ? 0 : -1;
	p = &e->param.conn;
	ev->type = e->event;
	ev->status = e->status;
	ev->id = e->id;
	ev->handle = (uintptr_t)(e->event == RDMA_CM_EVENT_CONNECT_REQUEST ? e->listen_id : e->id)->context;
	ev->responder_resources = p->responder_resources;
	ev->initiator_depth = p->initiator_depth;
	ev->private_len = 0;
	if (p->private_data) {
		ev->private_len = p->private_data_len;
		memcpy(ev->private_data, p->private_data, ev->private_len);
	}
	rdma_ack_cm_event(e);
	return 1;
}

int rblk_cm_create(struct rdma_event_channel *ch, uint64_t handle, struct rdma_cm_id **id)
{
	return rdma_create_id(ch, id, (void *)(uintptr_t)handle, RDMA_PS_TCP);
}

void rblk_cm_set_handle(struct rdma_cm_id *id, uint64_t handle)
{
	id->context = (void *)(uintptr_t)handle;
}

void rblk_cm_addr(struct rdma_cm_id *id, int peer, struct sockaddr_storage *out)
{
	const struct sockaddr *a = peer ? rdma_get_peer_addr(id) : rdma_get_local_addr(id);

	memset(out, 0, sizeof(*out));
	memcpy(out, a, a->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in));
}

// to_state moves qp to state with the connection manager's attributes, of which
// p, when given, replaces those that the transition has.
static int to_state(struct rdma_cm_id *id, struct ibv_qp *qp, enum ibv_qp_state state, const struct rblk_param *p)
{
	struct ibv_qp_attr a;
	int mask, rc;

	memset(&a, 0, sizeof(a));
	a.qp_state = state;
	if (rdma_init_qp_attr(id, &a, &mask))
		return -1;
	if (mask & IBV_QP_ACCESS_FLAGS)
		a.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
	if (p) {
		if (mask & IBV_QP_MIN_RNR_TIMER)
			a.min_rnr_timer = p->min_rnr_timer;
		if (mask & IBV_QP_MAX_DEST_RD_ATOMIC)
			a.max_dest_rd_atomic = p->responder_resources;
		if ((mask & IBV_QP_PATH_MTU) && p->path_mtu)
			a.path_mtu = p->path_mtu;
		if (mask & IBV_QP_MAX_QP_RD_ATOMIC)
			a.max_rd_atomic = p->initiator_depth;
		if (mask & IBV_QP_RETRY_CNT)
			a.retry_cnt = p->retry_count;
		if (mask & IBV_QP_RNR_RETRY)
			a.rnr_retry = p->rnr_retry;
		if ((mask & IBV_QP_TIMEOUT) && p->ack_timeout)
			a.timeout = p->ack_timeout;
	}
	rc = ibv_modify_qp(qp, &a, mask);
	if (rc) {
		errno = rc;
		return -1;
	}
	return 0;
}

int rblk_qp_init(struct rdma_cm_id *id, struct ibv_qp *qp)
{
	return to_state(id, qp, IBV_QPS_INIT, NULL);
}

int rblk_qp_ready(struct rdma_cm_id *id, struct ibv_qp *qp, const struct rblk_param *p)
{
	if (to_state(id, qp, IBV_QPS_RTR, p))
		return -1;
	return to_state(id, qp, IBV_QPS_RTS, p);
}

int rblk_qp_error(struct ibv_qp *qp)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_ERR };

	return ibv_modify_qp(qp, &a, IBV_QP_STATE);
}

static struct rdma_conn_param conn_param(struct ibv_qp *qp, const struct rblk_param *p, const void *data, uint8_t len)
{
	return (struct rdma_conn_param){
		.private_data = data,
		.private_data_len = len,
		.responder_resources = p->responder_resources,
		.initiator_depth = p->initiator_depth,
		.retry_count = p->retry_count,
		.rnr_retry_count = p->rnr_retry,
		.srq = p->srq,
		.qp_num = qp->qp_num,
	};
}

int rblk_connect(struct rdma_cm_id *id, struct ibv_qp *qp, const struct rblk_param *p, const void *data, uint8_t len)
{
	struct rdma_conn_param c = conn_param(qp, p, data, len);
	int r;

	UNINTERRUPTED(r, rdma_connect(id, &c));
	return r;
}

int rblk_accept(struct rdma_cm_id *id, struct ibv_qp *qp, const struct rblk_param *p, const void *data, uint8_t len)
{
	struct rdma_conn_param c = conn_param(qp, p, data, len);
	int r;

	UNINTERRUPTED(r, rdma_accept(id, &c));
	return r;
}

struct ibv_cq *rblk_create_cq(struct ibv_context *ctx, int depth, uint64_t handle, struct ibv_comp_channel *ch)
{
	struct ibv_cq *r;

	UNINTERRUPTED(r, ibv_create_cq(ctx, depth, (void *)(uintptr_t)handle, ch, 0));
	return r;
}

struct ibv_qp *rblk_create_qp(struct ibv_pd *pd, struct ibv_cq *cq, struct ibv_srq *srq, uint64_t handle, struct ibv_qp_cap *cap)
{
	struct ibv_qp_init_attr a = {
		.qp_context = (void *)(uintptr_t)handle,
		.send_cq = cq,
		.recv_cq = cq,
		.srq = srq,
		.cap = *cap,
		.qp_type = IBV_QPT_RC,
	};
	struct ibv_qp *qp;

	UNINTERRUPTED(qp, ibv_create_qp(pd, &a));
	if (qp)
		*cap = a.cap;
	return qp;
}

struct ibv_srq *rblk_create_srq(struct ibv_pd *pd, unsigned depth, unsigned segments)
{
	struct ibv_srq_init_attr a = { .attr = { .max_wr = depth, .max_sge = segments } };
	struct ibv_srq *r;

	UNINTERRUPTED(r, ibv_create_srq(pd, &a));
	return r;
}

struct ibv_mr *rblk_reg_mr(struct ibv_pd *pd, uint64_t addr, size_t len, unsigned access)
{
	struct ibv_mr *r;

	UNINTERRUPTED(r, ibv_reg_mr(pd, (void *)(uintptr_t)addr, len, access));
	return r;
}

int rblk_async_next(struct ibv_context *ctx, struct rblk_async *ev)
{
	struct ibv_async_event e;

	if (ibv_get_async_event(ctx, &e))
		return errno == EAGAIN || errno == EINTR ? 0 : -1;
	ev->type = e.event_type;
	ev->port = 0;
	ev->handle = 0;
	switch (e.event_type) {
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_COMM_EST:
	case IBV_EVENT_SQ_DRAINED:
	case IBV_EVENT_PATH_MIG:
	case IBV_EVENT_PATH_MIG_ERR:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		ev->handle = (uintptr_t)e.element.qp->qp_context;
		break;
	case IBV_EVENT_CQ_ERR:
		ev->handle = (uintptr_t)e.element.cq->cq_context;
		break;
	case IBV_EVENT_PORT_ACTIVE:
	case IBV_EVENT_PORT_ERR:
	case IBV_EVENT_LID_CHANGE:
	case IBV_EVENT_PKEY_CHANGE:
	case IBV_EVENT_SM_CHANGE:
	case IBV_EVENT_CLIENT_REREGISTER:
	case IBV_EVENT_GID_CHANGE:
		ev->port = e.element.port_num;
		break;
	default:
		break;
	}
	ibv_ack_async_event(&e);
	return 1;
}

int rblk_query_port(struct ibv_context *ctx, uint8_t port, struct ibv_port_attr *out)
{
	return ibv_query_port(ctx, port, out);
}
