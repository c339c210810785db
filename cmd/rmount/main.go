// SPDX-License-Identifier: Apache-2.0

// Command rmount is the initiator: it shows a target's exports as files. See
// `rmount help`, and docs/operations.md.
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

	"rblk/initiator"
)

// Exit codes.
const (
	exitFailed = 1 // it was tried and failed
	exitUsage  = 2 // the command line is wrong
)

// usageError is a mistake in the command line.
type usageError string

func (e usageError) Error() string { return string(e) }

// failure is an error of a command that was understood. Every other error is
// one of usage.
type failure struct{ err error }

func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

func main() { os.Exit(execute(os.Args[1:])) }

// execute runs one command line and returns the exit code.
func execute(args []string) int {
	// The first signal ends what is under way in good order; a second one ends
	// the process.
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	context.AfterFunc(ctx, stop)
	root := newRoot()
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	var status exitStatus
	var usage usageError
	var failed *failure
	switch {
	case err == nil:
		return 0
	case errors.As(err, &status):
		return int(status) // it has been reported
	}
	fmt.Fprintln(os.Stderr, "rmount:", strings.Join(strings.Fields(err.Error()), " "))
	if errors.As(err, &usage) || errors.Is(err, initiator.ErrSource) || !errors.As(err, &failed) {
		return exitUsage
	}
	return exitFailed
}

func newRoot() *cobra.Command {
	root := newMountCommand()
	root.SilenceErrors, root.SilenceUsage = true, true
	root.CompletionOptions.HiddenDefaultCmd = true
	for _, c := range []*cobra.Command{
		newLsCommand(), newStatCommand(), newGetCommand(), newPutCommand(), newBenchCommand(),
		newUmountCommand(), newNBDCommand(), newCheckCommand(), newVersionCommand(),
	} {
		run := c.RunE
		c.RunE = func(cmd *cobra.Command, args []string) error { return wrap(run(cmd, args)) }
		root.AddCommand(c)
	}
	return root
}

// wrap marks the error of a command that was understood.
func wrap(err error) error {
	if err == nil {
		return nil
	}
	return &failure{err}
}
