// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"rblk/dataset"
	"rblk/initiator"
)

// treeWorkers copy files at the same time, so that a tree of small ones does
// not wait a round trip for each.
const treeWorkers = 8

// treeCopy copies a dataset: directories and symlinks on the way down, files by
// the workers, then further names of files, and last what a directory's own
// mode and time are, for making an entry changes both.
type treeCopy struct {
	m     *dataset.Manifest
	files chan entry
	first map[dataset.NodeID]string // the name that a file with several has got
	links [][2]string               // its other names
	dirs  []entry
	chown bool
}

// entry is a node and where it goes.
type entry struct {
	node dataset.NodeID
	attr dataset.Attr
	path string
}

// getTree copies the node that src.Path names to path, which must not exist.
func getTree(ctx context.Context, v *initiator.Volume, src initiator.Source, path string) error {
	m, err := v.Manifest(ctx)
	if err != nil {
		return err
	}
	n, ok := m.Resolve(src.Path)
	if !ok {
		return fmt.Errorf("%s: there is no such path in the dataset", src)
	}
	if _, err := os.Lstat(path); err == nil {
		return fmt.Errorf("%s exists: choose another name", path)
	}
	a, _ := m.Attr(n)
	total := m.VolumeSize()
	if a.Mode&unix.S_IFMT == unix.S_IFREG {
		total = int64(a.Size)
	}
	bar := progress(total, "get")
	defer bar.Close()
	c := &treeCopy{m: m, files: make(chan entry, treeWorkers), first: map[dataset.NodeID]string{}, chown: os.Geteuid() == 0}
	if err := c.copy(ctx, v, bar, n, path); err != nil {
		return err
	}
	return c.finish()
}

// copy makes everything below n, less the links and what directories get last.
func (c *treeCopy) copy(ctx context.Context, v *initiator.Volume, bar *progressbar.ProgressBar, n dataset.NodeID, path string) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		defer close(c.files)
		return c.walk(ctx, n, path)
	})
	for range treeWorkers {
		g.Go(func() error { return c.work(ctx, v, bar) })
	}
	return g.Wait()
}

// walk makes directories and symlinks, and hands files to the workers.
func (c *treeCopy) walk(ctx context.Context, n dataset.NodeID, path string) error {
	a, _ := c.m.Attr(n)
	e := entry{n, a, path}
	switch a.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		if err := os.Mkdir(path, 0o700); err != nil {
			return err
		}
		c.dirs = append(c.dirs, e)
		for i := range c.m.NumEntries(n) {
			name, child := c.m.Entry(n, i)
			if err := c.walk(ctx, child, filepath.Join(path, name)); err != nil {
				return err
			}
		}
		return nil
	case unix.S_IFLNK:
		target, _ := c.m.Readlink(n)
		if err := os.Symlink(target, path); err != nil {
			return err
		}
		return c.dress(e)
	}
	if first := c.first[n]; first != "" {
		c.links = append(c.links, [2]string{first, path})
		return nil
	}
	if a.Nlink > 1 {
		c.first[n] = path
	}
	select {
	case c.files <- e:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// work copies files until there are no more.
func (c *treeCopy) work(ctx context.Context, v *initiator.Volume, bar *progressbar.ProgressBar) error {
	t, err := newTransfer(v, bar)
	if err != nil {
		return err
	}
	defer t.close()
	for e := range c.files {
		if err := c.file(ctx, t, e); err != nil {
			return err
		}
	}
	return nil
}

// file copies one file. A half one is not left behind.
func (c *treeCopy) file(ctx context.Context, t *transfer, e entry) error {
	f, err := os.OpenFile(e.path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = errors.Join(t.copyTo(ctx, f, int64(e.attr.Offset), int64(e.attr.Size)), f.Close())
	if err != nil {
		os.Remove(e.path)
		return fmt.Errorf("%s: %w", e.path, err)
	}
	return c.dress(e)
}

// finish makes links, then dresses directories, the deepest first: one that is
// not writable does not hinder what is below it.
func (c *treeCopy) finish() error {
	for _, l := range c.links {
		if err := os.Link(l[0], l[1]); err != nil {
			return err
		}
	}
	for i := len(c.dirs) - 1; i >= 0; i-- {
		if err := c.dress(c.dirs[i]); err != nil {
			return err
		}
	}
	return nil
}

// dress gives a copy its attributes, owner, mode and time, in that order: each
// may undo an earlier one's effect on the next.
func (c *treeCopy) dress(e entry) error {
	n, a, path := e.node, e.attr, e.path
	for _, name := range c.m.ListXattr(n) {
		v, _ := c.m.Xattr(n, name)
		if err := unix.Lsetxattr(path, name, v, 0); err != nil && !errors.Is(err, unix.ENOTSUP) {
			return &os.PathError{Op: "setxattr", Path: path, Err: err}
		}
	}
	if c.chown {
		if err := os.Lchown(path, int(a.UID), int(a.GID)); err != nil {
			return err
		}
	}
	if a.Mode&unix.S_IFMT != unix.S_IFLNK {
		if err := unix.Chmod(path, a.Mode&0o7777); err != nil {
			return &os.PathError{Op: "chmod", Path: path, Err: err}
		}
	}
	ts := []unix.Timespec{{Nsec: unix.UTIME_NOW}, {Sec: a.MtimeSec, Nsec: int64(a.MtimeNsec)}}
	if err := unix.UtimesNanoAt(unix.AT_FDCWD, path, ts, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return &os.PathError{Op: "utimes", Path: path, Err: err}
	}
	return nil
}
