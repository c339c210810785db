// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"rblk/fuse"
)

func TestParseMountOptions(t *testing.T) {
	for _, c := range []struct {
		name  string
		lists []string
		want  mountOptions
	}{
		{"nothing", nil, mountOptions{}},
		{"fstab's", []string{"defaults,nofail,_netdev,noauto,user,users,x-systemd.automount,x-systemd.mount-timeout=10,comment=here,user=joe"}, mountOptions{}},
		{"mount.fuse's", []string{"rw,dev,suid"}, mountOptions{source: map[string]string{"rw": ""}}},
		{"the kernel's", []string{"noexec,noatime"}, mountOptions{fuse: fuse.Options{Generic: []string{"noexec", "noatime"}}}},
		{"ours", []string{"allow_other,nonempty", "log=/var/log/x,log-level=debug,metrics=:9000"}, mountOptions{
			fuse: fuse.Options{AllowOther: true}, nonEmpty: true, log: "/var/log/x", level: slog.LevelDebug, metrics: ":9000"}},
		{"the session's", []string{"transport=tcp, cache=1GiB,soft=30s"}, mountOptions{source: map[string]string{"transport": "tcp", "cache": "1GiB", "soft": "30s"}}},
		{"the latest wins", []string{"ro,soft=1s", "rw", "hard,cache=1GiB,cache=2GiB"}, mountOptions{source: map[string]string{"rw": "", "hard": "", "cache": "2GiB"}}},
		{"read-only", []string{"rw,ro"}, mountOptions{fuse: fuse.Options{ReadOnly: true}, source: map[string]string{"ro": ""}}},
	} {
		got, err := parseMountOptions(c.lists)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if c.want.source == nil {
			c.want.source = map[string]string{}
		}
		if d := cmp.Diff(c.want, got, cmp.AllowUnexported(mountOptions{})); d != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, d)
		}
	}
}

func TestBadMountOptions(t *testing.T) {
	for opt, want := range map[string]string{
		"chache=1GiB":    "did you mean cache?",
		"nonsense":       `"nonsense"`,
		"cache":          "cache=VALUE",
		"cache=":         "cache=VALUE",
		"allow_other=1":  "takes no value",
		"log-level=loud": "debug, info, warn or error",
		"noexec=1":       "unknown",
	} {
		_, err := parseMountOptions([]string{"rw," + opt})
		var usage usageError
		if err == nil || !strings.Contains(err.Error(), want) || !errors.As(err, &usage) {
			t.Errorf("%s: %v, want a usage error with %q", opt, err, want)
		}
	}
}
