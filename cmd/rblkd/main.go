// SPDX-License-Identifier: Apache-2.0

// Command rblkd is the target: it exports memory and directory trees to
// initiators. See `rblkd help`, and docs/operations.md.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
)

// Exit codes.
const (
	exitFailed = 1 // it was tried and failed
	exitUsage  = 2 // the command line or the configuration is wrong
)

func main() {
	// The first signal ends what is under way in good order; a second one
	// ends the process.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	context.AfterFunc(ctx, stop)
	os.Exit(execute(ctx, os.Args[1:]))
}

// execute runs one command line and returns the exit code.
func execute(ctx context.Context, args []string) int {
	root := newRoot(args)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, "rblkd:", oneLine(err.Error()))
	var failed *failure
	if errors.As(err, &failed) {
		return exitFailed
	}
	return exitUsage
}

// oneLine joins the lines of a message.
func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

// newRoot makes the commands. args is the command line, which serve reads again
// on SIGHUP.
func newRoot(args []string) *cobra.Command {
	root := &cobra.Command{
		Use:   "rblkd",
		Short: "Serve memory and directory trees over RDMA",
		Long: "rblkd is the target of rblk: it exports memory and directory trees, which rmount\n" +
			"on other machines shows as files and block devices.",
		Args:          cobra.NoArgs,
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return errors.New("which command? try `rblkd serve --memory scratch=1GiB`, or `rblkd help`")
		},
	}
	root.CompletionOptions.HiddenDefaultCmd = true
	root.AddCommand(newServe(args), newCheck(), newStatus(), newDrain(), newExport(), newVersion())
	return root
}

// failure is an error of a command that was understood. Every other error is
// one of usage.
type failure struct{ err error }

func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

// usage is a mistake in the command line or the configuration that shows only
// while the command runs.
type usage struct{ err error }

func (u *usage) Error() string { return u.err.Error() }
func (u *usage) Unwrap() error { return u.err }

// run sorts the errors of a command's function.
func run(f func(ctx context.Context, cmd *cobra.Command, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		err := f(cmd.Context(), cmd, args)
		var u *usage
		if err == nil || errors.As(err, &u) {
			return err
		}
		return &failure{err}
	}
}
