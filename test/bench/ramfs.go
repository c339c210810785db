// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fs"
	gofuse "github.com/hanwen/go-fuse/v2/fuse"
)

// ramFile is one file whose bytes lie in memory: what a FUSE file system in Go
// can do when it has nothing to do.
type ramFile struct {
	fs.Inode
	mem []byte
}

var (
	_ fs.NodeOpener    = (*ramFile)(nil)
	_ fs.NodeReader    = (*ramFile)(nil)
	_ fs.NodeGetattrer = (*ramFile)(nil)
)

func (f *ramFile) Getattr(_ context.Context, _ fs.FileHandle, out *gofuse.AttrOut) syscall.Errno {
	out.Mode, out.Size = syscall.S_IFREG|0o444, uint64(len(f.mem))
	return 0
}

func (f *ramFile) Open(context.Context, uint32) (fs.FileHandle, uint32, syscall.Errno) {
	return nil, gofuse.FOPEN_KEEP_CACHE, 0
}

func (f *ramFile) Read(_ context.Context, _ fs.FileHandle, dest []byte, off int64) (gofuse.ReadResult, syscall.Errno) {
	end := min(off+int64(len(dest)), int64(len(f.mem)))
	return gofuse.ReadResultData(f.mem[min(off, end):end]), 0
}

type ramRoot struct {
	fs.Inode
	mem []byte
}

func (r *ramRoot) OnAdd(ctx context.Context) {
	r.AddChild("file", r.NewPersistentInode(ctx, &ramFile{mem: r.mem}, fs.StableAttr{Mode: syscall.S_IFREG, Ino: 2}), true)
}

// serveRAM mounts until a signal ends it.
func serveRAM(dir string, size int64) error {
	mem := make([]byte, size)
	for i := 0; i < len(mem); i += 4096 {
		mem[i] = 1 // touch it, so that it is really there
	}
	srv, err := fs.Mount(dir, &ramRoot{mem: mem}, &fs.Options{MountOptions: gofuse.MountOptions{
		MaxWrite: 1 << 20, MaxBackground: 64, DirectMount: true, FsName: "ramfs", Name: "bench",
		// It complains of each read that does not fit a pipe, and copies it.
		Logger: log.New(io.Discard, "", 0),
	}})
	if err != nil {
		return err
	}
	var st syscall.Stat_t
	if err := syscall.Stat(dir, &st); err == nil {
		// The same kernel read-ahead as rmount's.
		dev := fmt.Sprintf("/sys/class/bdi/%d:%d/read_ahead_kb", st.Dev>>8&0xfff, st.Dev&0xff)
		if err := os.WriteFile(dev, []byte("1024"), 0); err != nil {
			return err
		}
	}
	fmt.Println("ready")
	ch := make(chan os.Signal, 1)
	signal.Notify(ch, syscall.SIGTERM, syscall.SIGINT)
	<-ch
	return srv.Unmount()
}
