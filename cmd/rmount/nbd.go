// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"

	"rblk/cache"
	"rblk/initiator"
	"rblk/nbd"
	"rblk/rdma"
)

func newNBDCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "nbd", Short: "Show exports as NBD block devices"}
	serve := newNBDServeCommand()
	run := serve.RunE
	serve.RunE = func(cmd *cobra.Command, args []string) error { return wrap(run(cmd, args)) }
	cmd.AddCommand(serve)
	cmd.RunE = func(*cobra.Command, []string) error {
		return usageError("which command? rmount nbd serve SOURCE --listen unix:PATH")
	}
	return cmd
}

// nbdServe is `rmount nbd serve`.
type nbdServe struct {
	opts        []string
	listen      []string
	readOnly    bool
	tlsCert     string
	tlsKey      string
	connections int
	logLevel    string
}

func newNBDServeCommand() *cobra.Command {
	var s nbdServe
	cmd := &cobra.Command{
		Use:   "serve SOURCE…",
		Short: "Serve exports to NBD clients (libnbd, qemu, nbd-client) until SIGTERM",
		Long: `Each SOURCE is served under its export's name; the first one also under the empty
name. It prints one line with its addresses when clients may connect, and ends on
SIGTERM or SIGINT.`,
		Example: "  rmount nbd serve rblk://storage1/scratch --listen unix:/run/scratch.sock\n  nbdinfo nbd+unix:///scratch?socket=/run/scratch.sock",
		Args:    cobra.MinimumNArgs(1),
		RunE:    func(cmd *cobra.Command, args []string) error { return s.run(cmd.Context(), args) },
	}
	sourceFlags(cmd, &s.opts)
	f := cmd.Flags()
	f.StringArrayVar(&s.listen, "listen", nil, "where clients connect: unix:PATH or tcp:HOST:PORT; repeatable")
	f.BoolVar(&s.readOnly, "read-only", false, "serve read-only, whatever the exports allow")
	f.StringVar(&s.tlsCert, "tls-cert", "", "certificate FILE (PEM): clients must start TLS")
	f.StringVar(&s.tlsKey, "tls-key", "", "private key FILE (PEM)")
	f.IntVar(&s.connections, "max-connections", 0, "most clients at a time (default 256)")
	f.StringVar(&s.logLevel, "log-level", "warn", "debug, info, warn or error")
	return cmd
}

func (s *nbdServe) run(ctx context.Context, sources []string) (err error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(s.logLevel)); err != nil {
		return usageError(fmt.Sprintf("--log-level %s: want debug, info, warn or error", s.logLevel))
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	if len(s.listen) == 0 {
		return usageError("--listen is missing: unix:PATH or tcp:HOST:PORT")
	}
	opts := nbd.Options{MaxConnections: s.connections, Logger: log}
	if opts.TLS, err = s.tls(); err != nil {
		return err
	}
	opts.RequireTLS = opts.TLS != nil
	e := &nbdExports{log: log}
	defer func() { err = errors.Join(err, e.close()) }()
	for _, text := range sources {
		if err := e.open(ctx, text, s.opts, s.readOnly); err != nil {
			return err
		}
	}
	srv, err := nbd.NewServer(e.exports, opts)
	if err != nil {
		return err
	}
	return s.serve(ctx, srv)
}

// serve listens everywhere and serves until ctx ends.
func (s *nbdServe) serve(ctx context.Context, srv *nbd.Server) error {
	var ls []net.Listener
	var addrs []string
	defer func() {
		for _, l := range ls {
			l.Close()
		}
	}()
	for _, addr := range s.listen {
		l, err := listenNBD(ctx, addr)
		if err != nil {
			return err
		}
		ls = append(ls, l)
		addrs = append(addrs, l.Addr().Network()+":"+l.Addr().String())
	}
	fmt.Println("ready", strings.Join(addrs, " "))
	if _, err := daemon.SdNotify(true, daemon.SdNotifyReady); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	errs := make(chan error, len(ls))
	for _, l := range ls {
		go func() {
			errs <- srv.Serve(ctx, l)
			cancel() // one listener's failure ends all
		}()
	}
	var all []error
	for range ls {
		all = append(all, <-errs)
	}
	return errors.Join(all...)
}

func (s *nbdServe) tls() (*tls.Config, error) {
	if s.tlsCert == "" && s.tlsKey == "" {
		return nil, nil
	}
	if s.tlsCert == "" || s.tlsKey == "" {
		return nil, usageError("--tls-cert and --tls-key belong together")
	}
	cert, err := tls.LoadX509KeyPair(s.tlsCert, s.tlsKey)
	if err != nil {
		return nil, fmt.Errorf("certificate: %w", err)
	}
	// Clients of NBD are older than TLS 1.3 in places.
	return &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{cert}}, nil
}

func listenNBD(ctx context.Context, addr string) (net.Listener, error) {
	network, where, ok := strings.Cut(addr, ":")
	if !ok || network != "unix" && network != "tcp" {
		return nil, usageError(fmt.Sprintf("--listen %s: want unix:PATH or tcp:HOST:PORT", addr))
	}
	if network == "unix" {
		// A socket that nobody listens on any more is in the way.
		if c, err := net.Dial("unix", where); err == nil {
			c.Close()
			return nil, fmt.Errorf("--listen %s: somebody listens there already", addr)
		}
		if st, err := os.Lstat(where); err == nil && st.Mode()&os.ModeSocket != 0 {
			os.Remove(where)
		}
	}
	l, err := new(net.ListenConfig).Listen(ctx, network, where)
	if err != nil {
		return nil, fmt.Errorf("--listen %s: %w", addr, err)
	}
	return l, nil
}

// nbdExports are the exports that are served, and what they stand on.
type nbdExports struct {
	log       *slog.Logger
	exports   []*nbd.Export
	providers []rdma.Provider
}

// open adds an export.
func (e *nbdExports) open(ctx context.Context, text string, lists []string, readOnly bool) error {
	src, err := parseSource(text, lists)
	if err != nil {
		return err
	}
	if src.Export == "" || src.Path != "" {
		return usageError(fmt.Sprintf("%s: name one export: rblk://HOST/EXPORT", src))
	}
	if readOnly {
		src.Access = "ro"
	}
	ps, err := openProviders(src.Transport, e.log)
	if err != nil {
		return err
	}
	e.providers = append(e.providers, ps...)
	v, err := initiator.Dial(ctx, src, initiator.DialOptions{Providers: ps, Logger: e.log})
	if err != nil {
		return err
	}
	size := src.Cache
	if size < 0 {
		size = cache.SizeNone
	}
	c, err := cache.New(v, cache.Options{Size: size, Readahead: cache.Readahead(src.Readahead), Dir: src.CacheDir, DiskSize: src.CacheDisk, Logger: e.log})
	if err != nil {
		v.Close()
		return err
	}
	e.exports = append(e.exports, &nbd.Export{Name: src.Export, Description: src.String(), Volume: c, ReadOnly: readOnly})
	return nil
}

func (e *nbdExports) close() error {
	var errs []error
	for _, x := range e.exports {
		if g := x.Volume.Geometry(); g.CanFlush && !g.ReadOnly {
			ctx, cancel := context.WithTimeout(context.Background(), endTime)
			errs = append(errs, x.Volume.Flush(ctx))
			cancel()
		}
		errs = append(errs, x.Volume.Close())
	}
	closeProviders(e.providers, e.log)
	return errors.Join(errs...)
}
