// SPDX-License-Identifier: Apache-2.0

//go:build linux && cgo && verbs

package verbs

import (
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"rblk/internal/need"
	"rblk/rdma"
	"rblk/rdma/rdmatest"
)

// addrEnv names the address of an RDMA device of this machine; the scripts in
// test/vm/guest set it. Both ends of the tests' connections are there.
const addrEnv = "RBLK_VERBS_ADDR"

// patience bounds one wait. The default is for emulated machines, where a second
// of work may take twenty; RBLK_VERBS_PATIENCE is for hunting a hang.
func patience(t testing.TB) time.Duration {
	text := os.Getenv("RBLK_VERBS_PATIENCE")
	if text == "" {
		return 60 * time.Second
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func testAddr(t testing.TB) string {
	t.Helper()
	addr := os.Getenv(addrEnv)
	if addr == "" {
		need.Skip(t, "an RDMA device (make test-vm brings one; or set "+addrEnv+" to its address)")
	}
	return addr
}

// logger writes to the test's log where asked to.
func logger() *slog.Logger {
	if os.Getenv("RBLK_VERBS_LOG") == "" {
		return nil
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

func newProvider(t testing.TB) rdma.Provider {
	t.Helper()
	p, err := New(Options{Logger: logger()})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestConformance(t *testing.T) {
	addr := testAddr(t)
	rdmatest.Run(t, func(t testing.TB) rdmatest.Pair {
		const life = 500 * time.Millisecond
		p := newProvider(t)
		p.(*provider).requestLife = life
		devs, err := p.Devices()
		if err != nil || len(devs) == 0 {
			t.Fatalf("devices: %v, %v", devs, err)
		}
		iwarp := devs[0].Info().Transport == "iWARP"
		return rdmatest.Pair{
			Passive: p, Active: newProvider(t),
			Listen:      net.JoinHostPort(addr, "0"),
			Patience:    patience(t),
			BigRegion:   os.Getenv("RBLK_VERBS_BIG") != "",
			LooseStatus: iwarp || strings.HasSuffix(t.Name(), "/ReceiveTooSmall"), // rxe calls it an operation error
			IWARP:       iwarp,
			RequestLife: life,
			Siw:         iwarp && devs[0].Info().NUMANode < 0,
		}
	})
}
