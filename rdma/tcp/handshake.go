// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"rblk/rdma"
)

// The dialing side speaks first. Little-endian:
//
//	hello, 80 bytes: 0 "RBLKRDMA"   8 u16 version   10 u16 READ depth   12 u32 RNR timeout, ms (0: none)
//	                 16 u16 length of private data   18 [6] 0   24 [56] private data
//	reply, 172 bytes: 0 "RBLKRDMA"   8 u16 version   10 u16 READ depth   12 u32 RNR timeout, ms
//	                 16 u16 length of data   18 u8 result   19 [5] 0   24 [148] private data, or the reason
const (
	helloMagic   = "RBLKRDMA"
	helloVersion = 1
	helloSize    = 24 + rdma.MaxPrivateData
	replySize    = 24 + rdma.MaxRejectReason
)

const (
	resultAccepted = 1
	resultRejected = 2
	resultVersion  = 3
)

// greeting is a hello or a reply.
type greeting struct {
	version uint16
	reads   uint16
	rnr     uint32
	result  uint8
	data    []byte
}

func (g *greeting) encode(size int) []byte {
	b := make([]byte, size)
	copy(b, helloMagic)
	le.PutUint16(b[8:], g.version)
	le.PutUint16(b[10:], g.reads)
	le.PutUint32(b[12:], g.rnr)
	le.PutUint16(b[16:], uint16(len(g.data)))
	b[18] = g.result
	copy(b[24:], g.data)
	return b
}

var errNoGreeting = fmt.Errorf("%w: it does not greet as rblk's tcp provider (version %d) does; check host and port", rdma.ErrProtocol, helloVersion)

// decodeGreeting checks all but the version, whose layout later versions keep
// up to here.
func decodeGreeting(b []byte) (greeting, error) {
	if string(b[:8]) != helloMagic {
		return greeting{}, errNoGreeting
	}
	g := greeting{version: le.Uint16(b[8:]), reads: le.Uint16(b[10:]), rnr: le.Uint32(b[12:]), result: b[18]}
	n := int(le.Uint16(b[16:]))
	if g.version != helloVersion {
		return g, nil
	}
	if n > len(b)-24 || g.reads > maxReads || !allZero(b[19:24]) || !allZero(b[24+n:]) {
		return g, fmt.Errorf("%w: malformed greeting", rdma.ErrProtocol)
	}
	g.data = b[24 : 24+n : 24+n]
	return g, nil
}

func allZero(b []byte) bool {
	for _, x := range b {
		if x != 0 {
			return false
		}
	}
	return true
}

// terms is what a connection has agreed on.
type terms struct {
	reads   int           // READs in flight, each way
	rnr     time.Duration // of the peer's messages here; 0: none
	private []byte        // the peer's
}

func rnrMillis(d time.Duration) uint32 {
	if d <= 0 {
		return 0
	}
	return uint32(max(1, min(d.Milliseconds(), 1<<31)))
}

// withDefaults completes and clamps options.
func withDefaults(o rdma.ConnOptions) rdma.ConnOptions {
	def := func(v *int, d, most int) {
		if *v <= 0 {
			*v = d
		}
		*v = min(*v, most)
	}
	def(&o.SendDepth, 128, maxQueue)
	def(&o.RecvDepth, 64, maxQueue)
	def(&o.ReadDepth, 16, maxReads)
	def(&o.Segments, 4, maxSegments)
	def(&o.Inline, 64, maxInline)
	o.RecvDepth = max(o.RecvDepth, len(o.Receives))
	return o
}

// route is a resolved address.
type route struct {
	p     *provider
	addrs []string
	once  sync.Once
}

func (r *route) Device() rdma.Device { return &r.p.dev }

func (r *route) Close() error {
	r.once.Do(func() { r.p.routes.Add(-1) })
	return nil
}

func (r *route) Connect(ctx context.Context, pd rdma.ProtectionDomain, opts rdma.ConnOptions, private []byte) (rdma.Conn, error) {
	defer r.Close()
	d, err := checkDomain(r.p, pd, private, rdma.MaxPrivateData)
	if err != nil {
		return nil, err
	}
	opts = withDefaults(opts)
	ctx, cancel := context.WithTimeout(ctx, r.p.opts.HandshakeTime)
	defer cancel()
	var errs []error
	for _, addr := range r.addrs {
		// An address that swallows packets leaves time for the next.
		dialer := net.Dialer{Timeout: r.p.opts.HandshakeTime / time.Duration(len(r.addrs))}
		sock, err := dialer.DialContext(ctx, "tcp", addr)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		c, err := dial(ctx, sock.(*net.TCPConn), d, opts, private)
		if err != nil {
			sock.Close()
			return nil, fmt.Errorf("tcp: connect %s: %w", addr, err)
		}
		return c, nil
	}
	return nil, fmt.Errorf("tcp: connect: %w", joinLine(errs))
}

// joinLine joins errors on one line.
func joinLine(errs []error) error {
	err := errs[0]
	for _, e := range errs[1:] {
		err = fmt.Errorf("%w; %w", err, e)
	}
	return err
}

func checkDomain(p *provider, pd rdma.ProtectionDomain, data []byte, most int) (*domain, error) {
	d, ok := pd.(*domain)
	if !ok || d.p != p {
		return nil, fmt.Errorf("tcp: %w: domain of another device", rdma.ErrInvalid)
	}
	if len(data) > most {
		return nil, fmt.Errorf("tcp: %w: %d bytes of private data, at most %d", rdma.ErrInvalid, len(data), most)
	}
	return d, nil
}

// dial greets as the connecting side.
func dial(ctx context.Context, sock *net.TCPConn, d *domain, opts rdma.ConnOptions, private []byte) (*conn, error) {
	defer interruptible(ctx, sock)()
	hello := greeting{version: helloVersion, reads: uint16(opts.ReadDepth), rnr: rnrMillis(opts.RNRTimeout), data: private}
	if _, err := sock.Write(hello.encode(helloSize)); err != nil {
		return nil, cause(ctx, err)
	}
	b := make([]byte, replySize)
	if n, err := io.ReadFull(sock, b); err != nil {
		if n > 0 && string(b[:min(n, 8)]) != helloMagic[:min(n, 8)] {
			return nil, errNoGreeting
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			err = fmt.Errorf("%w: peer closed during the handshake: %w", rdma.ErrBroken, io.ErrUnexpectedEOF)
		}
		return nil, cause(ctx, err)
	}
	g, err := decodeGreeting(b)
	if err != nil {
		return nil, err
	}
	switch {
	case g.version != helloVersion:
		return nil, fmt.Errorf("%w: peer speaks version %d of the tcp provider, this side %d", rdma.ErrProtocol, g.version, helloVersion)
	case g.result == resultRejected:
		return nil, &rdma.RejectError{Reason: g.data}
	case g.result != resultAccepted || len(g.data) > rdma.MaxPrivateData:
		return nil, fmt.Errorf("%w: greeting with result %d and %d bytes", rdma.ErrProtocol, g.result, len(g.data))
	}
	c, err := newConn(sock, d, opts, terms{
		reads: min(opts.ReadDepth, int(g.reads)), rnr: time.Duration(g.rnr) * time.Millisecond, private: g.data,
	})
	if err == nil {
		c.start()
	}
	return c, err
}

// interruptible makes ctx's end interrupt sock; the returned function ends
// that and clears the deadline.
func interruptible(ctx context.Context, sock net.Conn) func() {
	fired := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(fired)
		sock.SetDeadline(time.Unix(1, 0))
	})
	return func() {
		if !stop() {
			<-fired
		}
		sock.SetDeadline(time.Time{})
	}
}

// cause prefers the context's error to the i/o error that it made.
func cause(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// listener accepts connections and greets them, each on a goroutine of its own.
type listener struct {
	p      *provider
	l      net.Listener
	reqs   chan *request
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	once   sync.Once

	mu   sync.Mutex
	half []*net.TCPConn // guarded by mu: handshakes under way, oldest first
}

func (p *provider) Listen(ctx context.Context, addr string) (rdma.Listener, error) {
	if p.closed.Load() {
		return nil, fmt.Errorf("tcp: listen: %w", net.ErrClosed)
	}
	nl, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("tcp: %w", err)
	}
	l := &listener{p: p, l: nl, reqs: make(chan *request)}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	p.listeners.Add(1)
	l.wg.Go(l.run)
	return l, nil
}

func (l *listener) Addr() net.Addr { return l.l.Addr() }

func (l *listener) Close() error {
	l.once.Do(func() {
		l.cancel()
		l.l.Close()
		l.wg.Wait()
		l.p.listeners.Add(-1)
	})
	return nil
}

func (l *listener) run() {
	for {
		sock, err := l.l.Accept()
		if err != nil {
			if l.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			l.p.opts.Logger.Warn("tcp: accept", "err", err)
			select { // out of descriptors, most likely: others must end first
			case <-time.After(50 * time.Millisecond):
			case <-l.ctx.Done():
			}
			continue
		}
		tc := sock.(*net.TCPConn)
		l.begin(tc)
		l.wg.Go(func() {
			defer l.end(tc)
			l.greet(tc)
		})
	}
}

// begin notes a handshake. When there are too many, the oldest loses its
// connection: peers that connect and stall cannot keep others out.
func (l *listener) begin(sock *net.TCPConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.half) >= l.p.opts.HalfOpen {
		l.p.opts.Logger.Warn("tcp: too many handshakes under way, closing the oldest", "remote", l.half[0].RemoteAddr())
		l.half[0].Close()
		l.half = slices.Delete(l.half, 0, 1)
	}
	l.half = append(l.half, sock)
}

func (l *listener) end(sock *net.TCPConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if i := slices.Index(l.half, sock); i >= 0 {
		l.half = slices.Delete(l.half, i, i+1)
	}
}

// greet reads a hello and hands the request out.
func (l *listener) greet(sock *net.TCPConn) {
	ctx, cancel := context.WithTimeout(l.ctx, l.p.opts.HandshakeTime)
	defer cancel()
	req := &request{p: l.p, sock: sock}
	if err := req.hello(ctx); err != nil {
		l.p.opts.Logger.Debug("tcp: handshake failed", "remote", sock.RemoteAddr(), "err", err)
		sock.Close()
		return
	}
	req.arm(l.p.opts.HandshakeTime)
	select {
	case l.reqs <- req:
	case <-l.ctx.Done():
		req.Reject([]byte("listener closed"))
	case <-ctx.Done():
		req.Reject([]byte("nobody took the connection request"))
	}
}

func (l *listener) Accept(ctx context.Context) (rdma.ConnRequest, error) {
	select {
	case req := <-l.reqs:
		return req, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-l.ctx.Done():
		return nil, net.ErrClosed
	}
}

// request is a peer that has said hello.
type request struct {
	p    *provider
	sock *net.TCPConn
	peer greeting

	mu    sync.Mutex
	timer *time.Timer // guarded by mu
	ended bool        // guarded by mu: accepted or rejected
}

func (r *request) hello(ctx context.Context) error {
	defer interruptible(ctx, r.sock)()
	b := make([]byte, helloSize)
	if _, err := io.ReadFull(r.sock, b); err != nil {
		return cause(ctx, err)
	}
	var err error
	if r.peer, err = decodeGreeting(b); err != nil {
		return err
	}
	if r.peer.version != helloVersion {
		reply := greeting{version: helloVersion, result: resultVersion}
		r.sock.Write(reply.encode(replySize))
		return fmt.Errorf("%w: peer speaks version %d", rdma.ErrProtocol, r.peer.version)
	}
	return nil
}

func (r *request) PrivateData() []byte  { return r.peer.data }
func (r *request) RemoteAddr() net.Addr { return r.sock.RemoteAddr() }
func (r *request) LocalAddr() net.Addr  { return r.sock.LocalAddr() }
func (r *request) Device() rdma.Device  { return &r.p.dev }

// arm rejects the request if it is left alone for d.
func (r *request) arm(d time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.timer = time.AfterFunc(d, func() { r.Reject([]byte("nobody took the connection request")) })
}

// end claims the request for its one ending.
func (r *request) end() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	was := r.ended
	r.ended = true
	r.timer.Stop()
	return !was
}

func (r *request) Accept(ctx context.Context, pd rdma.ProtectionDomain, opts rdma.ConnOptions, private []byte) (rdma.Conn, error) {
	d, err := checkDomain(r.p, pd, private, rdma.MaxPrivateData)
	if err != nil {
		return nil, err
	}
	if !r.end() {
		return nil, fmt.Errorf("tcp: accept: %w: request has ended", rdma.ErrInvalid)
	}
	opts = withDefaults(opts)
	t := terms{reads: min(opts.ReadDepth, int(r.peer.reads)), rnr: time.Duration(r.peer.rnr) * time.Millisecond, private: r.peer.data}
	c, err := r.accept(ctx, d, opts, t, private)
	if err != nil {
		r.answer(resultRejected, []byte("the target could not accept"))
		return nil, fmt.Errorf("tcp: accept: %w", err)
	}
	return c, nil
}

// accept makes the connection before it answers: a peer that is told yes can
// send at once.
func (r *request) accept(ctx context.Context, d *domain, opts rdma.ConnOptions, t terms, private []byte) (*conn, error) {
	c, err := newConn(r.sock, d, opts, t)
	if err != nil {
		return nil, err
	}
	reply := greeting{version: helloVersion, result: resultAccepted, reads: uint16(t.reads), rnr: rnrMillis(opts.RNRTimeout), data: private}
	finish := interruptible(ctx, r.sock)
	_, err = r.sock.Write(reply.encode(replySize))
	finish()
	if err != nil {
		c.Close()
		return nil, cause(ctx, err)
	}
	c.start()
	return c, nil
}

func (r *request) Reject(reason []byte) error {
	if len(reason) > rdma.MaxRejectReason {
		reason = reason[:rdma.MaxRejectReason]
	}
	if !r.end() {
		return nil
	}
	return r.answer(resultRejected, reason)
}

// answer sends a reply that ends the handshake, and gives the socket up.
func (r *request) answer(result uint8, data []byte) error {
	reply := greeting{version: helloVersion, result: result, data: data}
	r.sock.SetWriteDeadline(time.Now().Add(r.p.opts.HandshakeTime))
	_, err := r.sock.Write(reply.encode(replySize))
	r.p.linger(r.sock)
	return err
}
