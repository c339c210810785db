// SPDX-License-Identifier: Apache-2.0

package size

import "testing"

func TestParse(t *testing.T) {
	for in, want := range map[string]int64{
		"0": 0, "4096": 4096, "64KiB": 65536, "1GiB": 1 << 30, "1gib": 1 << 30,
		"1.5MiB": 1572864, "10MB": 10_000_000, " 2 KiB ": 2048, "1k": 1000,
	} {
		if got, err := Parse(in); err != nil || got != want {
			t.Errorf("Parse(%q) = %d, %v; want %d", in, got, err, want)
		}
	}
	for _, in := range []string{"", "GiB", "1XiB", "-1", "1GiBB", "9999999999999999999999", "1e30EiB", "16EiB"} {
		if got, err := Parse(in); err == nil {
			t.Errorf("Parse(%q) = %d, want an error", in, got)
		}
	}
}
