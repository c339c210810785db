// SPDX-License-Identifier: Apache-2.0

package rdmatest

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// stock is what a process holds.
type stock struct {
	fds    int
	pinned string // the VmPin and VmLck lines of /proc/self/status
	ignore goleak.Option
}

func takeStock() stock {
	return stock{fds: openFiles(), pinned: pinnedPages(), ignore: goleak.IgnoreCurrent()}
}

// check fails t when more is held than was. Ends may come a little later than
// the calls that ask for them, so it looks again for a while.
func (s stock) check(t *testing.T, p Pair) {
	t.Helper()
	if t.Failed() {
		return
	}
	for _, provider := range []any{p.Passive, p.Active} {
		c, ok := provider.(Counter)
		if !ok {
			continue
		}
		for noun, n := range c.Live() {
			if n != 0 {
				t.Errorf("%d %s alive after the test", n, noun)
			}
		}
	}
	if err := goleak.Find(s.ignore); err != nil {
		t.Errorf("goroutines left: %v", err)
	}
	deadline := time.Now().Add(10 * time.Second)
	for {
		fds, pinned := openFiles(), pinnedPages()
		if fds <= s.fds && pinned == s.pinned {
			return
		}
		if time.Now().After(deadline) {
			t.Errorf("%d descriptors, %d before the test; pinned %q, before %q\n%s", fds, s.fds, pinned, s.pinned, listFiles())
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func openFiles() int {
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0
	}
	return len(names)
}

func listFiles() string {
	names, _ := os.ReadDir("/proc/self/fd")
	var b strings.Builder
	for _, n := range names {
		target, _ := os.Readlink("/proc/self/fd/" + n.Name())
		fmt.Fprintf(&b, "  %s %s\n", n.Name(), target)
	}
	return b.String()
}

func pinnedPages() string {
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return ""
	}
	var out []string
	for line := range bytes.Lines(text) {
		if bytes.HasPrefix(line, []byte("VmPin:")) || bytes.HasPrefix(line, []byte("VmLck:")) {
			out = append(out, strings.Join(strings.Fields(string(line)), " "))
		}
	}
	return strings.Join(out, ", ")
}
