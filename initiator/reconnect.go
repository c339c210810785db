// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"rblk/rdma"
	"rblk/volume"
	"rblk/wire"
)

// Reconnect delays. The first try comes at once: most losses are a restart of
// the daemon or one lost connection. Later ones double up to the maximum, each
// with a jitter of half, so that a hundred initiators do not come back as one.
const (
	firstDelay = 50 * time.Millisecond
	maxDelay   = 3 * time.Second
)

// maxTries is how often an operation may be refused by the target's adapter
// before it fails: its grant is right each time, so something else is wrong.
const maxTries = 4

// gone is closed when the epoch is not the volume's any more.
func (e *epoch) gone() <-chan struct{} { return e.ended }

// run keeps the session connected until the volume is closed or has failed for
// good.
func (v *Volume) run() {
	for {
		v.mu.Lock()
		e := v.cur
		v.mu.Unlock()
		select {
		case <-v.ctx.Done():
			return
		case <-e.dead:
		}
		if v.ctx.Err() != nil || !v.reconnect(e) {
			return
		}
	}
}

// reconnect replaces a dead epoch; false when that is not possible any more.
func (v *Volume) reconnect(e *epoch) bool {
	why := e.cause()
	v.log.Warn("connection to the target lost", "err", why)
	v.mu.Lock()
	v.cur = nil
	v.mu.Unlock()
	v.setState(volume.StateReconnecting, why)
	e.close()
	close(e.ended)
	v.dropDoomed()
	if v.src.Soft > 0 {
		timer := time.AfterFunc(v.src.Soft, v.goAway)
		defer timer.Stop()
	}
	for delay := time.Duration(0); ; delay = min(max(2*delay, firstDelay), maxDelay) {
		if !v.sleep(delay) {
			return false
		}
		next, err := v.reopen()
		if err == nil {
			v.resume(next)
			return true
		}
		if v.ctx.Err() != nil {
			return false
		}
		var dead *deadError
		if errors.As(err, &dead) {
			v.die(dead.err)
			return false
		}
		v.log.Info("cannot reconnect yet", "err", err, "next_try_in", min(max(2*delay, firstDelay), maxDelay))
		v.setState(volume.StateReconnecting, err)
	}
}

// sleep waits for d with jitter; false when the volume is closed meanwhile.
func (v *Volume) sleep(d time.Duration) bool {
	if d > 0 {
		d = d/2 + rand.N(d)
	}
	select {
	case <-time.After(d):
		return true
	case <-v.ctx.Done():
		return false
	}
}

// deadError ends the volume for good.
type deadError struct{ err error }

func (e *deadError) Error() string { return e.err.Error() }

// reopen begins a new epoch of the session. When the target does not know the
// session any more, and holds the same content, a new session takes its place.
func (v *Volume) reopen() (*epoch, error) {
	v.control.Close() // what killed the data connections may have killed idle ones, too
	v.mu.Lock()
	r := v.request()
	r.Access = v.access
	r.Reopen = &wire.Reopen{Session: v.session, Epoch: v.number, Secret: v.secret}
	was := v.geometry
	v.mu.Unlock()
	reply, addr, err := v.control.Open(v.ctx, r)
	if code(err) == wire.CodeUnknownSession {
		reply, addr, err = v.anew()
		if code(err) == wire.CodeBusy {
			// The claim has ended, and another writer holds it now.
			err = &deadError{fmt.Errorf("%w: %w", volume.ErrFenced, err)}
		}
	}
	if dead := final(err); dead != nil {
		return nil, &deadError{dead}
	}
	if err != nil {
		return nil, err
	}
	if now := geometry(&reply.Export, v.access); now.Instance != was.Instance || now.Layout != was.Layout {
		v.giveUp(reply)
		return nil, &deadError{fmt.Errorf("%w: it was %.8s, it is %.8s", volume.ErrInstanceChanged, was.Instance, reply.Export.Instance)}
	}
	e, err := v.adopt(v.ctx, reply, addr)
	if err != nil {
		// The session stays: the next try re-opens it.
		v.mu.Lock()
		v.session, v.number, v.secret = reply.Session, reply.Epoch, reply.Secret
		v.mu.Unlock()
		return nil, err
	}
	return e, nil
}

// anew opens a new session, never by force: whoever writes by now has a right
// to.
func (v *Volume) anew() (*wire.SessionReply, string, error) {
	r := v.request()
	r.Access, r.Nonce = v.access, v.newNonce()
	reply, addr, err := v.control.Open(v.ctx, r)
	if err == nil {
		v.answered()
	}
	return reply, addr, err
}

// resume begins every unfinished operation anew.
func (v *Volume) resume(e *epoch) {
	v.mu.Lock()
	v.cur = e
	v.away = false
	var xs []*op
	for x := v.active.next; x != &v.active; x = x.next {
		if x.blockers == 0 {
			x.reset()
			xs = append(xs, x)
		}
	}
	v.mu.Unlock()
	v.log.Info("connected again", "replayed", len(xs))
	v.setState(volume.StateConnected, nil)
	v.stats.reconnects.Add(1)
	e.begin(xs)
}

// dropDoomed fails operations that must not be begun anew. There is no epoch.
func (v *Volume) dropDoomed() {
	v.mu.Lock()
	var doomed []refused
	for x := v.active.next; x != &v.active; x = x.next {
		if err := v.doom(x); err != nil {
			doomed = append(doomed, refused{x, err})
		}
	}
	v.mu.Unlock()
	for _, d := range doomed {
		v.complete(d.op, d.err)
	}
}

// doom is why x must not be begun anew: the target's adapter has refused it
// again and again, or others may have written the range since.
func (v *Volume) doom(x *op) error {
	switch {
	case x.tries >= maxTries:
		return fmt.Errorf("%w: the target's adapter refuses the access: %w", volume.ErrIO, &rdma.StatusError{Status: rdma.StatusRemoteAccess})
	case v.access == wire.AccessShared && x.changes() && x.begun:
		return volume.ErrUnknownOutcome
	}
	return nil
}

// goAway fails what waits once the soft time is over.
func (v *Volume) goAway() {
	v.mu.Lock()
	gone := v.cur == nil && v.err == nil
	v.away = gone
	var all []*op
	if gone {
		all = v.takeAll()
	}
	v.mu.Unlock()
	if !gone {
		return
	}
	v.log.Warn("the target is away for longer than soft allows: I/O fails until it is back", "soft", v.src.Soft)
	for _, x := range all {
		v.finished(x, volume.ErrAway)
	}
}

// die fails the volume for good.
func (v *Volume) die(err error) {
	v.log.Error("volume failed for good", "err", err)
	v.mu.Lock()
	v.err = err
	v.mu.Unlock()
	if errors.Is(err, volume.ErrInstanceChanged) {
		v.events.put(volume.Event{Kind: volume.EventInstance, Geometry: v.Geometry(), State: volume.StateFailed, Err: err})
	}
	v.setState(volume.StateFailed, err)
	v.endAll(err)
}

func (v *Volume) setState(s volume.State, why error) {
	v.mu.Lock()
	v.state, v.why = s, why
	g := v.geometry
	v.mu.Unlock()
	v.events.put(volume.Event{Kind: volume.EventState, Geometry: g, State: s, Err: why})
}

// follow takes the target's events up.
func (v *Volume) follow() {
	for delay := firstDelay; v.ctx.Err() == nil; delay = min(2*delay, maxDelay) {
		v.mu.Lock()
		e := v.cur
		v.mu.Unlock()
		silence := 15 * time.Second
		if e != nil {
			silence = time.Duration(e.limits.DeadMS) * time.Millisecond
		}
		err := v.control.Events(v.ctx, v.src.Export, silence, func(name string, ev wire.Event) {
			delay = firstDelay
			v.happened(name, ev)
		})
		v.log.Debug("event stream ended", "err", err)
		if !v.sleep(delay) {
			return
		}
		v.refresh()
	}
}

// happened acts on one event.
func (v *Volume) happened(name string, ev wire.Event) {
	switch name {
	case wire.EventDrain:
		v.events.put(volume.Event{Kind: volume.EventDrain, Geometry: v.Geometry()})
	case wire.EventResize, wire.EventGeneration:
		if ev.Info != nil && ev.Info.Name == v.src.Export {
			v.update(ev.Info)
		}
	}
}

// update takes a new description of the export up.
func (v *Volume) update(i *wire.ExportInfo) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if now := geometry(i, v.access); now.Instance != v.geometry.Instance || now.Layout != v.geometry.Layout || i.Size < 0 {
		return // a re-open will tell
	}
	old := v.geometry
	v.geometry.Size, v.geometry.Generation = i.Size, i.Generation
	v.announce(old, v.geometry)
}

// refresh asks for what an interrupted event stream may have missed.
func (v *Volume) refresh() {
	ctx, cancel := context.WithTimeout(v.ctx, closeTime)
	defer cancel()
	list, err := v.control.Exports(ctx)
	if err != nil {
		return
	}
	for i := range list {
		if list[i].Name == v.src.Export {
			v.update(&list[i])
		}
	}
}
