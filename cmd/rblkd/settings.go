// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"rblk/internal/size"
	"rblk/target"
	"rblk/wire"
)

// settings is all that serve can be told. Each has one name: the flag --NAME,
// the variable RBLK_NAME (in capitals, '_' for '-') and the key NAME of the
// file. Flags win over variables, which win over the file.
type settings struct {
	flags *pflag.FlagSet
	args  []string // the command line

	config     string
	listen     []string
	dataListen []string
	stateDir   string
	memoryDir  string
	frames     sizeValue

	tlsCert, tlsKey, tlsClientCA, tokenFile string
	insecure                                bool

	maxSessions, maxConnections                                      int
	tokenTime, claimTime, graceTime, keepalive, deadTime, revokeTime time.Duration
	scanWorkers                                                      int

	logLevel  levelValue
	logFormat formatValue

	memories memoryList
	datasets datasetList
}

// repeated are the settings that name exports: each source adds to them, and
// the stronger source wins for a name that both give.
var repeated = []string{"memory", "dataset"}

// register makes the flags. Their zero values are the defaults of
// target.Options, so the help says them.
func (s *settings) register(fs *pflag.FlagSet) {
	s.flags = fs
	fs.StringVar(&s.config, "config", "", "YAML `FILE` with the same settings; keys are the names of the flags")
	fs.StringSliceVar(&s.listen, "listen", []string{fmt.Sprintf("127.0.0.1:%d", wire.DefaultControlPort)}, "control plane: `HOST:PORT` or unix:PATH; port 0 takes a free one")
	fs.StringSliceVar(&s.dataListen, "data-listen", nil, "data plane: `[PROVIDER=]HOST:PORT`, tcp unless it says verbs (default: the control plane's host, port 7471 for tcp, 7472 for verbs)")
	fs.StringVar(&s.stateDir, "state-dir", defaultStateDir(), "`DIR` for claims and dataset layouts")
	fs.StringVar(&s.memoryDir, "memory-dir", defaultMemoryDir(), "tmpfs `DIR` for the bytes of memory exports")
	s.frames = 256 << 20
	fs.Var(&s.frames, "frames", "memory for the pages of datasets")
	fs.Var(&s.memories, "memory", "export memory: `NAME=SIZE[,hugepages=2MiB|1GiB]`; repeatable")
	fs.Var(&s.datasets, "dataset", "export a directory tree, read-only: `NAME=DIR`; repeatable")

	fs.StringVar(&s.tlsCert, "tls-cert", "", "certificate `FILE` (PEM): the control plane is HTTPS")
	fs.StringVar(&s.tlsKey, "tls-key", "", "private key `FILE` (PEM)")
	fs.StringVar(&s.tlsClientCA, "tls-client-ca", "", "`FILE` of the CA whose client certificates are demanded")
	fs.StringVar(&s.tokenFile, "token-file", "", "`FILE` with the bearer token that clients must present")
	fs.BoolVar(&s.insecure, "insecure", false, "allow plain HTTP beyond loopback")

	fs.IntVar(&s.maxSessions, "max-sessions", 1024, "most sessions at a time")
	fs.IntVar(&s.maxConnections, "max-connections", 16, "most data connections of a session")
	fs.DurationVar(&s.tokenTime, "token-time", 10*time.Second, "life of a connect token")
	fs.DurationVar(&s.claimTime, "claim-time", 15*time.Minute, "silence after which a session, and its write claim, ends")
	fs.DurationVar(&s.graceTime, "grace-time", time.Minute, "after a restart, how long only the last writer may claim an export")
	fs.DurationVar(&s.keepalive, "keepalive", 5*time.Second, "how often initiators say that they are there")
	fs.DurationVar(&s.deadTime, "dead-time", 15*time.Second, "silence after which a connection is broken")
	fs.DurationVar(&s.revokeTime, "revoke-time", 5*time.Second, "time to answer a REVOKE")
	fs.IntVar(&s.scanWorkers, "scan-workers", 0, "directories read in parallel by a dataset scan (default 4 per CPU)")

	fs.Var(&s.logLevel, "log-level", "`LEVEL`: debug, info, warn or error")
	s.logFormat = "text"
	fs.Var(&s.logFormat, "log-format", "`FORMAT`: text or json")
	for _, name := range []string{"tls-client-ca", "token-file"} {
		fs.Lookup(name).DefValue = ""
	}
}

// load adds the environment and the file to what the command line said.
func (s *settings) load(getenv func(string) string) error {
	given := map[string]bool{}
	s.flags.Visit(func(f *pflag.Flag) { given[f.Name] = true })
	if err := s.fromEnv(getenv, given); err != nil {
		return &usage{err}
	}
	if s.config == "" {
		return nil
	}
	text, err := os.ReadFile(s.config)
	if err != nil {
		return &usage{fmt.Errorf("configuration: %w", err)}
	}
	if err := s.fromFile(s.config, text, given); err != nil {
		return &usage{err}
	}
	return nil
}

// reread reads everything again, as it is now.
func (s *settings) reread() (*settings, error) {
	next := &settings{args: s.args}
	fs := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	next.register(fs)
	fs.Bool("json", false, "")
	if err := fs.Parse(s.args); err != nil {
		return nil, err
	}
	return next, next.load(os.Getenv)
}

// fromEnv sets what a variable says and no flag did; given gets its name.
func (s *settings) fromEnv(getenv func(string) string, given map[string]bool) (err error) {
	s.flags.VisitAll(func(f *pflag.Flag) {
		key := envName(f.Name)
		text := getenv(key)
		many := slices.Contains(repeated, f.Name)
		if text == "" || err != nil || (given[f.Name] && !many) {
			return
		}
		values := []string{text}
		if many {
			values = strings.FieldsFunc(text, func(r rune) bool { return r == ';' || r == '\n' })
		}
		for _, v := range values {
			if e := s.set(f, strings.TrimSpace(v)); e != nil {
				err = fmt.Errorf("environment %s=%q: %w", key, text, e)
			}
		}
		given[f.Name] = true
	})
	return err
}

// envName is the variable of a setting.
func envName(flag string) string {
	return "RBLK_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// set gives a setting a value from a weaker source than the one before: of
// exports, those that are already named are left alone.
func (s *settings) set(f *pflag.Flag, text string) error {
	switch v := f.Value.(type) {
	case *memoryList:
		return v.add(text, false)
	case *datasetList:
		return v.add(text, false)
	}
	return f.Value.Set(text)
}

// options are the settings as the target takes them; providers are added by
// the caller.
func (s *settings) options() target.Options {
	o := target.Options{
		Listen: s.listen, StateDir: s.stateDir, MemoryDir: s.memoryDir, Frames: int64(s.frames),
		TLSCert: s.tlsCert, TLSKey: s.tlsKey, TLSClientCA: s.tlsClientCA, TokenFile: s.tokenFile, Insecure: s.insecure,
		MaxSessions: s.maxSessions, MaxConnections: s.maxConnections,
		TokenTime: s.tokenTime, ClaimTime: s.claimTime, GraceTime: s.graceTime,
		Keepalive: s.keepalive, Dead: s.deadTime, Revoke: s.revokeTime,
	}
	o.Scan.Workers = s.scanWorkers
	return o
}

// logger writes to w; its level can be changed through level.
func (s *settings) logger(w io.Writer, level slog.Leveler) *slog.Logger {
	opts := &slog.HandlerOptions{Level: level}
	if s.logFormat == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}

// dataHost is where data connections are taken when nothing says otherwise:
// where the control plane is.
func (s *settings) dataHost() string {
	for _, l := range s.listen {
		if host, _, err := net.SplitHostPort(l); err == nil && !strings.HasPrefix(l, "unix:") {
			return host
		}
	}
	return "127.0.0.1"
}

// defaultStateDir is the system's for root, the user's own else.
func defaultStateDir() string {
	if os.Geteuid() == 0 {
		return "/var/lib/rblk"
	}
	if dir := os.Getenv("XDG_STATE_HOME"); dir != "" {
		return filepath.Join(dir, "rblk")
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "/var/lib/rblk"
	}
	return filepath.Join(home, ".local/state/rblk")
}

func defaultMemoryDir() string {
	if os.Geteuid() == 0 {
		return "/dev/shm/rblk"
	}
	return "/dev/shm/rblk-" + strconv.Itoa(os.Geteuid())
}

// sizeValue is a flag in bytes.
type sizeValue int64

func (v *sizeValue) Set(text string) error {
	n, err := size.Parse(text)
	if err == nil {
		*v = sizeValue(n)
	}
	return err
}
func (v *sizeValue) String() string { return strings.ReplaceAll(size.Format(int64(*v)), " ", "") }
func (v *sizeValue) Type() string   { return "SIZE" }

// levelValue is a flag for a log level; info by default.
type levelValue slog.Level

func (v *levelValue) Set(text string) error {
	levels := map[string]slog.Level{"debug": slog.LevelDebug, "info": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError}
	l, ok := levels[strings.ToLower(text)]
	if !ok {
		return fmt.Errorf("log level %q: want debug, info, warn or error", text)
	}
	*v = levelValue(l)
	return nil
}
func (v *levelValue) String() string { return strings.ToLower(slog.Level(*v).String()) }
func (v *levelValue) Type() string   { return "LEVEL" }

// formatValue is a flag for the log's format.
type formatValue string

func (v *formatValue) Set(text string) error {
	if text != "text" && text != "json" {
		return fmt.Errorf("log format %q: want text or json", text)
	}
	*v = formatValue(text)
	return nil
}
func (v *formatValue) String() string { return string(*v) }
func (v *formatValue) Type() string   { return "FORMAT" }
