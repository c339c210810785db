// SPDX-License-Identifier: Apache-2.0

// Package volume is what a volume is to anyone above the network: its
// geometry, its lanes, where its bytes may land, and how it can fail. The cache
// and the front ends know a volume by this package alone; the initiator
// satisfies it.
package volume

import (
	"context"
	"fmt"
)

// Kind is what an export is.
type Kind string

const (
	KindMemory  Kind = "memory"
	KindFile    Kind = "file"
	KindDataset Kind = "dataset"
)

// Geometry describes a volume. Size and Generation may change during its life,
// each time announced by an Event; nothing else does.
type Geometry struct {
	Export     string // the export's name
	Kind       Kind
	Size       int64 // bytes
	BlockSize  int64 // smallest aligned unit of a write, a power of two; reads may be any range
	ExtentSize int64 // unit of residency at the target, a power of two
	ReadOnly   bool
	Instance   string // identity of the content
	Layout     string // cache key: ranges of one layout never change their bytes (datasets)
	Generation uint64 // of a dataset's tree, else 0
	// What the volume can do beyond READ and WRITE; front ends compute their
	// flags from these and type nothing in.
	CanFlush, CanFUA, CanDiscard, CanZero bool
	// CanMultiConn: a FLUSH covers every acknowledged write of every user of
	// the Source.
	CanMultiConn bool
}

// Lane is a class of traffic. Lanes are served apart, so that a demand read
// never waits behind a window of read-ahead or a burst of writes. There is no
// order between lanes, nor between operations of one lane, except that a read
// which overlaps an unacknowledged write waits for it, and overlapping writes
// are applied in the order submitted.
type Lane uint8

const (
	LaneDemand Lane = iota
	LaneReadahead
	LaneWrite
	NumLanes
)

var laneNames = [NumLanes]string{"demand", "readahead", "write"}

// String is the metric label of l.
func (l Lane) String() string {
	if l < NumLanes {
		return laneNames[l]
	}
	return fmt.Sprintf("lane(%d)", uint8(l))
}

// OpKind says which way an Op moves bytes.
type OpKind uint8

const (
	OpRead OpKind = iota
	OpWrite
)

// Op is one transfer between the volume and arena memory. The submitter owns
// the struct; between Submit and Done it and Mem belong to the Source.
type Op struct {
	Kind   OpKind
	Lane   Lane
	FUA    bool   // OpWrite: durable before Done (only when Geometry.CanFUA)
	Offset int64  // in the volume; [Offset, Offset+len(Mem)) lies inside it
	Mem    []byte // wholly inside one Arena of this Source; at most Source.MaxTransfer bytes

	// Done is called exactly once, with Err set, from a goroutine of the
	// Source or from one that is in Submit or Await. It must not block and
	// must not call the Source, except Submit.
	Done func(*Op)

	// Err is valid from Done on: nil, or an error that matches a sentinel of
	// this package.
	Err error

	// Source is scratch space of the Source that serves the Op. Nobody else
	// reads or writes it.
	Source any
}

// Source is an opened volume. All methods are safe for concurrent use.
type Source interface {
	Geometry() Geometry

	// MaxTransfer is the most bytes in one Op.
	MaxTransfer() int

	// NewArena maps size bytes, zeroed, outside the Go heap, page-aligned, and
	// registers them for reads and writes of this Source.
	NewArena(size int64) (Arena, error)

	// Submit starts operations. It never blocks: what cannot be posted yet
	// waits in its lane, without limit but the number of Ops that exist. Every
	// Op is Done exactly once; after Close has begun, with ErrClosed.
	// Operations survive reconnects; they fail only as the policy of the
	// Source (hard, soft) says.
	Submit(ops []*Op)

	// Await returns when op is Done, with op.Err, or when ctx ends, with ctx's
	// error; then op is still under way and will be Done later. Waiting through
	// Await lets the caller's goroutine do the completion work itself, which
	// saves a wake-up; waiting by other means works too.
	Await(ctx context.Context, op *Op) error

	// Flush returns when every write that was Done before the call is durable
	// as the export states it.
	Flush(ctx context.Context) error

	// Zero makes [off, off+n) read as zeros and keeps it allocated. Only when
	// Geometry.CanZero.
	Zero(ctx context.Context, off, n int64) error

	// Discard tells that [off, off+n) is not needed; it reads as zeros
	// afterwards. Only when Geometry.CanDiscard.
	Discard(ctx context.Context, off, n int64) error

	// Events delivers what happens to the volume; one reader. It is closed
	// after Close. Events of a kind that nobody has taken yet are merged.
	Events() <-chan Event

	// Close ends the session: outstanding Ops are Done with ErrClosed, then
	// network resources go. Arenas must be closed first or are closed by it.
	Close() error
}

// Arena is memory that a Source may read into and write from.
type Arena interface {
	// Bytes is the whole arena. It stays mapped until Close returns.
	Bytes() []byte
	// Close waits until no Op uses the arena, unregisters and unmaps it.
	Close() error
}

// EventKind says what happened.
type EventKind uint8

const (
	// EventResized: Geometry.Size changed.
	EventResized EventKind = iota + 1
	// EventGeneration: a dataset has a new generation; Geometry is already
	// new. Ranges that both generations share keep their bytes.
	EventGeneration
	// EventInstance: the content was lost. Every Op fails with
	// ErrInstanceChanged from now on.
	EventInstance
	// EventState: State or Err changed.
	EventState
	// EventDrain: the target is about to go away for a moment.
	EventDrain
)

// State is a session's condition.
type State uint8

const (
	StateConnected State = iota
	StateReconnecting
	StateFailed // for good: fenced, instance changed, closed
)

var stateNames = []string{"connected", "reconnecting", "failed"}

func (s State) String() string {
	if int(s) < len(stateNames) {
		return stateNames[s]
	}
	return fmt.Sprintf("state(%d)", uint8(s))
}

// Event is something that happened to the volume.
type Event struct {
	Kind     EventKind
	Geometry Geometry // as of the event
	State    State
	Err      error // why, for StateReconnecting and StateFailed
}
