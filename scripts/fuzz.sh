#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# fuzz.sh [TIME]: runs every fuzz target of the tree for TIME (default 10s).
set -euo pipefail
time=${1:-10s}
n=0
while IFS=: read -r file func; do
  dir=./$(dirname "$file")
  echo "== $dir $func"
  go test -run '^$' -fuzz "^$func\$" -fuzztime "$time" -fuzzminimizetime 10x "$dir"
  n=$((n + 1))
done < <(git grep -E '^func Fuzz[A-Za-z0-9_]+\(' -- '*_test.go' | sed -E 's/^([^:]+):func (Fuzz[A-Za-z0-9_]+)\(.*/\1:\2/')
[ "$n" -gt 0 ] || { echo "fuzz: no target found" >&2; exit 1; }
echo "$n fuzz targets ran for $time each"
