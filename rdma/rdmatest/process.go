// SPDX-License-Identifier: Apache-2.0

package rdmatest

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"rblk/rdma"
)

// childEnv makes Run play the peer that gets killed.
const childEnv = "RBLK_RDMATEST_CHILD"

// childLine precedes the address in the child's output.
const childLine = "rdmatest child listens on "

// runChild accepts one connection, gives read access to a page, and waits for
// its death.
func runChild(t *testing.T, factory Factory) {
	r := newRig(t, factory(t), false)
	l := r.listen()
	fmt.Printf("%s%s\n", childLine, r.pair.Dial(l.Addr()))
	q, err := l.Accept(r.ctx)
	r.must(err, "accept")
	pd := r.domain(q.Device())
	mem := r.memory(regionSize)
	fill(mem, 77)
	mr := r.register(pd, mem, rdma.AccessRemoteRead)
	reply := binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint64(nil, mr.Addr()), mr.RKey())
	if _, err := q.Accept(r.ctx, pd, rdma.ConnOptions{}, reply); err != nil {
		t.Fatal(err)
	}
	time.Sleep(r.pair.Patience)
	os.Exit(1) // an orphan ends, too
}

// testPeerDies: a peer process is killed with requests in flight; this side
// hears of it, and every request is reported once.
func testPeerDies(r *rig) {
	if r.pair.NoChild {
		return
	}
	kill, addr := r.startChild()
	ctx, cancel := contextOf(r)
	defer cancel()
	route, err := r.pair.Active.Resolve(ctx, addr)
	r.must(err, "resolve")
	s := r.newSide("active", r.domain(route.Device()))
	c, err := route.Connect(ctx, s.pd, rdma.ConnOptions{SendDepth: 32}, nil)
	r.must(err, "connect")
	s.adopt(c, false)
	at := c.Info().PrivateData
	remote := rdma.RemoteAddr{Addr: binary.LittleEndian.Uint64(at), RKey: binary.LittleEndian.Uint32(at[8:])}
	read := func(id uint64, n int) rdma.WorkRequest {
		return rdma.WorkRequest{ID: id, Op: rdma.OpRead, Flags: rdma.WRSignaled, Local: s.seg(0, n), Remote: remote}
	}
	s.post(read(1, 5000))
	s.expect(1)
	want := make([]byte, 5000)
	fill(want, 77)
	if string(s.mem[:5000]) != string(want) {
		r.Fatal("wrong bytes from the child")
	}
	next, posted := uint64(0), uint64(0)
	for i := range uint64(16) {
		s.post(read(i, regionSize))
		posted++
	}
	s.expect(next)
	next++
	kill()
	// Keep asking, as a client does, until the end is noticed.
	var wc [8]rdma.Completion
	for {
		n, err := s.conn.Wait(ctx, wc[:])
		for _, c := range wc[:n] {
			if c.ID != next {
				r.Fatalf("completion %d, want %d", c.ID, next)
			}
			next++
			if c.Status == rdma.StatusOK {
				if n, _ := s.conn.Post([]rdma.WorkRequest{read(posted, regionSize)}); n == 1 {
					posted++
				}
			}
		}
		if err != nil {
			break
		}
	}
	if next != posted {
		r.Fatalf("%d of %d requests were reported", next, posted)
	}
	s.dies()
}

// startChild runs this test binary as the peer, and returns how to kill it and
// where it listens.
func (r *rig) startChild() (kill func(), addr string) {
	top, _, _ := strings.Cut(r.Name(), "/")
	ctx, cancel := context.WithTimeout(r.ctx, r.pair.Patience)
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^"+top+"$", "-test.v")
	cmd.Env = append(os.Environ(), childEnv+"=1")
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	r.must(err, "child")
	r.must(cmd.Start(), "child")
	ended := false
	kill = func() {
		if !ended {
			ended = true
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			cancel()
		}
	}
	r.later(kill)
	var seen strings.Builder
	for lines := bufio.NewScanner(out); lines.Scan(); {
		if _, a, ok := strings.Cut(lines.Text(), childLine); ok {
			return kill, a
		}
		seen.WriteString(lines.Text() + "\n")
	}
	r.Fatalf("the child does not listen:\n%s", seen.String())
	return nil, ""
}
