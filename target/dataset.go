// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"rblk/dataset"
	"rblk/wire"
)

// DatasetConfig is a dataset export.
type DatasetConfig struct {
	Name string
	Path string // the directory
}

// fillers bounds parallel reads of an export's store: enough to keep an SSD
// busy, few enough for a disk.
const fillers = 16

// data is a dataset export's tree and its store.
type data struct {
	cfg   DatasetConfig
	log   *slog.Logger
	root  *os.File
	state *stateDir
	stage *stager
	slots chan struct{} // one a fill under way

	tree    atomic.Pointer[dataset.Tree]
	packed  atomic.Pointer[packed]
	changed atomic.Int64 // reads refused because a file had changed since the scan

	scanning sync.Mutex // one scan at a time
	packing  sync.Mutex // one encoding at a time

	mu    sync.Mutex
	named map[string]bool // guarded by mu: files of this generation that the log has named
}

// packed is the manifest as it goes over the wire.
type packed struct {
	tree  *dataset.Tree
	plain []byte
	zstd  []byte
}

// openDataset scans the directory, or scans it again on top of the layout that
// a previous run left.
func openDataset(ctx context.Context, cfg DatasetConfig, st *stateDir, p *pool, scan dataset.ScanOptions, log *slog.Logger) (*data, error) {
	abs, err := filepath.Abs(cfg.Path)
	if err != nil {
		return nil, fmt.Errorf("dataset export %s: %w", cfg.Name, err)
	}
	cfg.Path = abs
	root, err := oDirectory(abs)
	if err != nil {
		return nil, fmt.Errorf("dataset export %s: %w", cfg.Name, err)
	}
	d := &data{cfg: cfg, log: log.With("export", cfg.Name), root: root, state: st, slots: make(chan struct{}, fillers), named: map[string]bool{}}
	tree, err := dataset.Open(ctx, abs, st.treePath(cfg.Name), scan)
	if err != nil {
		root.Close()
		return nil, fmt.Errorf("dataset export %s: %w", cfg.Name, err)
	}
	d.tree.Store(tree)
	d.stage = newStager(p, d, d.log)
	return d, nil
}

// rescan looks at the tree again; it tells whether there is a new generation.
func (d *data) rescan(ctx context.Context, opts dataset.ScanOptions) (bool, error) {
	d.scanning.Lock()
	defer d.scanning.Unlock()
	prev := d.tree.Load()
	// The layout is kept before anybody learns of it.
	next, err := dataset.Refresh(ctx, d.cfg.Path, d.state.treePath(d.cfg.Name), prev, opts)
	if err != nil {
		return false, fmt.Errorf("dataset export %s: %w", d.cfg.Name, err)
	}
	if next == prev {
		return false, nil
	}
	d.tree.Store(next)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.named = map[string]bool{}
	return true, nil
}

// manifest is the encoded manifest, made once for each generation.
func (d *data) manifest() (*packed, error) {
	d.packing.Lock()
	defer d.packing.Unlock()
	t := d.tree.Load()
	if p := d.packed.Load(); p != nil && p.tree == t {
		return p, nil
	}
	p := &packed{tree: t, plain: t.Manifest.Encode()}
	var err error
	if p.zstd, err = dataset.Compress(p.plain); err != nil {
		return nil, err
	}
	d.packed.Store(p)
	return p, nil
}

func (d *data) size() int64 { return d.tree.Load().Manifest.VolumeSize() }

func (d *data) info(i *wire.ExportInfo) {
	m := d.tree.Load().Manifest
	i.Kind, i.Size, i.BlockSize, i.ExtentSize, i.ReadOnly = "dataset", m.VolumeSize(), 1, extentSize, true
	i.Instance, i.Layout, i.Generation, i.Files = m.Layout(), m.Layout(), m.Generation(), m.NumFiles()
	i.Durability = "host"
}

// fill reads the files of an extent. A file that is not what was scanned, before
// or after the read, makes its range bad, and no other.
func (d *data) fill(ctx context.Context, off int64, buf []byte) []badRange {
	select {
	case d.slots <- struct{}{}:
		defer func() { <-d.slots }()
	case <-ctx.Done():
		return []badRange{{off, int64(len(buf)), wire.StatusAgain}}
	}
	clear(buf)
	t := d.tree.Load()
	end := off + int64(len(buf))
	var bad []badRange
	for i := t.FileIndex(off); i < len(t.Files) && t.Files[i].Offset < end; i++ {
		f := &t.Files[i]
		from, to := max(off, f.Offset), min(end, f.Offset+f.Size)
		if s := d.readFile(ctx, f, from-f.Offset, buf[from-off:to-off]); s != wire.StatusOK {
			bad = addBad(bad, badRange{from, to - from, s})
		}
	}
	return bad
}

// addBad appends a range, joined with the last one where they meet.
func addBad(bad []badRange, b badRange) []badRange {
	if n := len(bad); n > 0 && bad[n-1].off+bad[n-1].n == b.off && bad[n-1].status == b.status {
		bad[n-1].n += b.n
		return bad
	}
	return append(bad, b)
}

// readFile reads p at off of a file, if it is still the one that was scanned.
func (d *data) readFile(ctx context.Context, f *dataset.File, off int64, p []byte) wire.Status {
	if f.Stale {
		return wire.StatusStale
	}
	if !settled(ctx, &f.Ident) {
		return wire.StatusAgain
	}
	fd, err := openBeneath(int(d.root.Fd()), f.Path)
	if err != nil {
		return d.failed(f, err)
	}
	defer unix.Close(fd)
	if !d.unchanged(fd, f) {
		return wire.StatusStale
	}
	if err := readSparse(fd, off, p); err != nil {
		return d.failed(f, err)
	}
	if !d.unchanged(fd, f) {
		return wire.StatusStale
	}
	return wire.StatusOK
}

// settled waits until a file has rested long enough for its identity to be
// trusted; false when ctx ends first.
func settled(ctx context.Context, id *dataset.Ident) bool {
	wait := id.Settle(time.Now())
	if wait == 0 {
		return true
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// openBeneath opens a path below a directory; nothing in it, no symlink and no
// "..", leads elsewhere. O_NONBLOCK: what was a file may be a FIFO by now.
func openBeneath(dir int, path string) (int, error) {
	const flags = unix.O_RDONLY | unix.O_CLOEXEC | unix.O_NOFOLLOW | unix.O_NONBLOCK
	// One call takes a path of less than PATH_MAX.
	for len(path) >= unix.PathMax {
		cut := strings.LastIndexByte(path[:unix.PathMax-1], '/')
		if cut <= 0 {
			return -1, unix.ENAMETOOLONG
		}
		sub, err := openat2(dir, path[:cut], unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOFOLLOW)
		if err != nil {
			return -1, err
		}
		defer unix.Close(sub)
		dir, path = sub, path[cut+1:]
	}
	return openat2(dir, path, flags)
}

func openat2(dir int, path string, flags uint64) (int, error) {
	how := unix.OpenHow{Flags: flags, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS}
	for {
		fd, err := unix.Openat2(dir, path, &how)
		// EAGAIN: a rename raced the look-up (openat2(2)).
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) {
			continue
		}
		return fd, err
	}
}

func (d *data) unchanged(fd int, f *dataset.File) bool {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err == nil && dataset.IdentOf(&st) == f.Ident {
		return true
	}
	d.changed.Add(1)
	if d.first(f) {
		d.log.Warn("file changed since the scan: its data is refused until a rescan", "path", f.Path)
	}
	return false
}

// first tells whether this is the first trouble with a file: later reads of it
// would say the same again and again.
func (d *data) first(f *dataset.File) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	was := d.named[f.Path]
	d.named[f.Path] = true
	return !was
}

// failed logs why a file cannot be read and chooses the status.
func (d *data) failed(f *dataset.File, err error) wire.Status {
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) || errors.Is(err, unix.EXDEV) {
		d.changed.Add(1)
		if d.first(f) {
			d.log.Warn("file vanished since the scan: its data is refused until a rescan", "path", f.Path)
		}
		return wire.StatusStale
	}
	if d.first(f) {
		d.log.Error("cannot read file", "path", f.Path, "err", err)
	}
	return wire.StatusIO
}

// sparseStep is how much is read before the next hole is looked for. Asking
// where the data ends (SEEK_HOLE) would make tmpfs walk the rest of the file;
// where it begins is cheap to tell everywhere.
const sparseStep = 128 << 10

// readSparse reads len(p) bytes at off; p holds zeros, so holes need no reading.
func readSparse(fd int, off int64, p []byte) error {
	if len(p) < sparseStep {
		return readFull(fd, off, p)
	}
	for len(p) > 0 {
		start, err := unix.Seek(fd, off, unix.SEEK_DATA)
		switch {
		case errors.Is(err, unix.ENXIO):
			return nil // a hole up to the end
		case err != nil:
			return readFull(fd, off, p) // a file system that does not tell
		case start-off >= int64(len(p)):
			return nil
		}
		p, off = p[start-off:], start
		n := min(sparseStep, len(p))
		if err := readFull(fd, off, p[:n]); err != nil {
			return err
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// readFull reads exactly len(p) bytes.
func readFull(fd int, off int64, p []byte) error {
	for len(p) > 0 {
		n, err := unix.Pread(fd, p, off)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		if n == 0 {
			return nil // shorter than it was: the check behind the read sees it
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// mapRange grants the pieces of a range: the good parts of its first extent, and
// a refusal for each bad part.
func (d *data) mapRange(ctx context.Context, s *session, r wire.Range, intent wire.Intent, wait bool) []wire.Grant {
	if intent != wire.IntentRead {
		return refuse(r, wire.StatusReadOnly)
	}
	size := uint64(d.size())
	if r.Offset >= size || r.Length > size-r.Offset {
		return refuse(r, wire.StatusRange)
	}
	e, fresh, err := d.stage.acquire(ctx, int64(r.Offset/extentSize), wait)
	if err != nil {
		return refuse(r, wire.StatusAgain)
	}
	defer d.stage.release(e)
	if !fresh && d.stage.lacks(e) {
		d.stage.refresh(ctx, e)
	}
	return d.pieces(s, e, r)
}

// pieces answers for the part of r that lies in e.
func (d *data) pieces(s *session, e *extent, r wire.Range) []wire.Grant {
	base := e.index * extentSize
	n, bad := d.stage.contents(e)
	end := min(int64(r.Offset+r.Length), base+n)
	if len(bad) == 0 {
		return []wire.Grant{s.grantFrame(d.stage, e, base, n)}
	}
	var grants []wire.Grant
	off := int64(r.Offset)
	for _, b := range bad {
		if b.off+b.n <= off {
			continue
		}
		if b.off >= end || len(grants) >= maxPieces {
			break
		}
		if b.off > off {
			grants = append(grants, s.grantFrame(d.stage, e, off, b.off-off))
		}
		from := max(off, b.off)
		grants = append(grants, wire.Grant{Offset: uint64(from), Length: uint64(b.off + b.n - from), Status: b.status})
		off = b.off + b.n
	}
	if off < end && len(grants) < maxPieces {
		next := base + n
		for _, b := range bad {
			if b.off >= off {
				next = b.off
				break
			}
		}
		grants = append(grants, s.grantFrame(d.stage, e, off, next-off))
	}
	if len(grants) == 0 {
		return refuse(r, wire.StatusAgain) // the epoch ended before r was read
	}
	return grants
}

// maxPieces bounds the answer to one range; the initiator asks for the rest.
const maxPieces = 32

func (d *data) zero(context.Context, wire.Range) wire.Status { return wire.StatusReadOnly }
func (d *data) flush(context.Context) wire.Status            { return wire.StatusOK }
func (d *data) resize(int64) error {
	return fmt.Errorf("dataset export %s: its size is that of its files", d.cfg.Name)
}

// leave drops the registrations in a domain.
func (d *data) leave(dom *domain) {
	d.stage.mu.Lock()
	defer d.stage.mu.Unlock()
	for s := range d.stage.slabs {
		if r := s.regions[dom]; r != nil {
			r.Deregister()
			delete(s.regions, dom)
		}
	}
}

func (d *data) close() {
	d.stage.close()
	d.root.Close()
}
