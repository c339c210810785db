// SPDX-License-Identifier: Apache-2.0

// Package version names this build.
package version

import "runtime/debug"

// Version is set by the linker (-X rblk/internal/version.Version=…).
var Version = "0.1.0-dev"

// Commit is the revision the build was made from, or "" outside a checkout.
func Commit() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			return s.Value
		}
	}
	return ""
}
