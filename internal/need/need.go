// SPDX-License-Identifier: Apache-2.0

// Package need skips tests whose machine lacks a part, and says why. With
// RBLK_NO_SKIP set (as the virtual-machine suite sets it) a lacking part fails
// the test instead, so that a skip can never hide.
package need

import (
	"os"
	"os/exec"
	"testing"
)

// Skip ends the test for want of a part of the machine.
func Skip(t testing.TB, why string) {
	t.Helper()
	if os.Getenv("RBLK_NO_SKIP") != "" {
		t.Fatalf("need: %s", why)
	}
	t.Skipf("need: %s", why)
}

// Root skips unless the test runs as root.
func Root(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		Skip(t, "root")
	}
}

// FUSE skips unless /dev/fuse can be opened.
func FUSE(t testing.TB) {
	t.Helper()
	f, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		Skip(t, "/dev/fuse: "+err.Error())
	}
	f.Close()
}

// Program skips unless name is on the PATH, and returns its path. install names
// the package that brings it.
func Program(t testing.TB, name, install string) string {
	t.Helper()
	p, err := exec.LookPath(name)
	if err != nil {
		Skip(t, name+" (package "+install+")")
	}
	return p
}
