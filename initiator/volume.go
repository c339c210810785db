// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"rblk/dataset"
	"rblk/internal/version"
	"rblk/rdma"
	"rblk/volume"
	"rblk/wire"
)

// DialOptions of Dial.
type DialOptions struct {
	// Providers are tried in order.
	Providers []rdma.Provider
	Logger    *slog.Logger // nil: discard
}

// Volume is an opened export. It implements volume.Source; see there for its
// methods' contracts.
type Volume struct {
	// set once
	src       Source
	access    string
	transport string
	providers []rdma.Provider
	control   *Control
	log       *slog.Logger
	stats     stats
	seq       atomic.Uint64
	events    *events
	ctx       context.Context // ends with Close
	cancel    context.CancelFunc
	tasks     sync.WaitGroup

	domainsMu sync.Mutex // held while a domain is made

	mu       sync.Mutex
	geometry volume.Geometry // guarded by mu
	session  string          // guarded by mu
	secret   string          // guarded by mu: resume secret
	nonce    string          // guarded by mu: of a request for a new session that is unanswered
	number   uint64          // guarded by mu: the session's epoch
	cur      *epoch          // guarded by mu: nil while there is none
	state    volume.State    // guarded by mu
	err      error           // guarded by mu: why it has failed for good
	why      error           // guarded by mu: why it is in its state
	away     bool            // guarded by mu: the soft time is over
	closed   bool            // guarded by mu
	active   op              // guarded by mu: ring of unfinished operations
	order    order           // guarded by mu
	arenas   []*arena        // guarded by mu
	domains  []*domain       // guarded by mu
}

var _ volume.Source = (*Volume)(nil)

// Dial opens src.Export and connects. Errors are one line; those of the target
// are *wire.Error.
func Dial(ctx context.Context, src Source, opts DialOptions) (*Volume, error) {
	if len(opts.Providers) == 0 {
		return nil, errors.New("no provider")
	}
	control, err := NewControl(src)
	if err != nil {
		return nil, err
	}
	v := &Volume{src: src, access: src.Access, transport: src.Transport, providers: opts.Providers, control: control, log: opts.Logger, events: newEvents()}
	if v.log == nil {
		v.log = slog.New(slog.DiscardHandler)
	}
	if v.transport == "" {
		v.transport = "auto"
	}
	v.log = v.log.With("export", src.Export)
	v.active.next, v.active.prev = &v.active, &v.active
	v.ctx, v.cancel = context.WithCancel(context.Background())
	reply, addr, err := v.create(ctx)
	if err != nil {
		v.release()
		return nil, err
	}
	e, err := v.adopt(ctx, reply, addr)
	if err != nil {
		v.giveUp(reply)
		v.release()
		return nil, err
	}
	v.mu.Lock()
	v.cur = e
	v.mu.Unlock()
	v.tasks.Go(v.run)
	v.tasks.Go(v.follow)
	return v, nil
}

func (v *Volume) transportNames() string {
	var names []string
	for _, p := range v.providers {
		names = append(names, p.Name())
	}
	return strings.Join(names, ", ")
}

// request is a session request of this volume.
func (v *Volume) request() *wire.SessionRequest {
	name, _ := os.Hostname()
	n := v.src.Connections
	if n == 0 {
		n = defaultConnections
	}
	r := &wire.SessionRequest{
		Protocol: wire.ProtocolVersion, Export: v.src.Export, Access: v.access, Connections: n,
		Client: wire.Client{Host: name, Program: "rmount", PID: os.Getpid(), Version: version.Version, Process: thisProcess()},
	}
	for _, p := range v.providers {
		if v.transport == "auto" || v.transport == p.Name() {
			r.Transports = append(r.Transports, p.Name())
		}
	}
	return r
}

// create opens a new session. Without an access mode it asks for rw, and for ro
// where the export has nothing else.
func (v *Volume) create(ctx context.Context) (*wire.SessionReply, string, error) {
	access := v.access
	if access == "" {
		access = wire.AccessWrite
	}
	for {
		r := v.request()
		r.Access, r.Force, r.Nonce = access, v.src.Force, v.newNonce()
		if len(r.Transports) == 0 {
			return nil, "", fmt.Errorf("transport=%s: this build has %s", v.transport, v.transportNames())
		}
		reply, addr, err := v.control.Open(ctx, r)
		if err == nil {
			v.access = access
			v.answered()
			return reply, addr, nil
		}
		if abandoned(err) && !r.Force {
			v.log.Info("taking over from a dead process of this machine", "err", err)
			v.src.Force = true
			continue
		}
		if code(err) == wire.CodeReadOnly && v.access == "" && access == wire.AccessWrite {
			access = wire.AccessRead
			continue
		}
		return nil, addr, err
	}
}

// newNonce is that of the last request for a new session, while it is
// unanswered: the target then ends what that one may have made.
func (v *Volume) newNonce() string {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.nonce == "" {
		b := make([]byte, 16)
		rand.Read(b)
		v.nonce = hex.EncodeToString(b)
	}
	return v.nonce
}

func (v *Volume) answered() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.nonce = ""
}

// adopt makes the connections of a reply and takes its session over.
func (v *Volume) adopt(ctx context.Context, reply *wire.SessionReply, addr string) (*epoch, error) {
	if len(reply.Tokens) == 0 || reply.Export.Size < 0 || reply.Export.Size > maxVolume {
		return nil, errors.New("the target's answer makes no sense: no tokens, or an impossible size")
	}
	e, err := newEpoch(ctx, v, reply, addr)
	if err != nil {
		return nil, err
	}
	g := geometry(&reply.Export, v.access)
	v.mu.Lock()
	defer v.mu.Unlock()
	old := v.geometry
	if old.Layout != "" && old.Layout == g.Layout && old.Generation > g.Generation {
		g.Generation, g.Size = old.Generation, old.Size // an event has overtaken the answer
	}
	v.session, v.number, v.secret, v.geometry = reply.Session, reply.Epoch, reply.Secret, g
	if old.Export != "" {
		v.announce(old, g)
	}
	return e, nil
}

func geometry(i *wire.ExportInfo, access string) volume.Geometry {
	g := volume.Geometry{
		Export: i.Name, Kind: volume.Kind(i.Kind), Size: i.Size, BlockSize: max(1, i.BlockSize), ExtentSize: i.ExtentSize,
		ReadOnly: i.ReadOnly || access == wire.AccessRead, Instance: i.Instance, Layout: i.Layout, Generation: i.Generation,
		CanFlush: i.CanFlush, CanFUA: i.CanFUA, CanDiscard: i.CanDiscard, CanZero: i.CanZero, CanMultiConn: true,
	}
	if g.Kind != volume.KindDataset {
		g.Layout = "" // its ranges change their bytes
	}
	return g
}

// announce tells of what differs. Caller holds mu.
func (v *Volume) announce(old, now volume.Geometry) {
	if old.Size != now.Size {
		v.events.put(volume.Event{Kind: volume.EventResized, Geometry: now, State: v.state})
	}
	if old.Generation != now.Generation {
		v.events.put(volume.Event{Kind: volume.EventGeneration, Geometry: now, State: v.state})
	}
}

// Geometry of the volume as of now.
func (v *Volume) Geometry() volume.Geometry {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.geometry
}

// State tells how the session is, and why.
func (v *Volume) State() (volume.State, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.state, v.why
}

// Transport names the provider that carries the data, or "".
func (v *Volume) Transport() string {
	v.mu.Lock()
	e := v.cur
	v.mu.Unlock()
	if e == nil {
		return ""
	}
	return e.conns[0].rc.Info().Device.Info().Transport
}

// Manifest fetches the newest manifest of a dataset. It is always of the
// session's layout; a newer generation than the session has heard of is taken
// up.
func (v *Volume) Manifest(ctx context.Context) (*dataset.Manifest, error) {
	m, err := v.control.Manifest(ctx, v.src.Export, "")
	if err != nil {
		return nil, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	old := v.geometry
	if m.Layout() != old.Layout {
		return nil, fmt.Errorf("%w: the manifest is of another layout than the session", volume.ErrInstanceChanged)
	}
	if m.Generation() > old.Generation {
		v.geometry.Generation, v.geometry.Size = m.Generation(), max(old.Size, m.VolumeSize())
		v.announce(old, v.geometry)
	}
	return m, nil
}

// maxTransfer lets one operation keep several work requests in flight.
const maxTransfer = 8 << 20

// MaxTransfer is 8 MiB.
func (v *Volume) MaxTransfer() int { return maxTransfer }

// Events delivers what happens to the volume.
func (v *Volume) Events() <-chan volume.Event { return v.events.out }

func offsetOf(a *arena, p []byte) uintptr {
	return uintptr(unsafe.Pointer(unsafe.SliceData(p))) - a.base
}

// Submit starts operations.
func (v *Volume) Submit(ops []*volume.Op) {
	var few [16]*op
	xs := few[:0]
	now := time.Now()
	for _, o := range ops {
		x := opFor(o)
		x.start = now
		xs = append(xs, x)
	}
	v.submit(xs)
}

// prepare checks an operation and finds its arena. Caller holds mu.
func (v *Volume) prepare(x *op) error {
	x.arena = nil
	if x.vol == nil {
		return nil // a message, checked by who made it
	}
	g := &v.geometry
	switch {
	case x.off < 0 || x.n > g.Size || x.off > g.Size-x.n || x.n > maxTransfer:
		return fmt.Errorf("%w: %d bytes at %d of %d", volume.ErrRange, x.n, x.off, g.Size)
	case x.kind == kindWrite && g.ReadOnly:
		return volume.ErrReadOnly
	case x.kind == kindWrite && (x.off%g.BlockSize != 0 || x.n%g.BlockSize != 0):
		return fmt.Errorf("%w: %d bytes at %d, blocks have %d", volume.ErrRange, x.n, x.off, g.BlockSize)
	}
	for _, a := range v.arenas {
		if a.holds(x.mem) {
			x.arena = a
			break
		}
	}
	if x.arena == nil || !x.arena.use() {
		x.arena = nil
		return fmt.Errorf("%w: memory of no arena of this volume", volume.ErrRange)
	}
	return nil
}

// submit enters operations and begins those that may start.
func (v *Volume) submit(xs []*op) {
	v.mu.Lock()
	e := v.cur
	refuse := v.refusal()
	begin := xs[:0]
	var no []refused
	for _, x := range xs {
		err := refuse
		if err == nil {
			err = v.prepare(x)
		}
		if err != nil {
			no = append(no, refused{x, err})
			continue
		}
		x.reset()
		x.prev, x.next = v.active.prev, &v.active
		x.prev.next, x.next.prev = x, x
		if v.order.enter(x) && e != nil {
			begin = append(begin, x)
		}
	}
	v.mu.Unlock()
	for _, r := range no {
		v.finished(r.op, r.err)
	}
	if len(begin) > 0 {
		e.begin(begin)
	}
}

// refused is an operation that is not taken, and why.
type refused struct {
	op  *op
	err error
}

// refusal is why nothing is taken now. Caller holds mu.
func (v *Volume) refusal() error {
	switch {
	case v.closed:
		return volume.ErrClosed
	case v.err != nil:
		return v.err
	case v.away && v.cur == nil:
		return volume.ErrAway
	}
	return nil
}

// complete ends an operation that was entered, and begins those that waited for
// it.
func (v *Volume) complete(x *op, err error) {
	v.mu.Lock()
	x.prev.next, x.next.prev = x.next, x.prev
	x.next, x.prev = nil, nil
	ready := v.order.leave(x, nil)
	e := v.cur
	v.mu.Unlock()
	v.finished(x, err)
	if e != nil && len(ready) > 0 {
		e.begin(ready)
	}
}

// finished hands the operation back.
func (v *Volume) finished(x *op, err error) {
	v.stats.note(x, err)
	if x.arena != nil {
		x.arena.unuse()
		x.arena = nil
	}
	if x.vol == nil {
		x.finish(err)
		return
	}
	o := x.vol
	x.vol = nil
	o.Err = err
	o.Done(o)
	x.done.Store(true)
	x.stir()
	x.released.Store(true)
}

// Await waits for an operation, and does its connection's completions meanwhile
// when nobody else does.
func (v *Volume) Await(ctx context.Context, o *volume.Op) error {
	x, _ := o.Source.(*op)
	if x == nil {
		return fmt.Errorf("%w: operation was not submitted", volume.ErrRange)
	}
	x.awaiting.Store(true)
	// An operation that waits for grants has nothing to come on its connection:
	// who led that would not notice that it fails.
	idle := func() bool { return x.done.Load() || x.posted.Load() == 0 }
	for !x.done.Load() {
		var lead chan struct{}
		c := x.conn.Load()
		if c != nil && !c.always && !idle() {
			lead = c.lead
		}
		select {
		case <-x.wake:
		case <-lead:
			c.leading(ctx, idle)
			c.lead <- struct{}{}
			if c.rc.Err() != nil {
				// The connection is dead: wait for the next epoch's.
				select {
				case <-x.wake:
				case <-c.e.gone():
				case <-ctx.Done():
				}
			} else if c.busy() {
				c.stir()
			}
		case <-ctx.Done():
			if x.done.Load() {
				return o.Err
			}
			return ctx.Err()
		}
	}
	x.stir() // there may be others who wait
	return o.Err
}

// message runs an operation that travels as a message.
func (v *Volume) message(ctx context.Context, k kind, off, n int64) error {
	x := newOp()
	x.kind, x.off, x.n, x.start = k, off, n, time.Now()
	done := make(chan error, 1)
	x.finish = func(err error) { done <- err }
	v.submit([]*op{x})
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Flush makes what was acknowledged durable, as the export states it.
func (v *Volume) Flush(ctx context.Context) error { return v.message(ctx, kindFlush, 0, 0) }

// Zero makes a range read as zeros.
func (v *Volume) Zero(ctx context.Context, off, n int64) error {
	return v.change(ctx, kindZero, off, n, func(g volume.Geometry) bool { return g.CanZero })
}

// Discard gives a range up.
func (v *Volume) Discard(ctx context.Context, off, n int64) error {
	return v.change(ctx, kindDiscard, off, n, func(g volume.Geometry) bool { return g.CanDiscard })
}

func (v *Volume) change(ctx context.Context, k kind, off, n int64, can func(volume.Geometry) bool) error {
	g := v.Geometry()
	switch {
	case g.ReadOnly:
		return volume.ErrReadOnly
	case !can(g):
		return volume.ErrUnsupported
	case off < 0 || n < 0 || n > g.Size || off > g.Size-n || off%g.BlockSize != 0 || n%g.BlockSize != 0 && off+n != g.Size:
		return fmt.Errorf("%w: %d bytes at %d of %d", volume.ErrRange, n, off, g.Size)
	case n == 0:
		return nil
	}
	return v.message(ctx, k, off, n)
}

// closeTime bounds the farewell to the target.
const closeTime = 2 * time.Second

// Close ends the session.
func (v *Volume) Close() error {
	v.mu.Lock()
	was := v.closed
	v.closed = true
	v.mu.Unlock()
	v.cancel()
	v.tasks.Wait()
	if was {
		return nil
	}
	v.mu.Lock()
	e, session, secret := v.cur, v.session, v.secret
	v.cur = nil
	v.state, v.why = volume.StateFailed, volume.ErrClosed
	v.mu.Unlock()
	if e != nil {
		e.close()
	}
	v.endAll(volume.ErrClosed)
	ctx, cancel := context.WithTimeout(context.Background(), closeTime)
	defer cancel()
	if err := v.control.Delete(ctx, session, secret); err != nil {
		v.log.Debug("farewell to the target failed", "err", err)
	}
	v.release()
	return nil
}

// giveUp ends a session that could not be used.
func (v *Volume) giveUp(reply *wire.SessionReply) {
	ctx, cancel := context.WithTimeout(context.Background(), closeTime)
	defer cancel()
	v.control.Delete(ctx, reply.Session, reply.Secret)
}

// release frees arenas and domains.
func (v *Volume) release() {
	v.cancel()
	v.events.close()
	v.mu.Lock()
	arenas := append([]*arena(nil), v.arenas...)
	v.mu.Unlock()
	for _, a := range arenas {
		a.Close()
	}
	v.mu.Lock()
	domains := v.domains
	v.domains = nil
	v.mu.Unlock()
	for _, d := range domains {
		if err := d.pd.Close(); err != nil {
			v.log.Error("protection domain does not close", "err", err)
		}
	}
	v.control.Close()
}

// endAll ends every unfinished operation. There is no epoch.
func (v *Volume) endAll(err error) {
	v.mu.Lock()
	all := v.takeAll()
	v.mu.Unlock()
	for _, x := range all {
		v.finished(x, err)
	}
}

// takeAll empties the ring of unfinished operations. There is no epoch. Caller
// holds mu.
func (v *Volume) takeAll() []*op {
	var all []*op
	for x := v.active.next; x != &v.active; x = x.next {
		all = append(all, x)
	}
	v.active.next, v.active.prev = &v.active, &v.active
	v.order.changes = nil
	for _, x := range all {
		x.followers, x.blockers = x.followers[:0], 0
	}
	return all
}
