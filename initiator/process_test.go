// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"fmt"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"rblk/wire"
)

func TestAbandoned(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	name := processName(cmd.Process.Pid)
	busy := func(process string) error {
		return fmt.Errorf("open: %w", &wire.Error{Code: wire.CodeBusy, Writer: &wire.Writer{Client: wire.Client{Process: process}}})
	}
	if name == "" || abandoned(busy(name)) {
		t.Errorf("%q counts as dead while it lives", name)
	}
	cmd.Process.Kill()
	for startTime(cmd.Process.Pid) != "" {
		runtime.Gosched() // until it is a zombie
	}
	if !abandoned(busy(name)) {
		t.Errorf("%q counts as alive as a zombie", name)
	}
	cmd.Wait()
	if !abandoned(busy(name)) {
		t.Errorf("%q counts as alive", name)
	}
	boot, rest, _ := strings.Cut(name, ":")
	for _, other := range []string{"", "x:" + rest, boot, name + "0:1", boot + ":1" + rest} {
		if strings.HasPrefix(other, placeName()+":") {
			continue // of this machine after all
		}
		if abandoned(busy(other)) {
			t.Errorf("%q: nothing can be told of it, yet it counts as dead", other)
		}
	}
	if abandoned(&wire.Error{Code: wire.CodeBusy}) || abandoned(&wire.Error{Code: wire.CodeFenced}) {
		t.Error("a claim that names no process counts as abandoned")
	}
}
