// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo && verbs && vm

package verbs

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"rblk/rdma"
)

// These tests change the network and its devices: test/vm/guest/test-faults.sh
// runs them, in the virtual machine, on the two devices of its wire.
const (
	wireActive  = "10.9.0.1" // rxea, on va
	wirePassive = "10.9.0.2" // rxeb, on vb
	vmRegion    = 1 << 20
)

func sh(t testing.TB, command string) string {
	t.Helper()
	out, err := exec.Command("bash", "-c", command).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", command, err, out)
	}
	return string(out)
}

func vmContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// end is one side of a connection with its memory.
type end struct {
	pd   rdma.ProtectionDomain
	mr   rdma.MemoryRegion
	mem  []byte
	conn rdma.Conn
}

func newEnd(t testing.TB, dev rdma.Device) *end {
	t.Helper()
	mem, err := unix.Mmap(-1, 0, vmRegion, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	pd, err := dev.NewDomain()
	if err != nil {
		t.Fatal(err)
	}
	mr, err := pd.Register(mem, rdma.AccessLocalWrite|rdma.AccessRemoteRead|rdma.AccessRemoteWrite)
	if err != nil {
		t.Fatal(err)
	}
	return &end{pd: pd, mr: mr, mem: mem}
}

func (e *end) close(t testing.TB) {
	t.Helper()
	if e.conn != nil {
		check(t, e.conn.Close())
	}
	check(t, e.mr.Deregister())
	check(t, e.pd.Close())
	check(t, unix.Munmap(e.mem))
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

// pair is a connection over the wire; both ends are in this process.
type pair struct {
	active, passive rdma.Provider
	l               rdma.Listener
	a, b            *end
}

func providerFrom(t testing.TB, source string) rdma.Provider {
	t.Helper()
	o := Options{Logger: logger()}
	if source != "" {
		o.SourceAddr = netip.MustParseAddr(source)
	}
	p, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func wirePair(t testing.TB) *pair { return connectPair(t, wirePassive, wireActive) }

func connectPair(t testing.TB, listen, source string) *pair {
	t.Helper()
	p := &pair{active: providerFrom(t, source), passive: providerFrom(t, "")}
	var err error
	if p.l, err = p.passive.Listen(vmContext(t), net.JoinHostPort(listen, "0")); err != nil {
		t.Fatal(err)
	}
	p.a, p.b = p.connect(t)
	return p
}

func (p *pair) connect(t testing.TB) (a, b *end) {
	t.Helper()
	ctx := vmContext(t)
	accepted := make(chan *end, 1)
	go func() {
		defer close(accepted)
		q, err := p.l.Accept(ctx)
		if err != nil {
			t.Error(err)
			return
		}
		b := newEnd(t, q.Device())
		if b.conn, err = q.Accept(ctx, b.pd, rdma.ConnOptions{}, nil); err != nil {
			t.Error(err)
			return
		}
		accepted <- b
	}()
	r, err := p.active.Resolve(ctx, p.l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	a = newEnd(t, r.Device())
	if a.conn, err = r.Connect(ctx, a.pd, rdma.ConnOptions{}, nil); err != nil {
		t.Fatal(err)
	}
	b = <-accepted
	if b == nil {
		t.FailNow()
	}
	for i := range b.mem {
		b.mem[i] = byte(i * 7)
	}
	return a, b
}

func (p *pair) close(t testing.TB) {
	t.Helper()
	p.a.close(t)
	p.b.close(t)
	check(t, p.l.Close())
	check(t, p.active.Close())
	check(t, p.passive.Close())
}

// read READs n bytes and checks them.
func (p *pair) read(t testing.TB, n int) error {
	t.Helper()
	clear(p.a.mem[:n])
	wr := rdma.WorkRequest{ID: 1, Op: rdma.OpRead, Flags: rdma.WRSignaled, Local: []rdma.Segment{rdma.Seg(p.a.mr, 0, uint32(n))},
		Remote: rdma.RemoteAddr{Addr: p.b.mr.Addr(), RKey: p.b.mr.RKey()}}
	if _, err := p.a.conn.Post([]rdma.WorkRequest{wr}); err != nil {
		return err
	}
	var wc [1]rdma.Completion
	if _, err := p.a.conn.Wait(vmContext(t), wc[:]); err != nil {
		return err
	}
	if err := wc[0].Status.Err(); err != nil {
		return err
	}
	if string(p.a.mem[:n]) != string(p.b.mem[:n]) {
		t.Fatal("wrong bytes")
	}
	return nil
}

func (p *pair) reads(t testing.TB, count, n int) {
	t.Helper()
	for range count {
		if err := p.read(t, n); err != nil {
			t.Fatal(err)
		}
	}
}

func TestVMWire(t *testing.T) {
	p := wirePair(t)
	defer p.close(t)
	p.reads(t, 20, 64<<10)
	if a, b := p.a.conn.Info().Device.Info().Name, p.b.conn.Info().Device.Info().Name; a == b {
		t.Errorf("both ends are on %s: the traffic does not cross the wire", a)
	}
}

func TestVMDelayAndLoss(t *testing.T) {
	p := wirePair(t)
	defer p.close(t)
	defer sh(t, "tc qdisc del dev va root")
	sh(t, "tc qdisc add dev va root netem delay 5ms")
	p.reads(t, 20, 4096)
	sh(t, "tc qdisc replace dev va root netem loss 1%")
	p.reads(t, 100, 64<<10)
}

// TestVMBlackout: a network that loses everything for less than the retries
// last is not noticed.
func TestVMBlackout(t *testing.T) {
	p := wirePair(t)
	defer p.close(t)
	p.reads(t, 1, 4096)
	sh(t, "tc qdisc add dev va root netem loss 100%")
	done := make(chan error, 1)
	go func() { done <- p.read(t, 4096) }()
	sh(t, "tc qdisc del dev va root")
	if err := <-done; err != nil {
		t.Fatalf("READ over a network that came back: %v", err)
	}
	p.reads(t, 5, 64<<10)
}

// TestVMDark: a network that stays dark ends the connection, with the reason.
func TestVMDark(t *testing.T) {
	p := wirePair(t)
	defer p.close(t)
	p.reads(t, 1, 4096)
	sh(t, "tc qdisc add dev va root netem loss 100%")
	defer sh(t, "tc qdisc del dev va root")
	if err := p.read(t, 4096); !errors.Is(err, rdma.StatusRetryExceeded.Err()) {
		t.Fatalf("READ over a dark network: %v", err)
	}
	<-p.a.conn.Done()
	if err := p.a.conn.Err(); !errors.Is(err, rdma.ErrBroken) || !errors.Is(err, rdma.StatusRetryExceeded.Err()) {
		t.Fatalf("Err: %v", err)
	}
}

// TestVMLinkDown: a link that goes down ends the connection; rxe ends it at
// once, for want of a route. The device is of no use afterwards (docs/rdma.md).
func TestVMLinkDown(t *testing.T) {
	p := wirePair(t)
	defer p.close(t)
	p.reads(t, 1, 4096)
	sh(t, "ip link set va down")
	defer sh(t, "ip link set va up")
	if err := p.read(t, 4096); err == nil {
		t.Fatal("READ over a link that is down succeeded")
	}
	<-p.a.conn.Done()
	if err := p.a.conn.Err(); !errors.Is(err, rdma.ErrBroken) {
		t.Fatalf("Err: %v", err)
	}
}

// TestVMManyConnects: 200 connections come and go, and leave nothing in the
// kernel.
func TestVMManyConnects(t *testing.T) {
	p := wirePair(t)
	before := resources(t)
	for range 200 {
		a, b := p.connect(t)
		a.close(t)
		b.close(t)
	}
	deadline := time.Now().Add(30 * time.Second) // the CM keeps ids for a while: timewait
	for after := resources(t); after != before; after = resources(t) {
		if time.Now().After(deadline) {
			t.Fatalf("rdma resource: before\n%s\nafter\n%s", before, after)
		}
		time.Sleep(100 * time.Millisecond)
	}
	p.close(t)
}

func resources(t testing.TB) string {
	return regexp.MustCompile(` curr_unit.*`).ReplaceAllString(sh(t, "rdma resource show"), "")
}

// TestVMMemlock: with a low limit and no privilege, registration fails with one
// line that names need, limit and mend. The child is this test as uid 1000.
func TestVMMemlock(t *testing.T) {
	if os.Geteuid() == 0 {
		sh(t, "chmod 666 /dev/infiniband/*; chmod 755 "+os.Args[0])
		cmd := exec.Command("bash", "-c", "ulimit -l 64 && exec "+os.Args[0]+" -test.v -test.run '^TestVMMemlock$'")
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1000, Gid: 1000}}
		cmd.Env = append(os.Environ(), "HOME=/tmp")
		cmd.Dir = "/tmp"
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), "--- PASS: TestVMMemlock") {
			t.Fatalf("as uid 1000: %v\n%s", err, out)
		}
		return
	}
	p := providerFrom(t, "")
	defer p.Close()
	devs, err := p.Devices()
	if err != nil || len(devs) == 0 {
		t.Fatalf("devices: %v, %v", devs, err)
	}
	pd, err := devs[0].NewDomain()
	if err != nil {
		t.Fatal(err)
	}
	defer pd.Close()
	mem, err := unix.Mmap(-1, 0, vmRegion, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	_, err = pd.Register(mem, rdma.AccessRemoteRead)
	if !errors.Is(err, rdma.ErrMemlock) {
		t.Fatalf("register with a limit of 64 KiB: %v", err)
	}
	for _, want := range []string{"1.0 MiB", "64.0 KiB", "ulimit -l", "LimitMEMLOCK", "IPC_LOCK"} {
		if !strings.Contains(strings.ReplaceAll(err.Error(), "1 MiB", "1.0 MiB"), want) && !strings.Contains(strings.ReplaceAll(err.Error(), "64 KiB", "64.0 KiB"), want) {
			t.Errorf("%q does not name %s", err, want)
		}
	}
	if strings.Contains(err.Error(), "\n") {
		t.Errorf("more than one line: %q", err)
	}
}

// TestVMDeviceRemoved: the device is deleted under a connection, which ends at
// both sides and closes cleanly. Run last: rxe's deletion is complete only when
// this process, whose librdmacm keeps the device open, has ended.
func TestVMDeviceRemoved(t *testing.T) {
	p := wirePair(t)
	p.reads(t, 3, 4096)
	done := make(chan error, 1)
	go func() {
		for {
			if err := p.read(t, 64<<10); err != nil {
				done <- err
				return
			}
		}
	}()
	check(t, exec.Command("rdma", "link", "del", "rxea").Start())
	if err := <-done; err == nil {
		t.Fatal("reads go on without the device")
	}
	<-p.a.conn.Done()
	if err := p.a.conn.Err(); !errors.Is(err, rdma.ErrBroken) {
		t.Errorf("Err: %v", err)
	}
	p.close(t)
}

// TestVMNoDevice: without a device the provider lists none, and says what to do.
func TestVMNoDevice(t *testing.T) {
	p := providerFrom(t, "")
	defer func() { check(t, p.Close()) }()
	devs, err := p.Devices()
	if err != nil || len(devs) != 0 {
		t.Fatalf("devices: %v, %v", devs, err)
	}
	if _, err := p.Resolve(vmContext(t), "127.0.0.1:7472"); !errors.Is(err, rdma.ErrNoDevice) {
		t.Errorf("resolve: %v, want ErrNoDevice", err)
	}
}

func TestVMIPv6(t *testing.T) {
	p := connectPair(t, "fd09::1", "")
	defer p.close(t)
	p.reads(t, 10, 64<<10)
	if a := p.a.conn.Info().RemoteAddr.String(); !strings.HasPrefix(a, "[fd09::1]:") {
		t.Errorf("remote address %s", a)
	}
}
