// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestParseSource(t *testing.T) {
	base := Options{Transport: "auto", Readahead: -1}
	with := func(f func(*Options)) Options { o := base; f(&o); return o }
	for text, want := range map[string]Source{
		"rblk://h/e": {Addrs: []string{"h:7470"}, Export: "e", Options: base},
		"rblk://h":   {Addrs: []string{"h:7470"}, Options: base},
		"rblk://h/":  {Addrs: []string{"h:7470"}, Options: base},
		"rblk://h:1,k,10.0.0.1:65535/e/a/b": {
			Addrs: []string{"h:1", "k:7470", "10.0.0.1:65535"}, Export: "e", Path: "a/b", Options: base,
		},
		"rblk://[::1]:5/e":     {Addrs: []string{"[::1]:5"}, Export: "e", Options: base},
		"rblk://[fe80::1%a]/e": {Addrs: []string{"[fe80::1%a]:7470"}, Export: "e", Options: base},
		"rblk://::1/e":         {Addrs: []string{"[::1]:7470"}, Export: "e", Options: base},
		"rblk://h/a%20b/c%2fd": {Addrs: []string{"h:7470"}, Export: "a b", Path: "c/d", Options: base},
		"rblk+unix:///e?socket=%2Frun%2Fs&ro": {
			Addrs: []string{"unix:/run/s"}, Export: "e", Options: with(func(o *Options) { o.Access = "ro" }),
		},
		"rblk://h/e?soft=30s&connections=7&cache=none&readahead=0&ro": {Addrs: []string{"h:7470"}, Export: "e", Options: with(func(o *Options) {
			o.Soft, o.Connections, o.Cache, o.Readahead, o.Access = 30*time.Second, 7, -1, 0, "ro"
		})},
		"rblk://h/e?soft=1s&hard&cache=512MiB&tls-ca=/a%26b": {Addrs: []string{"h:7470"}, Export: "e", Options: with(func(o *Options) {
			o.Cache, o.TLSCA = 512<<20, "/a&b"
		})},
	} {
		got, err := ParseSource(text)
		if err != nil {
			t.Errorf("%s: %v", text, err)
		} else if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s: %s", text, d)
		}
	}
}

// TestBadSource: each is one line that says what to do.
func TestBadSource(t *testing.T) {
	for text, say := range map[string]string{
		"":                            "rblk://HOST",
		"http://h/e":                  "rblk://HOST",
		"rblk:///e":                   "host is missing",
		"rblk://a,/e":                 "host is missing",
		"rblk://h:0/e":                "1 to 65535",
		"rblk://h:x/e":                "1 to 65535",
		"rblk://h:99999/e":            "1 to 65535",
		"rblk://[::1/e":               "[IPV6]:PORT",
		"rblk://1:2:3/e":              "[IPV6]:PORT",
		"rblk://a b/e":                "HOST:PORT",
		"rblk://me:pass@h/e":          "token-file",
		"rblk://h/e?rao":              `"ro"`,
		"rblk://h/e?connection=3":     `"connections"`,
		"rblk://h/e?connections=0":    "1 to 64",
		"rblk://h/e?connections":      "needs a value",
		"rblk://h/e?cache=":           "needs a value",
		"rblk://h/e?cache=12KiB":      "at least 1MiB",
		"rblk://h/e?soft=-1s":         "30s",
		"rblk://h/e?ro=yes":           "takes no value",
		"rblk://h/e?token=abc":        "token-file",
		"rblk://h/e?transport=pigeon": "auto, verbs, tcp",
		"rblk://h/%zz":                "%zz",
		"rblk+unix:///e":              "socket=PATH",
	} {
		_, err := ParseSource(text)
		if !errors.Is(err, ErrSource) || !strings.Contains(err.Error(), say) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: %v, want one line with %q", text, err, say)
		}
		if err != nil && (strings.Contains(err.Error(), "abc") || strings.Contains(err.Error(), "pass@")) {
			t.Errorf("%q: the error shows the secret: %v", text, err)
		}
	}
}

func TestWithOptions(t *testing.T) {
	s, err := ParseSource("rblk://h/e?ro")
	if err == nil {
		s, err = s.WithOptions("rw,,soft=1m,allow_other")
	}
	if err != nil || s.Access != "rw" || s.Soft != time.Minute || !s.AllowOther {
		t.Errorf("%+v, %v", s, err)
	}
	if _, err := s.WithOptions("soft"); !errors.Is(err, ErrSource) {
		t.Errorf("soft without a value: %v", err)
	}
}

// FuzzParseSource: no panic, and what was taken can be shown and read again.
func FuzzParseSource(f *testing.F) {
	for _, s := range []string{"rblk://h:1,[::1]/e/p?ro&soft=1s", "rblk+unix:///e?socket=/s", "rblk://a%2fb/%41?cache=none", "rblk://x?="} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := ParseSource(text)
		if err != nil {
			if !errors.Is(err, ErrSource) {
				t.Fatalf("%v does not match ErrSource", err)
			}
			return
		}
		again, err := ParseSource(s.String())
		if err != nil || !slices.Equal(again.Addrs, s.Addrs) || again.Export != s.Export || again.Path != s.Path {
			t.Fatalf("%q is shown as %q, which is read as %+v, %v", text, s.String(), again, err)
		}
	})
}
