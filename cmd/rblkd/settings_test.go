// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// loaded is the settings of a command line, an environment and a file.
func loaded(t *testing.T, args []string, env map[string]string, yaml string) (*settings, error) {
	t.Helper()
	s := &settings{args: args}
	fs := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	s.register(fs)
	if yaml != "" {
		path := filepath.Join(t.TempDir(), "rblkd.yaml")
		if err := os.WriteFile(path, []byte(yaml), 0o644); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--config", path)
	}
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	return s, s.load(func(k string) string { return env[k] })
}

// TestPrecedence: flags, then environment, then file; exports add up by name.
func TestPrecedence(t *testing.T) {
	s, err := loaded(t, []string{"--frames", "1MiB", "--memory", "a=1MiB"},
		map[string]string{"RBLK_FRAMES": "2MiB", "RBLK_LOG_LEVEL": "debug", "RBLK_MEMORY": "a=2MiB; b=2MiB,hugepages=2MiB", "RBLK_LISTEN": "127.0.0.1:1,127.0.0.1:2"},
		`
frames: 3MiB
log-level: error
listen: [127.0.0.1:3]
max-sessions: 7
insecure: true
claim-time: 90s
memory:
  a: 3MiB
  b: {size: 3MiB}
  c:
    size: "3MiB"
dataset:
  d: /srv/d
  e: {path: /srv/e}
`)
	if err != nil {
		t.Fatal(err)
	}
	for what, got := range map[string]bool{
		"frames":      s.frames == 1<<20,
		"log-level":   slog.Level(s.logLevel) == slog.LevelDebug,
		"listen":      strings.Join(s.listen, " ") == "127.0.0.1:1 127.0.0.1:2",
		"max":         s.maxSessions == 7,
		"insecure":    s.insecure,
		"claim-time":  s.claimTime.Seconds() == 90,
		"memory":      s.memories.String() == "a=1.0 MiB b=2.0 MiB c=3.0 MiB",
		"hugepages":   s.memories[1].HugePages == 2<<20,
		"dataset":     s.datasets.String() == "d=/srv/d e=/srv/e",
		"state-dir":   s.stateDir == defaultStateDir(),
		"log-format":  s.logFormat == "text",
		"connections": s.maxConnections == 16,
	} {
		if !got {
			t.Errorf("%s is wrong: %+v", what, s)
		}
	}
}

// TestMistakes: each is one line that names the place and the mend.
func TestMistakes(t *testing.T) {
	for _, c := range []struct {
		name  string
		args  []string
		env   map[string]string
		yaml  string
		wants []string
	}{
		{"unknown key", nil, nil, "frames: 1MiB\nlissten: x\n", []string{"rblkd.yaml:2", `"lissten"`, `"listen"`}},
		{"far from every key", nil, nil, "zzzzzzzzzz: x\n", []string{"rblkd.yaml:1", "zzzzzzzzzz", "frames"}},
		{"unknown key of an export", nil, nil, "memory:\n  m:\n    size: 1MiB\n    hugpages: 2MiB\n", []string{":4", "hugpages", "hugepages"}},
		{"export without its key", nil, nil, "dataset:\n  d: {}\n", []string{":2", "path is missing"}},
		{"bad value", nil, nil, "\n\nframes: 1XB\n", []string{":3", "1XB", "MiB"}},
		{"bad bool", nil, nil, "insecure: perhaps\n", []string{":1", "insecure", "perhaps"}},
		{"list where one belongs", nil, nil, "frames: [1MiB, 2MiB]\n", []string{":1", "frames", "one value"}},
		{"map where a value belongs", nil, nil, "frames: {a: 1}\n", []string{":1", "frames"}},
		{"value where a map belongs", nil, nil, "memory: 1GiB\n", []string{":1", "map"}},
		{"no YAML", nil, nil, "frames: [1MiB\n", []string{"rblkd.yaml"}},
		{"key twice", nil, nil, "frames: 1MiB\nframes: 2MiB\n", []string{"frames", "rblkd.yaml"}},
		{"two documents", nil, nil, "frames: 1MiB\n---\nframes: 2MiB\n", []string{"one YAML document"}},
		{"bad variable", nil, map[string]string{"RBLK_FRAMES": "lots"}, "", []string{"RBLK_FRAMES", "lots"}},
		{"persist", []string{"--memory", "m=1MiB,persist=/x"}, nil, "", []string{"persist"}},
		{"huge page size", []string{"--memory", "m=1MiB,hugepages=3MiB"}, nil, "", []string{"hugepages=3MiB", "2MiB"}},
		{"no size", []string{"--memory", "m"}, nil, "", []string{"NAME=SIZE"}},
		{"size 0", []string{"--memory", "m=0"}, nil, "", []string{"above 0"}},
		{"twice", []string{"--memory", "m=1MiB", "--memory", "m=2MiB"}, nil, "", []string{"twice"}},
		{"no directory", []string{"--dataset", "d="}, nil, "", []string{"NAME=DIR"}},
		{"log level", []string{"--log-level", "loud"}, nil, "", []string{"loud", "debug"}},
		{"config missing", []string{"--config", "/nonexistent.yaml"}, nil, "", []string{"/nonexistent.yaml"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := loaded(t, c.args, c.env, c.yaml)
			if err == nil {
				t.Fatal("no error")
			}
			for _, w := range c.wants {
				if !strings.Contains(err.Error(), w) || strings.Contains(err.Error(), "\n") {
					t.Errorf("%q does not say %q in one line", err, w)
				}
			}
		})
	}
}

// FuzzFile: no file can crash the reader, and every refusal is one line.
func FuzzFile(f *testing.F) {
	for _, s := range []string{"frames: 1MiB\n", "memory:\n  m: {size: 1MiB}\n", "a: &x 1\nb: *x\n", "? [a]\n: b\n", "<<: {a: 1}\n", "memory: {m: {size: !!int 4}}\n", "- a\n", "null: 1\n", "memory: {? : 1}\n"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s := &settings{}
		s.register(pflag.NewFlagSet("serve", pflag.ContinueOnError))
		if err := s.fromFile("x.yaml", []byte(text), map[string]bool{}); err != nil && strings.Contains(err.Error(), "\n") {
			t.Errorf("%q", err)
		}
	})
}

// TestDataListen: which transports listen where.
func TestDataListen(t *testing.T) {
	open := func(args ...string) ([]string, error) {
		s, err := loaded(t, args, nil, "")
		if err != nil {
			t.Fatal(err)
		}
		ls, err := openData(s, slog.New(slog.DiscardHandler))
		defer closeData(ls)
		var addrs []string
		for _, l := range ls {
			addrs = append(addrs, l.Provider.Name()+"="+l.Addr)
		}
		return addrs, err
	}
	for want, args := range map[string][]string{
		"tcp=127.0.0.1:7471":             nil,
		"tcp=10.1.2.3:7471":              {"--listen", "unix:/x", "--listen", "10.1.2.3:7470"},
		"tcp=[::1]:9":                    {"--data-listen", "[::1]:9"},
		"tcp=127.0.0.1:1 tcp=10.0.0.1:1": {"--data-listen", "tcp=127.0.0.1:1", "--data-listen", "10.0.0.1:1"},
	} {
		got, err := open(args...)
		if err != nil || !strings.Contains(strings.Join(got, " "), want) {
			t.Errorf("%v: got %v, %v, want %s", args, got, err, want)
		}
	}
	for _, bad := range []string{"nonsense=1.2.3.4:5", "1.2.3.4"} {
		var u *usage
		if _, err := open("--data-listen", bad); !errors.As(err, &u) || !strings.Contains(err.Error(), bad) {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

// TestReread: SIGHUP sees a changed file, under the same command line.
func TestReread(t *testing.T) {
	path := filepath.Join(t.TempDir(), "c.yaml")
	put := func(text string) {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	put("log-level: warn\n")
	args := []string{"serve", "--config", path, "--memory", "m=1MiB", "--json"}
	s := &settings{args: args}
	next, err := s.reread()
	if err != nil || slog.Level(next.logLevel) != slog.LevelWarn {
		t.Fatalf("%v", err)
	}
	put("log-level: debug\nmemory: {n: 2MiB, m: 5MiB}\n")
	next, err = s.reread()
	if err != nil || slog.Level(next.logLevel) != slog.LevelDebug || next.memories.String() != "m=1.0 MiB n=2.0 MiB" {
		t.Errorf("%v, %v", err, next.memories.String())
	}
	put("log-levle: debug\n")
	if _, err := s.reread(); err == nil {
		t.Error("a mistake in the file: no error")
	}
}
