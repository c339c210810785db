// SPDX-License-Identifier: Apache-2.0

// Package size reads and prints byte counts as people write them.
package size

import (
	"fmt"
	"math"
	"strings"

	"github.com/dustin/go-humanize"
)

// Parse reads "4096", "64KiB", "1.5GiB", "10MB". Units are IEC (KiB = 1024) or
// SI (kB = 1000), in any case; a bare number is bytes. Zero is allowed.
func Parse(s string) (int64, error) {
	t := strings.TrimSpace(s)
	n, err := humanize.ParseBytes(t)
	if err != nil || t == "" || n > math.MaxInt64 {
		return 0, fmt.Errorf("size %q: want a number with an optional unit, such as 512MiB, 1GiB or 4096", s)
	}
	return int64(n), nil
}

// Format prints n in IEC units: "1.0 GiB".
func Format(n int64) string {
	if n < 0 {
		return "-" + humanize.IBytes(uint64(-n))
	}
	return humanize.IBytes(uint64(n))
}
