// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"bytes"
	"errors"
	"testing"

	"rblk/rdma"
)

func FuzzHeader(f *testing.F) {
	for _, h := range []header{
		{typ: frameReadReq, length: 4096, addr: 1 << 40, rkey: 7, seq: 9},
		{typ: frameWrite, flags: flagAck | flagImm, length: maxMessage, addr: 1, rkey: 2, imm: 3},
		{typ: frameSend, flags: flagAck, length: 1},
		{typ: frameReadResp, length: 10, seq: 1<<64 - 1},
		{typ: frameAck}, {typ: frameNak, status: rdma.StatusRemoteAccess},
	} {
		f.Add(frameBytes(h))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < headerSize {
			return
		}
		h, err := parseHeader(b)
		if err != nil {
			if !errors.Is(err, rdma.ErrProtocol) {
				t.Fatalf("error %v does not match ErrProtocol", err)
			}
			return
		}
		// What is accepted has one encoding: no byte goes unread.
		var again [headerSize]byte
		h.put(&again)
		if !bytes.Equal(again[:], b[:headerSize]) {
			t.Fatalf("%x decodes to %+v, which encodes to %x", b[:headerSize], h, again)
		}
	})
}

func FuzzGreeting(f *testing.F) {
	f.Add((&greeting{version: helloVersion, reads: 16, rnr: 1, data: []byte("token")}).encode(helloSize))
	f.Add((&greeting{version: helloVersion, result: resultRejected, data: bytes.Repeat([]byte("x"), rdma.MaxRejectReason)}).encode(replySize))
	f.Add((&greeting{version: 2}).encode(helloSize))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, size := range []int{helloSize, replySize} {
			in := make([]byte, size)
			copy(in, b)
			g, err := decodeGreeting(in)
			if err != nil {
				if !errors.Is(err, rdma.ErrProtocol) {
					t.Fatalf("error %v does not match ErrProtocol", err)
				}
				continue
			}
			if g.version == helloVersion && !bytes.Equal(g.encode(size), in) {
				t.Fatalf("%x decodes to %+v, which encodes to %x", in, g, g.encode(size))
			}
			if g.version != helloVersion && len(g.data) != 0 {
				t.Fatal("data of another version was read")
			}
		}
	})
}
