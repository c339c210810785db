// SPDX-License-Identifier: Apache-2.0

// Package wire is what target and initiator say to each other: the JSON types
// of the control plane and the binary messages of the data connections, with
// their versions and limits. It does no I/O. docs/protocol.md is its prose.
package wire

// ProtocolVersion is this build's version of both planes. A peer of another
// version is refused by name.
const ProtocolVersion = 1

// Ports. Control is HTTP; each data provider has its own.
const (
	DefaultControlPort = 7470
	DefaultTCPPort     = 7471
	DefaultVerbsPort   = 7472
)

// Access modes of a session.
const (
	AccessRead   = "ro"
	AccessWrite  = "rw"
	AccessShared = "shared"
)

// SessionRequest is the body of POST /v1/sessions. With Reopen it re-opens an
// existing session under a new epoch.
type SessionRequest struct {
	Protocol    int      `json:"protocol"`
	Export      string   `json:"export"`
	Access      string   `json:"access"`
	Force       bool     `json:"force,omitempty"`      // fence the present writer
	Connections int      `json:"connections"`          // tokens wanted, 1…Limits
	Transports  []string `json:"transports,omitempty"` // provider names the initiator has; empty: any
	Features    []string `json:"features,omitempty"`   // unknown ones are refused
	Client      Client   `json:"client"`
	// Nonce is 32 hex digits that the initiator makes up for each new session,
	// and repeats when it has not seen the answer: the target then replaces
	// the session that nobody has connected to.
	Nonce  string  `json:"nonce,omitempty"`
	Reopen *Reopen `json:"reopen,omitempty"`
}

// Client names the initiator to the people who run the target.
type Client struct {
	Host    string `json:"host"`
	Program string `json:"program"`
	PID     int    `json:"pid"`
	Version string `json:"version"`
	// Process names the process so that another one of its machine can tell
	// whether it is alive: BOOT:PIDNS:PID:START. Empty: nothing can be told.
	Process string `json:"process,omitempty"`
}

// Reopen identifies the session that is re-opened. The secret proves it.
type Reopen struct {
	Session string `json:"session"`
	Epoch   uint64 `json:"epoch"`
	Secret  string `json:"secret"` // 64 hex digits
}

// SessionReply answers POST /v1/sessions.
type SessionReply struct {
	Protocol int           `json:"protocol"`
	Session  string        `json:"session"`
	Epoch    uint64        `json:"epoch"`
	Secret   string        `json:"secret"` // resume secret, for Reopen
	Tokens   []Token       `json:"tokens"`
	Data     []DataAddress `json:"data"`
	Export   ExportInfo    `json:"export"`
	Limits   Limits        `json:"limits"`
	Features []string      `json:"features,omitempty"`
	BootID   string        `json:"boot_id"` // of the target's host
	Daemon   string        `json:"daemon"`  // identity of this run of rblkd
	// Verifier is the export's as of this answer, 32 hex digits (see Done).
	// Empty: the export has none.
	Verifier string `json:"verifier,omitempty"`
}

// Token lets one data connection in, once, for TokenTTL.
type Token struct {
	Connection int    `json:"connection"` // index within the session
	Secret     string `json:"secret"`     // 64 hex digits
}

// DataAddress is where a provider accepts data connections. An empty host means
// the host that answered.
type DataAddress struct {
	Provider string `json:"provider"` // "tcp", "verbs"
	Addr     string `json:"addr"`     // host:port
}

// Limits of a session.
type Limits struct {
	MaxConnections int   `json:"max_connections"`
	MaxMessage     int   `json:"max_message"`    // bytes of one binary message
	Credits        int   `json:"credits"`        // unanswered requests of the initiator, per connection
	TargetCredits  int   `json:"target_credits"` // unanswered requests of the target, per connection
	MaxGrants      int   `json:"max_grants"`     // granted frames per session
	SendDepth      int   `json:"send_depth"`
	ReadDepth      int   `json:"read_depth"`
	KeepaliveMS    int64 `json:"keepalive_ms"`
	DeadMS         int64 `json:"dead_ms"`
	RevokeMS       int64 `json:"revoke_ms"` // REVOKE unanswered this long ends the session's connections
}

// ExportInfo describes an export (GET /v1/exports, and in SessionReply).
type ExportInfo struct {
	Name       string `json:"name"`
	Kind       string `json:"kind"` // memory, file, dataset
	Size       int64  `json:"size"`
	BlockSize  int64  `json:"block_size"`
	ExtentSize int64  `json:"extent_size"`
	ReadOnly   bool   `json:"read_only"`
	Instance   string `json:"instance"`
	Layout     string `json:"layout"`
	Generation uint64 `json:"generation,omitempty"`
	Files      int    `json:"files,omitempty"`
	Durability string `json:"durability"` // what FLUSH means: "daemon" (survives rblkd, not the host), "host"
	CanFlush   bool   `json:"can_flush"`
	CanFUA     bool   `json:"can_fua"`
	CanDiscard bool   `json:"can_discard"`
	CanZero    bool   `json:"can_zero"`
	// NeedsCommit: a WRITE counts only once a COMMIT behind it is answered.
	NeedsCommit bool `json:"needs_commit"`
	// WriteBack: a COMMIT is answered before the backing store has the bytes.
	WriteBack bool `json:"write_back,omitempty"`
	// Confirm says how a WRITE is confirmed when NeedsCommit is false:
	// "completion", or "read" (a READ of a byte of the range behind it).
	Confirm string  `json:"confirm,omitempty"`
	Writer  *Writer `json:"writer,omitempty"` // who holds the write claim
}

// Writer names the holder of an export's write claim.
type Writer struct {
	Client    Client `json:"client"`
	Address   string `json:"address"`
	AgeSecond int64  `json:"age_seconds"`
}

// ExportList answers GET /v1/exports.
type ExportList struct {
	Protocol int          `json:"protocol"`
	Exports  []ExportInfo `json:"exports"`
}

// ConnectionsRequest is the body of POST /v1/sessions/{id}/connections: more
// tokens for a living session. The answer is a TokensReply.
type ConnectionsRequest struct {
	Epoch  uint64 `json:"epoch"`
	Secret string `json:"secret"`
	Count  int    `json:"count"`
}

// TokensReply carries fresh connect tokens.
type TokensReply struct {
	Tokens []Token `json:"tokens"`
}

// Error is the body of every answer with a status of 400 or above.
type Error struct {
	Code    string `json:"code"`
	Message string `json:"message"` // one line, names the mend
	// Writer is who holds the claim, with CodeBusy.
	Writer *Writer `json:"writer,omitempty"`
}

func (e *Error) Error() string { return e.Message }

// Error codes.
const (
	CodeBadRequest     = "bad_request"
	CodeVersion        = "version" // protocol version differs
	CodeFeature        = "feature" // unknown feature
	CodeUnauthorized   = "unauthorized"
	CodeUnknownExport  = "unknown_export"
	CodeReadOnly       = "read_only"
	CodeBusy           = "busy"   // another writer holds the claim
	CodeFenced         = "fenced" // the session was fenced, or its epoch is old
	CodeUnknownSession = "unknown_session"
	CodeInstance       = "instance" // re-open across a changed instance
	CodeLimit          = "limit"
	CodeDraining       = "draining"
	CodeTransport      = "transport" // no common provider
	CodeInternal       = "internal"
)

// Server-sent events of GET /v1/events: the SSE "event" field; Data is an Event.
const (
	EventDrain      = "drain"
	EventResize     = "resize"
	EventGeneration = "generation"
	EventExports    = "exports" // the list of exports changed
)

// Event is the data of a server-sent event.
type Event struct {
	Export string      `json:"export,omitempty"`
	Info   *ExportInfo `json:"info,omitempty"`
}

// TargetStatus answers GET /v1/status (`rblkd status`).
type TargetStatus struct {
	Version  string          `json:"version"`
	Daemon   string          `json:"daemon"`
	UptimeS  int64           `json:"uptime_seconds"`
	Draining bool            `json:"draining"`
	Data     []DataAddress   `json:"data"`
	Exports  []ExportInfo    `json:"exports"`
	Sessions []SessionStatus `json:"sessions"`
	Frames   FramesStatus    `json:"frames"`
}

// SessionStatus is one session in TargetStatus.
type SessionStatus struct {
	Session     string `json:"session"`
	Export      string `json:"export"`
	Access      string `json:"access"`
	Client      Client `json:"client"`
	Address     string `json:"address"`
	AgeSecond   int64  `json:"age_seconds"`
	Connections int    `json:"connections"`
	Grants      int    `json:"grants"`
}

// FramesStatus counts the target's frame pool.
type FramesStatus struct {
	Size     int64 `json:"size"` // bytes
	Free     int   `json:"free"`
	Filling  int   `json:"filling"`
	Resident int   `json:"resident"`
	Granted  int   `json:"granted"`
	Revoking int   `json:"revoking"`
}
