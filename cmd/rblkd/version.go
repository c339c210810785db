// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"runtime"
	"strings"

	"github.com/spf13/cobra"

	"rblk/internal/version"
	"rblk/wire"
)

func newVersion() *cobra.Command {
	asJSON := false
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
			fmt.Fprintf(cmd.OutOrStdout(), "rblkd %s, protocol %d, transports: %s, %s\n",
				version.Version, wire.ProtocolVersion, strings.Join(transportNames(), " "), runtime.Version())
			return nil
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}
