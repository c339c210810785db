// SPDX-License-Identifier: Apache-2.0

// Command bench measures what docs/performance.md shows: a mounted dataset
// against a go-fuse file system that answers from memory, and the walk of
// 100,000 files against tmpfs. The two sides of a comparison take turns; medians
// of -rounds are printed. Needs root (kernel caches are dropped) and bin/.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"syscall"
	"time"
)

var (
	bin    = flag.String("bin", "bin", "directory of rblkd and rmount")
	rounds = flag.Int("rounds", 5, "rounds; medians are printed")
	size   = flag.Int64("size", 1<<30, "bytes of the file that is read")
	files  = flag.Int("files", 100_000, "files of the tree that is walked")
	ramDir = flag.String("ramfs", "", "serve a file from memory at this directory (internal)")
)

func main() {
	flag.Parse()
	var err error
	if *ramDir != "" {
		err = serveRAM(*ramDir, *size)
	} else {
		ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
		defer stop()
		err = run(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// lab is the directory and the processes of a run.
type lab struct {
	ctx     context.Context
	dir     string // on tmpfs
	control string
	cmds    []*exec.Cmd
}

func run(ctx context.Context) error {
	dir, err := os.MkdirTemp("/dev/shm", "rblk-bench-")
	if err != nil {
		return err
	}
	l := &lab{ctx: ctx, dir: dir}
	defer l.close()
	if err := l.prepare(); err != nil {
		return err
	}
	var t table
	for range *rounds {
		if err := errors.Join(ctx.Err(), l.round(&t)); err != nil {
			return err
		}
	}
	t.print()
	return nil
}

func (l *lab) close() {
	for _, c := range slices.Backward(l.cmds) {
		c.Process.Signal(syscall.SIGTERM)
		c.Wait()
	}
	exec.Command("umount", "-l", l.path("ram")).Run()
	os.RemoveAll(l.dir)
}

func (l *lab) path(name string) string { return filepath.Join(l.dir, name) }

// prepare makes a large file and a tree of small ones, and starts a target and
// the file system to compare with.
func (l *lab) prepare() error {
	for _, d := range []string{"big", "tree", "ram", "mnt", "mem"} {
		if err := os.Mkdir(l.path(d), 0o755); err != nil {
			return err
		}
	}
	if err := fill(l.path("big/file"), *size); err != nil {
		return err
	}
	for i := range *files {
		d := filepath.Join(l.path("tree"), fmt.Sprintf("d%04d", i/100))
		if i%100 == 0 {
			if err := os.Mkdir(d, 0o755); err != nil {
				return err
			}
		}
		if err := os.WriteFile(filepath.Join(d, fmt.Sprintf("f%06d", i)), []byte("x"), 0o644); err != nil {
			return err
		}
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	if _, err := l.start(regexp.MustCompile(`ready`), self, "-ramfs", l.path("ram"), "-size", fmt.Sprint(*size)); err != nil {
		return err
	}
	l.control, err = l.start(regexp.MustCompile(`control=(\S+)`), filepath.Join(*bin, "rblkd"), "serve", "--listen", "127.0.0.1:0", "--data-listen", "127.0.0.1:0",
		"--state-dir", l.path("state"), "--memory-dir", l.path("mem"), "--frames", "512MiB", "--log-level", "warn", "--dataset", "big="+l.path("big"), "--dataset", "tree="+l.path("tree"))
	return err
}

// fill writes n bytes that compress badly.
func fill(path string, n int64) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	buf := make([]byte, 1<<20)
	x := uint64(1)
	for off := int64(0); off < n; off += int64(len(buf)) {
		for i := range buf {
			x ^= x << 13
			x ^= x >> 7
			x ^= x << 17
			buf[i] = byte(x)
		}
		if _, err := f.Write(buf[:min(int64(len(buf)), n-off)]); err != nil {
			return err
		}
	}
	return nil
}

// start runs a program and waits until a line of its output matches.
func (l *lab) start(ready *regexp.Regexp, name string, args ...string) (string, error) {
	cmd := exec.Command(name, args...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", err
	}
	if err := cmd.Start(); err != nil {
		return "", err
	}
	l.cmds = append(l.cmds, cmd)
	for sc := bufio.NewScanner(out); sc.Scan(); {
		if m := ready.FindStringSubmatch(sc.Text()); m != nil {
			go io.Copy(io.Discard, out)
			return m[len(m)-1], nil
		}
	}
	return "", fmt.Errorf("%s ended before it was ready", name)
}

// round measures everything once.
func (l *lab) round(t *table) error {
	ram := l.path("ram/file")
	if err := t.reads("go-fuse, from RAM: first read", ram, 128<<10, 1<<20); err != nil {
		return err
	}
	mount := func(export string, f func(dir string) error) error {
		dir := l.path("mnt")
		if out, err := exec.Command(filepath.Join(*bin, "rmount"), "rblk://"+l.control+"/"+export, dir, "-o", "cache=2GiB").CombinedOutput(); err != nil {
			return fmt.Errorf("rmount: %w: %s", err, out)
		}
		err := f(dir)
		out, uerr := exec.Command(filepath.Join(*bin, "rmount"), "umount", dir).CombinedOutput()
		if uerr != nil {
			uerr = fmt.Errorf("umount: %w: %s", uerr, out)
		}
		return errors.Join(err, uerr)
	}
	for _, bs := range []int{128 << 10, 1 << 20} {
		err := mount("big", func(dir string) error {
			file := filepath.Join(dir, "file")
			return errors.Join(
				t.read("rblk, cold: over the network", file, bs, true),
				t.read("rblk, from its cache", file, bs, true),
				t.read("rblk, from the kernel's cache", file, bs, false))
		})
		if err != nil {
			return err
		}
	}
	if err := t.walk("walk of tmpfs", l.path("tree")); err != nil {
		return err
	}
	return mount("tree", func(dir string) error {
		return errors.Join(t.walk("walk of rblk, first", dir), t.walk("walk of rblk, again", dir))
	})
}

// table collects figures by name.
type table struct {
	names []string
	units map[string]string
	runs  map[string][]float64
}

func (t *table) add(name, unit string, v float64) {
	if t.runs == nil {
		t.runs, t.units = map[string][]float64{}, map[string]string{}
	}
	if t.runs[name] == nil {
		t.names = append(t.names, name)
	}
	t.runs[name], t.units[name] = append(t.runs[name], v), unit
}

func (t *table) reads(name, path string, sizes ...int) error {
	for _, bs := range sizes {
		if err := t.read(name, path, bs, true); err != nil {
			return err
		}
	}
	return nil
}

// read reads a file from end to end, after dropping the kernel's pages.
func (t *table) read(name, path string, bs int, drop bool) error {
	if drop {
		if err := os.WriteFile("/proc/sys/vm/drop_caches", []byte("3"), 0); err != nil {
			return err
		}
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	buf := make([]byte, bs)
	start, n := time.Now(), int64(0)
	for {
		m, err := f.Read(buf)
		n += int64(m)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
	}
	if n != *size {
		return fmt.Errorf("%s: %d bytes, want %d", path, n, *size)
	}
	t.add(fmt.Sprintf("%s, %d KiB reads", name, bs>>10), "MB/s", float64(n)/time.Since(start).Seconds()/1e6)
	return nil
}

// walk lists and stats every name below dir, as find -size does.
func (t *table) walk(name, dir string) error {
	start, n := time.Now(), 0
	err := filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		n++
		_, err = d.Info()
		return err
	})
	if err == nil && n < *files {
		err = fmt.Errorf("%s: %d names, want more than %d", dir, n, *files)
	}
	t.add(name, "names/s", float64(n)/time.Since(start).Seconds())
	return err
}

func (t *table) print() {
	fmt.Printf("| what | median of %d | lowest – highest |\n|---|---:|---:|\n", *rounds)
	for _, name := range t.names {
		v := t.runs[name]
		slices.Sort(v)
		fmt.Printf("| %s | %.0f %s | %.0f – %.0f |\n", name, v[len(v)/2], t.units[name], v[0], v[len(v)-1])
	}
}
