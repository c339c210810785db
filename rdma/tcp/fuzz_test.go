// SPDX-License-Identifier: Apache-2.0

package tcp

import (
	"bytes"
	"errors"
	"net"
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

// FuzzStream feeds bytes to a connection behind a good handshake. Whatever they
// are, the connection ends when they end, memory that is not asked for
// stays as it is, and a good connection works on.
func FuzzStream(f *testing.F) {
	whole := newTarget(f, Options{})
	good := whole.dial()
	goods := <-whole.conns
	f.Cleanup(func() { goods.Close() })
	mem := whole.side.mem
	base, key := whole.side.mr.Addr(), whole.side.mr.RKey()
	f.Add(byte(frameWrite), uint64(0), uint32(5), []byte("hello"))
	f.Add(byte(frameReadReq), uint64(1<<20-1), uint32(2), []byte(nil))
	f.Add(byte(frameSend), uint64(0), uint32(3), []byte("abc"))
	f.Add(byte(frameNak), uint64(0), uint32(0), []byte("abc"))
	f.Add(byte(frameReadResp), uint64(0), uint32(4096), bytes.Repeat([]byte{1}, 5000))
	f.Fuzz(func(t *testing.T, typ byte, off uint64, length uint32, rest []byte) {
		tg := *whole
		tg.TB = t
		const page = 4096
		clear(mem[page : 2*page])
		h := header{typ: frameType(typ), length: length}
		if h.typ == frameReadReq || h.typ == frameWrite {
			h.addr, h.rkey = base+off, key
			if off < 2*page && off+uint64(length) > page {
				h.addr, h.length = base, length%page // the second page is not to be asked for
			}
		}
		c := tg.shake()
		defer c.Close()
		conn := <-tg.conns
		defer conn.Close()
		if n, err := conn.PostRecv([]rdma.RecvRequest{{Local: []rdma.Segment{rdma.Seg(tg.side.mr, 0, page)}}}); n != 1 {
			t.Fatal(err)
		}
		if _, err := c.Write(append(frameBytes(h), rest...)); err != nil {
			return // ended in the middle: as good
		}
		c.(*net.TCPConn).CloseWrite()
		dropped(t, c)
		for i, b := range mem[page : 2*page] {
			if b != 0 {
				t.Fatalf("byte %d was written", i)
			}
		}
		tg.works(good)
	})
}
