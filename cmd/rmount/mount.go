// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"rblk/cache"
	"rblk/fuse"
	"rblk/initiator"
	"rblk/internal/version"
	"rblk/rdma"
	"rblk/volume"
	"rblk/wire"
)

// endTime bounds the end of a mount after a signal; the unit's own time-out and
// people's patience are longer.
const endTime = 4 * time.Second

func newMountCommand() *cobra.Command {
	var opts []string
	var foreground bool
	cmd := &cobra.Command{
		Use:   "rmount SOURCE DIR",
		Short: "Show remote memory and datasets as files",
		Long: `rmount shows the exports of a target (rblkd) as files.

  rmount rblk://HOST[:PORT]/EXPORT DIR    mounts an export: a dataset as its tree,
                                          a memory export as one file
  rmount rblk://HOST/ DIR                 mounts all, each in a directory of its own

It returns when the mount is usable and leaves a daemon behind; -f stays.`,
		Example: "  rmount rblk://storage1/corpus /mnt/corpus\n  rmount rblk://storage1/scratch /mnt/scratch -o cache=1GiB",
		Args: func(_ *cobra.Command, args []string) error {
			switch {
			case len(args) == 2:
				return nil
			case len(args) == 1 && !strings.Contains(args[0], "://"):
				return usageError(fmt.Sprintf("unknown command %q: rmount help lists them", args[0]))
			}
			return usageError("want a SOURCE and a DIR: rmount rblk://HOST/EXPORT DIR")
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return wrap(mount(cmd.Context(), args[0], args[1], opts, foreground))
		},
	}
	// mount(8) calls the helper with options in front of or behind the names.
	cmd.Flags().StringArrayVarP(&opts, "options", "o", nil, "mount options, a list with commas; later ones win")
	cmd.Flags().BoolVarP(&foreground, "foreground", "f", false, "stay in the foreground")
	return cmd
}

// mounter is a mount in the making, and then its daemon.
type mounter struct {
	src       initiator.Source
	dir       string
	opts      mountOptions
	log       *slog.Logger
	providers []rdma.Provider
	metrics   *metricsServer
	started   time.Time

	mu      sync.Mutex
	volumes []*opened // guarded by mu
}

// opened is an export that is open.
type opened struct {
	source *initiator.Volume
	cache  *cache.Volume
}

// mount mounts source on path and, in the foreground or as a daemon, serves it
// until its end.
func mount(ctx context.Context, source, path string, lists []string, foreground bool) error {
	src, opts, err := parseMount(source, lists)
	if err != nil {
		return err
	}
	dir, err := fuse.MountPath(path)
	if err != nil {
		return err
	}
	if !foreground && !inDaemon() {
		return spawnDaemon(ctx)
	}
	log, closer, err := openLog(opts.log, opts.level, foreground && !inDaemon())
	if err != nil {
		return err
	}
	defer closer.Close()
	m := &mounter{src: src, dir: dir, opts: opts, log: log.With("dir", dir), started: time.Now()}
	return m.run(ctx)
}

// parseMount reads a source and mount options; those of the session are the
// source's.
func parseMount(source string, lists []string) (initiator.Source, mountOptions, error) {
	src, err := initiator.ParseSource(source)
	if err != nil {
		return src, mountOptions{}, err
	}
	if src.Path != "" {
		return src, mountOptions{}, usageError(fmt.Sprintf("%s: an export is mounted as a whole: leave /%s out", src, src.Path))
	}
	opts, err := parseMountOptions(lists)
	if err != nil {
		return src, opts, err
	}
	var session []string
	for _, name := range slices.Sorted(maps.Keys(opts.source)) {
		if v := opts.source[name]; v != "" {
			name += "=" + v
		}
		session = append(session, name)
	}
	src, err = src.WithOptions(strings.Join(session, ","))
	opts.fuse.AllowOther = opts.fuse.AllowOther || src.AllowOther
	opts.fuse.AllowRoot = opts.fuse.AllowRoot || src.AllowRoot
	opts.fuse.ReadOnly = src.Access == wire.AccessRead
	opts.nonEmpty = opts.nonEmpty || src.NonEmpty
	opts.fuse.Source = src.String()
	if opts.metrics == "" {
		opts.metrics = src.Metrics
	}
	if src.LogLevel != "" && err == nil {
		err = opts.level.UnmarshalText([]byte(src.LogLevel))
	}
	return src, opts, err
}

func (m *mounter) run(ctx context.Context) error {
	var err error
	if _, err = fuse.PreparePoint(ctx, m.dir, m.opts.nonEmpty); err != nil {
		return err
	}
	if m.providers, err = openProviders(m.src.Transport, m.log); err != nil {
		return err
	}
	defer func() { closeProviders(m.providers, m.log) }()
	if m.opts.metrics != "" {
		if m.metrics, err = serveMetrics(m.opts.metrics, m.log); err != nil {
			return err
		}
		defer m.metrics.close()
	}
	mnt, err := m.mount(ctx)
	if err != nil {
		return err
	}
	return m.serve(ctx, mnt)
}

// mount opens what is to be shown and shows it.
func (m *mounter) mount(ctx context.Context) (*fuse.Mount, error) {
	if m.src.Export == "" {
		d, err := newDirectory(m)
		if err != nil {
			return nil, err
		}
		return fuse.MountDirectory(m.dir, d, m.opts.fuse, m.log)
	}
	e, err := m.open(ctx, m.src)
	if err != nil {
		return nil, err
	}
	mnt, err := fuse.MountExport(m.dir, e, m.opts.fuse, m.log)
	if err != nil {
		e.Volume.Close()
	}
	return mnt, err
}

// serve stays until the mount has ended or ctx ends it.
func (m *mounter) serve(ctx context.Context, mnt *fuse.Mount) error {
	status, err := serveStatus(m.dir, m.status, m.log)
	if err == nil {
		defer status.close()
		err = announceReady()
	}
	if err == nil {
		signal.Ignore(syscall.SIGHUP) // the end of the terminal that it was started from
		select {
		case <-mnt.Done():
			return mnt.Wait()
		case <-ctx.Done():
		}
	}
	end, cancel := context.WithTimeout(context.Background(), endTime)
	defer cancel()
	return errors.Join(err, mnt.Close(end))
}

// open opens an export: session, cache, and the manifest of a dataset.
func (m *mounter) open(ctx context.Context, src initiator.Source) (*fuse.Export, error) {
	v, err := initiator.Dial(ctx, src, initiator.DialOptions{Providers: m.providers, Logger: m.log})
	if err != nil {
		return nil, err
	}
	size := src.Cache
	if size < 0 {
		size = cache.SizeNone
	}
	c, err := cache.New(v, cache.Options{
		Size: size, Readahead: cache.Readahead(src.Readahead), Dir: src.CacheDir, DiskSize: src.CacheDisk, Logger: m.log,
	})
	if err != nil {
		v.Close()
		return nil, err
	}
	e := &fuse.Export{Name: src.Export, Volume: c, Direct: size == cache.SizeNone}
	if c.Geometry().Kind == volume.KindDataset {
		e.Reload = v.Manifest
		if e.Manifest, err = e.Reload(ctx); err != nil {
			c.Close()
			return nil, err
		}
	}
	m.mu.Lock()
	m.volumes = append(m.volumes, &opened{v, c})
	m.mu.Unlock()
	if m.metrics != nil {
		m.metrics.add(src.Export, v, c)
	}
	return e, nil
}

// status is what the daemon says of itself.
func (m *mounter) status() mountStatus {
	st := mountStatus{Source: m.src.String(), Mountpoint: m.dir, PID: pid(), Version: version.Version, Started: m.started, State: volume.StateConnected.String()}
	m.mu.Lock()
	volumes := slices.Clone(m.volumes)
	m.mu.Unlock()
	worst := volume.StateConnected
	for _, o := range volumes {
		g := o.source.Geometry()
		state, err := o.source.State()
		e := exportStatus{
			Export: g.Export, Kind: g.Kind, Size: g.Size, ReadOnly: g.ReadOnly, Instance: g.Instance, Generation: g.Generation,
			State: state.String(), Cache: o.cache.Stats(),
		}
		if err != nil {
			e.Error = err.Error()
		}
		worst = max(worst, state)
		st.Exports = append(st.Exports, e)
	}
	st.State = worst.String()
	return st
}

// directory is a target's exports, for a mount of all of them.
type directory struct {
	m       *mounter
	control *initiator.Control
}

func newDirectory(m *mounter) (*directory, error) {
	control, err := initiator.NewControl(m.src)
	if err != nil {
		return nil, err
	}
	d := &directory{m, control}
	// A target that cannot be reached now is told at once, not at first use.
	ctx, cancel := context.WithTimeout(context.Background(), listTime)
	defer cancel()
	_, err = d.List(ctx)
	return d, err
}

const listTime = 30 * time.Second

func (d *directory) List(ctx context.Context) ([]fuse.Listed, error) {
	list, err := d.control.Exports(ctx)
	var listed []fuse.Listed
	for _, e := range list {
		listed = append(listed, fuse.Listed{Name: e.Name, Dataset: e.Kind == string(volume.KindDataset)})
	}
	return listed, err
}

func (d *directory) Open(ctx context.Context, name string) (*fuse.Export, error) {
	src := d.m.src
	src.Export = name
	return d.m.open(ctx, src)
}
