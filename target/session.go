// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"rblk/rdma"
	"rblk/wire"
)

// session is one initiator's use of one export. An epoch of it is a set of
// connections: re-opening ends one epoch before the next begins.
type session struct {
	// set once
	srv       *Server
	exp       *export
	id        string
	secret    [32]byte // sha256 of the resume secret
	nonce     string
	access    string
	client    wire.Client
	principal string
	instance  string // of the export, when the session was opened
	since     time.Time
	log       *slog.Logger

	reaping atomic.Bool // it is being ended for its silence

	// changing is held while an epoch ends or begins, so that two re-opens
	// cannot run at once.
	changing sync.Mutex

	mu      sync.Mutex
	address string // guarded by mu: where the last request came from
	epoch   uint64 // guarded by mu
	used    bool   // guarded by mu: a connection of this epoch was accepted
	// lastUsed is the last epoch that a connection was accepted in; 0 for a
	// claim of a previous run, whose connections all died with it.
	lastUsed uint64             // guarded by mu
	ended    bool               // guarded by mu
	open     bool               // guarded by mu: the epoch takes connections
	tokens   map[[32]byte]token // guarded by mu: by sha256 of the token
	conns    map[int]*sconn     // guarded by mu
	coming   map[int]bool       // guarded by mu: connections whose token was taken, and that are not in conns yet
	devices  []rdma.Device      // guarded by mu: by device index
	grants   map[uint64]*grant  // guarded by mu
	nextID   uint64             // guarded by mu
	seen     time.Time          // guarded by mu: when the last connection was there (monotonic)
	work     *sync.WaitGroup    // guarded by mu: connections and handlers of the epoch
	ctx      context.Context    // guarded by mu: ends with the epoch
	cancel   context.CancelFunc // guarded by mu
}

// token lets one connection in.
type token struct {
	conn    int
	expires time.Time // monotonic
}

// grant is a promise to a session. Those of a staged export hold an extent.
type grant struct {
	s    *session
	id   uint64
	st   *stager
	ext  *extent
	told bool // guarded by st.mu: the answer that carries it was sent
}

func secret() (text string, sum [32]byte) {
	b := make([]byte, 32)
	rand.Read(b)
	return hex.EncodeToString(b), sha256.Sum256(b)
}

// proves tells whether text is the session's resume secret.
func (s *session) proves(text string) bool {
	b, err := hex.DecodeString(text)
	if err != nil || len(b) != 32 {
		return false
	}
	sum := sha256.Sum256(b)
	return subtle.ConstantTimeCompare(sum[:], s.secret[:]) == 1
}

// begin starts an epoch and makes its tokens. Caller holds changing.
func (s *session) begin(conns int) []wire.Token {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.epoch++
	s.used, s.open = false, true
	s.tokens = map[[32]byte]token{}
	s.conns = map[int]*sconn{}
	s.coming = map[int]bool{}
	s.devices = nil
	s.grants = map[uint64]*grant{}
	s.seen = time.Now()
	s.work = &sync.WaitGroup{}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	ts := make([]wire.Token, 0, conns)
	for i := range conns {
		ts = append(ts, s.tokenLocked(i))
	}
	return ts
}

// tokenLocked makes a token for connection i. Caller holds mu.
func (s *session) tokenLocked(i int) wire.Token {
	text, sum := secret()
	s.tokens[sum] = token{i, time.Now().Add(s.srv.opts.TokenTime)}
	return wire.Token{Connection: i, Secret: text}
}

// more makes up to n further tokens, for connections that are not there.
func (s *session) more(n int) ([]wire.Token, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.open {
		return nil, fail(wire.CodeBadRequest, "the session has lost its connections: re-open it")
	}
	if n < 1 || n > s.srv.limits.MaxConnections {
		return nil, fail(wire.CodeLimit, "%d connections: want 1 to %d", n, s.srv.limits.MaxConnections)
	}
	now := time.Now()
	for sum, t := range s.tokens {
		if now.After(t.expires) {
			delete(s.tokens, sum)
		}
	}
	ts := []wire.Token{}
	for i := 0; i < s.srv.limits.MaxConnections && len(ts) < n && len(s.tokens) < 2*s.srv.limits.MaxConnections; i++ {
		if s.conns[i] == nil && !s.coming[i] {
			ts = append(ts, s.tokenLocked(i))
		}
	}
	return ts, nil
}

// stop ends the epoch: no token works any more, every queue pair is destroyed,
// every handler has returned, every grant is dropped. Caller holds changing.
func (s *session) stop() {
	s.mu.Lock()
	s.open = false
	s.tokens = nil
	conns := make([]*sconn, 0, len(s.conns))
	for _, c := range s.conns {
		conns = append(conns, c)
	}
	cancel, work := s.cancel, s.work
	s.mu.Unlock()
	if cancel == nil {
		return // a claim from before a restart has no epoch under way
	}
	for _, c := range conns {
		c.kill()
	}
	cancel()
	// A handler that reads the store is waited for, however long it takes: its
	// late effects must not meet the next epoch.
	work.Wait()
	s.dropGrants()
}

// kill destroys the queue pairs of an epoch, because it does not answer a
// REVOKE. Its frames are free afterwards. An epoch that is over is none of its
// business.
func (s *session) kill(epoch context.Context, why string) {
	s.changing.Lock()
	defer s.changing.Unlock()
	s.mu.Lock()
	now := s.ctx == epoch && s.open
	s.mu.Unlock()
	if !now {
		return
	}
	s.log.Warn("session's connections destroyed", "why", why)
	s.stop()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen = time.Now()
}

// fate is what becomes of a session's write claim when the session ends.
type fate int

const (
	claimDropped fate = iota // its holder is done with it, or was fenced: it never comes back
	claimLeft                // anybody may have it; until somebody does, its holder may come back
	claimKept                // for the next run of the daemon
)

// end ends the session for good.
func (s *session) end(f fate) {
	s.changing.Lock()
	defer s.changing.Unlock()
	s.endLocked(f)
}

// endLocked is end. Caller holds changing.
func (s *session) endLocked(f fate) {
	s.mu.Lock()
	was := s.ended
	s.ended = true
	s.mu.Unlock()
	if was {
		return
	}
	s.stop()
	e := s.exp
	e.mu.Lock()
	delete(e.sessions, s.id)
	if e.writer == s {
		e.writer = nil
		switch f {
		case claimLeft:
			rec := s.record()
			e.left, e.grace = &rec, time.Now()
		case claimDropped:
			// Before the lock is given up: the next writer keeps its claim in the same place.
			s.srv.state.dropClaim(e.name)
		}
	}
	e.mu.Unlock()
	s.log.Info("session ended")
}

// record is the claim as it is written down.
func (s *session) record() claimRecord {
	s.mu.Lock()
	defer s.mu.Unlock()
	return claimRecord{
		Session: s.id, Epoch: s.epoch, Secret: hex.EncodeToString(s.secret[:]), Access: s.access, Principal: s.principal,
		Instance: s.instance, Client: s.client, Address: s.address, Since: s.since,
	}
}

// holder describes the session as a writer.
func (s *session) holder() *wire.Writer {
	s.mu.Lock()
	defer s.mu.Unlock()
	return &wire.Writer{Client: s.client, Address: s.address, AgeSecond: int64(time.Since(s.since).Seconds())}
}

// silent: nobody has been connected for as long as a claim lasts.
func (s *session) silent() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns) == 0 && !s.seen.IsZero() && time.Since(s.seen) > s.srv.opts.ClaimTime
}

// admit takes a token for a connection and reserves its place in the epoch that
// it returns; 0: no.
func (s *session) admit(sum [32]byte, conn int) (epoch uint64, ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t, ok := s.tokens[sum]
	if !ok || t.conn != conn || time.Now().After(t.expires) || !s.open || s.conns[conn] != nil || s.coming[conn] {
		return 0, nil
	}
	delete(s.tokens, sum)
	s.coming[conn] = true
	s.used, s.lastUsed = true, s.epoch
	// From here on there may be a queue pair: the epoch does not end before it
	// is known to be destroyed.
	s.work.Add(1)
	return s.epoch, s.ctx
}

// arrived ends what admit began, whatever came of it.
func (s *session) arrived(conn int, epoch uint64) {
	s.mu.Lock()
	var unreachable map[uint64]*grant
	if s.epoch == epoch {
		delete(s.coming, conn)
		unreachable = s.unreachableLocked()
	}
	work := s.work
	s.mu.Unlock()
	for _, g := range unreachable {
		g.end()
	}
	work.Done()
}

// unreachableLocked takes the grants when no queue pair is there, or coming,
// that could reach their frames. Caller holds mu.
func (s *session) unreachableLocked() map[uint64]*grant {
	if len(s.conns) > 0 || len(s.coming) > 0 {
		return nil
	}
	gs := s.grants
	s.grants = map[uint64]*grant{}
	return gs
}

// deviceLocked is a device's index in the session, -1 beyond the limit. Caller
// holds mu.
func (s *session) deviceLocked(dev rdma.Device) int {
	if i := slices.Index(s.devices, dev); i >= 0 {
		return i
	}
	if len(s.devices) == wire.MaxDevices {
		return -1
	}
	s.devices = append(s.devices, dev)
	return len(s.devices) - 1
}

// domains are the session's protection domains by device index.
func (s *session) domains() ([]*domain, error) {
	s.mu.Lock()
	devs := slices.Clone(s.devices)
	s.mu.Unlock()
	ds := make([]*domain, len(devs))
	for i, dev := range devs {
		var err error
		if ds[i], err = s.exp.domain(dev, s.access != wire.AccessRead); err != nil {
			return nil, err
		}
	}
	return ds, nil
}

// grantMemory grants a piece of a memory export. Nothing has to be held for it.
func (s *session) grantMemory(p *piece) (wire.Grant, error) {
	ds, err := s.domains()
	if err != nil {
		return wire.Grant{}, err
	}
	g := wire.Grant{Offset: uint64(p.off), Length: uint64(len(p.mem))}
	for _, d := range ds {
		r, err := p.region(d)
		if err != nil {
			return wire.Grant{}, err
		}
		g.Addr = r.Addr()
		g.RKeys = append(g.RKeys, r.RKey())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.nextID++
	g.ID = s.nextID
	return g, nil
}

// grantFrame grants [off, off+n) of an extent that the caller has pinned.
func (s *session) grantFrame(st *stager, e *extent, off, n int64) wire.Grant {
	g := wire.Grant{Offset: uint64(off), Length: uint64(n)}
	ds, err := s.domains()
	if err != nil {
		g.Status = wire.StatusIO
		return g
	}
	for _, d := range ds {
		r, err := st.region(e.frame, d)
		if err != nil {
			s.log.Error("cannot register frames", "err", err)
			g.Status, g.RKeys = wire.StatusIO, nil
			return g
		}
		g.Addr = r.Addr() + uint64(offsetIn(e.frame)) + uint64(off-e.index*extentSize)
		g.RKeys = append(g.RKeys, r.RKey())
	}
	if g.Status = s.hold(st, e, &g.ID); g.Status != wire.StatusOK {
		g.RKeys = nil
	}
	return g
}

// offsetIn is where a frame lies in its slab.
func offsetIn(f *frame) int { return slices.Index(f.slab.frames, f) * extentSize }

// hold pins the extent for a new grant.
func (s *session) hold(st *stager, e *extent, id *uint64) wire.Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.open {
		return wire.StatusAgain // who is fenced learns it from the control plane
	}
	if len(s.grants) >= s.srv.limits.MaxGrants {
		return wire.StatusQuota
	}
	s.nextID++
	g := &grant{s: s, id: s.nextID, st: st, ext: e}
	s.grants[g.id] = g
	*id = g.id
	st.mu.Lock()
	defer st.mu.Unlock()
	if e.state == stateRevoking {
		delete(s.grants, g.id)
		return wire.StatusAgain
	}
	st.pinLocked(e)
	e.holds[g] = struct{}{}
	st.wakeLocked() // there is something to revoke
	return wire.StatusOK
}

// tell notes that the initiator has been sent these grants. Those that are
// wanted back by now are asked for at once.
func (s *session) tell(gs []wire.Grant) {
	var ask []*grant
	for i := range gs {
		s.mu.Lock()
		g := s.grants[gs[i].ID]
		s.mu.Unlock()
		if g == nil || gs[i].Status != wire.StatusOK {
			continue
		}
		g.st.mu.Lock()
		g.told = true
		if g.ext.state == stateRevoking {
			ask = append(ask, g)
		}
		g.st.mu.Unlock()
	}
	revoke(ask)
}

// give ends grants that the initiator has given back. Unknown ids are ignored.
func (s *session) give(ids []uint64) {
	for _, id := range ids {
		s.mu.Lock()
		g := s.grants[id]
		delete(s.grants, id)
		s.mu.Unlock()
		if g != nil {
			g.end()
		}
	}
}

func (s *session) dropGrants() {
	s.mu.Lock()
	all := s.grants
	s.grants = map[uint64]*grant{}
	s.mu.Unlock()
	for _, g := range all {
		g.end()
	}
}

// end unpins the extent.
func (g *grant) end() {
	g.st.mu.Lock()
	defer g.st.mu.Unlock()
	delete(g.ext.holds, g)
	g.st.unpinLocked(g.ext)
}

// revoke asks the holders for grants. A session that does not give them back in
// time loses its queue pairs.
func revoke(gs []*grant) {
	bySession := map[*session][]uint64{}
	for _, g := range gs {
		bySession[g.s] = append(bySession[g.s], g.id)
	}
	for s, ids := range bySession {
		s.revoke(ids)
	}
}

func (s *session) revoke(ids []uint64) {
	s.mu.Lock()
	c := s.conns[0]
	open := s.open
	ctx := s.ctx
	s.mu.Unlock()
	if !open {
		return // it is ending, and drops its grants
	}
	limit := time.Duration(s.srv.limits.RevokeMS) * time.Millisecond
	if c != nil {
		c.sendRevoke(ids)
	}
	s.srv.revokes.Add(1)
	s.srv.tasks.Go(func() {
		timer := time.NewTimer(limit)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
			return
		}
		s.mu.Lock()
		late := s.ctx == ctx && slices.ContainsFunc(ids, func(id uint64) bool { return s.grants[id] != nil })
		s.mu.Unlock()
		if late {
			s.kill(ctx, "a REVOKE was not answered")
		}
	})
}
