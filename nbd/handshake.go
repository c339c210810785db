// SPDX-License-Identifier: Apache-2.0

package nbd

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"unicode/utf8"
)

var be = binary.BigEndian

// errAbort: the client ended the handshake as the protocol has it.
var errAbort = errors.New("client aborted the handshake")

// ErrProtocol: the client broke the protocol so that its connection cannot go
// on.
var ErrProtocol = errors.New("nbd protocol violation")

// handshake is the state of a negotiation.
type handshake struct {
	srv  *Server
	conn net.Conn
	r    *bufio.Reader

	noZeroes   bool
	tls        bool
	structured bool
	extended   bool
	metaExport *Export // the export that SET_META_CONTEXT was for
	allocation bool    // base:allocation is selected
}

// negotiate runs the handshake to its end: the export that the client chose, or
// errAbort, or why the connection must close.
func (h *handshake) negotiate(ctx context.Context) (*Export, error) {
	var hello [18]byte
	be.PutUint64(hello[0:], magicInit)
	be.PutUint64(hello[8:], magicOption)
	be.PutUint16(hello[16:], flagFixedNewstyle|flagNoZeroes)
	if _, err := h.conn.Write(hello[:]); err != nil {
		return nil, err
	}
	var cf [4]byte
	if _, err := io.ReadFull(h.r, cf[:]); err != nil {
		return nil, err
	}
	flags := be.Uint32(cf[:])
	if flags&^(flagFixedNewstyle|flagNoZeroes) != 0 {
		return nil, fmt.Errorf("%w: unknown client flags %#x", ErrProtocol, flags)
	}
	h.noZeroes = flags&flagNoZeroes != 0
	for range maxOptions {
		exp, err := h.option(ctx)
		if exp != nil || err != nil {
			return exp, err
		}
	}
	return nil, fmt.Errorf("%w: more than %d options", ErrProtocol, maxOptions)
}

// option reads and answers one option. A non-nil export begins transmission.
func (h *handshake) option(ctx context.Context) (*Export, error) {
	opt, data, err := h.readOption()
	if err != nil {
		return nil, err
	}
	if data == nil {
		return nil, h.refuse(opt, repErrTooBig, "option data over 64 KiB")
	}
	if h.srv.opts.RequireTLS && !h.tls {
		switch opt {
		case optStartTLS, optAbort:
		case optExportName:
			return nil, fmt.Errorf("%w: EXPORT_NAME before STARTTLS", ErrProtocol)
		default:
			return nil, h.refuse(opt, repErrTLSRequired, "start TLS first")
		}
	}
	switch opt {
	case optExportName:
		return h.exportName(string(data))
	case optAbort:
		// The client may be gone already: that is no failure.
		_ = h.reply(opt, repAck, nil)
		return nil, errAbort
	case optList:
		return nil, h.list(data)
	case optStartTLS:
		return nil, h.startTLS(ctx, data)
	case optInfo, optGo:
		return h.info(opt, data)
	case optStructuredReply:
		return nil, h.structuredReply(data)
	case optExtendedHeaders:
		return nil, h.extendedHeaders(data)
	case optListMeta, optSetMeta:
		return nil, h.meta(opt, data)
	default:
		return nil, h.refuse(opt, repErrUnsup, "option not supported")
	}
}

// readOption reads one option whole. Data over maxOption is skipped and comes
// back as nil.
func (h *handshake) readOption() (option, []byte, error) {
	var hdr [16]byte
	if _, err := io.ReadFull(h.r, hdr[:]); err != nil {
		return 0, nil, err
	}
	if be.Uint64(hdr[0:]) != magicOption {
		return 0, nil, fmt.Errorf("%w: bad option magic", ErrProtocol)
	}
	opt, n := option(be.Uint32(hdr[8:])), be.Uint32(hdr[12:])
	if n > maxOption {
		if opt == optExportName {
			return 0, nil, fmt.Errorf("%w: export name of %d bytes", ErrProtocol, n)
		}
		_, err := io.CopyN(io.Discard, h.r, int64(n))
		return opt, nil, err
	}
	data := make([]byte, n)
	_, err := io.ReadFull(h.r, data)
	return opt, data, err
}

// reply sends one option reply.
func (h *handshake) reply(opt option, typ uint32, data []byte) error {
	buf := make([]byte, 20, 20+len(data))
	be.PutUint64(buf[0:], magicOptionReply)
	be.PutUint32(buf[8:], uint32(opt))
	be.PutUint32(buf[12:], typ)
	be.PutUint32(buf[16:], uint32(len(data)))
	_, err := h.conn.Write(append(buf, data...))
	return err
}

// refuse answers with an error reply; the handshake goes on.
func (h *handshake) refuse(opt option, typ uint32, why string) error {
	return h.reply(opt, typ, []byte(why))
}

// exportName is the oldest way in: there is no way to refuse but to close.
func (h *handshake) exportName(name string) (*Export, error) {
	exp := h.srv.find(name)
	if exp == nil {
		return nil, fmt.Errorf("unknown export %q", name)
	}
	g := exp.Volume.Geometry()
	if lo, _, _ := blockSizes(g); lo > 512 {
		return nil, fmt.Errorf("export %q has blocks of %d bytes, which EXPORT_NAME cannot tell", name, lo)
	}
	h.bind(exp)
	buf := make([]byte, 10+124)
	be.PutUint64(buf[0:], uint64(g.Size))
	be.PutUint16(buf[8:], exp.flags(g, h.structured))
	if h.noZeroes {
		buf = buf[:10]
	}
	if _, err := h.conn.Write(buf); err != nil {
		return nil, err
	}
	return exp, nil
}

// bind drops what was negotiated for another export.
func (h *handshake) bind(exp *Export) {
	if h.metaExport != exp {
		h.allocation = false
	}
}

func (h *handshake) list(data []byte) error {
	if len(data) != 0 {
		return h.refuse(optList, repErrInvalid, "LIST takes no data")
	}
	for _, exp := range h.srv.exports {
		b := be.AppendUint32(nil, uint32(len(exp.Name)))
		b = append(b, exp.Name...)
		if err := h.reply(optList, repServer, append(b, exp.Description...)); err != nil {
			return err
		}
	}
	return h.reply(optList, repAck, nil)
}

func (h *handshake) startTLS(ctx context.Context, data []byte) error {
	switch {
	case len(data) != 0:
		return h.refuse(optStartTLS, repErrInvalid, "STARTTLS takes no data")
	case h.srv.opts.TLS == nil:
		return h.refuse(optStartTLS, repErrPolicy, "this server has no certificate")
	case h.tls:
		return h.refuse(optStartTLS, repErrInvalid, "TLS is already on")
	case h.r.Buffered() != 0:
		// Plain bytes behind STARTTLS may be an attacker's; they must never be
		// taken for the client's.
		return fmt.Errorf("%w: data behind STARTTLS", ErrProtocol)
	}
	if err := h.reply(optStartTLS, repAck, nil); err != nil {
		return err
	}
	conn := tls.Server(h.conn, h.srv.opts.TLS)
	if err := conn.HandshakeContext(ctx); err != nil {
		return fmt.Errorf("tls handshake: %w", err)
	}
	h.conn, h.tls = conn, true
	h.r.Reset(conn)
	// All state from before TLS is forgotten.
	h.structured, h.extended, h.allocation, h.metaExport = false, false, false, nil
	return nil
}

func (h *handshake) structuredReply(data []byte) error {
	if len(data) != 0 || h.extended {
		return h.refuse(optStructuredReply, repErrInvalid, "no data, and not behind EXTENDED_HEADERS")
	}
	h.structured = true
	return h.reply(optStructuredReply, repAck, nil)
}

func (h *handshake) extendedHeaders(data []byte) error {
	if len(data) != 0 {
		return h.refuse(optExtendedHeaders, repErrInvalid, "EXTENDED_HEADERS takes no data")
	}
	h.structured, h.extended = true, true
	return h.reply(optExtendedHeaders, repAck, nil)
}

// info answers INFO and GO.
func (h *handshake) info(opt option, data []byte) (*Export, error) {
	name, rest, ok := cutString(data)
	if !ok || len(rest) < 2 || len(rest) != 2+2*int(be.Uint16(rest)) {
		return nil, h.refuse(opt, repErrInvalid, "malformed data")
	}
	exp := h.srv.find(name)
	if exp == nil {
		return nil, h.refuse(opt, repErrUnknown, "no such export; LIST names them")
	}
	wanted := map[uint16]bool{}
	for b := rest[2:]; len(b) > 0; b = b[2:] {
		wanted[be.Uint16(b)] = true
	}
	g := exp.Volume.Geometry()
	lo, pref, hi := blockSizes(g)
	if opt == optGo && lo > 512 && !wanted[infoBlockSize] {
		return nil, h.refuse(opt, repErrBlockSizeReq, fmt.Sprintf("blocks are %d bytes: ask for NBD_INFO_BLOCK_SIZE", lo))
	}
	b := be.AppendUint16(nil, infoExport)
	b = be.AppendUint64(b, uint64(g.Size))
	b = be.AppendUint16(b, exp.flags(g, h.structured))
	infos := [][]byte{b}
	if wanted[infoName] {
		infos = append(infos, append(be.AppendUint16(nil, infoName), exp.Name...))
	}
	if wanted[infoDescription] && exp.Description != "" {
		infos = append(infos, append(be.AppendUint16(nil, infoDescription), exp.Description...))
	}
	b = be.AppendUint16(nil, infoBlockSize)
	b = be.AppendUint32(b, lo)
	b = be.AppendUint32(b, pref)
	infos = append(infos, be.AppendUint32(b, hi))
	for _, i := range infos {
		if err := h.reply(opt, repInfo, i); err != nil {
			return nil, err
		}
	}
	if err := h.reply(opt, repAck, nil); err != nil || opt == optInfo {
		return nil, err
	}
	h.bind(exp)
	return exp, nil
}

// meta answers LIST_META_CONTEXT and SET_META_CONTEXT.
func (h *handshake) meta(opt option, data []byte) error {
	if opt == optSetMeta {
		h.allocation, h.metaExport = false, nil
	}
	if !h.structured {
		return h.refuse(opt, repErrInvalid, "ask for structured replies first")
	}
	name, queries, ok := parseMeta(data)
	if !ok {
		return h.refuse(opt, repErrInvalid, "malformed data")
	}
	exp := h.srv.find(name)
	if exp == nil {
		return h.refuse(opt, repErrUnknown, "no such export")
	}
	match := opt == optListMeta && len(queries) == 0
	for _, q := range queries {
		match = match || q == baseAllocation || opt == optListMeta && q == "base:"
	}
	if match {
		id := uint32(0)
		if opt == optSetMeta {
			id = allocationID
		}
		if err := h.reply(opt, repMetaContext, append(be.AppendUint32(nil, id), baseAllocation...)); err != nil {
			return err
		}
	}
	if opt == optSetMeta {
		h.allocation, h.metaExport = match, exp
	}
	return h.reply(opt, repAck, nil)
}

// parseMeta reads an export name and a counted list of queries.
func parseMeta(data []byte) (name string, queries []string, ok bool) {
	name, rest, ok := cutString(data)
	if !ok || len(rest) < 4 {
		return "", nil, false
	}
	n := be.Uint32(rest)
	rest = rest[4:]
	if uint64(n)*4 > uint64(len(rest)) {
		return "", nil, false
	}
	for range n {
		var q string
		if q, rest, ok = cutString(rest); !ok {
			return "", nil, false
		}
		queries = append(queries, q)
	}
	return name, queries, len(rest) == 0
}

// cutString reads a 32-bit length and that many bytes of UTF-8.
func cutString(b []byte) (s string, rest []byte, ok bool) {
	if len(b) < 4 {
		return "", nil, false
	}
	n := be.Uint32(b)
	if n > maxString || int(n) > len(b)-4 {
		return "", nil, false
	}
	s = string(b[4 : 4+n])
	if !utf8.ValidString(s) || strings.ContainsRune(s, 0) {
		return "", nil, false
	}
	return s, b[4+n:], true
}
