// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"rblk/fuse"
	"rblk/initiator"
	"rblk/internal/size"
	"rblk/rdma"
	"rblk/wire"
)

// sourceFlags are -o of commands that take a SOURCE.
func sourceFlags(cmd *cobra.Command, opts *[]string) {
	cmd.Flags().StringArrayVarP(opts, "options", "o", nil, "options of the source, a list with commas; later ones win")
}

func parseSource(text string, lists []string) (initiator.Source, error) {
	src, err := initiator.ParseSource(text)
	for _, l := range lists {
		if err == nil {
			src, err = src.WithOptions(l)
		}
	}
	return src, err
}

// client is an opened export of a command that is no mount.
type client struct {
	vol       *initiator.Volume
	providers []rdma.Provider
	log       *slog.Logger
	stop      func() bool // ends the watch over ctx
}

// quiet logs warnings to stderr.
func quiet() *slog.Logger {
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))
}

// dial opens src with that access, unless the source says one.
func dial(ctx context.Context, src initiator.Source, access string) (*client, error) {
	if src.Export == "" {
		return nil, usageError(fmt.Sprintf("%s names no export: rmount ls %s lists them", src, src))
	}
	if src.Access == "" {
		src.Access = access
	}
	c := &client{log: quiet()}
	var err error
	if c.providers, err = openProviders(src.Transport, c.log); err != nil {
		return nil, err
	}
	if c.vol, err = initiator.Dial(ctx, src, initiator.DialOptions{Providers: c.providers, Logger: c.log}); err != nil {
		closeProviders(c.providers, c.log)
		return nil, err
	}
	// Memory of operations under way is the network's until they end; with a
	// target that is away that may be never. A signal does not wait for it.
	c.stop = context.AfterFunc(ctx, func() {
		time.AfterFunc(endTime, func() {
			fmt.Fprintln(os.Stderr, "rmount: interrupted; the target does not answer")
			os.Exit(exitFailed)
		})
	})
	return c, nil
}

func (c *client) close() error {
	c.stop()
	err := c.vol.Close()
	closeProviders(c.providers, c.log)
	return err
}

func newLsCommand() *cobra.Command {
	var opts []string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "ls URI",
		Short: "List the exports of a target",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			src, err := parseSource(args[0], opts)
			if err != nil {
				return err
			}
			list, err := exports(cmd.Context(), src)
			if err != nil {
				return err
			}
			if asJSON {
				return printJSON(cmd.OutOrStdout(), list)
			}
			return printExports(cmd.OutOrStdout(), list)
		},
	}
	sourceFlags(cmd, &opts)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// exports asks the target; a source that names one export wants just that.
func exports(ctx context.Context, src initiator.Source) ([]wire.ExportInfo, error) {
	control, err := initiator.NewControl(src)
	if err != nil {
		return nil, err
	}
	defer control.Close()
	list, err := control.Exports(ctx)
	if err != nil || src.Export == "" {
		return list, err
	}
	for _, e := range list {
		if e.Name == src.Export {
			return []wire.ExportInfo{e}, nil
		}
	}
	target := src
	target.Export = ""
	return nil, fmt.Errorf("no export %q there: rmount ls %s lists them", src.Export, target)
}

func printExports(w io.Writer, list []wire.ExportInfo) error {
	tw := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(tw, "NAME\tKIND\tSIZE\tACCESS\tFILES\tWRITER")
	for _, e := range list {
		access, files, writer := "rw", "", ""
		if e.ReadOnly {
			access = "ro"
		}
		if e.Kind == "dataset" {
			files = fmt.Sprint(e.Files)
		}
		if e.Writer != nil {
			writer = fmt.Sprintf("%s (%s)", e.Writer.Client.Host, e.Writer.Address)
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\n", e.Name, e.Kind, size.Format(e.Size), access, files, writer)
	}
	return tw.Flush()
}

func printJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

func newStatCommand() *cobra.Command {
	var opts []string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "stat SOURCE|DIR",
		Short: "Show an export of a target, or the state of a mount",
		Long:  "With a SOURCE it asks the target; with a mount point it asks the mount's own daemon, which answers also when the target is dead.",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if !isSource(args[0]) {
				return statMount(cmd.OutOrStdout(), args[0], asJSON)
			}
			src, err := parseSource(args[0], opts)
			if err != nil {
				return err
			}
			list, err := exports(cmd.Context(), src)
			if err != nil {
				return err
			}
			switch {
			case !asJSON:
				return printExports(cmd.OutOrStdout(), list)
			case src.Export == "":
				return printJSON(cmd.OutOrStdout(), list)
			}
			return printJSON(cmd.OutOrStdout(), list[0])
		},
	}
	sourceFlags(cmd, &opts)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func isSource(s string) bool {
	_, err := initiator.ParseSource(s)
	return err == nil || len(s) > 5 && (s[:5] == "rblk:" || s[:5] == "rblk+")
}

func statMount(w io.Writer, path string, asJSON bool) error {
	dir, err := fuse.MountPath(path)
	if err != nil {
		return err
	}
	st, err := readStatus(dir)
	if err != nil {
		return err
	}
	if asJSON {
		return printJSON(w, st)
	}
	fmt.Fprintf(w, "%s on %s: %s, pid %d, version %s\n", st.Source, st.Mountpoint, st.State, st.PID, st.Version)
	for _, e := range st.Exports {
		fmt.Fprintf(w, "  %s (%s, %s): %s", e.Export, e.Kind, size.Format(e.Size), e.State)
		if e.Error != "" {
			fmt.Fprintf(w, ": %s", e.Error)
		}
		c := &e.Cache
		fmt.Fprintf(w, "\n    cache: %s of %s; %d hits, %d misses; fetched %s, served %s\n",
			size.Format(c.FramesUsed*c.Size/max(1, c.Frames)), size.Format(c.Size), c.Hits, c.Misses, size.Format(int64(c.FetchedBytes)), size.Format(int64(c.ServedBytes)))
	}
	return nil
}

// terminal tells whether progress may be drawn on stderr.
func terminal() bool { return term.IsTerminal(int(os.Stderr.Fd())) }

// errShort: fewer bytes than there should be.
var errShort = errors.New("short transfer")
