// SPDX-License-Identifier: Apache-2.0

package faulty

import (
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Proxy forwards TCP connections and harms them on the way: the network of
// transports that run over TCP, and of the control plane.
type Proxy struct {
	listener net.Listener
	target   string
	wg       sync.WaitGroup

	up, down atomic.Int64 // bytes forwarded to the target, and back

	mu     sync.Mutex
	cond   *sync.Cond
	live   map[net.Conn]struct{} // guarded by mu
	stall  bool                  // guarded by mu
	refuse bool                  // guarded by mu
	limit  int64                 // guarded by mu: cut after so many bytes to the target; negative: never
	closed bool                  // guarded by mu
}

// NewProxy listens on a free port of the loopback interface and forwards to
// target ("host:port").
func NewProxy(target string) (*Proxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &Proxy{listener: l, target: target, live: map[net.Conn]struct{}{}, limit: -1}
	p.cond = sync.NewCond(&p.mu)
	p.wg.Go(p.accept)
	return p, nil
}

// Addr is where it listens.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// Bytes tells how many bytes went to the target and came back.
func (p *Proxy) Bytes() (up, down int64) { return p.up.Load(), p.down.Load() }

// Stall stops forwarding, or takes it up again. Connections stay up and new
// ones are made: a black hole.
func (p *Proxy) Stall(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stall = on
	p.cond.Broadcast()
}

// Refuse makes new connections end at once.
func (p *Proxy) Refuse(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refuse = on
}

// Limit cuts everything when n more bytes have gone to the target, in the
// middle of whatever they are; a negative n takes the limit away.
func (p *Proxy) Limit(n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.limit = n
}

// Cut resets every connection there is.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cutLocked()
}

func (p *Proxy) cutLocked() {
	for c := range p.live {
		_ = c.(*net.TCPConn).SetLinger(0)
		_ = c.Close()
	}
	p.cond.Broadcast()
}

// Close ends the proxy and its connections.
func (p *Proxy) Close() error {
	p.mu.Lock()
	p.closed = true
	err := p.listener.Close()
	p.cutLocked()
	p.mu.Unlock()
	p.wg.Wait()
	if errors.Is(err, net.ErrClosed) {
		err = nil
	}
	return err
}

func (p *Proxy) accept() {
	for {
		c, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.wg.Go(func() { p.carry(c) })
	}
}

// add notes c, unless nothing is to be carried.
func (p *Proxy) add(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.refuse {
		_ = c.Close()
		return false
	}
	p.live[c] = struct{}{}
	return true
}

func (p *Proxy) remove(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.live, c)
	_ = c.Close()
}

func (p *Proxy) carry(in net.Conn) {
	if !p.add(in) {
		return
	}
	defer p.remove(in)
	out, err := net.DialTimeout("tcp", p.target, 10*time.Second)
	if err != nil || !p.add(out) {
		return
	}
	defer p.remove(out)
	var wg sync.WaitGroup
	wg.Go(func() { p.copy(out, in, &p.up, true) })
	wg.Go(func() { p.copy(in, out, &p.down, false) })
	wg.Wait()
}

// copy forwards one direction until it ends.
func (p *Proxy) copy(dst, src net.Conn, count *atomic.Int64, limited bool) {
	buf := make([]byte, 64<<10)
	for {
		n, err := src.Read(buf)
		if n = p.pass(src, n, limited); n > 0 {
			if _, err := dst.Write(buf[:n]); err != nil {
				_ = src.Close()
				return
			}
			count.Add(int64(n))
		}
		p.spend(n, limited)
		if err != nil {
			if errors.Is(err, io.EOF) {
				_ = dst.(*net.TCPConn).CloseWrite()
			} else {
				_ = dst.Close()
			}
			return
		}
	}
}

// pass waits while the proxy stalls, and tells how many of n bytes may go on.
func (p *Proxy) pass(src net.Conn, n int, limited bool) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.stall && !p.closed && !p.gone(src) {
		p.cond.Wait()
	}
	if limited && p.limit >= 0 && int64(n) > p.limit {
		n = int(p.limit)
	}
	return n
}

// gone tells whether c was cut while it stalled. Caller holds mu.
func (p *Proxy) gone(c net.Conn) bool {
	return c.SetReadDeadline(time.Time{}) != nil
}

// spend takes n bytes off the limit, and cuts when it is used up.
func (p *Proxy) spend(n int, limited bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !limited || p.limit < 0 {
		return
	}
	if p.limit -= int64(n); p.limit <= 0 {
		p.limit = -1
		p.cutLocked()
	}
}
