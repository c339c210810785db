// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"fmt"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"rblk/rdma"
	"rblk/volume"
)

// domain is the session's protection domain on one device. It outlives epochs.
type domain struct {
	dev rdma.Device
	pd  rdma.ProtectionDomain
}

// arena is registered memory of the volume's user. It outlives epochs.
type arena struct {
	v    *Volume
	mem  []byte
	base uintptr

	mu      sync.Mutex
	cond    *sync.Cond
	regions map[*domain]rdma.MemoryRegion // guarded by mu
	ops     int                           // guarded by mu: operations that use it
	closed  bool                          // guarded by mu
}

var _ volume.Arena = (*arena)(nil)

// mapMemory maps n bytes outside the Go heap, shared so that a fork cannot make
// the adapter's pages another's.
func mapMemory(n int) ([]byte, error) {
	mem, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, fmt.Errorf("map %d bytes: %w", n, err)
	}
	unix.Madvise(mem, unix.MADV_HUGEPAGE) // only a wish
	return mem, nil
}

// NewArena maps and registers memory.
func (v *Volume) NewArena(size int64) (volume.Arena, error) {
	page := int64(os.Getpagesize())
	if size <= 0 {
		return nil, fmt.Errorf("arena of %d bytes: %w", size, volume.ErrRange)
	}
	mem, err := mapMemory(int((size + page - 1) / page * page))
	if err != nil {
		return nil, err
	}
	a := &arena{v: v, mem: mem, base: uintptr(unsafe.Pointer(unsafe.SliceData(mem))), regions: map[*domain]rdma.MemoryRegion{}}
	a.cond = sync.NewCond(&a.mu)
	v.mu.Lock()
	if v.closed {
		v.mu.Unlock()
		unix.Munmap(mem)
		return nil, volume.ErrClosed
	}
	domains := append([]*domain(nil), v.domains...)
	v.arenas = append(v.arenas, a)
	v.mu.Unlock()
	for _, d := range domains {
		if _, err := a.region(d); err != nil {
			a.Close()
			return nil, err
		}
	}
	return a, nil
}

func (a *arena) Bytes() []byte { return a.mem }

// holds tells whether p lies wholly in the arena.
func (a *arena) holds(p []byte) bool {
	at := uintptr(unsafe.Pointer(unsafe.SliceData(p)))
	return at >= a.base && at-a.base <= uintptr(len(a.mem)) && uintptr(len(p)) <= uintptr(len(a.mem))-(at-a.base)
}

// region is the arena's registration in a domain; it registers once.
func (a *arena) region(d *domain) (rdma.MemoryRegion, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if r := a.regions[d]; r != nil {
		return r, nil
	}
	if a.closed {
		return nil, volume.ErrClosed
	}
	r, err := d.pd.Register(a.mem, rdma.AccessLocalWrite|rdma.AccessRelaxedOrdering)
	if err != nil {
		return nil, err
	}
	a.regions[d] = r
	return r, nil
}

// use notes one operation more; false when the arena is closing.
func (a *arena) use() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return false
	}
	a.ops++
	return true
}

func (a *arena) unuse() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ops--
	if a.ops == 0 {
		a.cond.Broadcast()
	}
}

// Close waits until no operation uses the arena, then unregisters and unmaps.
func (a *arena) Close() error {
	a.mu.Lock()
	was := a.closed
	a.closed = true
	for a.ops > 0 {
		a.cond.Wait()
	}
	regions := a.regions
	a.regions = map[*domain]rdma.MemoryRegion{}
	a.mu.Unlock()
	if was {
		return nil
	}
	for _, r := range regions {
		r.Deregister()
	}
	a.v.forgetArena(a)
	return unix.Munmap(a.mem)
}

func (v *Volume) forgetArena(a *arena) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for i, x := range v.arenas {
		if x == a {
			v.arenas = append(v.arenas[:i], v.arenas[i+1:]...)
			return
		}
	}
}

// domainOn returns the domain on a device, making it the first time, with every
// arena registered.
func (v *Volume) domainOn(dev rdma.Device) (*domain, error) {
	v.domainsMu.Lock()
	defer v.domainsMu.Unlock()
	v.mu.Lock()
	for _, d := range v.domains {
		if d.dev == dev {
			v.mu.Unlock()
			return d, nil
		}
	}
	v.mu.Unlock()
	pd, err := dev.NewDomain()
	if err != nil {
		return nil, err
	}
	d := &domain{dev: dev, pd: pd}
	v.mu.Lock()
	arenas := append([]*arena(nil), v.arenas...)
	v.domains = append(v.domains, d)
	v.mu.Unlock()
	for _, a := range arenas {
		if _, err := a.region(d); err != nil {
			return nil, err
		}
	}
	return d, nil
}
