// SPDX-License-Identifier: Apache-2.0

package fuse

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"golang.org/x/sys/unix"
)

// Options of a mount. The zero value is a good default: nosuid and nodev always
// hold, permission bits are enforced by the kernel, and nobody but the mounting
// user may come in.
type Options struct {
	// Source is shown by mount(8) and df(1); "" means "rmount". It must hold no
	// secrets.
	Source string
	// ReadOnly mounts read-only, whatever the export allows.
	ReadOnly bool
	// AllowOther lets every user in, as far as permission bits go. Without
	// root it needs user_allow_other in /etc/fuse.conf.
	AllowOther bool
	// AllowRoot lets root in beside the mounting user.
	AllowRoot bool
	// Generic are options of the kernel's VFS: see GenericOption.
	Generic []string
}

// genericOptions are the options of the VFS that a mount may carry, with their
// mount(2) flags.
var genericOptions = map[string]uintptr{
	"noexec":      unix.MS_NOEXEC,
	"noatime":     unix.MS_NOATIME,
	"relatime":    unix.MS_RELATIME,
	"strictatime": unix.MS_STRICTATIME,
	"sync":        unix.MS_SYNCHRONOUS,
	"dirsync":     unix.MS_DIRSYNC,
}

// GenericOption tells whether name may stand in Options.Generic.
func GenericOption(name string) bool { return genericOptions[name] != 0 }

// attach mounts a new connection on dir and returns its device: directly when
// we may, else through fusermount3.
func attach(dir string, o Options) (device, error) {
	o.Source = cmp.Or(o.Source, "rmount")
	dev, err := mountDirect(dir, o)
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		return mountHelper(dir, o)
	}
	return dev, err
}

// kernelOptions are the options that only FUSE knows.
func (o Options) kernelOptions() []string {
	opts := []string{fmt.Sprintf("max_read=%d", maxIO), "default_permissions"}
	if o.AllowOther || o.AllowRoot {
		opts = append(opts, "allow_other")
	}
	return opts
}

// mountDirect is mount(2).
func mountDirect(dir string, o Options) (device, error) {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENXIO) {
		return device{}, fmt.Errorf("/dev/fuse: %w (load the fuse kernel module: modprobe fuse)", err)
	}
	if err != nil {
		return device{}, fmt.Errorf("/dev/fuse: %w", err)
	}
	flags := uintptr(unix.MS_NOSUID | unix.MS_NODEV)
	if o.ReadOnly {
		flags |= unix.MS_RDONLY
	}
	for _, name := range o.Generic {
		flags |= genericOptions[name]
	}
	data := append(o.kernelOptions(),
		fmt.Sprintf("fd=%d", fd), "rootmode=40000",
		fmt.Sprintf("user_id=%d", os.Geteuid()), fmt.Sprintf("group_id=%d", os.Getegid()))
	if err := unix.Mount(o.Source, dir, FSType, flags, strings.Join(data, ",")); err != nil {
		unix.Close(fd)
		return device{}, fmt.Errorf("mounting on %s: %w", dir, err)
	}
	return device{fd}, nil
}

// mountHelper lets the set-user-ID helper fusermount3 mount, and receives the
// device from it.
func mountHelper(dir string, o Options) (device, error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return device{}, fmt.Errorf("socket for fusermount3: %w", err)
	}
	defer unix.Close(pair[0])
	theirs := os.NewFile(uintptr(pair[1]), "fusermount3")
	opts := append(o.kernelOptions(), "nosuid", "nodev",
		"fsname="+escapeOption(o.Source), "subtype="+strings.TrimPrefix(FSType, "fuse."))
	if o.ReadOnly {
		opts = append(opts, "ro")
	}
	opts = append(opts, o.Generic...)
	cmd := exec.Command("fusermount3", "-o", strings.Join(opts, ","), "--", dir)
	cmd.Env = append(os.Environ(), "_FUSE_COMMFD=3") // the first of ExtraFiles
	cmd.ExtraFiles = []*os.File{theirs}
	err = runHelper(cmd)
	theirs.Close()
	if err != nil {
		return device{}, fmt.Errorf("mounting on %s: %w", dir, err)
	}
	return receiveDevice(pair[0])
}

// escapeOption protects what separates options from each other.
func escapeOption(s string) string {
	return strings.NewReplacer(`\`, `\\`, `,`, `\,`).Replace(s)
}

// runHelper runs fusermount3, whose complaint becomes the error.
func runHelper(cmd *exec.Cmd) error {
	var complaint bytes.Buffer
	cmd.Stderr = &complaint
	err := cmd.Run()
	if errors.Is(err, exec.ErrNotFound) {
		return errors.New("only root may mount without fusermount3: install the package fuse3")
	}
	if err != nil {
		return helperError(strings.TrimSpace(complaint.String()), err)
	}
	return nil
}

// helperError gives fusermount3's words, and the errno that they are about
// where it matters to us.
func helperError(complaint string, err error) error {
	if strings.Contains(complaint, unix.EBUSY.Error()) || strings.Contains(complaint, "Device or resource busy") {
		return fmt.Errorf("%s: %w", complaint, unix.EBUSY)
	}
	if complaint == "" {
		return fmt.Errorf("fusermount3: %w", err)
	}
	return errors.New(complaint)
}

// receiveDevice takes the descriptor that fusermount3 has sent.
func receiveDevice(socket int) (device, error) {
	var data [1]byte
	control := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(socket, data[:], control, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return device{}, fmt.Errorf("receiving from fusermount3: %w", err)
	}
	messages, err := unix.ParseSocketControlMessage(control[:n])
	if err != nil || len(messages) != 1 {
		return device{}, errors.New("fusermount3 has sent no descriptor")
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return device{}, errors.New("fusermount3 has sent no descriptor")
	}
	return device{fds[0]}, nil
}

// Mode is how to unmount.
type Mode int

const (
	// Clean unmounts what nobody uses, else it fails with unix.EBUSY.
	Clean Mode = iota
	// Lazy takes the mount out of the tree at once; it ends with its last user.
	Lazy
	// Force ends the mount whoever uses it: calls under way fail.
	Force
)

// Unmount unmounts dir, which must be as MountPath gives it. It asks nobody but
// the kernel, so a dead or hung daemon does not matter, except that Clean and
// the daemon's unwritten pages can wait for each other until ctx ends.
func Unmount(ctx context.Context, dir string, mode Mode) error {
	var flags int
	switch mode {
	case Lazy:
		flags = unix.MNT_DETACH
	case Force:
		flags = unix.MNT_FORCE
	}
	result := make(chan error, 1)
	go func() { result <- unmountDirect(dir, flags) }()
	var err error
	select {
	case err = <-result:
	case <-ctx.Done():
		return fmt.Errorf("unmounting %s: %w", dir, ctx.Err())
	}
	if errors.Is(err, unix.EBUSY) && mode == Force {
		// The connection is cut; what is left is to take the mount out.
		return Unmount(ctx, dir, Lazy)
	}
	if errors.Is(err, unix.EPERM) {
		err = unmountHelper(ctx, dir, mode)
	}
	if err != nil {
		return fmt.Errorf("unmounting %s: %w", dir, err)
	}
	return nil
}

func unmountDirect(dir string, flags int) error {
	return unix.Unmount(dir, flags|unix.UMOUNT_NOFOLLOW)
}

func unmountHelper(ctx context.Context, dir string, mode Mode) error {
	args := []string{"-u", "--", dir}
	if mode != Clean {
		args = append([]string{"-z"}, args...)
	}
	return runHelper(exec.CommandContext(ctx, "fusermount3", args...))
}
