// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo && verbs

package verbs

/*
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"math"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"unsafe"

	"rblk/rdma"
)

// maxInlineProbe is the most inline bytes worth asking a device for: beyond it
// copying in the post call costs more than the adapter's own read.
const maxInlineProbe = 512

// device implements rdma.Device: an open context and its asynchronous events.
type device struct {
	p     *provider
	name  string
	ctx   *C.struct_ibv_context
	ports int
	info  rdma.DeviceInfo // without Ports
	maxCQ int
	iwarp bool
	// readSinkRemoteWrite: iWARP places a READ's answer like a peer's WRITE, so
	// hardware wants remote write on its destination. siw does not check it.
	readSinkRemoteWrite bool
	// reorders: siw completes a WRITE or SEND before the READ that was posted
	// ahead of it (Linux 6.12). The verbs forbid that (IBTA 10.8.3.2), and
	// callers build on the order: the connection restores it.
	reorders bool

	// ballast works around a defect of libsiw, see addBallast.
	ballast *C.struct_ibv_cq

	async *asyncReader
	gone  atomic.Bool // unplugged; set once
}

var _ rdma.Device = (*device)(nil)

// openDevice opens dev, learns its limits, logs them, and starts to listen for
// its asynchronous events (ibv_open_device(3), ibv_query_device(3)).
func (p *provider) openDevice(dev *C.struct_ibv_device, name string) (*device, error) {
	ctx, errno := C.ibv_open_device(dev)
	if err := errnoFromPtr("ibv_open_device", ctx == nil, errno); err != nil {
		return nil, err
	}
	d := &device{p: p, name: name, ctx: ctx}
	err := d.learn()
	if err == nil {
		d.async, err = startAsync(d)
	}
	if err != nil {
		d.closeContext()
		return nil, err
	}
	i := d.info
	p.log.Info("RDMA device", "device", name, "transport", i.Transport, "numa", i.NUMANode,
		"max_region", i.MaxRegion, "max_message", i.MaxMessage, "segments", i.MaxSegments,
		"send_queue", i.MaxSendQueue, "read_depth", i.MaxReadDepth, "inline", i.MaxInlineData)
	return d, nil
}

// learn fills in the limits, which never change.
func (d *device) learn() error {
	var a C.struct_ibv_device_attr
	if err := errnoFromRet("ibv_query_device", int(C.ibv_query_device(d.ctx, &a))); err != nil {
		return err
	}
	d.ports = int(a.phys_port_cnt)
	d.maxCQ = int(a.max_cqe)
	d.iwarp = d.ctx.device.transport_type == C.IBV_TRANSPORT_IWARP
	driver := d.driver()
	d.readSinkRemoteWrite = d.iwarp && driver != "siw"
	if driver == "siw" {
		d.reorders = true
		if err := d.addBallast(); err != nil {
			return err
		}
	}
	d.info = rdma.DeviceInfo{
		Name:          d.name,
		Transport:     "InfiniBand",
		NUMANode:      d.numaNode(),
		MaxRegion:     uint64(a.max_mr_size),
		MaxSegments:   int(a.max_sge),
		MaxSendQueue:  int(a.max_qp_wr),
		MaxRecvQueue:  int(a.max_qp_wr),
		MaxReadDepth:  int(min(a.max_qp_rd_atom, a.max_qp_init_rd_atom)),
		MaxInlineData: d.probeInline(),
	}
	if rd := int(a.max_sge_rd); rd > 0 { // iWARP: 1
		d.info.MaxSegments = min(d.info.MaxSegments, rd)
	}
	if d.info.MaxRegion == 0 {
		d.info.MaxRegion = math.MaxInt64
	}
	if d.iwarp {
		d.info.Transport = "iWARP"
	}
	var port C.struct_ibv_port_attr
	if d.ports > 0 && C.rblk_query_port(d.ctx, 1, &port) == 0 {
		d.info.MaxMessage = uint64(port.max_msg_sz)
		if !d.iwarp && port.link_layer == C.IBV_LINK_LAYER_ETHERNET {
			d.info.Transport = "RoCE"
		}
	}
	if !d.iwarp {
		d.info.Caps |= rdma.CapImmediate
	}
	if a.max_srq > 0 {
		d.info.Caps |= rdma.CapSharedReceive
	}
	if driver == "mlx5_core" {
		d.info.Caps |= rdma.CapRelaxedOrdering
	}
	return nil
}

// libsiw takes the mmap offset 0x90000, which comes up with the 17th connection,
// for "no offset" (SIW_INVAL_UOBJ_KEY; rdma-core 44). A completion queue of
// 32 Ki entries of 32 bytes, made first, lies across it.
const siwBallast = 32 << 10

// addBallast makes that queue; it costs siw, which is for tests, 1 MiB.
func (d *device) addBallast() error {
	cq, errno := C.rblk_create_cq(d.ctx, siwBallast, 0, nil)
	d.ballast = cq
	return errnoFromPtr("ibv_create_cq", cq == nil, errno)
}

// probeInline finds how many inline bytes a queue pair may have, which no
// attribute tells: it asks for less until one is made.
func (d *device) probeInline() int {
	pd := C.ibv_alloc_pd(d.ctx)
	if pd == nil {
		return 0
	}
	defer C.ibv_dealloc_pd(pd)
	cq := C.rblk_create_cq(d.ctx, 2, 0, nil)
	if cq == nil {
		return 0
	}
	defer C.ibv_destroy_cq(cq)
	for n := maxInlineProbe; n >= 16; n /= 2 {
		c := C.struct_ibv_qp_cap{max_send_wr: 1, max_recv_wr: 1, max_send_sge: 1, max_recv_sge: 1, max_inline_data: C.uint32_t(n)}
		if qp := C.rblk_create_qp(pd, cq, nil, 0, &c); qp != nil {
			C.ibv_destroy_qp(qp)
			return n
		}
	}
	return 0
}

func (d *device) sysfs(path ...string) string {
	return filepath.Join(append([]string{"/sys/class/infiniband", d.name}, path...)...)
}

// driver is the kernel driver's name. The software devices, rxe and siw, hang on
// no bus and have no driver link.
func (d *device) driver() string {
	link, err := os.Readlink(d.sysfs("device", "driver"))
	switch {
	case err == nil:
		return filepath.Base(link)
	case d.iwarp:
		return "siw"
	}
	return "rxe"
}

func (d *device) numaNode() int {
	text, err := os.ReadFile(d.sysfs("device", "numa_node"))
	if err != nil {
		return -1
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return -1
	}
	return n
}

// Info reports limits, and the ports as they are now.
func (d *device) Info() rdma.DeviceInfo {
	info := d.info
	if d.gone.Load() {
		return info
	}
	gids := d.gids()
	for n := 1; n <= d.ports; n++ {
		var a C.struct_ibv_port_attr
		if C.rblk_query_port(d.ctx, C.uint8_t(n), &a) != 0 {
			continue
		}
		port := rdma.PortInfo{
			Number:    n,
			State:     portState(int(a.state)),
			LinkLayer: "InfiniBand",
			MTU:       128 << a.active_mtu, // IBV_MTU_256 is 1
			Rate:      d.portFile(n, "rate"),
			GIDs:      gids[n],
		}
		if a.link_layer == C.IBV_LINK_LAYER_ETHERNET || d.iwarp {
			port.LinkLayer = "Ethernet"
		}
		port.NetDev = d.netDev(n)
		info.Ports = append(info.Ports, port)
	}
	return info
}

func (d *device) portFile(port int, name string) string {
	text, _ := os.ReadFile(d.sysfs("ports", strconv.Itoa(port), name))
	return strings.TrimSpace(string(text))
}

// netDev is the network device of a port: the one of its first GID, or the only
// one below the parent.
func (d *device) netDev(port int) string {
	dir := d.sysfs("ports", strconv.Itoa(port), "gid_attrs", "ndevs")
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if text, err := os.ReadFile(filepath.Join(dir, e.Name())); err == nil {
			return strings.TrimSpace(string(text))
		}
	}
	if text, err := os.ReadFile(d.sysfs("parent")); err == nil { // rxe
		return strings.TrimSpace(string(text))
	}
	if nets, err := os.ReadDir(d.sysfs("device", "net")); err == nil && len(nets) == 1 {
		return nets[0].Name()
	}
	return ""
}

// maxGIDs bounds the table that gids reads; adapters have 256 for each port.
const maxGIDs = 1024

// gids reads the GID tables of all ports (ibv_query_gid_table(3)).
func (d *device) gids() map[int][]rdma.GID {
	entries := make([]C.struct_ibv_gid_entry, maxGIDs)
	n := C._ibv_query_gid_table(d.ctx, &entries[0], maxGIDs, 0, C.size_t(unsafe.Sizeof(entries[0])))
	out := map[int][]rdma.GID{}
	for _, e := range entries[:max(int(n), 0)] {
		kind := ""
		switch {
		case d.iwarp:
		case e.gid_type == C.IBV_GID_TYPE_ROCE_V2:
			kind = "RoCE v2"
		default:
			kind = "IB/RoCE v1"
		}
		addr := netip.AddrFrom16(e.gid)
		port := int(e.port_num)
		out[port] = append(out[port], rdma.GID{Index: int(e.gid_index), Addr: addr.String(), Type: kind})
	}
	return out
}

func portState(s int) string {
	names := [...]string{"NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER"} // enum ibv_port_state
	if s >= 0 && s < len(names) {
		return names[s]
	}
	return fmt.Sprintf("state %d", s)
}

// mtuCode is the enum ibv_mtu of an MTU in bytes, 0 when there is none.
func mtuCode(bytes int) uint32 {
	for code := uint32(1); code <= 5; code++ {
		if 128<<code == bytes {
			return code
		}
	}
	return 0
}

// NewDomain allocates a protection domain (ibv_alloc_pd(3)).
func (d *device) NewDomain() (rdma.ProtectionDomain, error) {
	if err := d.p.hold(&d.p.live.domains); err != nil {
		return nil, err
	}
	pd, errno := C.ibv_alloc_pd(d.ctx)
	if err := errnoFromPtr("ibv_alloc_pd", pd == nil, errno); err != nil {
		d.p.release(&d.p.live.domains)
		return nil, fmt.Errorf("%s: %w", d.name, err)
	}
	return &domain{d: d, pd: pd}, nil
}

// close ends the asynchronous reader and closes the context.
func (d *device) close() error {
	d.async.close()
	return d.closeContext()
}

func (d *device) closeContext() error {
	if d.ballast != nil {
		C.ibv_destroy_cq(d.ballast)
	}
	return errnoFromRet("ibv_close_device", int(C.ibv_close_device(d.ctx)))
}

// unplugged marks the device gone and breaks its connections.
func (d *device) unplugged(cause error) {
	d.gone.Store(true)
	d.p.mu.Lock()
	ch := d.p.cm
	d.p.mu.Unlock()
	if ch == nil {
		return
	}
	for _, c := range ch.conns() {
		if c.dev == d {
			c.die(cause)
		}
	}
}

// tcpAddr is the form in which the provider tells addresses.
func tcpAddr(ap netip.AddrPort) net.Addr { return net.TCPAddrFromAddrPort(ap) }
