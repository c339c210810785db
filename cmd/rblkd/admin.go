// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"rblk/internal/size"
	"rblk/target"
	"rblk/wire"
)

func newStatus() *cobra.Command {
	var control controlFlags
	asJSON := false
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show what a running rblkd exports, and who uses it",
		Args:  cobra.NoArgs,
	}
	cmd.RunE = run(func(ctx context.Context, cmd *cobra.Command, _ []string) error {
		c, err := newClient(cmd, &control)
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(ctx, answerTime)
		defer cancel()
		var st wire.TargetStatus
		if err := c.do(ctx, http.MethodGet, "/v1/status", nil, &st); err != nil {
			return err
		}
		if asJSON {
			enc := json.NewEncoder(cmd.OutOrStdout())
			enc.SetIndent("", "  ")
			return enc.Encode(st)
		}
		return printStatus(cmd, &st)
	})
	control.register(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func printStatus(cmd *cobra.Command, st *wire.TargetStatus) error {
	w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
	state := "serving"
	if st.Draining {
		state = "draining"
	}
	fmt.Fprintf(w, "rblkd %s, %s, up %s\n", st.Version, state, time.Duration(st.UptimeS)*time.Second)
	for _, d := range st.Data {
		fmt.Fprintf(w, "data %s %s\n", d.Provider, d.Addr)
	}
	f := st.Frames
	fmt.Fprintf(w, "frames %s: %d free, %d filling, %d resident, %d granted, %d being revoked\n\n",
		size.Format(f.Size), f.Free, f.Filling, f.Resident, f.Granted, f.Revoking)
	fmt.Fprintln(w, "EXPORT\tKIND\tSIZE\tFILES\tWRITER")
	for _, e := range st.Exports {
		files, writer := "-", "-"
		if e.Kind == "dataset" {
			files = fmt.Sprint(e.Files)
		}
		if e.Writer != nil {
			writer = fmt.Sprintf("%s pid %d (%s) for %s", e.Writer.Client.Host, e.Writer.Client.PID, e.Writer.Address, age(e.Writer.AgeSecond))
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", e.Name, e.Kind, size.Format(e.Size), files, writer)
	}
	if len(st.Sessions) > 0 {
		fmt.Fprintln(w, "\nSESSION\tEXPORT\tACCESS\tCLIENT\tADDRESS\tAGE\tCONNECTIONS\tGRANTS")
	}
	for _, s := range st.Sessions {
		fmt.Fprintf(w, "%.8s\t%s\t%s\t%s pid %d\t%s\t%s\t%d\t%d\n",
			s.Session, s.Export, s.Access, s.Client.Host, s.Client.PID, s.Address, age(s.AgeSecond), s.Connections, s.Grants)
	}
	return w.Flush()
}

func age(seconds int64) string { return (time.Duration(seconds) * time.Second).String() }

func newDrain() *cobra.Command {
	var control controlFlags
	cmd := &cobra.Command{
		Use:   "drain",
		Short: "Ask a running rblkd to finish and exit; memory exports keep their bytes",
		Args:  cobra.NoArgs,
	}
	cmd.RunE = adminRun(&control, func(ctx context.Context, c *client, _ *cobra.Command, _ []string) error {
		return c.do(ctx, http.MethodPost, "/v1/admin/drain", nil, nil)
	})
	control.register(cmd)
	return cmd
}

// adminRun makes a command's function of one that sends a request.
func adminRun(control *controlFlags, f func(context.Context, *client, *cobra.Command, []string) error) func(*cobra.Command, []string) error {
	return run(func(ctx context.Context, cmd *cobra.Command, args []string) error {
		c, err := newClient(cmd, control)
		if err != nil {
			return err
		}
		return f(ctx, c, cmd, args)
	})
}

func newExport() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "export",
		Short: "Add, remove, resize and rescan exports of a running rblkd",
		Long: "Changes the exports of a running rblkd. They last until it ends: put into its\n" +
			"configuration what should be there after a restart.",
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return fmt.Errorf("export what? add, remove, resize or rescan")
		},
	}
	cmd.AddCommand(newExportAdd(), newExportRemove(), newExportResize(), newExportRescan())
	return cmd
}

func newExportAdd() *cobra.Command {
	var control controlFlags
	var memories memoryList
	var datasets datasetList
	cmd := &cobra.Command{
		Use:     "add (--memory NAME=SIZE | --dataset NAME=DIR)...",
		Short:   "Add exports",
		Example: "  rblkd export add --memory scratch=8GiB\n  rblkd export add --dataset corpus=/srv/corpus",
		Args:    cobra.NoArgs,
	}
	cmd.RunE = adminRun(&control, func(ctx context.Context, c *client, _ *cobra.Command, _ []string) error {
		if len(memories)+len(datasets) == 0 {
			return &usage{fmt.Errorf("add what? --memory NAME=SIZE or --dataset NAME=DIR")}
		}
		var reqs []target.AdminExport
		for _, m := range memories {
			if m.Dir != "" {
				return &usage{fmt.Errorf("memory export %s: dir is for the configuration of rblkd", m.Name)}
			}
			reqs = append(reqs, target.AdminExport{Name: m.Name, Memory: &target.AdminMemory{Size: m.Size, HugePages: m.HugePages}})
		}
		for _, d := range datasets {
			path, err := filepath.Abs(d.Path) // ours, not the daemon's, working directory
			if err != nil {
				return err
			}
			reqs = append(reqs, target.AdminExport{Name: d.Name, Dataset: &target.AdminDataset{Path: path}})
		}
		for _, r := range reqs {
			if err := c.do(ctx, http.MethodPost, "/v1/admin/exports", r, nil); err != nil {
				return err
			}
		}
		return nil
	})
	cmd.Flags().Var(&memories, "memory", "`NAME=SIZE[,hugepages=2MiB|1GiB]`; repeatable")
	cmd.Flags().Var(&datasets, "dataset", "`NAME=DIR`; repeatable")
	control.register(cmd)
	return cmd
}

func exportPath(name, verb string) string {
	return strings.TrimSuffix("/v1/admin/exports/"+url.PathEscape(name)+"/"+verb, "/")
}

func newExportRemove() *cobra.Command {
	var control controlFlags
	cmd := &cobra.Command{
		Use:   "remove NAME...",
		Short: "End exports and the sessions that use them; memory keeps its bytes",
		Args:  cobra.MinimumNArgs(1),
	}
	cmd.RunE = adminRun(&control, func(ctx context.Context, c *client, _ *cobra.Command, args []string) error {
		for _, name := range args {
			if err := c.do(ctx, http.MethodDelete, exportPath(name, ""), nil, nil); err != nil {
				return err
			}
		}
		return nil
	})
	control.register(cmd)
	return cmd
}

func newExportResize() *cobra.Command {
	var control controlFlags
	cmd := &cobra.Command{
		Use:   "resize NAME SIZE",
		Short: "Grow a memory export; initiators see it at once",
		Args:  cobra.ExactArgs(2),
	}
	cmd.RunE = adminRun(&control, func(ctx context.Context, c *client, _ *cobra.Command, args []string) error {
		n, err := size.Parse(args[1])
		if err != nil {
			return &usage{err}
		}
		return c.do(ctx, http.MethodPost, exportPath(args[0], "resize"), target.AdminResize{Size: n}, nil)
	})
	control.register(cmd)
	return cmd
}

func newExportRescan() *cobra.Command {
	var control controlFlags
	cmd := &cobra.Command{
		Use:   "rescan NAME...",
		Short: "Look at the trees of datasets again",
		Args:  cobra.MinimumNArgs(1),
	}
	cmd.RunE = adminRun(&control, func(ctx context.Context, c *client, cmd *cobra.Command, args []string) error {
		for _, name := range args {
			var r target.AdminRescan
			if err := c.do(ctx, http.MethodPost, exportPath(name, "rescan"), nil, &r); err != nil {
				return err
			}
			what := "unchanged"
			if r.Changed {
				what = "new generation"
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s: %s\n", name, what)
		}
		return nil
	})
	control.register(cmd)
	return cmd
}
