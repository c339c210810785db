// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"

	"github.com/agnivade/levenshtein"

	"rblk/fuse"
)

// mountOptions is what -o and the options of a URI say about a mount itself.
type mountOptions struct {
	fuse     fuse.Options
	nonEmpty bool
	metrics  string     // HOST:PORT, or "" for none
	log      string     // see openLog
	level    slog.Level // what is logged
	// source are the options that are not ours: of the session and the cache.
	source map[string]string
}

// optionKind says what an option of a mount is.
type optionKind int

const (
	ours    optionKind = iota
	session            // of the session or the cache: passed on
	ignored            // of mount(8) and fstab: means nothing to us
)

// mountOptionTable has every option that a mount takes.
var mountOptionTable = map[string]struct {
	kind  optionKind
	value bool // it needs =VALUE; otherwise it takes none
}{
	"allow_other": {ours, false},
	"allow_root":  {ours, false},
	"nonempty":    {ours, false},
	"metrics":     {ours, true},
	"log":         {ours, true},
	"log-level":   {ours, true},

	"ro": {session, false}, "rw": {session, false}, "shared": {session, false}, "force": {session, false},
	"transport": {session, true}, "connections": {session, true},
	"cache": {session, true}, "readahead": {session, true}, "cache-dir": {session, true}, "cache-disk": {session, true},
	"hard": {session, false}, "soft": {session, true},
	"tls-ca": {session, true}, "tls-cert": {session, true}, "tls-key": {session, true},
	"token-file": {session, true}, "insecure": {session, false},

	// nosuid and nodev always hold: mount.fuse adds suid and dev by itself, so
	// that these say nothing about what anybody wants.
	"suid": {ignored, false}, "nosuid": {ignored, false}, "dev": {ignored, false}, "nodev": {ignored, false},
	"defaults": {ignored, false}, "auto": {ignored, false}, "noauto": {ignored, false},
	"nofail": {ignored, false}, "_netdev": {ignored, false}, "exec": {ignored, false},
	"async": {ignored, false}, "atime": {ignored, false}, "diratime": {ignored, false}, "nodiratime": {ignored, false},
	"user": {ignored, false}, "users": {ignored, false}, "nouser": {ignored, false},
	"owner": {ignored, false}, "group": {ignored, false},
}

// isComment tells of what only mount(8), systemd and people read.
func isComment(name string) bool {
	return strings.HasPrefix(name, "x-") || strings.HasPrefix(name, "X-") || name == "comment" ||
		name == "user" || name == "uhelper" || name == "helper"
}

// parseMountOptions reads the arguments of -o, each a list with commas. Later
// ones win.
func parseMountOptions(lists []string) (mountOptions, error) {
	o := mountOptions{level: slog.LevelInfo, source: map[string]string{}}
	for _, list := range lists {
		for opt := range strings.SplitSeq(list, ",") {
			if opt = strings.TrimSpace(opt); opt == "" {
				continue
			}
			if err := o.set(opt); err != nil {
				return mountOptions{}, err
			}
		}
	}
	return o, nil
}

// set takes one NAME or NAME=VALUE.
func (o *mountOptions) set(opt string) error {
	name, value, hasValue := strings.Cut(opt, "=")
	known, ok := mountOptionTable[name]
	switch {
	case isComment(name):
		return nil
	case fuse.GenericOption(name) && !hasValue:
		o.fuse.Generic = append(o.fuse.Generic, name)
		return nil
	case !ok:
		return usageError(fmt.Sprintf("unknown mount option %q%s", name, nearest(name, maps.Keys(mountOptionTable))))
	case known.value && value == "":
		return usageError(fmt.Sprintf("mount option %s needs a value: %s=VALUE", name, name))
	case !known.value && hasValue:
		return usageError(fmt.Sprintf("mount option %s takes no value", name))
	}
	switch known.kind {
	case session:
		o.setSession(name, value)
	case ours:
		return o.setOurs(name, value)
	}
	return nil
}

// setSession keeps the latest of those that exclude each other.
func (o *mountOptions) setSession(name, value string) {
	for _, rivals := range [][]string{{"ro", "rw", "shared"}, {"hard", "soft"}} {
		if slices.Contains(rivals, name) {
			for _, r := range rivals {
				delete(o.source, r)
			}
		}
	}
	o.source[name] = value
	o.fuse.ReadOnly = o.has("ro")
}

func (o *mountOptions) has(name string) bool {
	_, ok := o.source[name]
	return ok
}

func (o *mountOptions) setOurs(name, value string) error {
	switch name {
	case "allow_other":
		o.fuse.AllowOther = true
	case "allow_root":
		o.fuse.AllowRoot = true
	case "nonempty":
		o.nonEmpty = true
	case "metrics":
		o.metrics = value
	case "log":
		o.log = value
	case "log-level":
		if err := o.level.UnmarshalText([]byte(value)); err != nil {
			return usageError(fmt.Sprintf("log-level=%s: want debug, info, warn or error", value))
		}
	}
	return nil
}

// nearest suggests the name that was meant, if there is one.
func nearest(name string, names func(func(string) bool)) string {
	best, least := "", 3 // farther than that is no misspelling
	for _, n := range slices.Sorted(names) {
		if d := levenshtein.ComputeDistance(name, n); d < least {
			best, least = n, d
		}
	}
	if best == "" {
		return ""
	}
	return fmt.Sprintf(" (did you mean %s?)", best)
}
