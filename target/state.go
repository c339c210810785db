// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"rblk/wire"
)

// writeFileSync replaces a file so that after a crash it is either the old or
// the new one.
func writeFileSync(path string, text []byte) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), ".tmp-*")
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name()) // after the rename there is nothing of that name
	_, err = tmp.Write(text)
	err = errors.Join(err, tmp.Sync(), tmp.Close())
	if err != nil {
		return err
	}
	if err := os.Rename(tmp.Name(), path); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Sync()
}

// lockFile takes an exclusive lock that ends with the process. Then it waits
// for the process that held it before: the kernel gives a lock up before it has
// torn everything of a dying process down.
func lockFile(ctx context.Context, path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	lockErr := flock(ctx, f)
	// Whoever had the lock last has written its name by now.
	text, _ := io.ReadAll(io.LimitReader(f, 100))
	pid, start := parseOwner(string(text))
	if err := lockErr; err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("in use by another rblkd (pid %d): stop it, or choose another directory (lock %s)", pid, path)
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	if pid != os.Getpid() {
		if err := awaitExit(ctx, pid, start); err != nil {
			f.Close()
			return nil, err
		}
	}
	_, err = f.WriteAt(fmt.Appendf(nil, "%-10d %-20s\n", os.Getpid(), startTime(os.Getpid())), 0)
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// lockTime is how long a lock is tried for: a process that was killed may still
// be going.
const lockTime = 2 * time.Second

// flock takes the exclusive lock of f.
func flock(ctx context.Context, f *os.File) error {
	for end := time.Now().Add(lockTime); ; {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(end) {
			return err
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func parseOwner(text string) (pid int, start string) {
	w := strings.Fields(text)
	if len(w) != 2 {
		return 0, ""
	}
	pid, _ = strconv.Atoi(w[0])
	return pid, w[1]
}

// startTime is field 22 of /proc/PID/stat: with the pid it names a process.
func startTime(pid int) string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return ""
	}
	// The second field is a name in parentheses that may hold anything.
	w := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(w) < 20 {
		return ""
	}
	return w[19]
}

// awaitExit waits until that process is gone.
func awaitExit(ctx context.Context, pid int, start string) error {
	if pid <= 0 {
		return nil
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil // gone
	}
	defer unix.Close(fd)
	if startTime(pid) != start {
		return nil // somebody else has its number
	}
	for ctx.Err() == nil {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 100)
		if n > 0 {
			return nil
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("wait for pid %d: %w", pid, err)
		}
	}
	return fmt.Errorf("wait for the previous rblkd (pid %d) to end: %w", pid, ctx.Err())
}

// claimRecord is a writer's claim as it is kept over a restart.
type claimRecord struct {
	Session   string      `json:"session"`
	Epoch     uint64      `json:"epoch"`
	Secret    string      `json:"secret_sha256"`
	Access    string      `json:"access"`
	Principal string      `json:"principal"`
	Instance  string      `json:"instance"`
	Client    wire.Client `json:"client"`
	Address   string      `json:"address"`
	Since     time.Time   `json:"since"`
}

// stateDir keeps what must outlive the process: claims and dataset layouts.
type stateDir struct {
	dir  string
	lock *os.File
}

func openState(ctx context.Context, dir string) (*stateDir, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("state directory: %w; choose another with --state-dir", err)
	}
	lock, err := lockFile(ctx, filepath.Join(dir, "lock"))
	if err != nil {
		return nil, fmt.Errorf("state directory %s: %w; or choose another with --state-dir", dir, err)
	}
	return &stateDir{dir, lock}, nil
}

func (d *stateDir) close() { d.lock.Close() }

func (d *stateDir) claimPath(export string) string {
	return filepath.Join(d.dir, "claim-"+export+".json")
}

// saveClaim is durable when it returns.
func (d *stateDir) saveClaim(export string, c claimRecord) error {
	text, err := json.Marshal(c)
	if err != nil {
		return err
	}
	return writeFileSync(d.claimPath(export), text)
}

func (d *stateDir) dropClaim(export string) { os.Remove(d.claimPath(export)) }

// loadClaim returns the claim that a previous run left, if any.
func (d *stateDir) loadClaim(export string) (claimRecord, bool) {
	text, err := os.ReadFile(d.claimPath(export))
	var c claimRecord
	if err != nil || json.Unmarshal(text, &c) != nil || c.Session == "" {
		return c, false
	}
	return c, true
}

func (d *stateDir) treePath(export string) string {
	return filepath.Join(d.dir, "tree-"+export+".bin")
}

// bootID identifies this boot of the host.
func bootID() string {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	return strings.TrimSpace(string(text))
}
