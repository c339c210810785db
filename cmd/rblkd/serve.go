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
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"

	"rblk/target"
	"rblk/wire"
)

func newServe(args []string) *cobra.Command {
	s := settings{args: args}
	asJSON := false
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Serve exports until SIGTERM or `rblkd drain`",
		Long: `Serves exports until SIGTERM, SIGINT or "rblkd drain"; then initiators are told,
what is under way finishes, and it exits 0. The bytes of memory exports stay, and
the next rblkd serves them on. SIGHUP rescans datasets and reads the configuration
again: log level, certificate, token and added exports take effect.

When it is ready it prints one line on stdout with the addresses that it got.

Every setting can also come from the variable RBLK_NAME and from the key NAME of
the file that --config names.`,
		Example: "  rblkd serve --memory scratch=1GiB --dataset corpus=/usr/share/doc",
		Args:    cobra.NoArgs,
	}
	cmd.RunE = run(func(ctx context.Context, cmd *cobra.Command, _ []string) error {
		if err := s.load(os.Getenv); err != nil {
			return err
		}
		d := &daemonRun{settings: &s, level: new(slog.LevelVar), out: cmd.OutOrStdout(), json: asJSON}
		return d.serve(ctx)
	})
	s.register(cmd.Flags())
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the ready line as JSON")
	return cmd
}

// daemonRun is one run of serve.
type daemonRun struct {
	settings *settings
	level    *slog.LevelVar
	out      io.Writer
	json     bool
	log      *slog.Logger
	srv      *target.Server
}

func (d *daemonRun) serve(ctx context.Context) (err error) {
	s := d.settings
	d.level.Set(slog.Level(s.logLevel))
	d.log = s.logger(os.Stderr, d.level)
	opts := s.options()
	opts.Logger = d.log
	listens, err := openData(s, d.log)
	defer func() { err = errors.Join(err, closeData(listens)) }()
	if err != nil {
		return err
	}
	opts.Providers = listens
	bar := newScanBar(os.Stderr)
	opts.Scan.Progress = bar.show
	d.srv, err = target.New(ctx, opts)
	if err != nil {
		return err
	}
	if err := d.addExports(ctx); err != nil {
		d.srv.Close()
		return err
	}
	bar.done()
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	ctx, cancel := context.WithCancel(ctx)
	reloads := make(chan struct{})
	go func() {
		defer close(reloads)
		d.reloads(ctx, hup)
	}()
	defer func() { cancel(); <-reloads }()
	d.ready()
	return d.srv.Serve(ctx)
}

func (d *daemonRun) addExports(ctx context.Context) error {
	for _, m := range d.settings.memories {
		if err := d.srv.AddMemory(ctx, m); err != nil {
			return err
		}
	}
	for _, c := range d.settings.datasets {
		if err := d.srv.AddDataset(ctx, c); err != nil {
			return err
		}
	}
	return nil
}

// readyLine is what serve prints when it is ready, with --json.
type readyLine struct {
	Event   string             `json:"event"` // "ready"
	Control []string           `json:"control"`
	Data    []wire.DataAddress `json:"data"`
	Exports []string           `json:"exports"`
}

// ready tells whoever started us.
func (d *daemonRun) ready() {
	r := readyLine{"ready", d.srv.ControlAddrs(), d.srv.DataAddrs(), d.srv.Exports()}
	if d.json {
		json.NewEncoder(d.out).Encode(r)
	} else {
		line := "ready"
		for _, a := range r.Control {
			line += " control=" + a
		}
		for _, a := range r.Data {
			line += " " + a.Provider + "=" + a.Addr
		}
		fmt.Fprintf(d.out, "%s exports=%s\n", line, strings.Join(r.Exports, ","))
	}
	if len(r.Exports) == 0 {
		d.log.Warn("nothing is exported: give --memory or --dataset, or use `rblkd export add`")
	}
	notify(d.log, daemon.SdNotifyReady)
}

// notify tells systemd, when it started us.
func notify(log *slog.Logger, state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		log.Warn("systemd does not take the notification", "err", err)
	}
}

// reloads serves SIGHUP until ctx ends.
func (d *daemonRun) reloads(ctx context.Context, hup <-chan os.Signal) {
	for {
		select {
		case <-ctx.Done():
			notify(d.log, daemon.SdNotifyStopping)
			return
		case <-hup:
		}
		d.log.Info("reloading")
		if err := d.reload(ctx); err != nil {
			d.log.Error("reload is incomplete", "err", oneLine(err.Error()))
		} else {
			d.log.Info("reloaded")
		}
	}
}

// reload reads the settings again and takes over what may change at run time.
func (d *daemonRun) reload(ctx context.Context) error {
	next, err := d.settings.reread()
	if err != nil {
		return err // nothing is taken from a file with a mistake
	}
	d.level.Set(slog.Level(next.logLevel))
	errs := []error{d.srv.Reload()}
	have := d.srv.Exports()
	for _, m := range next.memories {
		if !slices.Contains(have, m.Name) {
			errs = append(errs, d.srv.AddMemory(ctx, m))
		}
	}
	for _, c := range next.datasets {
		if !slices.Contains(have, c.Name) {
			errs = append(errs, d.srv.AddDataset(ctx, c))
		}
	}
	errs = append(errs, d.srv.RescanAll(ctx))
	return errors.Join(errs...)
}
