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

	"github.com/spf13/cobra"

	"rblk/rdma"
	"rblk/target"
)

func newCheck() *cobra.Command {
	var s settings
	asJSON := false
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Look for what would keep serve, with the same settings, from working",
		Long: `Looks at everything that "rblkd serve" with these settings needs: limits, memory,
huge pages, directories, certificates, ports, devices. It changes nothing. Exit
status 1 when something would fail.`,
		Args: cobra.NoArgs,
	}
	cmd.RunE = run(func(ctx context.Context, cmd *cobra.Command, _ []string) error {
		if err := s.load(os.Getenv); err != nil {
			return err
		}
		findings, err := check(ctx, &s)
		if err != nil {
			return err
		}
		return report(cmd.OutOrStdout(), findings, asJSON)
	})
	s.register(cmd.Flags())
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// check asks the target what it makes of the settings, and the transports what
// devices there are.
func check(ctx context.Context, s *settings) (findings []target.Finding, err error) {
	listens, err := openData(s, slog.New(slog.DiscardHandler))
	defer func() { err = errors.Join(err, closeData(listens)) }()
	if err != nil {
		return nil, err
	}
	opts := s.options()
	opts.Providers = listens
	findings = target.Check(ctx, opts, s.memories, s.datasets)
	return append(findings, checkDevices(listens)...), nil
}

// checkDevices describes what each transport sees.
func checkDevices(listens []target.DataListen) []target.Finding {
	var fs []target.Finding
	seen := map[rdma.Provider]bool{}
	for _, l := range listens {
		if seen[l.Provider] {
			continue
		}
		seen[l.Provider] = true
		name := "transport " + l.Provider.Name()
		devs, err := l.Provider.Devices()
		switch {
		case err != nil:
			fs = append(fs, target.Finding{Level: target.Bad, Name: name, Detail: oneLine(err.Error())})
		case len(devs) == 0:
			fs = append(fs, target.Finding{Level: target.Bad, Name: name, Detail: "no device: load its driver (rdma link shows them), or leave the transport out"})
		}
		for _, d := range devs {
			fs = append(fs, describe(name, d.Info())...)
		}
	}
	return fs
}

func describe(name string, d rdma.DeviceInfo) []target.Finding {
	unlimited := func(n int) string {
		if n == 0 {
			return "unlimited"
		}
		return fmt.Sprint(n)
	}
	numa := ""
	if d.NUMANode >= 0 {
		numa = fmt.Sprintf(", NUMA node %d", d.NUMANode)
	}
	fs := []target.Finding{{Level: target.Good, Name: name,
		Detail: fmt.Sprintf("%s (%s): send queue %s, READs in flight %s%s", d.Name, d.Transport, unlimited(d.MaxSendQueue), unlimited(d.MaxReadDepth), numa)}}
	for _, p := range d.Ports {
		f := target.Finding{Level: target.Good, Name: fmt.Sprintf("%s port %d", d.Name, p.Number),
			Detail: fmt.Sprintf("%s, %s, MTU %d, %s %s", p.State, p.LinkLayer, p.MTU, p.Rate, p.NetDev)}
		if p.State != "ACTIVE" {
			f.Level, f.Detail = target.Doubtful, f.Detail+": bring the link up"
		}
		for _, g := range p.GIDs {
			f.Detail += fmt.Sprintf("; GID %d %s %s", g.Index, g.Addr, g.Type)
		}
		fs = append(fs, f)
	}
	return fs
}

// report prints findings; its error says how many are bad.
func report(w io.Writer, findings []target.Finding, asJSON bool) error {
	bad := 0
	for _, f := range findings {
		if f.Level == target.Bad {
			bad++
		}
	}
	if asJSON {
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		if err := enc.Encode(findings); err != nil {
			return err
		}
	} else {
		tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		for _, f := range findings {
			fmt.Fprintf(tw, "%s\t%s\t%s\n", f.Level, f.Name, f.Detail)
		}
		if err := tw.Flush(); err != nil {
			return err
		}
	}
	if bad > 0 {
		return fmt.Errorf("%d of %d checks failed", bad, len(findings))
	}
	return nil
}
