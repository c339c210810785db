// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"rblk/rdma"
	"rblk/wire"
)

// content is what stands behind an export: memory, or a dataset.
type content interface {
	info(*wire.ExportInfo)
	// mapRange grants r to s: at least one grant, for a prefix of r. Without
	// wait it never waits for memory that others hold: StatusAgain.
	mapRange(ctx context.Context, s *session, r wire.Range, intent wire.Intent, wait bool) []wire.Grant
	zero(ctx context.Context, r wire.Range) wire.Status
	flush(ctx context.Context) wire.Status
	resize(n int64) error
	// leave drops the registrations in a domain that is about to close.
	leave(*domain)
	// close ends it. No session is left.
	close()
}

// domain is a protection domain of one export, in one access mode, on one
// device. A read-only one holds nothing that can be written.
type domain struct {
	pd    rdma.ProtectionDomain
	dev   rdma.Device
	write bool
}

// export is a named thing that can be opened.
type export struct {
	name    string
	content content
	log     *slog.Logger

	mu       sync.Mutex
	domains  []*domain           // guarded by mu
	sessions map[string]*session // guarded by mu
	writer   *session            // guarded by mu: who holds the claim
	left     *claimRecord        // guarded by mu: a claim whose holder is away: of a previous run, or silent for too long
	grace    time.Time           // guarded by mu: until when nobody else may have it (monotonic)
	lost     string              // guarded by mu: the session that wrote to content that is gone
	closed   bool                // guarded by mu
}

// newExport takes the content over.
func newExport(name string, c content, st *stateDir, grace time.Duration, log *slog.Logger) *export {
	e := &export{name: name, content: c, sessions: map[string]*session{}, log: log.With("export", name)}
	if rec, ok := st.loadClaim(name); ok {
		if rec.Instance != e.info().Instance {
			e.lost = rec.Session
			st.dropClaim(name) // it was a claim on content that is gone
		} else {
			e.left, e.grace = &rec, time.Now().Add(grace)
		}
	}
	return e
}

// arm begins the time of grace anew: it is for the holder's return to a target
// that serves.
func (e *export) arm(grace time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.left != nil {
		e.grace = time.Now().Add(grace)
	}
}

// info describes the export as of now.
func (e *export) info() wire.ExportInfo {
	i := wire.ExportInfo{Name: e.name}
	e.content.info(&i)
	return i
}

// describe adds who writes.
func (e *export) describe() wire.ExportInfo {
	i := e.info()
	e.mu.Lock()
	defer e.mu.Unlock()
	i.Writer = e.writerLocked()
	return i
}

// writerLocked names the holder of the claim: a session, or, within its grace,
// the one that a previous run has left. Caller holds mu.
func (e *export) writerLocked() *wire.Writer {
	switch {
	case e.writer != nil:
		return e.writer.holder()
	case e.left != nil && time.Now().Before(e.grace):
		return &wire.Writer{Client: e.left.Client, Address: e.left.Address, AgeSecond: int64(time.Since(e.left.Since).Seconds())}
	}
	return nil
}

// domain returns the protection domain for a device and mode, making it the
// first time.
func (e *export) domain(dev rdma.Device, write bool) (*domain, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return nil, fmt.Errorf("export %s is closed", e.name)
	}
	for _, d := range e.domains {
		if d.dev == dev && d.write == write {
			return d, nil
		}
	}
	pd, err := dev.NewDomain()
	if err != nil {
		return nil, err
	}
	d := &domain{pd: pd, dev: dev, write: write}
	e.domains = append(e.domains, d)
	return d, nil
}

// close ends every session, then the domains, then the content.
func (e *export) close() {
	e.mu.Lock()
	e.closed = true
	sessions := make([]*session, 0, len(e.sessions))
	for _, s := range e.sessions {
		sessions = append(sessions, s)
	}
	e.mu.Unlock()
	for _, s := range sessions {
		s.end(claimDropped)
	}
	e.mu.Lock()
	domains := e.domains
	e.domains = nil
	e.mu.Unlock()
	for _, d := range domains {
		e.content.leave(d)
	}
	e.content.close()
	for _, d := range domains {
		if err := d.pd.Close(); err != nil {
			e.log.Error("protection domain does not close", "err", err)
		}
	}
}

// refuse answers a range with a status.
func refuse(r wire.Range, s wire.Status) []wire.Grant {
	return []wire.Grant{{Offset: r.Offset, Length: r.Length, Status: s}}
}
