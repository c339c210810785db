// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo && verbs

package verbs

/*
#include "shim.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"log/slog"
	"os"

	"rblk/rdma"
)

// asyncReader is the goroutine that takes a device's asynchronous events
// (ibv_get_async_event(3)). Its device starts and ends it.
type asyncReader struct {
	d    *device
	fd   *eventFD
	done chan struct{}
}

func startAsync(d *device) (*asyncReader, error) {
	fd, err := newEventFD(int(d.ctx.async_fd), "ibv-async")
	if err != nil {
		return nil, err
	}
	r := &asyncReader{d: d, fd: fd, done: make(chan struct{})}
	go r.run()
	return r, nil
}

func (r *asyncReader) close() {
	r.fd.close()
	<-r.done
}

func (r *asyncReader) run() {
	defer close(r.done)
	for {
		var ev C.struct_rblk_async
		var rc C.int
		var errno error
		err := r.fd.wait(func(uintptr) bool {
			rc, errno = C.rblk_async_next(r.d.ctx, &ev)
			return rc != 0
		})
		if err == nil {
			err = errnoFromCM("ibv_get_async_event", int(rc), errno)
		}
		if errors.Is(err, os.ErrClosed) {
			return
		}
		if err != nil {
			// A descriptor that fails once fails for ever: the device is gone.
			r.d.p.event(slog.LevelError, Event{Device: r.d.name, Kind: "device_gone"}, "err", err)
			r.d.unplugged(fmt.Errorf("device %s is gone: %w", r.d.name, err))
			return
		}
		r.handle(uint32(ev._type), int(ev.port), uint64(ev.handle))
	}
}

// handle acts on one event: what is fatal ends the connections that it
// concerns; a port that goes down does not, since the adapter retries and the
// port may come back; all are logged and counted.
func (r *asyncReader) handle(kind uint32, port int, handle uint64) {
	d := r.d
	ev := Event{Device: d.name, Port: port, Kind: asyncName(kind)}
	c := d.p.connOf(handle)
	switch kind {
	case C.IBV_EVENT_COMM_EST:
		if c != nil {
			C.rdma_notify(c.id.id, C.IBV_EVENT_COMM_EST)
		}
		return // a message came before the last handshake packet: ordinary
	case C.IBV_EVENT_SQ_DRAINED, C.IBV_EVENT_QP_LAST_WQE_REACHED:
		return
	case C.IBV_EVENT_QP_FATAL, C.IBV_EVENT_CQ_ERR:
		d.p.event(slog.LevelError, ev)
		if c != nil {
			c.die(rdma.StatusGeneral.Err())
		}
	case C.IBV_EVENT_QP_REQ_ERR:
		d.p.event(slog.LevelWarn, ev)
		if c != nil {
			c.die(rdma.StatusRemoteInvalidRequest.Err())
		}
	case C.IBV_EVENT_QP_ACCESS_ERR:
		d.p.event(slog.LevelWarn, ev)
		if c != nil {
			c.die(fmt.Errorf("the peer asked for memory that it was not granted: %w", rdma.StatusRemoteAccess.Err()))
		}
	case C.IBV_EVENT_DEVICE_FATAL:
		d.p.event(slog.LevelError, ev)
		d.unplugged(fmt.Errorf("device %s failed", d.name))
	case C.IBV_EVENT_PORT_ERR:
		d.p.event(slog.LevelWarn, ev)
	default:
		d.p.event(slog.LevelInfo, ev)
	}
}

// asyncName is the metric label of an event type.
func asyncName(kind uint32) string {
	names := map[uint32]string{
		C.IBV_EVENT_CQ_ERR:              "cq_err",
		C.IBV_EVENT_QP_FATAL:            "qp_fatal",
		C.IBV_EVENT_QP_REQ_ERR:          "qp_request_err",
		C.IBV_EVENT_QP_ACCESS_ERR:       "qp_access_err",
		C.IBV_EVENT_COMM_EST:            "comm_est",
		C.IBV_EVENT_SQ_DRAINED:          "sq_drained",
		C.IBV_EVENT_PATH_MIG:            "path_mig",
		C.IBV_EVENT_PATH_MIG_ERR:        "path_mig_err",
		C.IBV_EVENT_DEVICE_FATAL:        "device_fatal",
		C.IBV_EVENT_PORT_ACTIVE:         "port_active",
		C.IBV_EVENT_PORT_ERR:            "port_err",
		C.IBV_EVENT_LID_CHANGE:          "lid_change",
		C.IBV_EVENT_PKEY_CHANGE:         "pkey_change",
		C.IBV_EVENT_SM_CHANGE:           "sm_change",
		C.IBV_EVENT_SRQ_ERR:             "srq_err",
		C.IBV_EVENT_SRQ_LIMIT_REACHED:   "srq_limit",
		C.IBV_EVENT_QP_LAST_WQE_REACHED: "last_wqe",
		C.IBV_EVENT_CLIENT_REREGISTER:   "client_reregister",
		C.IBV_EVENT_GID_CHANGE:          "gid_change",
		C.IBV_EVENT_WQ_FATAL:            "wq_fatal",
	}
	if n, ok := names[kind]; ok {
		return n
	}
	return fmt.Sprintf("event_%d", kind)
}
