// SPDX-License-Identifier: Apache-2.0

package target

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"rblk/rdma"
	"rblk/wire"
)

// fail is an error for the client.
func fail(code, format string, args ...any) *wire.Error {
	return &wire.Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// open answers POST /v1/sessions. Errors are *wire.Error.
func (s *Server) open(r *wire.SessionRequest, principal, remote string) (*wire.SessionReply, error) {
	if err := s.checkRequest(r); err != nil {
		return nil, err
	}
	e := s.export(r.Export)
	if e == nil {
		return nil, fail(wire.CodeUnknownExport, "no export %q here; there is: %s", r.Export, s.names())
	}
	if r.Access != wire.AccessRead && e.info().ReadOnly {
		return nil, fail(wire.CodeReadOnly, "export %s is read-only: ask for ro", e.name)
	}
	if r.Reopen != nil {
		return s.reopen(e, r, principal, remote)
	}
	return s.create(e, r, principal, remote)
}

func (s *Server) names() string {
	names := strings.Join(s.Exports(), ", ")
	if names == "" {
		return "nothing"
	}
	return names
}

func (s *Server) checkRequest(r *wire.SessionRequest) error {
	if err := wire.CheckVersion("initiator", r.Protocol); err != nil {
		return err
	}
	if err := wire.CheckFeatures(r.Features, nil); err != nil {
		return err
	}
	if s.draining.Load() {
		return fail(wire.CodeDraining, "target is draining: try again")
	}
	switch r.Access {
	case wire.AccessRead, wire.AccessWrite, wire.AccessShared:
	default:
		return fail(wire.CodeBadRequest, "access %q: want ro, rw or shared", r.Access)
	}
	if r.Connections < 1 || r.Connections > s.limits.MaxConnections {
		return fail(wire.CodeLimit, "%d connections: want 1 to %d", r.Connections, s.limits.MaxConnections)
	}
	if len(r.Nonce) > 64 || len(r.Client.Host)+len(r.Client.Program)+len(r.Client.Version)+len(r.Client.Process) > 1024 {
		return fail(wire.CodeBadRequest, "nonce or client too long")
	}
	if len(r.Transports) == 0 {
		return nil
	}
	for _, d := range s.data {
		for _, t := range r.Transports {
			if d.provider == t {
				return nil
			}
		}
	}
	return fail(wire.CodeTransport, "no transport in common: the initiator has %s", strings.Join(r.Transports, ", "))
}

// create makes a new session.
func (s *Server) create(e *export, r *wire.SessionRequest, principal, remote string) (*wire.SessionReply, error) {
	s.replaceUnanswered(e, r.Nonce, principal)
	id := make([]byte, 16)
	rand.Read(id)
	x := &session{
		srv: s, exp: e, id: hex.EncodeToString(id), access: r.Access, nonce: r.Nonce, client: r.Client,
		principal: principal, instance: e.info().Instance, address: remote, since: time.Now(),
	}
	var text string
	text, x.secret = secret()
	x.log = s.log.With("export", e.name, "session", x.id[:8], "client", r.Client.Host)
	x.changing.Lock()
	defer x.changing.Unlock()
	// The place comes first: nobody is fenced for a request that is refused.
	if !s.place(x) {
		return nil, fail(wire.CodeLimit, "%d sessions are open, the most this target takes: try again later", s.opts.MaxSessions)
	}
	join := e.join
	if r.Access == wire.AccessWrite {
		join = func(x *session) error { return s.claim(e, x, r.Force) }
	}
	if err := join(x); err != nil {
		s.displace(x)
		return nil, err
	}
	tokens := x.begin(r.Connections)
	if err := s.keepClaim(x); err != nil {
		x.endLocked(claimDropped)
		s.displace(x)
		return nil, err
	}
	x.log.Info("session opened", "access", x.access, "address", remote, "principal", principal)
	s.metrics.opened.Inc()
	return s.reply(x, r, text, tokens), nil
}

// place gives a session its place in the table, if there is one.
func (s *Server) place(x *session) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.sessions) >= s.opts.MaxSessions {
		return false
	}
	s.sessions[x.id] = x
	return true
}

func (s *Server) displace(x *session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.sessions, x.id)
}

// replaceUnanswered ends the session that an earlier try of the same request
// made, when nobody has connected to it: its answer was lost.
func (s *Server) replaceUnanswered(e *export, nonce, principal string) {
	if nonce == "" {
		return
	}
	for _, x := range s.sessionList() {
		x.mu.Lock()
		same := x.exp == e && x.nonce == nonce && x.principal == principal && !x.used && x.epoch == 1
		x.mu.Unlock()
		if same {
			s.endSession(x, claimDropped)
		}
	}
}

// join adds a session that claims nothing.
func (e *export) join(x *session) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return fail(wire.CodeUnknownExport, "export %s is being removed", e.name)
	}
	if x.access == wire.AccessShared {
		if e.writer != nil || (e.left != nil && time.Now().Before(e.grace)) {
			return e.busyLocked()
		}
		e.forgetLeftLocked(x.srv.state)
	}
	e.sessions[x.id] = x
	return nil
}

// forgetLeftLocked: its holder may not come back any more, for somebody else
// writes from now on. Caller holds mu.
func (e *export) forgetLeftLocked(st *stateDir) {
	if e.left != nil {
		e.left = nil
		st.dropClaim(e.name)
	}
}

// busyLocked says who writes. Caller holds mu.
func (e *export) busyLocked() error {
	w := e.writerLocked()
	if w == nil {
		return fail(wire.CodeBusy, "export %s was just given up: try again", e.name)
	}
	err := fail(wire.CodeBusy, "export %s is being written by %s (pid %d, %s) for %s: wait, open it ro, or take it over with force",
		e.name, w.Client.Host, w.Client.PID, w.Address, time.Duration(w.AgeSecond)*time.Second)
	err.Writer = w
	return err
}

// claim makes x the export's writer. With force, the one before is fenced: its
// queue pairs are destroyed and its handlers have returned before x is.
func (s *Server) claim(e *export, x *session, force bool) error {
	for {
		e.mu.Lock()
		old := e.writer
		switch {
		case e.closed:
			e.mu.Unlock()
			return fail(wire.CodeUnknownExport, "export %s is being removed", e.name)
		case old == nil && (force || e.left == nil || !time.Now().Before(e.grace)) && !e.sharedLocked():
			e.forgetLeftLocked(s.state)
			e.writer = x
			e.sessions[x.id] = x
			e.mu.Unlock()
			return nil
		case !force:
			err := error(fail(wire.CodeBusy, "export %s is open shared: close those sessions first", e.name))
			if old != nil || e.left != nil {
				err = e.busyLocked()
			}
			e.mu.Unlock()
			return err
		}
		victims := []*session{old}
		if old == nil {
			victims = e.sharersLocked()
		}
		e.mu.Unlock()
		for _, v := range victims {
			v.log.Warn("session fenced", "by", x.client.Host)
			s.endSession(v, claimDropped)
		}
	}
}

// sharedLocked tells whether there are shared writers. Caller holds mu.
func (e *export) sharedLocked() bool { return len(e.sharersLocked()) > 0 }

func (e *export) sharersLocked() []*session {
	var xs []*session
	for _, x := range e.sessions {
		if x.access == wire.AccessShared {
			xs = append(xs, x)
		}
	}
	return xs
}

// keepClaim writes a writer's claim down before it is answered.
func (s *Server) keepClaim(x *session) error {
	if x.access != wire.AccessWrite {
		return nil
	}
	if err := s.state.saveClaim(x.exp.name, x.record()); err != nil {
		return fail(wire.CodeInternal, "the claim cannot be kept: %v", err)
	}
	return nil
}

func (x *session) epochNow() uint64 {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.epoch
}

// reopen begins a new epoch of a session.
func (s *Server) reopen(e *export, r *wire.SessionRequest, principal, remote string) (*wire.SessionReply, error) {
	x, err := s.find(e, r, principal)
	if err != nil {
		return nil, err
	}
	x.changing.Lock()
	defer x.changing.Unlock()
	x.mu.Lock()
	// An epoch that nobody has connected to was one whose answer was lost: who
	// knows the last one that was used, or a later one, knows enough.
	stale := r.Reopen.Epoch > x.epoch || r.Reopen.Epoch < x.lastUsed
	gone := x.ended
	x.mu.Unlock()
	switch {
	case gone:
		e.mu.Lock()
		defer e.mu.Unlock()
		return nil, e.goneLocked(r)
	case stale:
		return nil, fail(wire.CodeFenced, "epoch %d of the session is over", r.Reopen.Epoch)
	}
	x.stop()
	x.mu.Lock()
	x.address = remote
	x.mu.Unlock()
	tokens := x.begin(r.Connections)
	if err := s.keepClaim(x); err != nil {
		x.stop()
		return nil, err
	}
	x.log.Info("session re-opened", "epoch", x.epochNow(), "address", remote)
	s.metrics.reopened.Inc()
	return s.reply(x, r, r.Reopen.Secret, tokens), nil
}

// find is the session to re-open: a living one, or that of a claim whose holder
// was away.
func (s *Server) find(e *export, r *wire.SessionRequest, principal string) (*session, error) {
	s.mu.Lock()
	x := s.sessions[r.Reopen.Session]
	s.mu.Unlock()
	if x == nil {
		return s.takeUp(e, r, principal)
	}
	if !x.proves(r.Reopen.Secret) || x.exp != e || x.principal != principal || x.access != r.Access {
		return nil, errNoSession()
	}
	return x, nil
}

func errNoSession() error { return fail(wire.CodeUnknownSession, "no such session here") }

// gone answers for a session that nothing is known of. A writer is refused for
// good: others may have written since, and what it would replay could land on
// top of that. Caller holds mu.
func (e *export) goneLocked(r *wire.SessionRequest) error {
	switch {
	case r.Access != wire.AccessWrite:
		return errNoSession()
	case e.lost != "" && e.lost == r.Reopen.Session:
		return fail(wire.CodeInstance, "the content of export %s was lost since: it is new and empty", e.name)
	}
	return fail(wire.CodeFenced, "the write claim on export %s has ended, or was taken over: open it anew", e.name)
}

// takeUp makes a session of a claim whose holder was away.
func (s *Server) takeUp(e *export, r *wire.SessionRequest, principal string) (*session, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	rec := e.left
	if rec == nil || rec.Session != r.Reopen.Session || rec.Access != r.Access || e.writer != nil || e.closed {
		return nil, e.goneLocked(r)
	}
	x := &session{
		srv: s, exp: e, id: rec.Session, access: rec.Access, client: rec.Client, principal: rec.Principal,
		instance: rec.Instance, address: rec.Address, since: rec.Since, epoch: rec.Epoch, seen: time.Now(),
	}
	sum, err := hex.DecodeString(rec.Secret)
	if err != nil || copy(x.secret[:], sum) != len(x.secret) || !x.proves(r.Reopen.Secret) || principal != rec.Principal {
		return nil, errNoSession()
	}
	if !s.place(x) {
		return nil, fail(wire.CodeLimit, "%d sessions are open, the most this target takes: try again later", s.opts.MaxSessions)
	}
	x.log = s.log.With("export", e.name, "session", x.id[:min(8, len(x.id))], "client", x.client.Host)
	e.left = nil
	e.writer = x
	e.sessions[x.id] = x
	return x, nil
}

// reply is the answer about a session whose epoch has begun.
func (s *Server) reply(x *session, r *wire.SessionRequest, secret string, tokens []wire.Token) *wire.SessionReply {
	info := x.exp.info()
	info.Confirm = s.confirm(r.Transports)
	return &wire.SessionReply{
		Protocol: wire.ProtocolVersion, Session: x.id, Epoch: x.epochNow(), Secret: secret, Tokens: tokens,
		Data: s.DataAddrs(), Export: info, Limits: s.limits, BootID: s.boot, Daemon: s.daemon,
	}
}

// confirm says how a write is confirmed on an export that needs no COMMIT. On
// iWARP a WRITE's completion says only that TCP has it, and with more than one
// device the adapter that took it may not be the one that is read through: a
// READ behind the WRITE settles both. transports are what the initiator may
// use; empty: any.
func (s *Server) confirm(transports []string) string {
	for _, d := range s.opts.Providers {
		if len(transports) > 0 && !slices.Contains(transports, d.Provider.Name()) {
			continue
		}
		devs, err := d.Provider.Devices()
		if err != nil {
			return "read"
		}
		for _, dev := range devs {
			if dev.Info().Caps&rdma.CapPlacedOnCompletion == 0 {
				return "read"
			}
		}
	}
	return "completion"
}

// session finds a session by id and secret, for DELETE and more connections.
func (s *Server) session(id, secret string) (*session, error) {
	s.mu.Lock()
	x := s.sessions[id]
	s.mu.Unlock()
	if x == nil || !x.proves(secret) {
		return nil, fail(wire.CodeUnknownSession, "no such session here")
	}
	return x, nil
}

// asError makes any error one for the client.
func asError(err error) *wire.Error {
	var e *wire.Error
	if errors.As(err, &e) {
		return e
	}
	code := wire.CodeBadRequest
	if errors.Is(err, ErrUnknown) {
		code = wire.CodeUnknownExport
	}
	return &wire.Error{Code: code, Message: strings.ReplaceAll(err.Error(), "\n", "; ")}
}
