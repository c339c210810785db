// SPDX-License-Identifier: Apache-2.0

// Package nbd serves cached volumes over the Network Block Device protocol, to
// user-space clients (libnbd, qemu, nbd-client) and to the Linux kernel.
//
// The protocol is the public document doc/proto.md of the
// NetworkBlockDevice/nbd repository. All integers on the wire are big-endian.
//
// # One request
//
// A connection has one reader at a time. It reads a request with its payload,
// passes the right to read on to another goroutine, and then carries the request
// to its end, the reply included. So no request changes goroutines, and no
// request waits for another.
//
// A read's reply leaves as one writev of header and cached frames, and only
// once all its data is there. A write's payload is read from the socket into
// registered memory, once.
package nbd

// Magic numbers.
const (
	magicInit          = 0x4e42444d41474943 // "NBDMAGIC"
	magicOption        = 0x49484156454f5054 // "IHAVEOPT"
	magicOptionReply   = 0x0003e889045565a9
	magicRequest       = 0x25609513
	magicRequestExt    = 0x21e41c71
	magicReply         = 0x67446698
	magicReplyChunk    = 0x668e33ef
	magicReplyChunkExt = 0x6e8a278c
)

// Handshake flags of the server, and of the client.
const (
	flagFixedNewstyle = 1 << 0
	flagNoZeroes      = 1 << 1
)

// Transmission flags: each is a promise, computed by Export.flags.
const (
	tfHasFlags        = 1 << 0
	tfReadOnly        = 1 << 1
	tfSendFlush       = 1 << 2
	tfSendFUA         = 1 << 3
	tfSendTrim        = 1 << 5
	tfSendWriteZeroes = 1 << 6
	tfSendDF          = 1 << 7
	tfCanMultiConn    = 1 << 8
	tfSendCache       = 1 << 10
	tfSendFastZero    = 1 << 11
)

// option is a client's request during the handshake.
type option uint32

const (
	optExportName      option = 1
	optAbort           option = 2
	optList            option = 3
	optStartTLS        option = 5
	optInfo            option = 6
	optGo              option = 7
	optStructuredReply option = 8
	optListMeta        option = 9
	optSetMeta         option = 10
	optExtendedHeaders option = 11
)

// Option replies.
const (
	repAck         = 1
	repServer      = 2
	repInfo        = 3
	repMetaContext = 4

	repErr             = 1 << 31
	repErrUnsup        = repErr | 1
	repErrPolicy       = repErr | 2
	repErrInvalid      = repErr | 3
	repErrTLSRequired  = repErr | 5
	repErrUnknown      = repErr | 6
	repErrBlockSizeReq = repErr | 8
	repErrTooBig       = repErr | 9
)

// Information types of INFO and GO.
const (
	infoExport      = 0
	infoName        = 1
	infoDescription = 2
	infoBlockSize   = 3
)

// command is a request in the transmission phase.
type command uint16

const (
	cmdRead        command = 0
	cmdWrite       command = 1
	cmdDisc        command = 2
	cmdFlush       command = 3
	cmdTrim        command = 4
	cmdCache       command = 5
	cmdWriteZeroes command = 6
	cmdBlockStatus command = 7
)

// Command flags.
const (
	cfFUA        = 1 << 0
	cfNoHole     = 1 << 1
	cfDF         = 1 << 2
	cfReqOne     = 1 << 3
	cfFastZero   = 1 << 4
	cfPayloadLen = 1 << 5 // extended headers: the length counts a payload
)

// Structured reply chunks.
const (
	chunkDone = 1 << 0 // flag: the last of its request

	chunkNone           = 0
	chunkOffsetData     = 1
	chunkBlockStatus    = 5
	chunkBlockStatusExt = 6
	chunkError          = 1<<15 | 1
)

// Limits.
const (
	// maxOption bounds the data of one option: strings end at 4096 bytes, and
	// 64 KiB leaves room for a list of queries.
	maxOption = 64 << 10
	// maxString is the protocol's own limit on names and queries.
	maxString = 4096
	// maxPayload is the most bytes that one READ or WRITE moves; advertised as
	// the maximum block size. 32 MiB is what the protocol lets every client
	// assume.
	maxPayload = 32 << 20
	// maxOptions bounds the options of one handshake, so that a client cannot
	// stay in it for ever.
	maxOptions = 256
)

// baseAllocation is the one metadata context offered, allocationID the id under
// which it is selected.
const (
	baseAllocation = "base:allocation"
	allocationID   = 1
)
