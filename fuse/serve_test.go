// SPDX-License-Identifier: Apache-2.0

package fuse

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	gofuse "github.com/hanwen/go-fuse/v2/fuse"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"rblk/internal/need"
)

// patience bounds every wait of the tests for something that must happen.
const patience = 20 * time.Second

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// testLog sends a log to the test's.
// discard is a log that nobody reads.
var discard = slog.New(slog.DiscardHandler)

func testLog(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelInfo}))
}

// ramFS is one file of bytes, "file", which can be made to block.
type ramFS struct {
	gofuse.RawFileSystem
	mu      sync.Mutex // for data: the race detector does not see through the kernel
	data    []byte
	blocked chan string // told of each call that blocks
	block   bool
	cached  bool // the kernel may keep pages
}

const ramFile = 2

func newRAM(n int) *ramFS {
	r := &ramFS{RawFileSystem: gofuse.NewDefaultRawFileSystem(), data: make([]byte, n), blocked: make(chan string, 100)}
	for i := range r.data {
		r.data[i] = byte(i * 7 >> 3)
	}
	return r
}

func (r *ramFS) attr(n uint64, a *gofuse.Attr) {
	*a = gofuse.Attr{Ino: n, Nlink: 1, Mode: unix.S_IFREG | 0o644, Size: uint64(len(r.data))}
	if n == gofuse.FUSE_ROOT_ID {
		a.Mode = unix.S_IFDIR | 0o755
	}
}

func (r *ramFS) Lookup(cancel <-chan struct{}, _ *gofuse.InHeader, name string, out *gofuse.EntryOut) gofuse.Status {
	switch name {
	case "file":
		out.NodeId = ramFile
		r.attr(ramFile, &out.Attr)
		return gofuse.OK
	case "block":
		return r.wait("lookup", cancel)
	}
	return gofuse.ENOENT
}

func (r *ramFS) wait(what string, cancel <-chan struct{}) gofuse.Status {
	r.blocked <- what
	<-cancel
	return gofuse.EINTR
}

func (r *ramFS) GetAttr(_ <-chan struct{}, in *gofuse.GetAttrIn, out *gofuse.AttrOut) gofuse.Status {
	r.attr(in.NodeId, &out.Attr)
	return gofuse.OK
}

func (r *ramFS) Open(_ <-chan struct{}, _ *gofuse.OpenIn, out *gofuse.OpenOut) gofuse.Status {
	if !r.cached {
		out.OpenFlags = gofuse.FOPEN_DIRECT_IO
	}
	return gofuse.OK
}

func (r *ramFS) StatFs(<-chan struct{}, *gofuse.InHeader, *gofuse.StatfsOut) gofuse.Status {
	return gofuse.OK
}

type ramReply [][]byte

func (r ramReply) Slices() [][]byte { return r }
func (r ramReply) Len() int         { return len(r[0]) + len(r[1]) }
func (r ramReply) Release()         {}

func (r *ramFS) read(ctx context.Context, in *gofuse.ReadIn) (reply, gofuse.Status) {
	if r.block {
		return nil, r.wait("read", ctx.Done())
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	off := min(int(in.Offset), len(r.data))
	b := r.data[off:min(off+int(in.Size), len(r.data))]
	return ramReply{b[:len(b)/3], b[len(b)/3:]}, gofuse.OK // in two pieces
}

func (r *ramFS) write(_ context.Context, in *gofuse.WriteIn, data []byte) (uint32, gofuse.Status) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return uint32(copy(r.data[in.Offset:], data)), gofuse.OK
}

func (r *ramFS) holds(off int, want []byte) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return bytes.Equal(r.data[off:off+len(want)], want)
}

// mountRAM mounts r and starts a server. The mount is gone at the test's end.
func mountRAM(t *testing.T, r *ramFS) (dir string, s *server) {
	t.Helper()
	need.Root(t)
	need.FUSE(t)
	dir = t.TempDir()
	dev, err := attach(dir, Options{Source: "test"})
	if err != nil {
		t.Fatal(err)
	}
	s, err = newServer(dev, r, protocolOptions(false, true, testLog(t)), testLog(t))
	if err != nil {
		t.Fatal(err)
	}
	s.start()
	primePoll(t, dir+"/file")
	return dir, s
}

// primePoll lets the kernel learn that we have no FUSE_POLL. Go's os.Open polls
// what it opens, in a way that stops the whole process until the answer is
// there; a process that serves the mount itself would wait for itself.
func primePoll(t *testing.T, file string) {
	t.Helper()
	fd, err := unix.Open(file, unix.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0); err != nil {
		t.Fatal(err)
	}
}

// endRAM unmounts and waits for the server.
func endRAM(t *testing.T, dir string, s *server) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := Unmount(ctx, dir, Clean); err != nil {
		t.Error(err)
	}
	wait(t, s.done, "the server's end")
	s.dev.close()
}

func wait(t testing.TB, done <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatalf("no sign of %s", what)
	}
}

func TestServe(t *testing.T) {
	r := newRAM(5<<20 + 77)
	dir, s := mountRAM(t, r)
	defer endRAM(t, dir, s)
	got, err := os.ReadFile(dir + "/file")
	if err != nil || !r.holds(0, got) || len(got) != len(r.data) {
		t.Fatalf("read %d bytes, %v", len(got), err)
	}
	f, err := os.OpenFile(dir+"/file", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	want := bytes.Repeat([]byte("rblk"), 300<<10)
	if n, err := f.WriteAt(want, 12345); n != len(want) || err != nil {
		t.Fatal(n, err)
	}
	if !r.holds(12345, want) {
		t.Error("written bytes differ")
	}
	if _, err := os.Stat(dir + "/none"); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
	if err := os.Mkdir(dir+"/d", 0o755); !errors.Is(err, syscall.ENOSYS) {
		t.Error(err)
	}
}

// statfsPoke is what the owner of a mount gives to stop.
func statfsPoke(dir string) func() {
	return func() {
		var st unix.Statfs_t
		unix.Statfs(dir, &st)
	}
}

// TestAdopt hands a live mount from server to server, as a new process will
// take it over from an old one, while files are open and being read.
func TestAdopt(t *testing.T) {
	r := newRAM(3 << 20)
	dir, s := mountRAM(t, r)
	f, err := os.Open(dir + "/file")
	if err != nil {
		t.Fatal(err)
	}
	stop := make(chan struct{})
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			buf := make([]byte, len(r.data))
			for {
				select {
				case <-stop:
					return
				default:
				}
				if n, err := f.ReadAt(buf, 0); n != len(buf) || !bytes.Equal(buf, r.data) {
					t.Errorf("read %d bytes: %v", n, err)
					return
				}
			}
		})
	}
	var old []*sync.WaitGroup
	for range 10 {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		pokes, err := s.stop(ctx, statfsPoke(dir))
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		old = append(old, pokes)
		next, err := adoptServer(s.dev, s.init, r, protocolOptions(false, true, testLog(t)), testLog(t))
		if err != nil {
			t.Fatal(err)
		}
		next.start()
		s = next
		// The new one serves what the old one never saw.
		if _, err := os.Stat(fmt.Sprintf("%s/none%d", dir, len(old))); !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
	}
	close(stop)
	readers.Wait()
	f.Close()
	endRAM(t, dir, s)
	for _, pokes := range old {
		pokes.Wait()
	}
}

// TestInterrupt kills a process that is blocked in READ or LOOKUP.
func TestInterrupt(t *testing.T) {
	r := newRAM(1 << 20)
	r.block = true
	dir, s := mountRAM(t, r)
	defer endRAM(t, dir, s)
	for _, path := range []string{"/file", "/block"} {
		cmd := exec.Command("cat", dir+path)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		select {
		case what := <-r.blocked:
			t.Log("blocked in", what)
		case <-time.After(patience):
			t.Error("cat did not come")
		}
		cmd.Process.Kill()
		if err := cmd.Wait(); err == nil {
			t.Error("cat was not killed")
		}
	}
}

// TestCancelAll ends a server whose requests are all blocked, with the mount
// still there.
func TestCancelAll(t *testing.T) {
	r := newRAM(1 << 20)
	r.block = true
	dir, s := mountRAM(t, r)
	var calls sync.WaitGroup
	const each = 20 // more than there are processors, so new workers must come
	f, err := os.Open(dir + "/file")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for range each {
		calls.Go(func() {
			if _, err := f.ReadAt(make([]byte, 10), 0); err == nil || err == io.EOF {
				t.Error("a blocked read succeeded")
			}
		})
	}
	calls.Go(func() {
		if _, err := os.Stat(dir + "/block"); err == nil {
			t.Error("a blocked lookup succeeded")
		}
	})
	for range each + 1 {
		select {
		case <-r.blocked:
		case <-time.After(patience):
			t.Fatal("calls did not come")
		}
	}
	s.cancelAll()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	pokes, err := s.stop(ctx, statfsPoke(dir))
	if err != nil {
		t.Fatal(err)
	}
	s.dev.close() // the kernel fails what comes after
	pokes.Wait()
	calls.Wait()
	if err := Unmount(ctx, dir, Lazy); err != nil {
		t.Error(err)
	}
}

func TestReplyIsAllocationFree(t *testing.T) {
	null, err := unix.Open("/dev/null", unix.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(null)
	w := newWorker()
	s := &server{dev: device{null}, log: testLog(t)}
	body := [][]byte{make([]byte, 10), make([]byte, 10)}
	if n := testing.AllocsPerRun(100, func() {
		w.unique.Store(42)
		s.send(w, gofuse.OK, 42, body...)
		w.finish()
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}
