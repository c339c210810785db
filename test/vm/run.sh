#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# run.sh [NAME…]: the tests that need the virtual machine. Builds the Go test
# binaries, then boots one machine for each guest/test-NAME.sh (default: all) and
# runs it there. Whatever fails there, is skipped there, or runs no test, fails
# here. Logs: LOGS (default: vm-logs beside the images).
#
# To add tests: Go tests with the build tag "vm" in one of the packages below, or
# another guest/test-NAME.sh. Its head may say
#   # timeout: SECONDS    (default 300)
#   # memory: MiB         (default 2048)
# It finds $STAGE/PACKAGE.test (rdma-verbs.test), $STAGE/rblkd, $STAGE/rmount and
# sources lib.sh for devices and helpers.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
top=$(cd "$here/../.." && pwd)
packages=(rdma/verbs)
cache=${RBLK_VM_CACHE:-$top/.vm}
logs=${LOGS:-$cache/vm-logs}

[ -n "$(echo '#include <rdma/rdma_cma.h>' | ${CC:-cc} -E - 2>/dev/null)" ] ||
  { echo "test-vm: install libibverbs-dev and librdmacm-dev first (make deps)" >&2; exit 1; }
"$here/build.sh" >/dev/null

stage=$(mktemp -d "${TMPDIR:-/tmp}/rblk-vm-stage.XXXXXX")
trap 'rm -rf "$stage"' EXIT
cd "$top"
for p in "${packages[@]}"; do
  ${GO:-go} test -c -tags 'verbs vm' -o "$stage/${p//\//-}.test" "./$p"
done
for c in rblkd rmount; do
  if [ -f "cmd/$c/main.go" ]; then ${GO:-go} build -tags verbs -trimpath -o "$stage/" "./cmd/$c"; fi
done
cp "$here"/guest/*.sh "$stage/"

names=("$@")
if [ ${#names[@]} -eq 0 ]; then
  for f in "$here"/guest/test-*.sh; do
    n=$(basename "$f" .sh)
    names+=("${n#test-}")
  done
fi
head_of() { sed -n "s/^# $2: *//p" "$1" | head -1; }
failed=()
for n in "${names[@]}"; do
  script=$here/guest/test-$n.sh
  [ -f "$script" ] || { echo "test-vm: no $script" >&2; exit 2; }
  t=$(head_of "$script" timeout) m=$(head_of "$script" memory)
  start=$SECONDS rc=0
  mkdir -p "$logs/$n"
  echo "=== vm $n"
  "$here/boot.sh" -t "${t:-300}" -m "${m:-2048}" -s "$stage" -l "$logs/$n" \
    "${RBLK_VM_ENV:-} export RBLK_NO_SKIP=1 STAGE=/mnt/host; . ./test-$n.sh" 2>&1 | tee "$logs/$n/output" || rc=${PIPESTATUS[0]}
  if grep -qE -- '--- SKIP|no tests to run|^guest kernel:' "$logs/$n/output"; then
    echo "vm $n: a test was skipped, none ran, or the guest's kernel complained" >&2
    [ "$rc" -ne 0 ] || rc=1
  fi
  if [ "$rc" -eq 0 ]; then
    echo "ok    vm/$n $((SECONDS - start))s"
  else
    echo "FAIL  vm/$n $((SECONDS - start))s (status $rc; logs in $logs/$n)"
    failed+=("$n")
  fi
done
[ ${#failed[@]} -eq 0 ] || { echo "test-vm: failed: ${failed[*]}" >&2; exit 1; }
