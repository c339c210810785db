// SPDX-License-Identifier: Apache-2.0

package nbd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// AttachOptions of a kernel device. The zero value is a good default.
type AttachOptions struct {
	// Device names it ("/dev/nbd3"); empty: the kernel chooses.
	Device string
	// Connections is the number of socket pairs: the device's hardware queues.
	// Default: the CPUs, at most 16. More than one needs CAN_MULTI_CONN and is
	// reduced to one without it.
	Connections int
	// Timeout fails a request that has gone unanswered for so long. Default
	// 0: none; the session decides (hard, soft).
	Timeout time.Duration
	// DeadConn is how long the kernel holds requests when this process has
	// died, waiting for Reconnect. Default 30 s.
	DeadConn time.Duration
	// BlockSize of the device: 512 to 4096, a power of two, not below the
	// volume's. Default: the volume's, at least 512.
	BlockSize int
	// Identifier is kept by the kernel; only the same one may Reconnect.
	Identifier string
	// Reconnect takes Device over from a process that died.
	Reconnect bool
}

// defaultDeadConn is longer than a restart of a daemon takes, and shorter than
// the patience of whoever waits for a process in D state.
const defaultDeadConn = 30 * time.Second

// maxSockets is where more hardware queues stop paying.
const maxSockets = 16

// Device is a kernel block device served by this process.
type Device struct {
	path  string
	index int
	exp   *Export
	done  chan struct{}
	err   error // valid once done is closed
}

// Path of the device: /dev/nbdN.
func (d *Device) Path() string { return d.path }

// Done is closed when the device is no longer served: after Detach, or when
// somebody else disconnected it.
func (d *Device) Done() <-chan struct{} { return d.done }

// Err tells why serving ended; nil after a disconnect.
func (d *Device) Err() error {
	<-d.done
	return d.err
}

// Attach hands one end of new socket pairs to the kernel and serves the other
// until the device is disconnected or ctx ends. Needs CAP_SYS_ADMIN. The
// volume stays the caller's.
func Attach(ctx context.Context, exp *Export, opts AttachOptions) (*Device, error) {
	srv, err := NewServer([]*Export{exp}, Options{})
	if err != nil {
		return nil, err
	}
	cfg, err := attachConfig(exp, opts)
	if err != nil {
		return nil, err
	}
	k, err := openKernel()
	if err != nil {
		return nil, fmt.Errorf("nbd attach: %w", err)
	}
	defer k.Close()
	ours, theirs, err := socketPairs(connections(exp, opts))
	if err != nil {
		return nil, fmt.Errorf("nbd attach: %w", err)
	}
	defer closeAll(theirs) // the kernel has references of its own
	cfg.sockets = theirs
	if opts.Reconnect {
		err = k.reconfigure(cfg)
	} else {
		cfg.index, err = k.connect(cfg)
	}
	if err != nil {
		closeAll(ours)
		return nil, fmt.Errorf("nbd attach %s: %w", opts.Device, attachHint(err))
	}
	d := &Device{path: "/dev/nbd" + strconv.Itoa(cfg.index), index: cfg.index, exp: exp, done: make(chan struct{})}
	go d.serve(ctx, srv, ours)
	return d, nil
}

// attachHint words the kernel's refusals.
func attachHint(err error) error {
	switch {
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("needs root (CAP_SYS_ADMIN): %w", err)
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("the device is in use; `rmount nbd list` shows by whom: %w", err)
	case errors.Is(err, unix.ENOSPC):
		return fmt.Errorf("the device has no dead connection to take over: %w", err)
	}
	return err
}

func attachConfig(exp *Export, opts AttachOptions) (config, error) {
	g := exp.Volume.Geometry()
	block := opts.BlockSize
	if block == 0 {
		block = int(max(512, g.BlockSize))
	}
	if block < 512 || block > os.Getpagesize() || block&(block-1) != 0 || int64(block) < g.BlockSize {
		return config{}, fmt.Errorf("block size %d: want a power of two from %d to %d", block, max(512, g.BlockSize), os.Getpagesize())
	}
	if g.Size%int64(block) != 0 {
		return config{}, fmt.Errorf("volume size %d is not a multiple of the block size %d", g.Size, block)
	}
	cfg := config{
		index: -1, size: uint64(g.Size), blockSize: uint64(block),
		flags:   uint64(exp.flags(g, false)),
		timeout: opts.Timeout, deadConn: opts.DeadConn, identifier: opts.Identifier,
	}
	if cfg.deadConn == 0 {
		cfg.deadConn = defaultDeadConn
	}
	if opts.Device != "" {
		i, err := deviceIndex(opts.Device)
		if err != nil {
			return config{}, err
		}
		cfg.index = i
	} else if opts.Reconnect {
		return config{}, errors.New("reconnect: name the device")
	}
	return cfg, nil
}

func connections(exp *Export, opts AttachOptions) int {
	n := opts.Connections
	if n <= 0 {
		n = runtime.NumCPU()
	}
	if exp.flags(exp.Volume.Geometry(), false)&tfCanMultiConn == 0 {
		n = 1
	}
	return min(n, maxSockets)
}

// deviceIndex reads N of /dev/nbdN.
func deviceIndex(path string) (int, error) {
	s, ok := strings.CutPrefix(filepath.Clean(path), "/dev/nbd")
	i, err := strconv.Atoi(s)
	if !ok || err != nil || i < 0 {
		return -1, fmt.Errorf("device %q: want /dev/nbdN", path)
	}
	return i, nil
}

// socketPairs makes n pairs of connected Unix sockets.
func socketPairs(n int) (ours, theirs []*os.File, err error) {
	for range n {
		fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			closeAll(ours)
			closeAll(theirs)
			return nil, nil, os.NewSyscallError("socketpair", err)
		}
		ours = append(ours, os.NewFile(uintptr(fds[0]), "nbd"))
		theirs = append(theirs, os.NewFile(uintptr(fds[1]), "nbd"))
	}
	return ours, theirs, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// serve runs the device's connections to their end.
func (d *Device) serve(ctx context.Context, srv *Server, socks []*os.File) {
	defer close(d.done)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	resize := make(chan struct{})
	go func() {
		defer close(resize)
		d.followSize(ctx)
	}()
	var wg sync.WaitGroup
	errs := make([]error, len(socks))
	for i, s := range socks {
		wg.Go(func() { errs[i] = srv.serveSocket(ctx, s, d.exp) })
	}
	wg.Wait()
	cancel()
	<-resize
	d.err = errors.Join(errs...)
}

// serveSocket serves a connection that needs no handshake.
func (s *Server) serveSocket(ctx context.Context, f *os.File, exp *Export) error {
	conn, err := net.FileConn(f)
	f.Close()
	if err != nil {
		return err
	}
	defer conn.Close()
	return s.transmit(ctx, newHandshake(s, conn), exp)
}

// followSize tells the kernel when the volume has grown.
func (d *Device) followSize(ctx context.Context) {
	// The cache hands its events to one reader, who may be another; the size
	// itself is there for everyone.
	const every = time.Second
	size := d.exp.Volume.Geometry().Size
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := d.exp.Volume.Geometry().Size
		if now == size {
			continue
		}
		if err := setSize(d.index, now); err == nil {
			size = now
		}
	}
}

func setSize(index int, size int64) error {
	k, err := openKernel()
	if err != nil {
		return err
	}
	defer k.Close()
	return k.reconfigure(config{index: index, size: uint64(size)})
}

// Detach flushes the device and disconnects it. It works whoever serves it.
func Detach(path string) error {
	index, err := deviceIndex(path)
	if err != nil {
		return err
	}
	// fsync(2) of a block device writes back and flushes it; a device that is
	// gone or dead must not keep us from disconnecting it.
	var flush error
	if f, err := os.OpenFile(path, os.O_RDONLY, 0); err == nil {
		flush = f.Sync()
		f.Close()
	}
	k, err := openKernel()
	if err != nil {
		return fmt.Errorf("nbd detach %s: %w", path, err)
	}
	defer k.Close()
	if err := k.disconnect(index); err != nil {
		return fmt.Errorf("nbd detach %s: %w", path, err)
	}
	if flush != nil {
		return fmt.Errorf("nbd detach %s: disconnected, but the flush failed: %w", path, flush)
	}
	return nil
}

// List tells of every device that the kernel has.
func List() ([]DeviceStatus, error) {
	k, err := openKernel()
	if err != nil {
		return nil, fmt.Errorf("nbd list: %w", err)
	}
	defer k.Close()
	list, err := k.status()
	if err != nil {
		return nil, fmt.Errorf("nbd list: %w", err)
	}
	for i := range list {
		list[i].fill("/sys/block/nbd" + strconv.Itoa(list[i].Index))
	}
	return list, nil
}

// fill adds what sysfs knows.
func (d *DeviceStatus) fill(sys string) {
	d.Path = "/dev/nbd" + strconv.Itoa(d.Index)
	d.Identifier = sysfs(sys, "backend")
	d.PID, _ = strconv.Atoi(sysfs(sys, "pid"))
	if n, err := strconv.ParseInt(sysfs(sys, "size"), 10, 64); err == nil {
		d.Size = n * 512
	}
}

// sysfs reads one attribute; one that is not there is empty.
func sysfs(dir, name string) string {
	b, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}
