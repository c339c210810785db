// SPDX-License-Identifier: Apache-2.0

package fuse

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	gofuse "github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

const (
	// maxBackground is how many requests of the kernel's read-ahead may be
	// under way: 64 of 1 MiB cover the bandwidth-delay product of a fast
	// network; go-fuse's default of 12 costs a third of the sequential rate.
	maxBackground = 64
	// readAheadKB is the kernel's read-ahead window of a mount. Its default of
	// 128 KiB cuts sequential reads into pieces that cost half of the rate;
	// more than 1 MiB gains nothing, and mmap faults pay for it.
	readAheadKB = 1024
)

// Mount is a mounted filesystem and the goroutines that serve it.
type Mount struct {
	dir   string
	info  Info
	fs    *fileSystem
	srv   *server
	notes *notifier
	log   *slog.Logger

	mu    sync.Mutex
	lives []*live // guarded by mu: the opened exports
	ended bool    // guarded by mu: no export is opened any more

	done chan struct{}
	err  error // valid once done is closed
}

// MountExport shows one export at dir, which must be as MountPath gives it: a
// dataset as a tree, another as a directory with one file. It returns once the
// mount is usable. The mount closes e.Volume at its end; when MountExport
// fails, that is left to the caller.
func MountExport(dir string, e *Export, o Options, log *slog.Logger) (*Mount, error) {
	o.ReadOnly = o.ReadOnly || e.Manifest != nil || e.Volume.Geometry().ReadOnly
	m := newMount(dir, o, log)
	m.fs.noOpen = e.Manifest != nil
	m.fs.root.Store(m.fs.plant(func(p *planted) tree { return e.tree(e.Manifest, p) }))
	if err := m.start(o, e.Manifest != nil); err != nil {
		return nil, err
	}
	m.follow(&live{Export: e, place: &m.fs.root, top: true})
	return m, nil
}

// MountDirectory shows every export of a target at dir, each as a directory in
// it that is opened on first use.
func MountDirectory(dir string, d Directory, o Options, log *slog.Logger) (*Mount, error) {
	m := newMount(dir, o, log)
	root := &exportsTree{dir: d, born: time.Now(), log: log, turn: make(chan struct{}, 1), known: map[string]*atomic.Pointer[planted]{}}
	root.plant = func(e Listed, place *atomic.Pointer[planted]) {
		place.Store(m.fs.plant(func(p *planted) tree {
			start := func(ctx context.Context) (tree, error) { return m.open(ctx, d, e.Name, place, p) }
			return newLazyTree(start, e.Dataset)
		}))
	}
	m.fs.root.Store(m.fs.plant(func(*planted) tree { return root }))
	if err := m.start(o, true); err != nil {
		return nil, err
	}
	return m, nil
}

func newMount(dir string, o Options, log *slog.Logger) *Mount {
	m := &Mount{dir: dir, fs: newFileSystem(), log: log, done: make(chan struct{})}
	m.fs.private = o.AllowRoot && !o.AllowOther
	return m
}

// start mounts and serves.
func (m *Mount) start(o Options, xattrs bool) error {
	dev, err := attach(m.dir, o)
	if err != nil {
		return err
	}
	m.srv, err = newServer(dev, m.fs, protocolOptions(m.fs.noOpen, xattrs, m.log), m.log)
	if err != nil {
		dev.close()
		Unmount(context.Background(), m.dir, Lazy)
		return fmt.Errorf("mounting on %s: %w", m.dir, err)
	}
	m.notes = newNotifier(dev, m.log)
	m.srv.start()
	go m.finish()
	m.identify()
	m.raiseReadAhead()
	return nil
}

// protocolOptions is what to agree on with the kernel.
func protocolOptions(noOpen, xattrs bool, log *slog.Logger) *gofuse.MountOptions {
	// Not CAP_ASYNC_DIO: with it the kernel waits for O_DIRECT calls in a way
	// that not even SIGKILL ends, and a dead target would make zombies.
	extra := uint64(gofuse.CAP_ATOMIC_O_TRUNC | gofuse.CAP_DIRECT_IO_ALLOW_MMAP | gofuse.CAP_HANDLE_KILLPRIV_V2)
	if noOpen {
		extra |= gofuse.CAP_NO_OPENDIR_SUPPORT
	}
	return &gofuse.MountOptions{
		MaxWrite:                 maxIO,
		MaxBackground:            maxBackground,
		EnableSymlinkCaching:     true,
		ExplicitDataCacheControl: true, // pages go by our notifications alone
		DisableXAttrs:            !xattrs,
		ExtraCapabilities:        extra,
		Logger:                   slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
}

// identify finds out what the kernel calls the mount.
func (m *Mount) identify() {
	info, ok, err := FindMount(m.dir)
	if err != nil || !ok {
		m.log.Warn("the new mount is not in mountinfo", "dir", m.dir, "err", err)
		return
	}
	m.info = info
}

// raiseReadAhead lets the kernel read ahead as far as one request reaches. Only
// root may; for others the first mount of a process says what it costs.
func (m *Mount) raiseReadAhead() {
	if m.info.Device == "" {
		return
	}
	name := "/sys/class/bdi/" + m.info.Device + "/read_ahead_kb"
	if err := os.WriteFile(name, []byte(strconv.Itoa(readAheadKB)), 0); err != nil {
		readAheadWarning.Do(func() {
			m.log.Info(fmt.Sprintf("large sequential reads will be about half as fast as they could be: let root run echo %d > %s", readAheadKB, name), "err", err)
		})
	}
}

var readAheadWarning sync.Once

// open opens an export of d to be shown as p.
func (m *Mount) open(ctx context.Context, d Directory, name string, place *atomic.Pointer[planted], p *planted) (tree, error) {
	e, err := d.Open(ctx, name)
	if err != nil {
		if !errors.Is(err, context.Canceled) {
			m.log.Error("opening the export failed", "export", name, "err", err)
		}
		return nil, err
	}
	t := e.tree(e.Manifest, p)
	if !m.follow(&live{Export: e, place: place}) {
		e.Volume.Close()
		return nil, unix.ENOTCONN
	}
	return t, nil
}

// follow takes an export over; false when the mount has ended.
func (m *Mount) follow(l *live) bool {
	l.fs, l.notes, l.log = m.fs, m.notes, m.log
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ended {
		return false
	}
	m.lives = append(m.lives, l)
	l.follow()
	return true
}

// finish waits for the end of serving and then ends everything else.
func (m *Mount) finish() {
	<-m.srv.done
	m.notes.close()
	m.srv.dev.close() // whatever the kernel still waits for fails now
	m.mu.Lock()
	m.ended = true
	lives := slices.Clone(m.lives)
	m.mu.Unlock()
	var errs []error
	for _, l := range lives {
		errs = append(errs, l.close())
	}
	m.err = errors.Join(errs...)
	close(m.done)
}

// Info is what the kernel says about the mount.
func (m *Mount) Info() Info { return m.info }

// Done is closed when the mount has ended, for whatever reason, and its exports
// are closed.
func (m *Mount) Done() <-chan struct{} { return m.done }

// Wait waits for Done, and returns what went wrong in closing the exports.
func (m *Mount) Wait() error {
	<-m.done
	return m.err
}

// Unmount unmounts. Clean fails with unix.EBUSY while the mount is in use. After
// Lazy the mount serves on until its last user is gone. Force answers calls
// under way with errors and ends the mount at once. But for Lazy it returns
// when the mount has ended or ctx ends.
func (m *Mount) Unmount(ctx context.Context, mode Mode) error {
	if mode == Force {
		return m.abort(ctx)
	}
	if err := Unmount(ctx, m.dir, mode); err != nil || mode == Lazy {
		return err
	}
	return m.wait(ctx)
}

func (m *Mount) wait(ctx context.Context) error {
	select {
	case <-m.done:
		return m.err
	case <-ctx.Done():
		return fmt.Errorf("unmounting %s: %w", m.dir, ctx.Err())
	}
}

// Close ends the mount: cleanly if nobody uses it and everything can be written
// within half of the time that ctx leaves, by force otherwise.
func (m *Mount) Close(ctx context.Context) error {
	half, cancel := halfTime(ctx)
	defer cancel()
	err := m.Unmount(half, Clean)
	if errors.Is(err, unix.EBUSY) {
		m.log.Warn("the mount is in use; programs that use it will see errors", "dir", m.dir)
		m.sync(half) // pages that programs changed through mmap
	}
	if err == nil {
		return nil
	}
	select {
	case <-m.done:
		return m.err
	default:
		return m.abort(ctx)
	}
}

func halfTime(ctx context.Context) (context.Context, context.CancelFunc) {
	if deadline, ok := ctx.Deadline(); ok {
		return context.WithTimeout(ctx, time.Until(deadline)/2)
	}
	return context.WithCancel(ctx)
}

// sync writes changed pages back while somebody still uses the mount.
func (m *Mount) sync(ctx context.Context) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		// Not os.Open: that polls, and must not wait for ourselves.
		if fd, err := unix.Open(m.dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err == nil {
			unix.Syncfs(fd)
			unix.Close(fd)
		}
	}()
	select {
	case <-done:
	case <-ctx.Done():
	}
}

// abort takes the mount out of the tree, answers everything that is under way,
// and closes the device, upon which the kernel fails all the rest.
func (m *Mount) abort(ctx context.Context) error {
	top, err := m.hold()
	if err != nil {
		return err
	}
	defer unix.Close(top)
	if err := Unmount(ctx, m.dir, Lazy); err != nil {
		m.log.Warn("the mount could not be taken out", "err", err)
	}
	m.srv.cancelAll()
	pokes, err := m.srv.stop(ctx, func() {
		var st unix.Statfs_t
		unix.Fstatfs(top, &st)
	})
	if err != nil {
		return err
	}
	err = m.wait(ctx)
	pokes.Wait() // the device is closed
	return err
}

// hold opens the mount's top directory without asking our own server anything.
func (m *Mount) hold() (int, error) {
	fd, err := unix.Open(m.dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return -1, fmt.Errorf("holding %s: %w", m.dir, err)
	}
	about, err := os.ReadFile("/proc/self/fdinfo/" + strconv.Itoa(fd))
	if err == nil && slices.Contains(strings.Split(string(about), "\n"), "mnt_id:\t"+strconv.Itoa(m.info.ID)) {
		return fd, nil
	}
	unix.Close(fd)
	return -1, fmt.Errorf("%s: not reachable: unmounted already, or hidden by another mount", m.dir)
}
