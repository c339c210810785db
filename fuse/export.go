// SPDX-License-Identifier: Apache-2.0

package fuse

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	gofuse "github.com/hanwen/go-fuse/v2/fuse"

	"rblk/cache"
	"rblk/dataset"
	"rblk/volume"
)

// flushTime bounds the last flush of a volume before it is closed.
const flushTime = 2 * time.Second

// Export is an opened export. The mount that shows it owns the volume and
// closes it at its end.
type Export struct {
	// Name is the name of a volume's file, and of the export's directory in a
	// mount of all exports.
	Name   string
	Volume *cache.Volume
	// Manifest is the tree of a dataset; nil shows the volume itself as a file.
	Manifest *dataset.Manifest
	// Reload fetches the newest manifest of a dataset. It is called when the
	// volume announces another generation; nil ignores that.
	Reload func(ctx context.Context) (*dataset.Manifest, error)
	// Direct makes the kernel keep no pages of a volume's file, for cache=none.
	Direct bool
	// OnEvent, if set, sees every event of the volume after the mount has acted
	// on it. It must not block.
	OnEvent func(volume.Event)
}

// tree is the export as the tree that p will be.
func (e *Export) tree(m *dataset.Manifest, p *planted) tree {
	if m != nil {
		return &datasetTree{manifest: m, volume: e.Volume, self: p}
	}
	return newVolumeTree(e.Name, e.Volume, e.Direct, p)
}

// live is an export that is being shown, and the goroutine that follows its
// events.
type live struct {
	*Export
	fs    *fileSystem
	notes *notifier
	log   *slog.Logger
	// place is where the export's current tree is shown: the mount's top
	// directory, or a name in it.
	place *atomic.Pointer[planted]
	top   bool

	cancel context.CancelFunc
	done   sync.WaitGroup
}

// follow begins to follow the events of the export.
func (l *live) follow() {
	ctx, cancel := context.WithCancel(context.Background())
	l.cancel = cancel
	l.done.Go(func() {
		for ev := range l.Volume.Events() {
			l.handle(ctx, ev)
		}
	})
}

// close flushes and ends the volume, and with it the goroutine.
func (l *live) close() error {
	l.cancel()
	if g := l.Volume.Geometry(); g.CanFlush && !g.ReadOnly {
		ctx, cancel := context.WithTimeout(context.Background(), flushTime)
		if err := l.Volume.Flush(ctx); err != nil {
			l.log.Error("the last flush failed; writes since the one before may be lost with the target", "export", l.Name, "err", err)
		}
		cancel()
	}
	err := l.Volume.Close()
	l.done.Wait()
	if err != nil {
		return fmt.Errorf("closing %s: %w", l.Name, err)
	}
	return nil
}

func (l *live) handle(ctx context.Context, ev volume.Event) {
	switch ev.Kind {
	case volume.EventResized:
		l.invalidate()
		l.log.Info("volume resized", "export", l.Name, "size", ev.Geometry.Size)
	case volume.EventInstance:
		l.invalidate()
		l.log.Error("the content of the export was lost or replaced; unmount it and mount it anew", "export", l.Name)
	case volume.EventGeneration:
		l.renew(ctx)
	}
	if l.OnEvent != nil {
		l.OnEvent(ev)
	}
}

// invalidate drops what the kernel keeps of a volume's file.
func (l *live) invalidate() {
	if l.Manifest == nil {
		l.notes.inode(ref{l.place.Load(), fileIndex}.node())
	}
}

// renew shows the newest generation of a dataset. Files that are open keep the
// tree they were opened in.
func (l *live) renew(ctx context.Context) {
	if l.Manifest == nil || l.Reload == nil {
		return
	}
	m, err := l.Reload(ctx)
	switch {
	case ctx.Err() != nil:
	case err != nil:
		l.log.Error("loading the new generation failed; the old one stays", "export", l.Name, "err", err)
	case m.Digest() != l.Manifest.Digest():
		l.swap(m)
		l.log.Info("generation changed", "export", l.Name, "generation", m.Generation(), "files", m.NumFiles())
	}
}

// swap plants the tree of m in place of the current one and tells the kernel to
// forget the names that led to that.
func (l *live) swap(m *dataset.Manifest) {
	l.Manifest = m
	fresh := l.fs.plant(func(p *planted) tree { return l.tree(m, p) })
	old := l.place.Swap(fresh)
	names := []string{l.Name}
	if l.top {
		// Names of the new tree may be remembered as absent.
		names = append(topNames(old), topNames(fresh)...)
	}
	l.notes.entries(gofuse.FUSE_ROOT_ID, names...)
	l.fs.retire(old)
}

// topNames are the names in the top directory of a tree.
func topNames(t tree) []string {
	var names []string
	for i := 0; ; i++ {
		name, _, ok := t.entry(rootIndex, i)
		if !ok {
			return names
		}
		names = append(names, name)
	}
}
