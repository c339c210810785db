// SPDX-License-Identifier: Apache-2.0

package nbd

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
)

// Defaults of Options.
const (
	// defaultConnections: a client rarely opens more than 16; hundreds mean a
	// mistake or an attack.
	defaultConnections = 256
	// defaultRequests is above the queue depth of every common client (the
	// kernel's is 128 over all connections).
	defaultRequests = 64
	// defaultInFlight lets eight of the largest requests run at once.
	defaultInFlight = 8 * maxPayload
	// handshakeTime is plenty for a person with a slow link, and short for
	// somebody who only wants to hold a place.
	handshakeTime = 30 * time.Second
	// stallTime: a client that takes no byte of a reply for so long is dead,
	// and the frames that its replies hold are wanted.
	stallTime = 60 * time.Second
	// readBuffer holds a burst of request headers; payloads of any size go
	// past it.
	readBuffer = 16 << 10
)

// Options of a Server. The zero value serves plain NBD to anybody who can
// connect.
type Options struct {
	// TLS offers STARTTLS. RequireTLS refuses everything else.
	TLS        *tls.Config
	RequireTLS bool
	// MaxConnections at once; more are closed at once. Default 256.
	MaxConnections int
	// MaxRequests under way on one connection; more wait in its socket.
	// Default 64.
	MaxRequests int
	// MaxInFlight is the most bytes of payloads under way on all connections
	// together. At least 32 MiB; default 256 MiB.
	MaxInFlight int64
	Logger      *slog.Logger // nil: discard
}

func (o Options) withDefaults() Options {
	if o.MaxConnections <= 0 {
		o.MaxConnections = defaultConnections
	}
	if o.MaxRequests <= 0 {
		o.MaxRequests = defaultRequests
	}
	if o.MaxInFlight <= 0 {
		o.MaxInFlight = defaultInFlight
	}
	o.MaxInFlight = max(o.MaxInFlight, maxPayload)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o
}

// Server serves exports. It does not own their volumes.
type Server struct {
	exports []*Export
	opts    Options
	bytes   *semaphore.Weighted // payload bytes under way
	places  chan struct{}       // one token a connection
}

// NewServer makes a server of the exports. The first one is also what the empty
// name means.
func NewServer(exports []*Export, opts Options) (*Server, error) {
	if len(exports) == 0 {
		return nil, errors.New("nbd: nothing to export")
	}
	if opts.RequireTLS && opts.TLS == nil {
		return nil, errors.New("nbd: TLS is required but there is no certificate")
	}
	seen := map[string]bool{}
	for _, e := range exports {
		if len(e.Name) > maxString {
			return nil, fmt.Errorf("nbd: export name of %d bytes, at most %d", len(e.Name), maxString)
		}
		if seen[e.Name] {
			return nil, fmt.Errorf("nbd: two exports are named %q", e.Name)
		}
		seen[e.Name] = true
	}
	opts = opts.withDefaults()
	return &Server{
		exports: exports,
		opts:    opts,
		bytes:   semaphore.NewWeighted(opts.MaxInFlight),
		places:  make(chan struct{}, opts.MaxConnections),
	}, nil
}

// find returns the export of that name, or nil.
func (s *Server) find(name string) *Export {
	if name == "" {
		return s.exports[0]
	}
	for _, e := range s.exports {
		if e.Name == name {
			return e
		}
	}
	return nil
}

// Serve accepts connections until ctx ends or l fails, then ends them all and
// waits. It closes l. The error is nil when ctx ended.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	var conns sync.WaitGroup
	defer conns.Wait()
	defer cancel()
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	defer l.Close()
	for {
		conn, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			if retryAccept(ctx, err) {
				continue
			}
			return fmt.Errorf("nbd: accept: %w", err)
		}
		select {
		case s.places <- struct{}{}:
		default:
			s.opts.Logger.Warn("nbd connection refused: too many", "limit", s.opts.MaxConnections, "remote", conn.RemoteAddr())
			conn.Close()
			continue
		}
		conns.Go(func() {
			defer func() { <-s.places }()
			s.serveAndLog(ctx, conn)
		})
	}
}

// retryAccept waits a moment after a passing failure (out of descriptors, a
// client that left early) and tells whether to go on.
func retryAccept(ctx context.Context, err error) bool {
	if errors.Is(err, net.ErrClosed) {
		return false
	}
	select {
	case <-ctx.Done():
	case <-time.After(50 * time.Millisecond):
	}
	return true
}

func (s *Server) serveAndLog(ctx context.Context, conn net.Conn) {
	log := s.opts.Logger.With("remote", conn.RemoteAddr().String())
	switch err := s.ServeConn(ctx, conn); {
	case err == nil, errors.Is(err, io.EOF), errors.Is(err, net.ErrClosed), errors.Is(err, context.Canceled):
		log.Debug("nbd connection ended")
	default:
		log.Info("nbd connection ended", "err", err)
	}
}

// ServeConn serves one client from handshake to end and closes conn. The error
// is nil after a proper disconnect.
func (s *Server) ServeConn(ctx context.Context, conn net.Conn) error {
	defer conn.Close()
	// A dying server interrupts whatever the connection is at.
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := conn.SetDeadline(time.Now().Add(handshakeTime)); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	h := &handshake{srv: s, conn: conn, r: bufio.NewReaderSize(conn, readBuffer)}
	exp, err := h.negotiate(ctx)
	if errors.Is(err, errAbort) {
		return nil
	}
	if err != nil {
		return err
	}
	return s.transmit(ctx, h, exp)
}
