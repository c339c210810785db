// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/net/netutil"

	"rblk/dataset"
	"rblk/rdma"
	"rblk/wire"
)

// Options of a Server.
type Options struct {
	// Listen are the control addresses: "HOST:PORT" or "unix:PATH". At least
	// one.
	Listen []string
	// Providers and, for each, where it takes data connections.
	Providers []DataListen
	// StateDir keeps claims and layouts; MemoryDir the bytes of memory
	// exports, on tmpfs.
	StateDir, MemoryDir string
	// Frames is the memory for staged extents, in bytes. Default 256 MiB.
	Frames int64

	// TLS certificate, key, and the CA whose client certificates are asked
	// for. Empty: plain HTTP, on loopback and Unix sockets only, unless
	// Insecure.
	TLSCert, TLSKey, TLSClientCA string
	Insecure                     bool
	// TokenFile holds the bearer token that clients must present. Empty: none.
	TokenFile string

	MaxSessions    int           // default 1024
	MaxConnections int           // per session; default 16
	TokenTime      time.Duration // life of a connect token; default 10 s
	ClaimTime      time.Duration // silence after which a session ends; default 15 min
	GraceTime      time.Duration // after a restart, for the last writer; default 60 s
	Keepalive      time.Duration // what initiators are told; default 5 s
	Dead           time.Duration // silence after which a connection is broken; default 15 s
	Revoke         time.Duration // time to answer a REVOKE; default 5 s
	ReadTime       time.Duration // for a control request to arrive; default 30 s

	Scan   dataset.ScanOptions
	Logger *slog.Logger // nil: discard
}

// DataListen is a provider and its address ("HOST:PORT").
type DataListen struct {
	Provider rdma.Provider
	Addr     string
}

func (o *Options) defaults() {
	def := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	def(&o.TokenTime, 10*time.Second)
	def(&o.ClaimTime, 15*time.Minute)
	def(&o.GraceTime, time.Minute)
	def(&o.Keepalive, 5*time.Second)
	def(&o.Dead, 15*time.Second)
	def(&o.Revoke, 5*time.Second)
	def(&o.ReadTime, 30*time.Second)
	if o.MaxSessions <= 0 {
		o.MaxSessions = 1024
	}
	if o.MaxConnections <= 0 {
		o.MaxConnections = 16
	}
	if o.Frames <= 0 {
		o.Frames = 256 << 20
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Scan.Logger == nil {
		o.Scan.Logger = o.Logger
	}
}

// Limits of a session that are not worth an option.
const (
	credits       = 32 // an initiator's metadata: a few dozen in flight cover any round trip
	targetCredits = 8
	sendDepth     = 256
	readDepth     = 64
)

// Server is a target. Make it with New, run it with Serve.
type Server struct {
	opts     Options
	limits   wire.Limits
	log      *slog.Logger
	start    time.Time
	daemon   string // identity of this run
	boot     string
	verifier [16]byte
	state    *stateDir
	metrics  *metrics
	hub      *hub
	security *security

	control []net.Listener
	data    []dataListener
	http    *http.Server

	mu       sync.Mutex
	frames   *pool               // guarded by mu: nil until a staged export is there
	exports  map[string]*export  // guarded by mu
	sessions map[string]*session // guarded by mu

	serving  sync.RWMutex // a request holds it; the end of Serve takes it for good
	draining atomic.Bool
	revokes  atomic.Int64
	tasks    sync.WaitGroup
	ctx      context.Context
	cancel   context.CancelFunc
	drained  chan struct{} // closed when Drain has been asked for
	once     sync.Once
}

type dataListener struct {
	provider string
	l        rdma.Listener
	host     string // as configured: empty for every address
}

// New opens the state, the frames and the listeners. Exports are added next;
// nothing is served before Serve.
func New(ctx context.Context, opts Options) (_ *Server, err error) {
	opts.defaults()
	id := make([]byte, 16)
	rand.Read(id)
	s := &Server{
		opts: opts, log: opts.Logger, start: time.Now(), daemon: hex.EncodeToString(id), boot: bootID(),
		exports: map[string]*export{}, sessions: map[string]*session{}, drained: make(chan struct{}), hub: newHub(),
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	// What is acknowledged here survives this process: only a reboot loses it.
	sum := sha256.Sum256([]byte(s.boot))
	copy(s.verifier[:], sum[:])
	s.metrics = newMetrics(s)
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if s.security, err = newSecurity(&opts); err != nil {
		return nil, err
	}
	if s.state, err = openState(ctx, opts.StateDir); err != nil {
		return nil, err
	}
	s.limits = wire.Limits{
		MaxConnections: opts.MaxConnections, MaxMessage: wire.MaxMessage, Credits: credits, TargetCredits: targetCredits,
		// A session may hold a quarter of the frames; the least is what one
		// large request of each lane needs at once.
		MaxGrants: max(64, slabsOf(opts.Frames)*slabFrames/4), SendDepth: sendDepth, ReadDepth: readDepth,
		KeepaliveMS: opts.Keepalive.Milliseconds(), DeadMS: opts.Dead.Milliseconds(), RevokeMS: opts.Revoke.Milliseconds(),
	}
	return s, s.listen(ctx)
}

// listen opens every listener.
func (s *Server) listen(ctx context.Context) error {
	if len(s.opts.Listen) == 0 {
		return errors.New("no control address: --listen HOST:PORT")
	}
	for _, addr := range s.opts.Listen {
		l, err := s.listenControl(ctx, addr)
		if err != nil {
			return err
		}
		s.control = append(s.control, l)
	}
	for _, d := range s.opts.Providers {
		l, err := d.Provider.Listen(ctx, d.Addr)
		if err != nil {
			return listenError("data", d.Addr, "--data-listen", err)
		}
		host, _, _ := net.SplitHostPort(d.Addr)
		if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
			host = ""
		}
		s.data = append(s.data, dataListener{d.Provider.Name(), l, host})
	}
	return nil
}

func (s *Server) listenControl(ctx context.Context, addr string) (net.Listener, error) {
	if path, ok := strings.CutPrefix(addr, "unix:"); ok {
		return listenUnix(ctx, path)
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, listenError("control", addr, "--listen", err)
	}
	if err := s.security.allowPlain(l.Addr()); err != nil {
		l.Close()
		return nil, err
	}
	// Each session may keep an event stream open; the rest is for requests.
	l = netutil.LimitListener(l, s.opts.MaxSessions+spareRequests)
	if s.security.tls != nil {
		l = tls.NewListener(l, s.security.tls)
	}
	return l, nil
}

// listenUnix listens on a socket that its owner alone may use. A socket that a
// dead process left is replaced; anything else of that name is left alone.
func listenUnix(ctx context.Context, path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, listenError("control", "unix:"+path, "--listen", err)
	}
	if st, err := os.Lstat(path); err == nil && st.Mode()&os.ModeSocket != 0 {
		conn, err := net.Dial("unix", path)
		if err == nil {
			conn.Close()
			return nil, listenError("control", "unix:"+path, "--listen", syscall.EADDRINUSE)
		}
		if errors.Is(err, syscall.ECONNREFUSED) {
			os.Remove(path) // what goes wrong here shows below
		}
	}
	// The mode of the socket is that of its file from the first moment on.
	private := func(_, _ string, c syscall.RawConn) (err error) {
		e := c.Control(func(fd uintptr) { err = syscall.Fchmod(int(fd), 0o600) })
		return errors.Join(err, e)
	}
	l, err := (&net.ListenConfig{Control: private}).Listen(ctx, "unix", path)
	if err != nil {
		return nil, listenError("control", "unix:"+path, "--listen", err)
	}
	return l, nil
}

// listenError names the mend.
func listenError(plane, addr, flag string, err error) error {
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("%s address %s is in use: stop what listens there, or choose another with %s", plane, addr, flag)
	}
	return fmt.Errorf("%s address %s: %w; choose another with %s", plane, addr, err, flag)
}

// spareRequests are control connections beyond one for each session.
const spareRequests = 256

// ControlAddrs are the addresses that were got.
func (s *Server) ControlAddrs() []string {
	var addrs []string
	for _, l := range s.control {
		if l.Addr().Network() == "unix" {
			addrs = append(addrs, "unix:"+l.Addr().String())
		} else {
			addrs = append(addrs, l.Addr().String())
		}
	}
	return addrs
}

// DataAddrs are the data addresses that were got.
func (s *Server) DataAddrs() []wire.DataAddress {
	var addrs []wire.DataAddress
	for _, d := range s.data {
		addr := d.l.Addr().String()
		if _, port, err := net.SplitHostPort(addr); err == nil {
			addr = net.JoinHostPort(d.host, port)
		}
		addrs = append(addrs, wire.DataAddress{Provider: d.provider, Addr: addr})
	}
	return addrs
}

// ErrExists: an export of that name is there.
var ErrExists = errors.New("export exists")

// nameOK: a name is part of URIs, file names and metric labels.
func nameOK(name string) bool {
	if name == "" || len(name) > 64 || name[0] == '.' || name[0] == '-' {
		return false
	}
	return strings.Trim(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == ""
}

func errName(name string) error {
	return fmt.Errorf("export name %q: want up to 64 letters, digits, '.', '_' and '-'", name)
}

// AddMemory adds a memory export.
func (s *Server) AddMemory(ctx context.Context, cfg MemoryConfig) error {
	return s.add(cfg.Name, func() (content, error) { return openMemory(ctx, cfg, s.opts.MemoryDir) })
}

// AddDataset scans a directory and adds it.
func (s *Server) AddDataset(ctx context.Context, cfg DatasetConfig) error {
	return s.add(cfg.Name, func() (content, error) {
		p, err := s.pool()
		if err != nil {
			return nil, err
		}
		return openDataset(ctx, cfg, s.state, p, s.opts.Scan, s.log)
	})
}

// pool is the memory for staged extents, made for the first export that needs
// it: who serves memory alone pins nothing else.
func (s *Server) pool() (*pool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var err error
	if s.frames == nil {
		s.frames, err = newPool(s.opts.Frames, s.metrics.fill)
	}
	return s.frames, err
}

func (s *Server) add(name string, open func() (content, error)) error {
	if !nameOK(name) {
		return errName(name)
	}
	s.mu.Lock()
	_, there := s.exports[name]
	s.mu.Unlock()
	if there {
		return fmt.Errorf("%w: %s", ErrExists, name)
	}
	c, err := open()
	if err != nil {
		return err
	}
	e := newExport(name, c, s.state, s.opts.GraceTime, s.log)
	s.mu.Lock()
	if _, there := s.exports[name]; there {
		s.mu.Unlock()
		e.close()
		return fmt.Errorf("%w: %s", ErrExists, name)
	}
	s.exports[name] = e
	s.mu.Unlock()
	s.hub.publish(wire.EventExports, wire.Event{Export: name})
	return nil
}

// ErrUnknown: no export of that name.
var ErrUnknown = errors.New("unknown export")

// Remove ends an export and its sessions. Memory stays in its file.
func (s *Server) Remove(name string) error {
	s.mu.Lock()
	e := s.exports[name]
	delete(s.exports, name)
	s.mu.Unlock()
	if e == nil {
		return fmt.Errorf("%w: %s", ErrUnknown, name)
	}
	e.close()
	s.forget(e)
	s.hub.publish(wire.EventExports, wire.Event{Export: name})
	return nil
}

// forget drops the sessions of an export that is gone.
func (s *Server) forget(e *export) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, x := range s.sessions {
		if x.exp == e {
			delete(s.sessions, id)
		}
	}
}

// Resize changes an export's size.
func (s *Server) Resize(name string, n int64) error {
	e := s.export(name)
	if e == nil {
		return fmt.Errorf("%w: %s", ErrUnknown, name)
	}
	if err := e.content.resize(n); err != nil {
		return err
	}
	i := e.info()
	s.hub.publish(wire.EventResize, wire.Event{Export: name, Info: &i})
	return nil
}

// Rescan looks at a dataset's tree again; changed tells of a new generation.
func (s *Server) Rescan(ctx context.Context, name string) (changed bool, err error) {
	e := s.export(name)
	if e == nil {
		return false, fmt.Errorf("%w: %s", ErrUnknown, name)
	}
	d, ok := e.content.(*data)
	if !ok {
		return false, fmt.Errorf("export %s is no dataset", name)
	}
	changed, err = d.rescan(ctx, s.opts.Scan)
	if err == nil && changed {
		i := e.info()
		s.hub.publish(wire.EventGeneration, wire.Event{Export: name, Info: &i})
	}
	return changed, err
}

// RescanAll rescans every dataset, as SIGHUP asks.
func (s *Server) RescanAll(ctx context.Context) error {
	var errs []error
	for _, e := range s.list() {
		if _, ok := e.content.(*data); ok {
			_, err := s.Rescan(ctx, e.name)
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Reload reads the certificate and the token file again.
func (s *Server) Reload() error { return s.security.load() }

// Exports names what is exported.
func (s *Server) Exports() []string {
	var names []string
	for _, e := range s.list() {
		names = append(names, e.name)
	}
	return names
}

func (s *Server) export(name string) *export {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.exports[name]
}

// list is every export, by name.
func (s *Server) list() []*export {
	s.mu.Lock()
	defer s.mu.Unlock()
	es := make([]*export, 0, len(s.exports))
	for _, e := range s.exports {
		es = append(es, e)
	}
	slices.SortFunc(es, func(a, b *export) int { return strings.Compare(a.name, b.name) })
	return es
}

// Serve runs the target until ctx ends or a drain was asked for over the
// control plane, then drains: initiators are told, handlers finish, sessions
// end. The memory of memory exports stays.
func (s *Server) Serve(ctx context.Context) error {
	s.http = s.newHTTP()
	errs := make(chan error, len(s.control))
	var servers sync.WaitGroup
	for _, l := range s.control {
		servers.Go(func() {
			if err := s.http.Serve(l); !errors.Is(err, http.ErrServerClosed) {
				errs <- err
			}
		})
	}
	var acceptors sync.WaitGroup
	for _, d := range s.data {
		acceptors.Go(func() { s.acceptAll(d.l) })
	}
	for _, e := range s.list() {
		e.arm(s.opts.GraceTime)
	}
	s.tasks.Go(s.watch)
	var err error
	select {
	case <-ctx.Done():
	case <-s.drained:
	case err = <-errs:
	}
	s.drain()
	servers.Wait()
	s.cancel()
	s.serving.Lock() // requests that the drain cut off have returned; late ones are refused
	for _, d := range s.data {
		d.l.Close()
	}
	acceptors.Wait()
	s.endSessions() // before tasks, which they start
	s.tasks.Wait()
	s.close()
	return err
}

// drainTime bounds how long a drain waits for control requests under way.
const drainTime = 5 * time.Second

func (s *Server) drain() {
	s.draining.Store(true)
	s.log.Info("draining")
	s.hub.publish(wire.EventDrain, wire.Event{})
	s.hub.close() // event streams end, else they would hold the shutdown up
	ctx, cancel := context.WithTimeout(context.Background(), drainTime)
	defer cancel()
	if err := s.http.Shutdown(ctx); err != nil {
		s.http.Close()
	}
}

// Close releases a Server that is not served. Serve closes by itself.
func (s *Server) Close() { s.close() }

// close releases what New and the Adds took. Claims are kept for the writers'
// return.
func (s *Server) close() {
	s.cancel()
	s.endSessions()
	for _, e := range s.list() {
		e.close()
	}
	for _, l := range s.control {
		l.Close()
	}
	for _, d := range s.data {
		d.l.Close()
	}
	if s.frames != nil {
		s.frames.close()
	}
	if s.state != nil {
		s.state.close()
	}
}

// endSessions ends every session; writers may come back to the next run.
func (s *Server) endSessions() {
	for _, x := range s.sessionList() {
		s.endSession(x, claimKept)
	}
}

func (s *Server) sessionList() []*session {
	s.mu.Lock()
	defer s.mu.Unlock()
	xs := make([]*session, 0, len(s.sessions))
	for _, x := range s.sessions {
		xs = append(xs, x)
	}
	return xs
}

// Drain asks Serve to drain and return.
func (s *Server) Drain() { s.once.Do(func() { close(s.drained) }) }

// watch breaks silent connections and ends silent sessions.
func (s *Server) watch() {
	tick := time.NewTicker(min(time.Second, s.opts.Dead/4))
	defer tick.Stop()
	for {
		select {
		case <-s.ctx.Done():
			return
		case <-tick.C:
		}
		for _, x := range s.sessionList() {
			s.watchSession(x)
		}
	}
}

func (s *Server) watchSession(x *session) {
	x.mu.Lock()
	var silent []*sconn
	for _, c := range x.conns {
		if time.Since(s.start)-time.Duration(c.heard.Load()) > s.opts.Dead {
			silent = append(silent, c)
		}
	}
	x.mu.Unlock()
	for _, c := range silent {
		c.log.Warn("nothing heard: connection ended", "for", s.opts.Dead)
		c.kill()
	}
	if x.silent() && !x.reaping.Swap(true) {
		// Its handlers may hang in the store: nobody else waits for them.
		s.tasks.Go(func() { s.reap(x) })
	}
}

// reap ends a session that is still silent.
func (s *Server) reap(x *session) {
	x.changing.Lock()
	defer x.changing.Unlock()
	if !x.silent() {
		x.reaping.Store(false)
		return
	}
	x.log.Info("session silent for too long", "for", s.opts.ClaimTime)
	x.endLocked(claimLeft)
	s.displace(x)
}

// endSession ends a session and forgets it.
func (s *Server) endSession(x *session, f fate) {
	x.end(f)
	s.displace(x)
}

// acceptAll takes data connections.
func (s *Server) acceptAll(l rdma.Listener) {
	for {
		req, err := l.Accept(s.ctx)
		if err != nil {
			return
		}
		s.tasks.Go(func() { s.acceptOne(req) })
	}
}

func (s *Server) acceptOne(req rdma.ConnRequest) {
	log := s.log.With("remote", req.RemoteAddr().String())
	var c wire.Connect
	if err := c.Parse(req.PrivateData()); err != nil {
		reason := wire.RejectToken
		if errors.Is(err, wire.ErrVersion) {
			reason = wire.RejectVersion
		}
		log.Info("data connection refused", "reason", reason, "err", err)
		reject(req, reason)
		return
	}
	if s.draining.Load() {
		reject(req, wire.RejectDraining)
		return
	}
	sum := sha256.Sum256(c.Token[:])
	for _, x := range s.sessionList() {
		epoch, ctx := x.admit(sum, int(c.Connection))
		if epoch == 0 {
			continue
		}
		ctx, cancel := context.WithTimeout(ctx, s.opts.TokenTime)
		defer cancel()
		err := x.accept(ctx, req, int(c.Connection), epoch)
		x.arrived(int(c.Connection), epoch)
		if err != nil {
			log.Warn("data connection failed", "err", err)
		}
		return
	}
	s.metrics.refusedTokens.Inc()
	log.Info("data connection refused", "reason", wire.RejectToken)
	reject(req, wire.RejectToken)
}
