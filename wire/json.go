// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// MaxJSON bounds one JSON body of the control plane.
const MaxJSON = 64 << 10

// DecodeJSON reads exactly one JSON value of at most MaxJSON bytes into v.
// Unknown fields and bytes behind the value are refused. Errors are *Error with
// CodeBadRequest, of one line.
func DecodeJSON(r io.Reader, v any) error {
	lr := &io.LimitedReader{R: r, N: MaxJSON + 1}
	dec := json.NewDecoder(lr)
	dec.DisallowUnknownFields()
	err := dec.Decode(v)
	if err == nil {
		if _, err = dec.Token(); errors.Is(err, io.EOF) {
			return nil
		}
		err = errors.New("more than one JSON value")
	}
	if lr.N <= 0 {
		err = fmt.Errorf("more than %d bytes", MaxJSON)
	}
	return &Error{Code: CodeBadRequest, Message: "request body: " + strings.ReplaceAll(err.Error(), "\n", " ")}
}

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
