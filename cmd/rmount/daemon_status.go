// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"

	"rblk/cache"
	"rblk/fuse"
	"rblk/volume"
)

// statusTime bounds one exchange over a status socket, on both sides. The
// answer is made from the daemon's memory; it never waits for a target.
const statusTime = time.Second

// mountStatus is what the daemon of a mount says of itself, as JSON.
type mountStatus struct {
	Source     string         `json:"source"`
	Mountpoint string         `json:"mountpoint"`
	PID        int            `json:"pid"`
	Version    string         `json:"version"`
	Started    time.Time      `json:"started"`
	State      string         `json:"state"` // the worst of the exports
	Exports    []exportStatus `json:"exports"`
}

// exportStatus is one opened export of a mount.
type exportStatus struct {
	Export     string      `json:"export"`
	Kind       volume.Kind `json:"kind"`
	Size       int64       `json:"size"`
	ReadOnly   bool        `json:"read_only"`
	Instance   string      `json:"instance"`
	Generation uint64      `json:"generation,omitempty"`
	State      string      `json:"state"`
	Error      string      `json:"error,omitempty"`
	Cache      cache.Stats `json:"cache"`
}

// runDirs are the directories where status sockets may be, the one to create
// in first. uid is whose mounts are meant.
func runDirs(uid int) []string {
	if dir := os.Getenv("RBLK_RUN"); dir != "" {
		return []string{dir}
	}
	var dirs []string
	if uid == 0 {
		return []string{"/run/rblk"}
	}
	if dir := os.Getenv("XDG_RUNTIME_DIR"); dir != "" && uid == os.Geteuid() {
		dirs = append(dirs, filepath.Join(dir, "rblk"))
	}
	id := strconv.Itoa(uid)
	return append(dirs, filepath.Join("/run/user", id, "rblk"), filepath.Join(os.TempDir(), "rblk-"+id))
}

// socketName is the file name of the status socket of the mount at dir: short
// enough for any socket address.
func socketName(dir string) string {
	return fmt.Sprintf("mount-%016x.sock", xxhash.Sum64String(dir))
}

// statusServer answers every connection with one JSON object.
type statusServer struct {
	listener net.Listener
	status   func() mountStatus
	log      *slog.Logger
	running  sync.WaitGroup
}

// serveStatus listens on the status socket of the mount at dir. A socket that a
// dead daemon left there is replaced.
func serveStatus(dir string, status func() mountStatus, log *slog.Logger) (*statusServer, error) {
	var errs []error
	for _, run := range runDirs(os.Geteuid()) {
		l, err := listenStatus(run, dir)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		s := &statusServer{listener: l, status: status, log: log}
		s.running.Go(s.run)
		return s, nil
	}
	return nil, fmt.Errorf("status socket: %w (RBLK_RUN names another directory)", errors.Join(errs...))
}

func listenStatus(run, dir string) (net.Listener, error) {
	if err := os.MkdirAll(run, 0o755); err != nil {
		return nil, err
	}
	path := filepath.Join(run, socketName(dir))
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		l.Close()
		return nil, err
	}
	return l, nil
}

func (s *statusServer) run() {
	for {
		conn, err := s.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			s.log.Error("the status socket is lost; the mount goes on", "err", err)
			return
		}
		// One at a time: an answer is small, and its time is bounded.
		conn.SetDeadline(time.Now().Add(statusTime))
		if err := json.NewEncoder(conn).Encode(s.status()); err != nil {
			s.log.Debug("status socket", "err", err)
		}
		conn.Close()
	}
}

// close ends the server and removes the socket.
func (s *statusServer) close() {
	s.listener.Close()
	s.running.Wait()
}

// readStatus asks the daemon of the mount at dir (as fuse.MountPath gives it)
// for its status. It touches neither the mount nor the target.
func readStatus(dir string) (mountStatus, error) {
	info, mounted, err := fuse.FindMount(dir)
	if err != nil {
		return mountStatus{}, err
	}
	if !mounted || info.Type != fuse.FSType {
		return mountStatus{}, fmt.Errorf("%s: not a mount of rmount", dir)
	}
	var errs []error
	for _, run := range runDirs(info.UID) {
		st, err := askStatus(filepath.Join(run, socketName(dir)))
		if err == nil {
			return st, nil
		}
		errs = append(errs, err)
	}
	return mountStatus{}, fmt.Errorf("%s: the daemon of this mount does not answer (rmount umount %s cleans up): %w", dir, dir, errors.Join(errs...))
}

// maxStatus bounds what is read from a status socket.
const maxStatus = 16 << 20

func askStatus(path string) (mountStatus, error) {
	conn, err := net.DialTimeout("unix", path, statusTime)
	if err != nil {
		return mountStatus{}, err
	}
	defer conn.Close()
	conn.SetDeadline(time.Now().Add(statusTime))
	var st mountStatus
	if err := json.NewDecoder(io.LimitReader(conn, maxStatus)).Decode(&st); err != nil {
		return mountStatus{}, fmt.Errorf("%s: %w", path, err)
	}
	return st, nil
}
