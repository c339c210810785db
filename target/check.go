// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"rblk/internal/size"
)

// Level says how bad a Finding is.
type Level string

const (
	Good     Level = "ok"
	Doubtful Level = "warn" // it works, but look at it
	Bad      Level = "FAIL" // Serve would not work
)

// Finding is one thing that Check looked at.
type Finding struct {
	Level  Level  `json:"level"`
	Name   string `json:"name"`
	Detail string `json:"detail"` // one line; names the mend
}

// checker collects findings.
type checker struct{ found []Finding }

func (c *checker) good(name, format string, args ...any) {
	c.found = append(c.found, Finding{Good, name, fmt.Sprintf(format, args...)})
}

func (c *checker) doubtful(name, format string, args ...any) {
	c.found = append(c.found, Finding{Doubtful, name, fmt.Sprintf(format, args...)})
}

func (c *checker) bad(name string, err error) {
	c.found = append(c.found, Finding{Bad, name, strings.Join(strings.Fields(err.Error()), " ")})
}

// Check looks for what would keep a Server with these options and exports from
// working. It changes nothing, and may run beside a living Server.
func Check(ctx context.Context, opts Options, memories []MemoryConfig, datasets []DatasetConfig) []Finding {
	opts.defaults()
	c := &checker{}
	if len(datasets) == 0 {
		opts.Frames = 0 // they are not made
	}
	c.memlock(&opts, memories)
	c.files()
	for _, m := range memories {
		c.memory(&opts, m)
	}
	for _, d := range datasets {
		c.dataset(d)
	}
	c.dir("state directory", opts.StateDir)
	sec := c.security(&opts)
	c.control(ctx, &opts, sec)
	c.data(ctx, &opts)
	return c.found
}

// memlock compares what will be pinned with what may be. Adapters count memory
// once more for each domain that it is registered in: a read-only one and a
// read-write one for memory exports.
func (c *checker) memlock(opts *Options, memories []MemoryConfig) {
	need := opts.Frames
	for _, m := range memories {
		if m.HugePages == 0 {
			need += m.Size
		}
	}
	for _, l := range opts.Providers {
		if l.Provider.Name() != "tcp" {
			need = 2*opts.Frames + 3*(need-opts.Frames)
			break
		}
	}
	limit, unlimited := memlockLimit()
	switch {
	case unlimited:
		c.good("memlock", "unlimited; %s are needed", size.Format(need))
	case need > limit:
		c.bad("memlock", &MemlockError{Need: need})
	default:
		c.good("memlock", "%s of %s are needed", size.Format(need), size.Format(limit))
	}
}

// memlockLimit is how much this process may pin.
func memlockLimit() (n int64, unlimited bool) {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &lim); err != nil || lim.Cur == unix.RLIM_INFINITY || hasIPCLock() {
		return 0, true
	}
	return int64(lim.Cur), false
}

// hasIPCLock: CAP_IPC_LOCK lifts the memlock limit (mlock(2)).
func hasIPCLock() bool {
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return false
	}
	for line := range strings.Lines(string(text)) {
		if v, ok := strings.CutPrefix(line, "CapEff:"); ok {
			caps, err := strconv.ParseUint(strings.TrimSpace(v), 16, 64)
			return err == nil && caps&(1<<unix.CAP_IPC_LOCK) != 0
		}
	}
	return false
}

// enoughFiles: a descriptor for each connection and a few for each fill.
const enoughFiles = 4096

func (c *checker) files() {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &lim); err != nil {
		c.bad("open files", err)
		return
	}
	// Go raises the soft limit to the hard one at start.
	if lim.Max < enoughFiles {
		c.doubtful("open files", "limit %d: many sessions need more; raise it (LimitNOFILE=65536 in the unit, or ulimit -Hn)", lim.Max)
		return
	}
	c.good("open files", "limit %d", lim.Max)
}

// memory looks for room, huge pages, and what is there already.
func (c *checker) memory(opts *Options, m MemoryConfig) {
	name := "memory " + m.Name
	if !nameOK(m.Name) {
		c.bad(name, errName(m.Name))
		return
	}
	dir, page, err := m.place(opts.MemoryDir)
	if err != nil {
		c.bad(name, err)
		return
	}
	path := filepath.Join(dir, m.Name+".mem")
	need := roundTo(m.Size, page)
	if st, err := os.Stat(path); err == nil {
		if st.Size() != need {
			c.doubtful(name, "%s holds %s: serve keeps that size only; use `rblkd export resize`", path, size.Format(st.Size()))
			return
		}
		c.good(name, "%s is there with %s", path, size.Format(need))
		return
	}
	have := dir
	for {
		if _, err := os.Stat(have); err == nil || have == filepath.Dir(have) {
			break
		}
		have = filepath.Dir(have)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(have, &st); err != nil {
		c.bad(name, err)
		return
	}
	if room := int64(st.Bavail) * st.Bsize; room < need {
		c.bad(name, errNoRoom(need, dir, m.HugePages))
		return
	}
	const tmpfs, hugetlb = 0x01021994, 0x958458f6 // TMPFS_MAGIC, HUGETLBFS_MAGIC
	if st.Type != tmpfs && st.Type != hugetlb {
		c.doubtful(name, "%s is not on tmpfs: its pages would be written to a disk; choose another --memory-dir", dir)
		return
	}
	c.good(name, "%s in %s", size.Format(need), dir)
}

func (c *checker) dataset(d DatasetConfig) {
	name := "dataset " + d.Name
	if !nameOK(d.Name) {
		c.bad(name, errName(d.Name))
		return
	}
	f, err := oDirectory(d.Path)
	if err == nil {
		_, err = f.Readdirnames(1)
		f.Close()
	}
	if err != nil && err.Error() != "EOF" {
		c.bad(name, fmt.Errorf("%w: it must be a directory that this user can read", err))
		return
	}
	c.good(name, "%s is readable", d.Path)
}

// dir looks whether a directory can be written to, or be made.
func (c *checker) dir(name, dir string) {
	have := dir
	for {
		st, err := os.Stat(have)
		if err == nil && !st.IsDir() {
			c.bad(name, fmt.Errorf("%s is no directory", have))
			return
		}
		if err == nil || have == filepath.Dir(have) {
			break
		}
		have = filepath.Dir(have)
	}
	if err := unix.Access(have, unix.W_OK); err != nil {
		c.bad(name, fmt.Errorf("%s cannot be written to (%w): choose another with --state-dir", have, err))
		return
	}
	c.good(name, "%s", dir)
}

func (c *checker) security(opts *Options) *security {
	sec, err := newSecurity(opts)
	if err != nil {
		c.bad("security", err)
		return nil
	}
	switch {
	case sec.tls != nil && opts.TLSClientCA != "":
		c.good("security", "TLS 1.3, clients prove themselves by certificate")
	case sec.tls != nil:
		c.good("security", "TLS 1.3")
	default:
		c.good("security", "plain HTTP")
	}
	if opts.TokenFile == "" {
		return sec
	}
	if st, err := os.Stat(opts.TokenFile); err == nil && st.Mode().Perm()&0o077 != 0 {
		c.doubtful("token file", "%s can be read by others: chmod 600", opts.TokenFile)
	}
	return sec
}

// control looks whether the addresses are free.
func (c *checker) control(ctx context.Context, opts *Options, sec *security) {
	for _, addr := range opts.Listen {
		name := "control " + addr
		if path, ok := strings.CutPrefix(addr, "unix:"); ok {
			conn, err := net.Dial("unix", path)
			if err == nil {
				conn.Close()
				c.bad(name, listenError("control", addr, "--listen", syscall.EADDRINUSE))
				continue
			}
			c.good(name, "free")
			continue
		}
		l, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
		if err != nil {
			c.bad(name, listenError("control", addr, "--listen", err))
			continue
		}
		if sec != nil {
			err = sec.allowPlain(l.Addr())
		}
		l.Close()
		if err != nil {
			c.bad(name, err)
			continue
		}
		c.good(name, "free")
	}
}

func (c *checker) data(ctx context.Context, opts *Options) {
	if len(opts.Providers) == 0 {
		c.bad("data", errors.New("no transport: say --data-listen"))
	}
	for _, d := range opts.Providers {
		name := "data " + d.Provider.Name() + " " + d.Addr
		l, err := d.Provider.Listen(ctx, d.Addr)
		if err != nil {
			c.bad(name, listenError("data", d.Addr, "--data-listen", err))
			continue
		}
		l.Close()
		c.good(name, "free")
	}
}
