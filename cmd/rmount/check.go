// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"rblk/initiator"
	"rblk/internal/size"
	"rblk/internal/version"
	"rblk/wire"
)

// finding is one line of `rmount check`.
type finding struct {
	OK   bool   `json:"ok"`
	What string `json:"what"`
	Text string `json:"text"`
}

func newCheckCommand() *cobra.Command {
	var opts []string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "check [SOURCE]",
		Short: "Look at what this machine has, and what would go wrong",
		Args:  cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			fs := append(checkTransports(), checkMemlock(), checkHuge(), checkFUSE())
			if len(args) == 1 {
				src, err := parseSource(args[0], opts)
				if err != nil {
					return err
				}
				fs = append(fs, checkSource(cmd.Context(), src))
			}
			return report(cmd.OutOrStdout(), fs, asJSON)
		},
	}
	sourceFlags(cmd, &opts)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func report(w io.Writer, fs []finding, asJSON bool) error {
	if asJSON {
		if err := printJSON(w, fs); err != nil {
			return err
		}
	}
	bad := 0
	for _, f := range fs {
		mark := "ok  "
		if !f.OK {
			mark = "FAIL"
			bad++
		}
		if !asJSON {
			fmt.Fprintf(w, "%s  %-12s %s\n", mark, f.What, f.Text)
		}
	}
	if bad > 0 {
		return fmt.Errorf("%d of %d checks failed", bad, len(fs))
	}
	return nil
}

func checkTransports() []finding {
	var fs []finding
	for _, t := range transports {
		p, err := t.open(quiet())
		if err != nil {
			fs = append(fs, finding{false, t.name, err.Error()})
			continue
		}
		devs, err := p.Devices()
		if err != nil || len(devs) == 0 {
			fs = append(fs, finding{true, t.name, "no device here: other transports are used"})
		}
		for _, d := range devs {
			i := d.Info()
			text := fmt.Sprintf("%s (%s), %d READs in flight, NUMA node %d", i.Name, i.Transport, i.MaxReadDepth, i.NUMANode)
			for _, port := range i.Ports {
				text += fmt.Sprintf("; port %d %s %s MTU %d %s", port.Number, port.State, port.NetDev, port.MTU, port.Rate)
				for _, g := range port.GIDs {
					text += fmt.Sprintf(" GID[%d] %s %s", g.Index, g.Addr, g.Type)
				}
			}
			fs = append(fs, finding{true, t.name, text})
		}
		if err := p.Close(); err != nil {
			fs = append(fs, finding{false, t.name, err.Error()})
		}
	}
	for name, how := range missing {
		if !strings.Contains(" "+strings.Join(transportNames(), " ")+" ", " "+name+" ") {
			fs = append(fs, finding{true, name, "not built in: " + how})
		}
	}
	return fs
}

// memlockWant is what the default cache pins over verbs.
const memlockWant = 640 << 20

func checkMemlock() finding {
	var lim unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &lim); err != nil {
		return finding{false, "memlock", err.Error()}
	}
	switch {
	case lim.Cur == unix.RLIM_INFINITY:
		return finding{true, "memlock", "unlimited"}
	case os.Geteuid() == 0:
		return finding{true, "memlock", size.Format(int64(lim.Cur)) + ", which does not bind root (CAP_IPC_LOCK)"}
	case lim.Cur < memlockWant:
		return finding{true, "memlock", fmt.Sprintf("%s: enough for tcp; verbs with the default cache needs %s: ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit",
			size.Format(int64(lim.Cur)), size.Format(memlockWant))}
	}
	return finding{true, "memlock", size.Format(int64(lim.Cur))}
}

func checkHuge() finding {
	text, err := os.ReadFile("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
	if err != nil {
		return finding{true, "hugepages", "not known to this kernel: ordinary pages are used"}
	}
	return finding{true, "hugepages", "transparent, for shared memory: " + strings.TrimSpace(string(text))}
}

func checkFUSE() finding {
	f, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		return finding{false, "fuse", err.Error() + ": modprobe fuse, or let the container have /dev/fuse"}
	}
	f.Close()
	if os.Geteuid() == 0 {
		return finding{true, "fuse", "/dev/fuse, mounted by root directly"}
	}
	if path, err := exec.LookPath("fusermount3"); err == nil {
		return finding{true, "fuse", "/dev/fuse and " + path}
	}
	return finding{false, "fuse", "fusermount3 is missing, and only root mounts without: install fuse3"}
}

// checkSource asks the target, and opens a session where an export is named.
func checkSource(ctx context.Context, src initiator.Source) finding {
	list, err := exports(ctx, src)
	if err != nil {
		return finding{false, "target", err.Error()}
	}
	if src.Export == "" {
		return finding{true, "target", fmt.Sprintf("%s answers: %d exports", src, len(list))}
	}
	c, err := dial(ctx, src, wire.AccessRead)
	if err != nil {
		return finding{false, "target", err.Error()}
	}
	text := fmt.Sprintf("%s can be read over %s", src, c.vol.Transport())
	if err := c.close(); err != nil {
		return finding{false, "target", err.Error()}
	}
	return finding{true, "target", text}
}

func newVersionCommand() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version, the protocol and the transports of this build",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if asJSON {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(map[string]any{
					"version": version.Version, "commit": version.Commit(), "protocol": wire.ProtocolVersion,
					"transports": transportNames(), "go": runtime.Version(),
				})
			}
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "rmount %s, protocol %d, transports: %s, %s\n",
				version.Version, wire.ProtocolVersion, strings.Join(transportNames(), " "), runtime.Version())
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}
