// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/cespare/xxhash/v2"
	"github.com/spf13/cobra"

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
	bar := progress(g.Size, "get")
	defer bar.Close()
	t, err := newTransfer(c.vol, bar)
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
	bar := progress(total, "put")
	defer bar.Close()
	t, err := newTransfer(c.vol, bar)
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
