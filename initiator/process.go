// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"rblk/wire"
)

// A process names itself to the target as BOOT:PIDNS:PID:START, so that a later
// one on the same machine can tell whether it is still alive.

// thisProcess names this process; "" where the machine does not tell.
func thisProcess() string { return processName(os.Getpid()) }

func processName(pid int) string {
	where := placeName()
	start := startTime(pid)
	if where == "" || start == "" {
		return ""
	}
	return fmt.Sprintf("%s:%d:%s", where, pid, start)
}

// placeName is this boot and this pid namespace, in which a pid means one
// process.
func placeName() string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	var st unix.Stat_t
	if err != nil || unix.Stat("/proc/self/ns/pid", &st) != nil {
		return ""
	}
	return fmt.Sprintf("%s:%d", strings.TrimSpace(string(boot)), st.Ino)
}

// startTime is field 22 of /proc/PID/stat; "" when the process is gone, or a
// zombie that nobody has waited for.
func startTime(pid int) string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	// The second field is a name in parentheses that may hold anything.
	s := string(text)
	w := strings.Fields(s[strings.LastIndexByte(s, ')')+1:])
	if len(w) < 20 || w[0] == "Z" || w[0] == "X" {
		return ""
	}
	return w[19]
}

// isDead tells whether name is a process of this boot and pid namespace that
// does not exist any more. Of any other nothing can be told.
func isDead(name string) bool {
	where := placeName()
	rest, here := strings.CutPrefix(name, where+":")
	if where == "" || !here {
		return false
	}
	pidText, start, ok := strings.Cut(rest, ":")
	pid, err := strconv.Atoi(pidText)
	return ok && err == nil && pid > 0 && startTime(pid) != start
}

// abandoned tells whether err is a writer's claim that a dead process of this
// machine has left. It can write no more, so there is nobody to wait for.
func abandoned(err error) bool {
	var e *wire.Error
	return errors.As(err, &e) && e.Code == wire.CodeBusy && e.Writer != nil && isDead(e.Writer.Client.Process)
}
