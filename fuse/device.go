// SPDX-License-Identifier: Apache-2.0

package fuse

import (
	"errors"
	"unsafe"

	gofuse "github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// Opcodes that the descriptor loop must know; the others are go-fuse's
// business. Source: include/uapi/linux/fuse.h.
const (
	opForget      = 2
	opRead        = 15
	opWrite       = 16
	opInit        = 26
	opReaddir     = 28
	opInterrupt   = 36
	opBatchForget = 42
	opReaddirplus = 44
)

// Sizes on the wire.
const (
	sizeInHeader  = int(unsafe.Sizeof(gofuse.InHeader{}))
	sizeOutHeader = int(unsafe.Sizeof(gofuse.OutHeader{}))
	sizeReadIn    = int(unsafe.Sizeof(gofuse.ReadIn{}))
	sizeWriteIn   = int(unsafe.Sizeof(gofuse.WriteIn{}))
)

// device is an open /dev/fuse descriptor: one connection to the kernel. Any
// number of goroutines may read and write it; close comes after all of them.
type device struct{ fd int }

// read blocks until the kernel has a message, and returns its length.
// unix.ENODEV means that the filesystem was unmounted or aborted; all other
// errors that concern a single request are retried here.
func (d device) read(p []byte) (int, error) {
	for {
		n, err := unix.Read(d.fd, p)
		switch {
		case err == nil && n >= sizeInHeader:
			return n, nil
		case err == nil: // end of file: the connection is gone
			return 0, unix.ENODEV
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN):
		case errors.Is(err, unix.ENOENT): // the request was aborted while being read
		case errors.Is(err, unix.ECONNABORTED):
			return 0, unix.ENODEV
		default:
			return 0, err
		}
	}
}

// writev sends one message. The kernel takes a message whole or not at all.
func (d device) writev(iov ...[]byte) error {
	for {
		_, err := unix.Writev(d.fd, iov)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// notify sends an unsolicited message: code is a gofuse.NOTIFY_* constant, parts
// the body that belongs to it. On the wire the code is positive.
func (d device) notify(code int32, parts ...[]byte) error {
	h := gofuse.OutHeader{Length: uint32(sizeOutHeader), Status: -code}
	iov := make([][]byte, 1, 1+len(parts))
	for _, p := range parts {
		h.Length += uint32(len(p))
		iov = append(iov, p)
	}
	iov[0] = bytesOf(&h)
	return d.writev(iov...)
}

// invalidateInode drops the kernel's cached attributes of a node, and its
// cached pages in [off, off+length): length 0 means to the end, off < 0 none.
// A node that the kernel does not know gives nil.
func (d device) invalidateInode(node uint64, off, length int64) error {
	out := gofuse.NotifyInvalInodeOut{Ino: node, Off: off, Length: length}
	return ignoreNoEntry(d.notify(gofuse.NOTIFY_INVAL_INODE, bytesOf(&out)))
}

// invalidateEntry drops a name, known or known to be absent, that the kernel
// has cached in a directory.
func (d device) invalidateEntry(parent uint64, name string) error {
	out := gofuse.NotifyInvalEntryOut{Parent: parent, NameLen: uint32(len(name))}
	return ignoreNoEntry(d.notify(gofuse.NOTIFY_INVAL_ENTRY, bytesOf(&out), append([]byte(name), 0)))
}

func (d device) close() error { return unix.Close(d.fd) }

func ignoreNoEntry(err error) error {
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// bytesOf views a wire struct as bytes.
func bytesOf[T any](p *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(p)), unsafe.Sizeof(*p))
}

// as views the start of a message as a wire struct. The caller has checked that
// the message is long enough; messages begin at 8-byte boundaries.
func as[T any](b []byte) *T { return (*T)(unsafe.Pointer(unsafe.SliceData(b))) }
