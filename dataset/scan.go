// SPDX-License-Identifier: Apache-2.0

package dataset

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// ScanOptions of a Scan or Rescan.
type ScanOptions struct {
	// Workers read directories in parallel. Default: 4 per CPU, since most of
	// the time goes to waiting for the file system.
	Workers int
	// Progress, when set, is called now and then, and once at the end, from
	// one goroutine at a time.
	Progress func(Progress)
	// MaxMemory bounds what a scan and its tree take, in bytes, by estimate:
	// some 300 for each name, and its length. Beyond it: ErrTooLarge.
	// Default: 8 GiB.
	MaxMemory int64
	Logger    *slog.Logger // nil: discard
}

// Progress counts what a scan has seen.
type Progress struct {
	Dirs, Files int64
	Bytes       int64 // of regular files
	Special     int64 // sockets, FIFOs and devices left out
	Unreadable  int64 // files, directories, names and attributes that this process may not or cannot read
	Vanished    int64 // names that were gone when looked at
}

const (
	// progressEvery is the number of names between two calls of Progress.
	progressEvery = 4096
	// maxDepth bounds the directories within each other. Without it, who may
	// write to the tree could make paths of quadratic size.
	maxDepth = 4096
	// nameCost is a found, a node, an entry and a File, less their strings.
	nameCost         = 112 + 72 + 12 + 96
	defaultMaxMemory = 8 << 30
	// maxComplaints bounds the log lines of one scan about single names.
	maxComplaints = 20
)

// found is one name in a directory. Millions of them live between the walk and
// the layout, so it holds what is needed and no more.
type found struct {
	name                  string
	id                    Ident
	mode, nlink, uid, gid uint32
	blocks                uint64
	extra                 *extra    // of a symlink, or what has attributes
	dir                   *foundDir // of a directory
}

// extra is what few names have.
type extra struct {
	link  string
	xattr []byte // encoded
}

func (e *found) is(format uint32) bool { return e.mode&unix.S_IFMT == format }

func (e *found) set(st *unix.Stat_t) {
	e.id, e.blocks = IdentOf(st), uint64(st.Blocks)
	e.mode, e.nlink, e.uid, e.gid = st.Mode, uint32(st.Nlink), st.Uid, st.Gid
}

// foundDir is a directory and, once read, its sorted names.
type foundDir struct {
	parent *openDir // nil for the root
	name   string
	depth  int // 0 for the root
	names  []found
}

// openDir is a descriptor shared by the subdirectories that are still to be
// opened through it.
type openDir struct {
	f    *os.File
	refs atomic.Int32
}

func (d *openDir) release() {
	if d.refs.Add(-1) == 0 {
		d.f.Close()
	}
}

// scanner walks a tree with several workers. Directories wait on a stack, so
// that few are open at a time. It never follows a symlink and never uses a path
// of more than one component, so that whoever may write to the tree can neither
// lead it out nor make it fail with long paths.
type scanner struct {
	opts ScanOptions
	log  *slog.Logger
	root *os.File
	// checkAccess: the process is not root, so that there may be files that it
	// sees and cannot read.
	checkAccess bool

	memory                                                               atomic.Int64 // estimate
	names, dirs, files, bytes, special, unreadable, vanished, complaints atomic.Int64

	mu    sync.Mutex
	cond  *sync.Cond
	stack []*foundDir // guarded by mu
	busy  int         // guarded by mu: workers at a directory
	err   error       // guarded by mu: the first fatal one

	progress sync.Mutex
}

// walk reads the tree below dir.
func walk(ctx context.Context, dir string, opts ScanOptions) (root found, sc *scanner, err error) {
	if opts.Workers <= 0 {
		opts.Workers = 4 * runtime.NumCPU()
	}
	if opts.MaxMemory <= 0 {
		opts.MaxMemory = defaultMaxMemory
	}
	sc = &scanner{opts: opts, log: opts.Logger, checkAccess: os.Geteuid() != 0}
	if sc.log == nil {
		sc.log = slog.New(slog.DiscardHandler)
	}
	sc.cond = sync.NewCond(&sc.mu)
	if sc.root, err = os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY, 0); err != nil {
		return root, nil, fmt.Errorf("dataset: %w", err)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(sc.root.Fd()), &st); err != nil {
		sc.root.Close()
		return root, nil, fmt.Errorf("dataset: %s: %w", dir, err)
	}
	root.set(&st)
	root.dir = &foundDir{name: dir}
	w := &worker{scanner: sc}
	if x := w.xattrs("/proc/self/fd/"+strconv.Itoa(int(sc.root.Fd())), unix.Listxattr, unix.Getxattr); x != nil {
		root.extra = &extra{xattr: x}
	}
	sc.stack = []*foundDir{root.dir}
	stop := context.AfterFunc(ctx, func() { sc.fail(ctx.Err()) })
	defer stop()
	var wg sync.WaitGroup
	for range opts.Workers {
		wg.Go(func() { (&worker{scanner: sc}).run() })
	}
	wg.Wait()
	sc.report()
	return root, sc, sc.end()
}

// end closes what a failure left open, and is the failure.
func (sc *scanner) end() error {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	for _, d := range sc.stack {
		if d.parent == nil {
			sc.root.Close()
		} else {
			d.parent.release()
		}
	}
	return sc.err
}

// fail ends the scan.
func (sc *scanner) fail(err error) {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	if sc.err == nil {
		sc.err = err
	}
	sc.cond.Broadcast()
}

func (sc *scanner) failed() bool {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	return sc.err != nil
}

// report calls Progress.
func (sc *scanner) report() {
	if sc.opts.Progress == nil {
		return
	}
	sc.progress.Lock()
	defer sc.progress.Unlock()
	sc.opts.Progress(sc.counts())
}

func (sc *scanner) counts() Progress {
	return Progress{
		Dirs: sc.dirs.Load(), Files: sc.files.Load(), Bytes: sc.bytes.Load(),
		Special: sc.special.Load(), Unreadable: sc.unreadable.Load(), Vanished: sc.vanished.Load(),
	}
}

// trouble counts and logs what could not be read, and goes on; a lack of
// descriptors or memory ends the scan, for it would leave out what is there.
func (sc *scanner) trouble(op string, dir *openDir, name string, err error) {
	path := name
	if dir != nil {
		path = dir.f.Name() + "/" + name
	}
	err = &fs.PathError{Op: op, Path: path, Err: err}
	switch {
	case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		sc.fail(fmt.Errorf("dataset: %w: raise the limit of open files (ulimit -n)", err))
	case errors.Is(err, unix.ENOMEM), dir == nil:
		sc.fail(fmt.Errorf("dataset: %w", err))
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP), errors.Is(err, unix.ESTALE):
		sc.vanished.Add(1)
	default:
		sc.unreadable.Add(1)
		switch n := sc.complaints.Add(1); {
		case n < maxComplaints:
			sc.log.Warn("dataset scan: cannot read", "err", err)
		case n == maxComplaints:
			sc.log.Warn("dataset scan: cannot read; more of this is only counted", "err", err)
		}
	}
}

// push puts the subdirectories, of that depth, on the stack, the first one on
// top.
func (sc *scanner) push(dir *openDir, names []found, depth int) {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	for _, e := range slices.Backward(names) {
		if e.dir != nil {
			dir.refs.Add(1)
			e.dir.parent, e.dir.depth = dir, depth
			sc.stack = append(sc.stack, e.dir)
		}
	}
	sc.cond.Broadcast()
}

// charge counts what a name costs, with the path that its File will have, and
// ends the scan beyond MaxMemory.
func (sc *scanner) charge(dir *openDir, e *found) {
	cost := nameCost + 2*len(e.name)
	if e.extra != nil {
		cost += len(e.extra.link) + len(e.extra.xattr)
	}
	if e.is(unix.S_IFREG) {
		cost += len(dir.f.Name())
	}
	if sc.memory.Add(int64(cost)) > sc.opts.MaxMemory {
		sc.fail(fmt.Errorf("dataset: %w: a tree that takes more than %d bytes of memory; export its directories one by one",
			ErrTooLarge, sc.opts.MaxMemory))
	}
}

// take waits for a directory to read; nil when there will be none. After it
// done must be called.
func (sc *scanner) take() *foundDir {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	for len(sc.stack) == 0 && sc.busy > 0 && sc.err == nil {
		sc.cond.Wait()
	}
	if len(sc.stack) == 0 || sc.err != nil {
		return nil
	}
	d := sc.stack[len(sc.stack)-1]
	sc.stack = sc.stack[:len(sc.stack)-1]
	sc.busy++
	return d
}

func (sc *scanner) done() {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	sc.busy--
	sc.cond.Broadcast()
}

// worker is one goroutine of a scan, with its scratch space.
type worker struct {
	*scanner
	buf   []byte // of names of attributes, or a symlink's target
	value []byte // of an attribute
}

func (w *worker) run() {
	for d := w.take(); d != nil; d = w.take() {
		w.read(d)
		w.done()
	}
}

// open opens a directory through its parent, without following links; nil when
// that failed.
func (w *worker) open(d *foundDir) *openDir {
	dir := &openDir{f: w.root}
	dir.refs.Store(1)
	if d.parent == nil {
		return dir
	}
	defer d.parent.release()
	if d.depth > maxDepth {
		w.trouble("open", d.parent, d.name, unix.ENAMETOOLONG)
		return nil
	}
	for {
		fd, err := unix.Openat(int(d.parent.f.Fd()), d.name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			w.trouble("open", d.parent, d.name, err)
			return nil
		}
		dir.f = os.NewFile(uintptr(fd), d.parent.f.Name()+"/"+d.name)
		return dir
	}
}

// read lists a directory and looks at each name.
func (w *worker) read(d *foundDir) {
	dir := w.open(d)
	if dir == nil {
		return
	}
	defer dir.release()
	w.dirs.Add(1)
	for !w.failed() {
		names, err := dir.f.Readdirnames(1024)
		for _, name := range names {
			if e, ok := w.look(dir, name); ok {
				d.names = append(d.names, e)
				w.charge(dir, &e)
			}
			if w.names.Add(1)%progressEvery == 0 {
				w.report()
			}
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			w.trouble("read", d.parent, d.name, cmp.Or(errors.Unwrap(err), err))
			break
		}
	}
	slices.SortFunc(d.names, func(a, b found) int { return cmp.Compare(a.name, b.name) })
	// A directory that changes while it is listed may name an entry twice.
	d.names = slices.CompactFunc(d.names, func(a, b found) bool { return a.name == b.name })
	w.push(dir, d.names, d.depth+1)
}

// look examines one name; false leaves it out.
func (w *worker) look(dir *openDir, name string) (e found, ok bool) {
	fd := int(dir.f.Fd())
	var st unix.Stat_t
	if err := unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		w.trouble("stat", dir, name, err)
		return e, false
	}
	e.name = name
	e.set(&st)
	var x extra
	switch e.mode & unix.S_IFMT {
	case unix.S_IFREG:
		w.files.Add(1)
		w.bytes.Add(e.id.Size)
		if w.checkAccess {
			if err := unix.Faccessat(fd, name, unix.R_OK, unix.AT_EACCESS|unix.AT_SYMLINK_NOFOLLOW); err != nil && !errors.Is(err, unix.ENOENT) {
				w.trouble("access", dir, name, err) // in the tree, but reads of it will fail
			}
		}
	case unix.S_IFDIR:
		e.dir = &foundDir{name: name}
	case unix.S_IFLNK:
		w.buf = slices.Grow(w.buf[:0], maxSymlink+1)[:maxSymlink+1]
		n, err := unix.Readlinkat(fd, name, w.buf)
		if err == nil && n > maxSymlink {
			err = unix.ENAMETOOLONG
		}
		if err == nil && n == 0 {
			err = unix.ENOENT
		}
		if err != nil {
			w.trouble("readlink", dir, name, err)
			return e, false
		}
		x.link = string(w.buf[:n])
	default:
		w.special.Add(1)
		return e, false
	}
	x.xattr = w.xattrs("/proc/self/fd/"+strconv.Itoa(fd)+"/"+name, unix.Llistxattr, unix.Lgetxattr)
	if x.link != "" || x.xattr != nil {
		e.extra = &x
	}
	return e, true
}

// xattrs reads the user.* attributes of path, encoded; nil when there are none.
// Whether list and get follow the last component is the caller's choice.
func (w *worker) xattrs(path string, list func(string, []byte) (int, error), get func(string, string, []byte) (int, error)) []byte {
	n, err := list(path, nil)
	if err != nil || n == 0 {
		return nil // none, or a file system without, or gone meanwhile
	}
	w.buf = slices.Grow(w.buf[:0], n)[:n]
	if n, err = list(path, w.buf); err != nil {
		w.unreadable.Add(1) // more of them meanwhile, or gone
		return nil
	}
	var names []string
	for name := range bytes.SplitSeq(w.buf[:n], []byte{0}) {
		if bytes.HasPrefix(name, []byte("user.")) {
			names = append(names, string(name))
		}
	}
	slices.Sort(names)
	var out []byte
	for _, name := range names {
		n, err := get(path, name, w.value)
		if err == unix.ERANGE || err == nil && len(w.value) == 0 {
			w.value = make([]byte, maxXattrValue)
			n, err = get(path, name, w.value)
		}
		if err != nil {
			w.unreadable.Add(1)
			continue
		}
		out = appendXattr(out, name, w.value[:n])
	}
	return out
}
