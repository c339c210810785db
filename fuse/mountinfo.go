// SPDX-License-Identifier: Apache-2.0

package fuse

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// FSType is the type of our mounts, as mount(8) shows it.
const FSType = "fuse.rmount"

// Info is a mount as /proc/self/mountinfo tells it. Reading that touches no
// filesystem, so that a dead mount cannot hold the reader up.
type Info struct {
	ID     int    // unique while the mount exists
	Device string // MAJOR:MINOR
	Dir    string // the mount point
	Type   string
	Source string
	UID    int // who mounted a FUSE filesystem; 0 for others
}

// FindMount is the mount that a path leads to if it is a mount point: the
// topmost one there. dir must be absolute and free of symbolic links.
func FindMount(dir string) (Info, bool, error) {
	all, err := Mounts()
	if err != nil {
		return Info{}, false, err
	}
	for i := len(all) - 1; i >= 0; i-- {
		if all[i].Dir == dir {
			return all[i], true, nil
		}
	}
	return Info{}, false, nil
}

// Mounts are all mounts of this process's namespace, oldest first.
func Mounts() ([]Info, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("listing mounts: %w", err)
	}
	defer f.Close()
	return parseMountinfo(f)
}

// parseMountinfo reads the format of proc_pid_mountinfo(5).
func parseMountinfo(r io.Reader) ([]Info, error) {
	var all []Info
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		info, err := parseMount(lines.Text())
		if err != nil {
			return nil, fmt.Errorf("listing mounts: %q: %w", lines.Text(), err)
		}
		all = append(all, info)
	}
	return all, lines.Err()
}

// parseMount reads one line: ID PARENT MAJOR:MINOR ROOT DIR OPTIONS [TAG...] -
// TYPE SOURCE OPTIONS.
func parseMount(line string) (Info, error) {
	before, after, found := strings.Cut(line, " - ")
	head, tail := strings.Fields(before), strings.Split(after, " ")
	if !found || len(head) < 6 || len(tail) < 2 {
		return Info{}, errors.New("too few fields")
	}
	id, err := strconv.Atoi(head[0])
	if err != nil {
		return Info{}, err
	}
	info := Info{
		ID: id, Device: head[2], Dir: unescape(head[4]),
		Type: tail[0], Source: unescape(tail[1]),
	}
	for _, opt := range strings.Split(tail[len(tail)-1], ",") {
		if uid, ok := strings.CutPrefix(opt, "user_id="); ok {
			if info.UID, err = strconv.Atoi(uid); err != nil {
				return Info{}, err
			}
		}
	}
	return info, nil
}

// unescape undoes the kernel's \ooo for blanks, newlines and backslashes.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(n))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// MountPath is path made absolute, with symbolic links resolved, as mountinfo
// has it. It does not touch what is mounted at path.
func MountPath(path string) (string, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	for range 40 { // as many links as the kernel follows
		if _, mounted, err := FindMount(abs); err != nil || mounted {
			return abs, err
		}
		parent, err := filepath.EvalSymlinks(filepath.Dir(abs))
		if errors.Is(err, os.ErrNotExist) {
			return abs, nil // nothing can be mounted there
		}
		if err != nil {
			return "", fmt.Errorf("%s: %w", path, err)
		}
		abs = filepath.Join(parent, filepath.Base(abs))
		if _, mounted, err := FindMount(abs); err != nil || mounted {
			return abs, err
		}
		target, err := os.Readlink(abs)
		if err != nil {
			return abs, nil // not a link, or not there
		}
		if !filepath.IsAbs(target) {
			target = filepath.Join(parent, target)
		}
		abs = filepath.Clean(target)
	}
	return "", fmt.Errorf("%s: too many symbolic links", path)
}
