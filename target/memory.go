// SPDX-License-Identifier: Apache-2.0

package target

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"rblk/internal/size"
	"rblk/rdma"
	"rblk/wire"
)

// MemoryConfig is a memory export.
type MemoryConfig struct {
	Name string
	Size int64 // bytes; rounded up to a page
	// HugePages is the page size in bytes (2 MiB, 1 GiB), 0 for ordinary
	// pages. Huge ones need a mounted hugetlbfs of that size.
	HugePages int64
	// Dir is the tmpfs directory for the backing file; empty: Options.MemoryDir.
	Dir string
}

// memory is an export of pinned memory. Its bytes live in a file on tmpfs or
// hugetlbfs, so that a crash of this process loses nothing.
type memory struct {
	cfg      MemoryConfig
	file     *os.File
	lock     *os.File
	path     string // the bytes
	beside   string // lock and instance file, without their endings
	instance string

	resizing sync.Mutex // one at a time

	mu     sync.RWMutex
	pieces []*piece // guarded by mu: mappings, in order; a grow adds one
	size   int64    // guarded by mu
}

// piece is one mapping of the file.
type piece struct {
	off int64
	mem []byte

	mu      sync.Mutex                    // held while a registration pins; nothing but a MAP waits for it
	regions map[*domain]rdma.MemoryRegion // guarded by mu
}

// instanceFile is what lies beside the bytes and says whose they are.
type instanceFile struct {
	Instance string `json:"instance"`
	Size     int64  `json:"size"`
	Boot     string `json:"boot"`           // a file that is on no tmpfs after all may come back torn from a reboot
	File     string `json:"file,omitempty"` // device and inode of the bytes: another file of that name is other content
}

// place is where the memory lies, and the size of its pages.
func (c *MemoryConfig) place(defaultDir string) (dir string, page int64, err error) {
	dir, page = c.Dir, int64(os.Getpagesize())
	if dir == "" {
		dir = defaultDir
	}
	if c.HugePages == 0 {
		return dir, page, nil
	}
	if c.Dir == "" {
		dir, err = hugetlbfs(c.HugePages)
	}
	return dir, c.HugePages, err
}

// roundTo rounds n up to a multiple of page.
func roundTo(n, page int64) int64 { return (n + page - 1) / page * page }

// openMemory opens or creates the export's memory and pins it.
func openMemory(ctx context.Context, cfg MemoryConfig, defaultDir string) (_ *memory, err error) {
	dir, page, err := cfg.place(defaultDir)
	if err != nil {
		return nil, fmt.Errorf("memory export %s: %w", cfg.Name, err)
	}
	if cfg.Size <= 0 {
		return nil, fmt.Errorf("memory export %s: size must be above 0, such as %s=1GiB", cfg.Name, cfg.Name)
	}
	m := &memory{cfg: cfg, size: roundTo(cfg.Size, page), path: filepath.Join(dir, cfg.Name+".mem"), beside: filepath.Join(dir, cfg.Name)}
	if cfg.HugePages > 0 {
		// hugetlbfs has no write(2): what is not bytes lies on the tmpfs, which
		// a reboot empties as well.
		m.beside = filepath.Join(defaultDir, cfg.Name)
	}
	defer func() {
		if err != nil {
			m.close()
			err = fmt.Errorf("memory export %s: %w", cfg.Name, err)
		}
	}()
	for _, d := range []string{dir, filepath.Dir(m.beside)} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, err
		}
	}
	if m.lock, err = lockFile(ctx, m.beside+".lock"); err != nil {
		return nil, err
	}
	if m.file, err = os.OpenFile(m.path, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return nil, err
	}
	if err := m.adopt(); err != nil {
		return nil, err
	}
	return m, m.mapPiece(0, m.size)
}

func (m *memory) instancePath() string { return m.beside + ".json" }

// fileID names the file of the bytes.
func (m *memory) fileID() (string, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(m.file.Fd()), &st); err != nil {
		return "", err
	}
	return fmt.Sprintf("%d:%d", st.Dev, st.Ino), nil
}

// adopt takes existing memory over when its instance file vouches for it, else
// makes new memory with a new instance.
func (m *memory) adopt() error {
	st, err := m.file.Stat()
	if err != nil {
		return err
	}
	id, err := m.fileID()
	if err != nil {
		return err
	}
	var in instanceFile
	text, err := os.ReadFile(m.instancePath())
	// A file that is longer was being grown: the rest was never promised.
	if err == nil && json.Unmarshal(text, &in) == nil && in.Instance != "" && in.Size <= st.Size() && in.Boot == bootID() && (in.File == "" || in.File == id) {
		if in.Size != m.size {
			return fmt.Errorf("it exists with %s in %s, not %s: keep that size, change it with `rblkd export resize`, or delete %s to start anew",
				size.Format(in.Size), m.path, size.Format(m.size), m.instancePath())
		}
		m.instance = in.Instance
		return m.file.Truncate(m.size)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	// New content: whatever was here is gone before the instance says so.
	os.Remove(m.instancePath())
	if err := m.file.Truncate(0); err != nil {
		return err
	}
	if err := m.grow(m.size); err != nil {
		return err
	}
	b := make([]byte, 16)
	rand.Read(b)
	m.instance = hex.EncodeToString(b)
	return m.writeInstance(m.size)
}

func (m *memory) writeInstance(size int64) error {
	id, err := m.fileID()
	if err != nil {
		return err
	}
	text, err := json.Marshal(instanceFile{m.instance, size, bootID(), id})
	if err != nil {
		return err
	}
	return writeFileSync(m.instancePath(), text)
}

// grow makes the file n bytes long and reserves its pages, so that no access
// can fail later.
func (m *memory) grow(n int64) error {
	if err := m.file.Truncate(n); err != nil {
		return err
	}
	err := unix.Fallocate(int(m.file.Fd()), 0, 0, n)
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.ENOMEM) {
		return errNoRoom(n, filepath.Dir(m.path), m.cfg.HugePages)
	}
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return fmt.Errorf("reserve %s: %w", size.Format(n), err)
	}
	return nil
}

// errNoRoom: n bytes do not fit.
func errNoRoom(n int64, dir string, hugePages int64) error {
	if hugePages > 0 {
		return fmt.Errorf("not enough free huge pages for %s: raise /sys/kernel/mm/hugepages/hugepages-%dkB/nr_hugepages", size.Format(n), hugePages>>10)
	}
	return fmt.Errorf("no room for %s in %s: free memory, enlarge that tmpfs (mount -o remount,size=…), or use --memory-dir", size.Format(n), dir)
}

// mapPiece maps and pins [off, off+n) of the file.
func (m *memory) mapPiece(off, n int64) error {
	mem, err := unix.Mmap(int(m.file.Fd()), off, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("mmap: %w", err)
	}
	if err := pin(mem); err != nil {
		unix.Munmap(mem)
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.pieces = append(m.pieces, &piece{off: off, mem: mem, regions: map[*domain]rdma.MemoryRegion{}})
	m.size = off + n
	return nil
}

// pin locks memory; a limit that forbids it is named with the mend.
func pin(mem []byte) error {
	err := unix.Mlock(mem)
	if err == nil {
		return nil
	}
	if !errors.Is(err, unix.ENOMEM) && !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EAGAIN) {
		return fmt.Errorf("mlock: %w", err)
	}
	return &MemlockError{Need: int64(len(mem))}
}

// MemlockError: the memlock limit forbids pinning Need bytes more.
type MemlockError struct{ Need int64 }

func (e *MemlockError) Error() string {
	return fmt.Sprintf("%s must be locked in memory, the limit is %s: raise it (LimitMEMLOCK=infinity in the unit, `ulimit -l unlimited`, or CAP_IPC_LOCK)",
		size.Format(e.Need), MemlockLimit())
}

func (e *MemlockError) Is(target error) bool { return target == rdma.ErrMemlock }

// MemlockLimit is this process's limit in words.
func MemlockLimit() string {
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &lim) != nil || lim.Cur == unix.RLIM_INFINITY {
		return "unlimited"
	}
	return size.Format(int64(lim.Cur))
}

// hugetlbfs finds where huge pages of that size are mounted.
func hugetlbfs(pageSize int64) (string, error) {
	f, err := os.Open("/proc/mounts")
	if err != nil {
		return "", err
	}
	defer f.Close()
	for sc := bufio.NewScanner(f); sc.Scan(); {
		w := strings.Fields(sc.Text())
		var st unix.Statfs_t
		if len(w) > 2 && w[2] == "hugetlbfs" && unix.Statfs(w[1], &st) == nil && st.Bsize == pageSize {
			return filepath.Join(w[1], "rblk"), nil
		}
	}
	mb := pageSize >> 20
	return "", fmt.Errorf("no hugetlbfs with pages of %d MiB is mounted: mount -t hugetlbfs -o pagesize=%dM none /dev/hugepages", mb, mb)
}

func (m *memory) info(i *wire.ExportInfo) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	i.Kind, i.Size, i.BlockSize, i.ExtentSize = "memory", m.size, 1, extentSize
	i.Instance, i.Layout = m.instance, m.instance
	i.Durability = "daemon"
	i.CanFlush, i.CanFUA, i.CanDiscard, i.CanZero = true, true, true, true
}

// within are the pieces that r touches, in order; nil when it leaves the
// export. A piece stays mapped as long as there are sessions.
func (m *memory) within(r wire.Range) []*piece {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if r.Offset >= uint64(m.size) || r.Length > uint64(m.size)-r.Offset {
		return nil
	}
	var ps []*piece
	for _, p := range m.pieces {
		if r.Offset < uint64(p.off)+uint64(len(p.mem)) && r.Offset+r.Length > uint64(p.off) {
			ps = append(ps, p)
		}
	}
	return ps
}

// mapRange grants whole pieces: no frame, no message on the data path.
func (m *memory) mapRange(_ context.Context, s *session, r wire.Range, _ wire.Intent, _ bool) []wire.Grant {
	pieces := m.within(r)
	if pieces == nil {
		return refuse(r, wire.StatusRange)
	}
	var grants []wire.Grant
	for _, p := range pieces {
		g, err := s.grantMemory(p)
		if err != nil {
			s.log.Error("cannot register memory", "err", err)
			from := max(r.Offset, uint64(p.off))
			return append(grants, refuse(wire.Range{Offset: from, Length: r.Offset + r.Length - from}, wire.StatusIO)...)
		}
		grants = append(grants, g)
	}
	return grants
}

// region registers the piece in a domain, once.
func (p *piece) region(d *domain) (rdma.MemoryRegion, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r := p.regions[d]; r != nil {
		return r, nil
	}
	// No relaxed ordering: a write's acknowledgement means that it is placed.
	access := rdma.AccessRemoteRead
	if d.write {
		access |= rdma.AccessRemoteWrite | rdma.AccessLocalWrite
	}
	r, err := d.pd.Register(p.mem, access)
	if err != nil {
		return nil, err
	}
	p.regions[d] = r
	return r, nil
}

// zeroStep is how much is cleared at once: a clear cannot be preempted, and
// the garbage collector waits for it.
const zeroStep = 1 << 20

// zero writes zeros. Registered memory is never punched.
func (m *memory) zero(ctx context.Context, r wire.Range) wire.Status {
	pieces := m.within(r)
	if pieces == nil {
		return wire.StatusRange
	}
	for _, p := range pieces {
		from := max(r.Offset, uint64(p.off)) - uint64(p.off)
		to := min(r.Offset+r.Length-uint64(p.off), uint64(len(p.mem)))
		for ; from < to; from += zeroStep {
			if ctx.Err() != nil {
				return wire.StatusAgain // the epoch ends; nobody hears this
			}
			clear(p.mem[from:min(from+zeroStep, to)])
		}
	}
	return wire.StatusOK
}

// flush: an acknowledged write is in memory that outlives this process, which
// is all that the export states.
func (m *memory) flush(context.Context) wire.Status { return wire.StatusOK }

// resize grows the export; n is rounded up to a page. The instance file says the
// new size before anybody can write there, so that no acknowledged byte is cut
// off by a restart.
func (m *memory) resize(n int64) error {
	m.resizing.Lock()
	defer m.resizing.Unlock()
	page := int64(os.Getpagesize())
	if m.cfg.HugePages > 0 {
		page = m.cfg.HugePages
	}
	n = roundTo(n, page)
	m.mu.RLock()
	old := m.size
	m.mu.RUnlock()
	if n == old {
		return nil
	}
	if n < old {
		return fmt.Errorf("memory export %s has %s: it can grow, not shrink", m.cfg.Name, size.Format(old))
	}
	err := m.grow(n)
	if err == nil {
		err = m.writeInstance(n)
	}
	if err == nil {
		err = m.mapPiece(old, n-old)
	}
	if err != nil {
		err = errors.Join(err, m.writeInstance(old), m.file.Truncate(old)) // nobody has seen the rest
		return fmt.Errorf("memory export %s: %w", m.cfg.Name, err)
	}
	return nil
}

// leave drops the registrations in a domain.
func (m *memory) leave(d *domain) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	for _, p := range m.pieces {
		p.mu.Lock()
		if r := p.regions[d]; r != nil {
			r.Deregister()
			delete(p.regions, d)
		}
		p.mu.Unlock()
	}
}

// close unmaps; the bytes stay in their file.
func (m *memory) close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.pieces {
		unix.Munmap(p.mem)
	}
	m.pieces = nil
	if m.file != nil {
		m.file.Close()
	}
	if m.lock != nil {
		m.lock.Close()
	}
}
