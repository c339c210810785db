// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"testing"

	"rblk/wire"
)

// TestNextMessage: answers never wait for credits, nor behind requests that do;
// the last credit is for what gives back or keeps alive.
func TestNextMessage(t *testing.T) {
	request := func(typ wire.Type) message { return message{typ: typ, answer: func(wire.Header, []byte) {}} }
	mapMsg, unmap, alive, answer := request(wire.TypeMap), request(wire.TypeUnmap), request(wire.TypeKeepalive), message{}
	for _, c := range []struct {
		name    string
		credits int
		outbox  []message
		want    int
	}{
		{"nothing", 5, nil, -1},
		{"in order", 5, []message{mapMsg, mapMsg}, 0},
		{"answer first", 5, []message{mapMsg, unmap, answer}, 2},
		{"answer without credit", 0, []message{mapMsg, unmap, answer}, 2},
		{"urgent before others", 5, []message{mapMsg, alive}, 1},
		{"last credit is kept", 1, []message{mapMsg, mapMsg}, -1},
		{"last credit for urgent", 1, []message{mapMsg, unmap, alive}, 1},
		{"no credit", 0, []message{mapMsg, unmap}, -1},
	} {
		conn := &conn{credits: c.credits, outbox: c.outbox}
		if got := conn.nextMessage(); got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
	}
}
