// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/cespare/xxhash/v2"
	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"rblk/dataset"
	"rblk/initiator"
	"rblk/internal/size"
	"rblk/volume"
	"rblk/wire"
)

func newGetCommand() *cobra.Command {
	var opts []string
	cmd := &cobra.Command{
		Use:   "get SOURCE FILE|DIR",
		Short: "Copy an export to a file, or a dataset (or a path in it) to a directory",
		Args:  cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			src, err := parseSource(args[0], opts)
			if err != nil {
				return err
			}
			return get(cmd.Context(), src, args[1])
		},
	}
	sourceFlags(cmd, &opts)
	return cmd
}

func get(ctx context.Context, src initiator.Source, path string) (err error) {
	c, err := dial(ctx, src, wire.AccessRead)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	g := c.vol.Geometry()
	if g.Kind == volume.KindDataset {
		return getTree(ctx, c.vol, src, path)
	}
	if src.Path != "" {
		return fmt.Errorf("%s: export %s is no dataset, so there is no /%s in it", src, src.Export, src.Path)
	}
	t, err := newTransfer(c.vol, g.Size, "get")
	if err != nil {
		return err
	}
	defer t.close()
	f, commit, abort, err := create(path)
	if err != nil {
		return err
	}
	if err := t.copyTo(ctx, f, 0, g.Size); err != nil {
		abort()
		return err
	}
	return commit()
}

// copyTo reads [off, off+n) into f, leaving holes where there are zeros, and
// checks that the file has what was read.
func (t *transfer) copyTo(ctx context.Context, f *os.File, off, n int64) error {
	h := xxhash.New()
	at := int64(0)
	err := t.read(ctx, off, n, func(p []byte) error {
		h.Write(p)
		defer func() { at += int64(len(p)) }()
		if allZero(p) {
			return nil
		}
		_, err := f.WriteAt(p, at)
		return err
	})
	if err == nil {
		err = f.Truncate(n)
	}
	if err != nil {
		return err
	}
	back := xxhash.New()
	if _, err := io.Copy(back, io.NewSectionReader(f, 0, n)); err != nil {
		return err
	}
	if back.Sum64() != h.Sum64() {
		return fmt.Errorf("%s: what was written is not what is read back", f.Name())
	}
	return nil
}

func allZero(p []byte) bool {
	for len(p) >= 8 {
		if p[0]|p[1]|p[2]|p[3]|p[4]|p[5]|p[6]|p[7] != 0 {
			return false
		}
		p = p[8:]
	}
	for _, b := range p {
		if b != 0 {
			return false
		}
	}
	return true
}

// tree copies a dataset.
type treeCopy struct {
	m     *dataset.Manifest
	t     *transfer
	done  map[dataset.NodeID]string // files with several names that are there already
	chown bool
	dirs  []func() error // what is set last: a directory's mode and times
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
	t, err := newTransfer(v, total, "get")
	if err != nil {
		return err
	}
	defer t.close()
	c := &treeCopy{m: m, t: t, done: map[dataset.NodeID]string{}, chown: os.Geteuid() == 0}
	if err := c.node(ctx, n, path); err != nil {
		return err
	}
	for i := len(c.dirs) - 1; i >= 0; i-- {
		if err := c.dirs[i](); err != nil {
			return err
		}
	}
	return nil
}

// node copies one node, and what is below it.
func (c *treeCopy) node(ctx context.Context, n dataset.NodeID, path string) error {
	a, _ := c.m.Attr(n)
	switch a.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		if err := os.Mkdir(path, 0o700); err != nil {
			return err
		}
		c.dirs = append(c.dirs, func() error { return c.dress(n, a, path) })
		for i := range c.m.NumEntries(n) {
			name, child := c.m.Entry(n, i)
			if err := c.node(ctx, child, filepath.Join(path, name)); err != nil {
				return err
			}
		}
		return nil
	case unix.S_IFLNK:
		target, _ := c.m.Readlink(n)
		if err := os.Symlink(target, path); err != nil {
			return err
		}
		return c.dress(n, a, path)
	}
	if first := c.done[n]; first != "" {
		return os.Link(first, path)
	}
	if a.Nlink > 1 {
		c.done[n] = path
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = errors.Join(c.t.copyTo(ctx, f, int64(a.Offset), int64(a.Size)), f.Close())
	if err != nil {
		os.Remove(path)
		return fmt.Errorf("%s: %w", path, err)
	}
	return c.dress(n, a, path)
}

// dress gives a copy its attributes, owner, mode and time, in that order: each
// may undo an earlier one's effect on the next.
func (c *treeCopy) dress(n dataset.NodeID, a dataset.Attr, path string) error {
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

func newPutCommand() *cobra.Command {
	var opts []string
	var verify bool
	cmd := &cobra.Command{
		Use:   "put FILE SOURCE",
		Short: "Copy a file to the beginning of an export, and verify it",
		Args:  cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			src, err := parseSource(args[1], opts)
			if err != nil {
				return err
			}
			return put(cmd.Context(), args[0], src, verify)
		},
	}
	sourceFlags(cmd, &opts)
	cmd.Flags().BoolVar(&verify, "verify", true, "read back what was written and compare")
	return cmd
}

func put(ctx context.Context, path string, src initiator.Source, verify bool) (err error) {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() {
		return fmt.Errorf("%s: not a regular file", path)
	}
	c, err := dial(ctx, src, wire.AccessWrite)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	g := c.vol.Geometry()
	if st.Size() > g.Size {
		return fmt.Errorf("%s has %s, export %s only %s", path, size.Format(st.Size()), g.Export, size.Format(g.Size))
	}
	total := st.Size()
	if verify {
		total *= 2
	}
	t, err := newTransfer(c.vol, total, "put")
	if err != nil {
		return err
	}
	defer t.close()
	h := xxhash.New()
	if err := t.write(ctx, 0, st.Size(), io.TeeReader(f, h)); err != nil || !verify {
		return err
	}
	return t.verify(ctx, st.Size(), h.Sum64())
}
