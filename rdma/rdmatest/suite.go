// SPDX-License-Identifier: Apache-2.0

// Package rdmatest is the conformance suite of providers: the contracts of
// package rdma in executable form. A provider passes it unchanged:
//
//	func TestConformance(t *testing.T) {
//		rdmatest.Run(t, func(t testing.TB) rdmatest.Pair {
//			p, err := tcp.New(tcp.Options{})
//			…
//			return rdmatest.Pair{Passive: p, Active: p, Listen: "127.0.0.1:0"}
//		})
//	}
//
// Every wait is bounded, and every test ends with a count: nothing may be left
// of connections, regions, domains, goroutines, descriptors and pinned pages.
package rdmatest

import (
	"net"
	"os"
	"testing"
	"time"

	"rblk/rdma"
)

// Pair is what a test runs on. Each test gets a new one from the Factory and
// closes its providers.
type Pair struct {
	// Passive listens, Active connects. They may be one provider.
	Passive, Active rdma.Provider

	// Listen is an address for Passive with port 0, such as "127.0.0.1:0".
	Listen string

	// Dial turns the listener's address into what Active resolves. Default:
	// its text.
	Dial func(net.Addr) string

	// Patience bounds one wait. Default 30 s; emulated machines need more.
	Patience time.Duration

	// BigRegion allows one sparse region of a little more than 4 GiB.
	BigRegion bool

	// LooseStatus: the device reports refusals with another status than the
	// specification's (software iWARP). What must fail still must.
	LooseStatus bool

	// IWARP: the transport's looser rules hold. A WRITE or SEND is complete when
	// TCP has its bytes, so a refusal shows as the connection's end, not as the
	// request's; a message that finds no receive ends the connection at once.
	// Set it together with LooseStatus.
	IWARP bool

	// Siw: the device is Linux's software iWARP, whose defects (docs/rdma.md)
	// the suite steps around: any key of the right domain may be READ with,
	// small requests that cross a page carry wrong bytes, a refusal may not be
	// sent until there is more to send, and Deregister does not wait for a
	// packet that is being placed.
	Siw bool

	// RequestLife is how long the provider lets a ConnRequest be left alone.
	// Default 10 s.
	RequestLife time.Duration

	// NoChild: leave out the test that kills a peer process. The child is this
	// test binary, told to run the same test.
	NoChild bool
}

// Factory makes a new pair for one test.
type Factory func(t testing.TB) Pair

// Counter is implemented by providers that can count what is alive. Live maps a
// noun ("regions") to how many there are.
type Counter interface{ Live() map[string]int }

// tests run in both progress modes.
var tests = []struct {
	name string
	run  func(*rig)
}{
	{"Lengths", testLengths},
	{"GatherScatter", testGatherScatter},
	{"BothDirections", testBothDirections},
	{"Inline", testInline},
	{"Immediate", testImmediate},
	{"BackPressure", testBackPressure},
	{"UnsignaledLeavesAPlace", testUnsignaled},
	{"ReadsBeyondDepth", testReadsBeyondDepth},
	{"ReadAfterWrite", testReadAfterWrite},
	{"SendAfterWrite", testSendAfterWrite},
	{"Fence", testFence},
	{"Random", testRandom},
	{"Flood", testFlood},
	{"ConcurrentPost", testConcurrentPost},
	{"TinyQueues", testTinyQueues},
	{"Messages", testMessages},
	{"ReceivePostedLate", testReceivePostedLate},
	{"Polling", testPolling},
	{"ReceiverNeverReady", testReceiverNeverReady},
	{"ReceiveTooSmall", testReceiveTooSmall},
	{"SharedReceive", testSharedReceive},
	{"Refusals", testRefusals},
	{"FlushOnError", testFlushOnError},
	{"InvalidRequests", testInvalidRequests},
	{"CancelWait", testCancelWait},
	{"CloseInFlight", testCloseInFlight},
	{"PeerCloses", testPeerCloses},
	{"Disconnect", testDisconnect},
	{"DeregisterInUse", testDeregisterInUse},
}

// once are tests that progress does not matter to.
var once = []struct {
	name string
	run  func(*rig)
}{
	{"UnservedPeer", testUnservedPeer},
	{"ManyConnections", testManyConnections},
	{"BigRegion", testBigRegion},
	{"Info", testInfo},
	{"PrivateData", testPrivateData},
	{"Reject", testReject},
	{"RequestLeftAlone", testRequestLeftAlone},
	{"RequestEndsOnce", testRequestEndsOnce},
	{"ListenerCloses", testListenerCloses},
	{"NobodyListens", testNobodyListens},
	{"ConnectCancelled", testConnectCancelled},
	{"TeardownOrder", testTeardownOrder},
	{"KeysNotReused", testKeys},
	{"PeerDies", testPeerDies},
}

// Run runs the suite.
func Run(t *testing.T, factory Factory) {
	if os.Getenv(childEnv) != "" {
		runChild(t, factory)
		return
	}
	warmUp(t, factory)
	for _, mode := range []string{"auto", "manual"} {
		t.Run(mode, func(t *testing.T) {
			for _, tt := range tests {
				t.Run(tt.name, func(t *testing.T) { runOne(t, factory, mode == "manual", tt.run) })
			}
		})
	}
	for _, tt := range once {
		t.Run(tt.name, func(t *testing.T) { runOne(t, factory, false, tt.run) })
	}
}

func runOne(t *testing.T, factory Factory, manual bool, run func(*rig)) {
	before := takeStock()
	r := newRig(t, factory(t), manual)
	defer func() {
		r.tearDown()
		before.check(t, r.pair)
	}()
	run(r)
}

// warmUp makes what the runtime and C libraries make once, so that the first
// test's count is right.
func warmUp(t *testing.T, factory Factory) {
	r := newRig(t, factory(t), false)
	l := r.connect(linkOptions{})
	l.read(0, 0, 64)
	r.tearDown()
}
