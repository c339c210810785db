#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Installs the Debian packages that building, the demo and the tests need, those
# that are missing only. Needs root or sudo for that, and nothing when all are there.
set -euo pipefail

command -v go >/dev/null || { echo "deps: Go 1.26 or newer is needed and must be on the PATH (https://go.dev/dl)" >&2; exit 1; }

want=(gcc libc6-dev make git fuse3 attr libibverbs-dev librdmacm-dev)
[ "${RBLK_DEPS:-all}" = demo ] || want+=(fio libnbd-bin qemu-utils iproute2)
missing=()
for p in "${want[@]}"; do
  dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing+=("$p")
done
[ ${#missing[@]} -eq 0 ] && exit 0

if ! command -v apt-get >/dev/null; then
  echo "deps: install the equivalents of: ${missing[*]}" >&2
  exit 1
fi
sudo=
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "deps: run as root, or install sudo, or install by hand: ${missing[*]}" >&2; exit 1; }
  sudo=sudo
fi
echo "deps: installing ${missing[*]}" >&2
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for try in 1 2; do
  if { $sudo apt-get update && $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
    exit 0
  fi
done
tail -20 "$log" >&2
echo "deps: apt-get could not install: ${missing[*]}" >&2
exit 1
