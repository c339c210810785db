// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo && verbs

package verbs

/*
#include "shim.h"
*/
import "C"

import (
	"fmt"
	"maps"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"rblk/internal/size"
	"rblk/rdma"
)

// domain implements rdma.ProtectionDomain.
type domain struct {
	d *device

	mu       sync.Mutex
	pd       *C.struct_ibv_pd // nil after Close; guarded by mu
	children int              // regions, shared receive queues, connections; guarded by mu

	// regions by lkey, for the check at each post: replaced under mu when a
	// region comes or goes, which is rare, and read without a lock.
	regions atomic.Pointer[map[uint32]*region]
}

var _ rdma.ProtectionDomain = (*domain)(nil)

func (pd *domain) Device() rdma.Device { return pd.d }

// hold counts a child and returns the domain's handle.
func (pd *domain) hold() (*C.struct_ibv_pd, error) {
	pd.mu.Lock()
	defer pd.mu.Unlock()
	if pd.pd == nil {
		return nil, net.ErrClosed
	}
	pd.children++
	return pd.pd, nil
}

func (pd *domain) release() {
	pd.mu.Lock()
	defer pd.mu.Unlock()
	pd.children--
}

// Close frees the domain (ibv_dealloc_pd(3)).
func (pd *domain) Close() error {
	pd.mu.Lock()
	defer pd.mu.Unlock()
	if pd.pd == nil {
		return nil
	}
	if pd.children > 0 {
		return fmt.Errorf("protection domain with %d children: %w", pd.children, rdma.ErrBusy)
	}
	if err := errnoFromRet("ibv_dealloc_pd", int(C.ibv_dealloc_pd(pd.pd))); err != nil {
		return err
	}
	pd.pd = nil
	pd.d.p.release(&pd.d.p.live.domains)
	return nil
}

// region implements rdma.MemoryRegion.
type region struct {
	pd     *domain
	mem    []byte
	addr   uint64
	lkey   uint32
	rkey   uint32
	access rdma.Access

	mu sync.Mutex
	mr *C.struct_ibv_mr // nil after Deregister; guarded by mu
}

var _ rdma.MemoryRegion = (*region)(nil)

// Register pins mem (ibv_reg_mr(3)). Relaxed ordering is an optional access
// flag: a driver that does not know it ignores it.
func (pd *domain) Register(mem []byte, access rdma.Access) (rdma.MemoryRegion, error) {
	if len(mem) == 0 {
		return nil, fmt.Errorf("register: %w: empty memory", rdma.ErrInvalid)
	}
	if access&rdma.AccessRemoteWrite != 0 && access&rdma.AccessLocalWrite == 0 {
		return nil, fmt.Errorf("register: %w: remote write requires local write", rdma.ErrInvalid)
	}
	if limit := pd.d.info.MaxRegion; uint64(len(mem)) > limit {
		return nil, fmt.Errorf("register %s: %w: %s takes %s in one region", size.Format(int64(len(mem))), rdma.ErrTooLarge, pd.d.name, size.Format(int64(limit)))
	}
	cpd, err := pd.hold()
	if err != nil {
		return nil, err
	}
	addr := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(mem))))
	mr, errno := C.rblk_reg_mr(cpd, C.uint64_t(addr), C.size_t(len(mem)), pd.accessFlags(access))
	if mr == nil {
		pd.release()
		return nil, registerError(uint64(len(mem)), causeOf(errno))
	}
	pd.d.p.mu.Lock()
	pd.d.p.live.regions++
	pd.d.p.mu.Unlock()
	r := &region{pd: pd, mem: mem, addr: addr, lkey: uint32(mr.lkey), rkey: uint32(mr.rkey), access: access, mr: mr}
	pd.update(func(m map[uint32]*region) { m[r.lkey] = r })
	return r, nil
}

// update replaces the table of regions by a changed copy.
func (pd *domain) update(change func(map[uint32]*region)) {
	pd.mu.Lock()
	defer pd.mu.Unlock()
	m := map[uint32]*region{}
	if old := pd.regions.Load(); old != nil {
		m = maps.Clone(*old)
	}
	change(m)
	pd.regions.Store(&m)
}

// check refuses segments that are not inside a region of the domain, and, when
// the network is to write there, not writable. An adapter would find out, too,
// and break the connection over it.
func (pd *domain) check(local []rdma.Segment, write bool) error {
	var regions map[uint32]*region
	if m := pd.regions.Load(); m != nil {
		regions = *m
	}
	for _, s := range local {
		if s.Length == 0 {
			continue
		}
		r := regions[s.LKey]
		if r == nil {
			return fmt.Errorf("%w: no region of the domain has lkey %#x", rdma.ErrInvalid, s.LKey)
		}
		if off := s.Addr - r.addr; off > uint64(len(r.mem)) || uint64(s.Length) > uint64(len(r.mem))-off {
			return fmt.Errorf("%w: %d bytes at %#x lie outside their region", rdma.ErrInvalid, s.Length, s.Addr)
		}
		if write && r.access&rdma.AccessLocalWrite == 0 {
			return fmt.Errorf("%w: the region at %#x has no local write", rdma.ErrInvalid, r.addr)
		}
	}
	return nil
}

// checkRecv is check for a receive, with its number of segments.
func (pd *domain) checkRecv(local []rdma.Segment, segments int) error {
	if _, err := lengthOf(local, segments, pd.d.info.MaxMessage); err != nil {
		return err
	}
	return pd.check(local, true)
}

func (pd *domain) accessFlags(a rdma.Access) C.uint {
	var f C.uint
	if a&rdma.AccessLocalWrite != 0 {
		f |= C.IBV_ACCESS_LOCAL_WRITE
		if pd.d.readSinkRemoteWrite {
			f |= C.IBV_ACCESS_REMOTE_WRITE
		}
	}
	if a&rdma.AccessRemoteRead != 0 {
		f |= C.IBV_ACCESS_REMOTE_READ
	}
	if a&rdma.AccessRemoteWrite != 0 {
		f |= C.IBV_ACCESS_REMOTE_WRITE
	}
	if a&rdma.AccessRelaxedOrdering != 0 {
		f |= C.IBV_ACCESS_RELAXED_ORDERING
	}
	return f
}

// registerError explains a refused registration: memlock's limit, which is the
// usual reason, with need, limit and mend; else the errno.
func registerError(need uint64, errno syscall.Errno) error {
	var lim unix.Rlimit
	limited := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &lim) == nil && lim.Cur != unix.RLIM_INFINITY
	if errno == syscall.EPERM || errno == syscall.ENOMEM && limited {
		return fmt.Errorf("register %s: %w: %w: the limit is %s for all regions of the process; raise it: ulimit -l unlimited, LimitMEMLOCK=infinity in the unit, or --ulimit memlock=-1 (or capability IPC_LOCK) for the container",
			size.Format(int64(need)), rdma.ErrMemlock, errno, size.Format(int64(lim.Cur)))
	}
	return fmt.Errorf("register %s: %w", size.Format(int64(need)), opError("ibv_reg_mr", errno))
}

func (r *region) Bytes() []byte       { return r.mem }
func (r *region) Addr() uint64        { return r.addr }
func (r *region) Len() uint64         { return uint64(len(r.mem)) }
func (r *region) LKey() uint32        { return r.lkey }
func (r *region) RKey() uint32        { return r.rkey }
func (r *region) Access() rdma.Access { return r.access }

// Deregister ends the region; the driver returns when the adapter has let go
// (ibv_dereg_mr(3)).
func (r *region) Deregister() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mr == nil {
		return nil
	}
	r.pd.update(func(m map[uint32]*region) { delete(m, r.lkey) })
	if err := errnoFromRet("ibv_dereg_mr", int(C.ibv_dereg_mr(r.mr))); err != nil {
		return err
	}
	r.mr = nil
	r.pd.release()
	r.pd.d.p.release(&r.pd.d.p.live.regions)
	return nil
}
