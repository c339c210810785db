// SPDX-License-Identifier: Apache-2.0

package dataset

import (
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
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// ScanOptions of a Scan or Rescan.
type ScanOptions struct {
	// Workers read directories in parallel. Default: 4 per CPU, since most of
	// the time goes to waiting for the file system.
	Workers int
	// Progress, when set, is called now and then, from one goroutine at a time.
	Progress func(Progress)
	Logger   *slog.Logger // nil: discard
}

// Progress counts what a scan has seen.
type Progress struct {
	Dirs, Files int64
	Bytes       int64 // of regular files
	Special     int64 // sockets, FIFOs and devices left out
	Unreadable  int64 // directories and attributes that could not be read
	Vanished    int64 // names that were gone when looked at
}

// Ident tells whether a file has changed.
type Ident struct {
	Dev, Ino  uint64
	Size      int64
	MtimeSec  int64
	MtimeNsec int64
	CtimeSec  int64
	CtimeNsec int64
}

// IdentOf is the identity in st.
func IdentOf(st *unix.Stat_t) Ident {
	return Ident{uint64(st.Dev), st.Ino, st.Size, st.Mtim.Sec, st.Mtim.Nsec, st.Ctim.Sec, st.Ctim.Nsec}
}

// found is one name in a directory.
type found struct {
	name  string
	st    unix.Stat_t
	link  string
	xattr []byte
	dir   *foundDir // of a directory
}

// foundDir is a directory and, once read, its sorted names.
type foundDir struct {
	parent *openDir
	name   string
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
// that few are open at a time.
type scanner struct {
	opts ScanOptions
	log  *slog.Logger

	dirs, files, bytes, special, unreadable, vanished atomic.Int64

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
	sc = &scanner{opts: opts, log: opts.Logger}
	if sc.log == nil {
		sc.log = slog.New(slog.DiscardHandler)
	}
	sc.cond = sync.NewCond(&sc.mu)
	f, err := os.OpenFile(dir, os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return root, nil, fmt.Errorf("dataset: %w", err)
	}
	// The directory itself must be readable: an empty export would be a lie.
	if _, err := f.Readdirnames(1); err != nil && !errors.Is(err, io.EOF) {
		f.Close()
		return root, nil, fmt.Errorf("dataset: %w", err)
	}
	if err := unix.Fstat(int(f.Fd()), &root.st); err != nil {
		f.Close()
		return root, nil, fmt.Errorf("dataset: %s: %w", dir, err)
	}
	root.xattr = sc.xattrs(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), false)
	f.Close()
	root.dir = &foundDir{name: dir}
	sc.stack = []*foundDir{root.dir}
	stop := context.AfterFunc(ctx, func() { sc.fail(ctx.Err()) })
	defer stop()
	var wg sync.WaitGroup
	for range opts.Workers {
		wg.Go(sc.work)
	}
	wg.Wait()
	for _, d := range sc.stack { // left over after a failure
		if d.parent != nil {
			d.parent.release()
		}
	}
	sc.report()
	return root, sc, sc.err
}

func (sc *scanner) fail(err error) {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	if sc.err == nil {
		sc.err = err
	}
	sc.cond.Broadcast()
}

func (sc *scanner) work() {
	for {
		sc.mu.Lock()
		for len(sc.stack) == 0 && sc.busy > 0 && sc.err == nil {
			sc.cond.Wait()
		}
		if len(sc.stack) == 0 || sc.err != nil {
			sc.cond.Broadcast()
			sc.mu.Unlock()
			return
		}
		d := sc.stack[len(sc.stack)-1]
		sc.stack = sc.stack[:len(sc.stack)-1]
		sc.busy++
		sc.mu.Unlock()
		sc.read(d)
		sc.mu.Lock()
		sc.busy--
		sc.cond.Broadcast()
		sc.mu.Unlock()
	}
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

// open opens a directory through its parent, without following links.
func (d *foundDir) open() (*os.File, error) {
	if d.parent == nil {
		return os.OpenFile(d.name, os.O_RDONLY|unix.O_DIRECTORY, 0)
	}
	defer d.parent.release()
	for {
		fd, err := unix.Openat(int(d.parent.f.Fd()), d.name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, &fs.PathError{Op: "open", Path: d.parent.f.Name() + "/" + d.name, Err: err}
		}
		return os.NewFile(uintptr(fd), d.parent.f.Name()+"/"+d.name), nil
	}
}

// read lists a directory and looks at each name.
func (sc *scanner) read(d *foundDir) {
	f, err := d.open()
	if err != nil {
		sc.trouble(err)
		return
	}
	dir := &openDir{f: f}
	dir.refs.Store(1)
	defer dir.release()
	if n := sc.dirs.Add(1); n%64 == 0 {
		sc.report()
	}
	for {
		names, err := f.Readdirnames(4096)
		for _, name := range names {
			if e, ok := sc.look(dir, name); ok {
				d.names = append(d.names, e)
			}
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			sc.trouble(err)
			break
		}
	}
	slices.SortFunc(d.names, func(a, b found) int { return cmp.Compare(a.name, b.name) })
	// A directory that changes while it is listed may name an entry twice.
	d.names = slices.CompactFunc(d.names, func(a, b found) bool { return a.name == b.name })
	sc.push(dir, d.names)
}

// push puts the subdirectories on the stack, the first one on top.
func (sc *scanner) push(dir *openDir, names []found) {
	sc.mu.Lock()
	defer sc.mu.Unlock()
	for _, e := range slices.Backward(names) {
		if e.dir != nil {
			dir.refs.Add(1)
			e.dir.parent = dir
			sc.stack = append(sc.stack, e.dir)
		}
	}
	sc.cond.Broadcast()
}

// trouble counts and logs what could not be read.
func (sc *scanner) trouble(err error) {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) {
		sc.vanished.Add(1)
		return
	}
	sc.unreadable.Add(1)
	sc.log.Warn("dataset scan: cannot read", "err", err)
}

// look examines one name; false leaves it out.
func (sc *scanner) look(dir *openDir, name string) (found, bool) {
	e := found{name: name}
	fd := int(dir.f.Fd())
	if err := unix.Fstatat(fd, name, &e.st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		sc.trouble(&fs.PathError{Op: "stat", Path: dir.f.Name() + "/" + name, Err: err})
		return e, false
	}
	switch e.st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		sc.files.Add(1)
		sc.bytes.Add(e.st.Size)
	case unix.S_IFDIR:
		e.dir = &foundDir{name: name}
	case unix.S_IFLNK:
		buf := make([]byte, maxSymlink+1)
		n, err := unix.Readlinkat(fd, name, buf)
		if err != nil || n == 0 || n > maxSymlink {
			sc.trouble(&fs.PathError{Op: "readlink", Path: dir.f.Name() + "/" + name, Err: err})
			return e, false
		}
		e.link = string(buf[:n])
	default:
		sc.special.Add(1)
		return e, false
	}
	e.xattr = sc.xattrs(fmt.Sprintf("/proc/self/fd/%d/%s", fd, name), true)
	return e, true
}

// xattrs reads the user.* attributes of path, encoded. A path may be followed
// only where it is a descriptor's.
func (sc *scanner) xattrs(path string, nofollow bool) []byte {
	list, get := unix.Listxattr, unix.Getxattr
	if nofollow {
		list, get = unix.Llistxattr, unix.Lgetxattr
	}
	n, err := list(path, nil)
	if err != nil || n == 0 {
		return nil // none, or a file system without
	}
	buf := make([]byte, n+1024)
	if n, err = list(path, buf); err != nil {
		return nil
	}
	var names []string
	for name := range strings.SplitSeq(string(buf[:n]), "\x00") {
		if strings.HasPrefix(name, "user.") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	var out []byte
	for _, name := range names {
		val := make([]byte, 64<<10) // XATTR_SIZE_MAX
		n, err := get(path, name, val)
		if err != nil {
			sc.unreadable.Add(1)
			continue
		}
		out = appendXattr(out, name, val[:n])
	}
	return out
}
