// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"rblk/rdma"
)

// Limits of the device. They bound what a peer can make this side hold.
const (
	maxMessage  = 1 << 30 // bytes in one request
	maxSegments = 16
	maxQueue    = 16384 // requests in a send or receive queue
	maxReads    = 1024  // READs in flight, each way: a response holds a queue entry, no memory
	maxInline   = 512
)

// Defaults of Options.
const (
	// defaultHandshakeTime: two round trips on any network that is worth
	// using for this.
	defaultHandshakeTime = 10 * time.Second
	// defaultHalfOpen bounds peers that have connected and said nothing yet.
	defaultHalfOpen = 256
	// deregisterGrace is how long Deregister waits for a transfer that is
	// under way before it breaks its connection.
	deregisterGrace = time.Second
	// lingerTime is how long a NAK is given to reach the peer.
	lingerTime = time.Second
	// userTimeout is how long sent bytes may go unacknowledged before the
	// kernel breaks the connection (TCP_USER_TIMEOUT): several retransmissions
	// on a bad network. The protocol above has a keepalive of its own.
	userTimeout = 20 * time.Second
)

// Options of New. The zero value is a good default.
type Options struct {
	// HandshakeTime bounds a handshake, and how long a ConnRequest may be left
	// alone. Default 10 s.
	HandshakeTime time.Duration
	// HalfOpen bounds connections whose handshake is under way, per listener;
	// when one more comes, the oldest is closed. Default 256.
	HalfOpen int
	Logger   *slog.Logger // nil: discard
}

// New makes the provider. It cannot fail; the error is there for symmetry with
// providers that need hardware.
func New(opts Options) (rdma.Provider, error) {
	if opts.HandshakeTime <= 0 {
		opts.HandshakeTime = defaultHandshakeTime
	}
	if opts.HalfOpen <= 0 {
		opts.HalfOpen = defaultHalfOpen
	}
	if opts.Logger == nil {
		opts.Logger = slog.New(slog.DiscardHandler)
	}
	p := &provider{opts: opts}
	p.dev.p = p
	return p, nil
}

type provider struct {
	opts   Options
	dev    device
	closed atomic.Bool

	lingerMu sync.Mutex     // held over lingers.Add and the setting of closed
	lingers  sync.WaitGroup // sockets that deliver a last frame

	listeners, routes, domains, regions, conns atomic.Int64
}

var _ rdma.Provider = (*provider)(nil)

func (p *provider) Name() string { return "tcp" }

func (p *provider) Devices() ([]rdma.Device, error) { return []rdma.Device{&p.dev}, nil }

// Live counts what has not been closed; tests check that it goes back to zero.
func (p *provider) Live() map[string]int {
	return map[string]int{
		"listeners": int(p.listeners.Load()), "routes": int(p.routes.Load()), "domains": int(p.domains.Load()),
		"regions": int(p.regions.Load()), "connections": int(p.conns.Load()),
	}
}

func (p *provider) Close() error {
	if p.listeners.Load() != 0 || p.routes.Load() != 0 || p.domains.Load() != 0 {
		return fmt.Errorf("tcp: provider: %w", rdma.ErrBusy)
	}
	p.lingerMu.Lock()
	p.closed.Store(true)
	p.lingerMu.Unlock()
	p.lingers.Wait()
	return nil
}

// linger reads and drops what the peer still sends until it has seen our last
// frame and closed, so that no reset overtakes the frame. It takes sock over.
func (p *provider) linger(sock *net.TCPConn) {
	p.lingerMu.Lock()
	defer p.lingerMu.Unlock()
	if p.closed.Load() {
		sock.Close()
		return
	}
	p.lingers.Go(func() {
		defer sock.Close()
		sock.CloseWrite()
		sock.SetReadDeadline(time.Now().Add(lingerTime))
		buf := make([]byte, 16<<10)
		for {
			if _, err := sock.Read(buf); err != nil {
				return
			}
		}
	})
}

func (p *provider) Resolve(ctx context.Context, addr string) (rdma.Route, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, fmt.Errorf("tcp: address %q: want HOST:PORT: %w", addr, err)
	}
	addrs := []string{addr}
	if host != "" && net.ParseIP(host) == nil {
		names, err := net.DefaultResolver.LookupHost(ctx, host)
		if err != nil {
			return nil, fmt.Errorf("tcp: resolve %s: %w", host, err)
		}
		addrs = addrs[:0]
		for _, n := range names {
			addrs = append(addrs, net.JoinHostPort(n, port))
		}
	}
	p.routes.Add(1)
	return &route{p: p, addrs: addrs}, nil
}

type device struct{ p *provider }

func (d *device) Info() rdma.DeviceInfo {
	return rdma.DeviceInfo{
		Name: "tcp", Transport: "TCP", NUMANode: -1,
		Caps:       rdma.CapImmediate | rdma.CapPlacedOnCompletion | rdma.CapSharedReceive,
		MaxMessage: maxMessage, MaxSegments: maxSegments,
		MaxSendQueue: maxQueue, MaxRecvQueue: maxQueue, MaxReadDepth: maxReads, MaxInlineData: maxInline,
	}
}

func (d *device) NewDomain() (rdma.ProtectionDomain, error) {
	if d.p.closed.Load() {
		return nil, fmt.Errorf("tcp: domain: %w", net.ErrClosed)
	}
	d.p.domains.Add(1)
	return &domain{p: d.p, regions: map[uint32]*region{}, conns: map[*conn]struct{}{}}, nil
}
