// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode"
)

// Limits of one JSON body of the control plane.
const (
	MaxJSON  = 64 << 10 // of a request
	MaxReply = 4 << 20  // of an answer: a list of some thousand exports or sessions
)

// maxComplaint bounds what of a bad body is repeated in an error.
const maxComplaint = 200

// DecodeJSON reads a request's body: exactly one JSON value of at most MaxJSON
// bytes, into v. Unknown fields and bytes behind the value are refused, so that
// a misspelt field cannot be silently without effect. Errors are *Error with
// CodeBadRequest, of one line.
func DecodeJSON(r io.Reader, v any) error {
	if err := decode(r, v, MaxJSON, true); err != nil {
		return &Error{Code: CodeBadRequest, Message: "request body: " + err.Error()}
	}
	return nil
}

// DecodeReply reads an answer's body: exactly one JSON value of at most
// MaxReply bytes, into v. Unknown fields are skipped: a newer target of the
// same protocol version may tell more. Errors are of one line.
func DecodeReply(r io.Reader, v any) error {
	if err := decode(r, v, MaxReply, false); err != nil {
		return fmt.Errorf("answer of the target: %w", err)
	}
	return nil
}

func decode(r io.Reader, v any, limit int64, strict bool) error {
	lr := &io.LimitedReader{R: r, N: limit + 1}
	dec := json.NewDecoder(lr)
	if strict {
		dec.DisallowUnknownFields()
	}
	err := dec.Decode(v)
	if err == nil {
		if _, err = dec.Token(); errors.Is(err, io.EOF) && lr.N > 0 {
			return nil
		}
		err = errors.New("more than one JSON value")
	}
	if lr.N <= 0 {
		return fmt.Errorf("more than %d bytes", limit)
	}
	return oneLine{err}
}

// oneLine shows an error as one line of bounded length: the text may repeat
// what the peer sent.
type oneLine struct{ error }

func (e oneLine) Error() string {
	s := strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, e.error.Error())
	if len(s) > maxComplaint {
		s = strings.ToValidUTF8(s[:maxComplaint], "") + "…"
	}
	return s
}

func (e oneLine) Unwrap() error { return e.error }

// CheckVersion refuses another protocol version than this build's. peer names
// the other side: "initiator" or "target".
func CheckVersion(peer string, version int) error {
	if version == ProtocolVersion {
		return nil
	}
	older := peer
	if version > ProtocolVersion {
		older = "this side"
	}
	return &Error{Code: CodeVersion, Message: fmt.Sprintf("%s speaks protocol %d, this side %d: upgrade %s", peer, version, ProtocolVersion, older)}
}

// CheckFeatures refuses features that are not among known.
func CheckFeatures(asked, known []string) error {
	for _, f := range asked {
		if !slices.Contains(known, f) {
			return &Error{Code: CodeFeature, Message: fmt.Sprintf("feature %q is not known here: upgrade the target or leave it out", f)}
		}
	}
	return nil
}
