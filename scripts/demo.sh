#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# The whole of rblk on one machine, in about a minute: installs what is missing,
# builds, serves a real directory and a memory export on loopback, mounts both,
# compares every file with its source, writes the memory export and reads it
# back, prints throughput, and cleans up, also after Ctrl-C.
#   DEMO_DIR=/some/tree    what to serve as a dataset (default /usr/share/doc)
#   DEMO_SIZE=256MiB       size of the memory export
set -euo pipefail
cd "$(dirname "$0")/.."

if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "demo: run as root, or install sudo" >&2; exit 1; }
  exec sudo --preserve-env=DEMO_DIR,DEMO_SIZE env "PATH=$PATH" "$0" "$@"
fi

dir=${DEMO_DIR:-/usr/share/doc}
size=${DEMO_SIZE:-256MiB}
[ -d "$dir" ] || { echo "demo: DEMO_DIR=$dir is not a directory" >&2; exit 2; }

say() { printf '\n\033[1m== %s\033[0m\n' "$*"; }

tmp=$(mktemp -d /tmp/rblk-demo.XXXXXX)
shm=$(mktemp -d /dev/shm/rblk-demo.XXXXXX)
target=
export RBLK_RUN=$tmp/run
cleanup() {
  trap - INT TERM EXIT
  for m in "$tmp/corpus" "$tmp/scratch"; do
    if grep -q " $m " /proc/self/mountinfo; then
      bin/rmount umount "$m" 2>/dev/null || bin/rmount umount -l "$m" || true
    fi
  done
  if [ -n "$target" ]; then
    kill "$target" 2>/dev/null || true
    wait "$target" 2>/dev/null || true
  fi
  rm -rf --one-file-system "$tmp" "$shm"
}
trap cleanup EXIT
trap 'echo; echo "demo: interrupted, cleaning up" >&2; exit 130' INT TERM

say "Install what is missing, and build"
RBLK_DEPS=demo scripts/deps.sh
make --no-print-directory build
bin/rblkd version
bin/rmount version

say "Serve $dir and $size of memory on loopback"
# In a session of its own: Ctrl-C is for this script, which ends it last.
setsid bin/rblkd serve --listen 127.0.0.1:0 --data-listen 127.0.0.1:0 \
  --state-dir "$tmp/state" --memory-dir "$shm" --memory "scratch=$size" --dataset "corpus=$dir" \
  >"$tmp/ready" 2>"$tmp/rblkd.log" &
target=$!
for _ in $(seq 600); do
  control=$(sed -n 's/.*control=\([^ ]*\).*/\1/p' "$tmp/ready")
  [ -n "$control" ] && break
  kill -0 "$target" 2>/dev/null || { cat "$tmp/rblkd.log" >&2; exit 1; }
  sleep 0.1
done
[ -n "$control" ] || { echo "demo: rblkd is not ready after a minute" >&2; cat "$tmp/rblkd.log" >&2; exit 1; }
cat "$tmp/ready"
bin/rmount ls "rblk://$control/"

say "Mount the dataset and compare every file with its source"
mkdir "$tmp/corpus" "$tmp/scratch"
bin/rmount "rblk://$control/corpus" "$tmp/corpus"
sums() { (cd "$1" && find . -xdev -type f -print0 | LC_ALL=C sort -z | xargs -0 -r sha256sum); }
sums "$dir" >"$tmp/want"
start=$(date +%s.%N)
sums "$tmp/corpus" >"$tmp/got"
end=$(date +%s.%N)
cmp "$tmp/want" "$tmp/got" || { echo "demo: the mounted tree differs from its source" >&2; exit 1; }
files=$(wc -l <"$tmp/got")
awk -v n="$files" -v t="$(echo "$end $start" | awk '{print $1-$2}')" 'BEGIN { printf "%d files, every sha256 equal; read, hashed and compared at %.0f files/s\n", n, n/t }'

say "Mount the memory export, write it, and read it back"
bin/rmount "rblk://$control/scratch" "$tmp/scratch"
bytes=$(stat -c %s "$tmp/scratch/scratch")
head -c "$bytes" /dev/urandom >"$tmp/noise"
copy() { # FROM TO WHAT
  local start end
  start=$(date +%s%N)
  dd if="$1" of="$2" bs=1M conv=notrunc,fsync status=none
  end=$(date +%s%N)
  awk -v b="$bytes" -v ns="$((end - start))" -v what="$3" 'BEGIN { printf "%-28s %7.0f MB/s\n", what, b * 1000 / ns }'
}
copy "$tmp/noise" "$tmp/scratch/scratch" "write through FUSE, fsync"
bin/rmount umount "$tmp/scratch"
bin/rmount "rblk://$control/scratch" "$tmp/scratch"
copy "$tmp/scratch/scratch" "$tmp/back" "read through FUSE, cold"
cmp "$tmp/noise" "$tmp/back" || { echo "demo: the memory export gave back other bytes" >&2; exit 1; }
echo "every byte equal"
bin/rmount umount "$tmp/scratch"

say "Without FUSE: one-sided READs straight from the target's memory"
bin/rmount bench "rblk://$control/scratch" --rw read --bs 1MiB --depth 8 --time 2s
bin/rmount bench "rblk://$control/scratch" --rw randread --bs 4KiB --depth 1 --time 2s
bin/rmount bench "rblk://$control/scratch" --rw randread --bs 4KiB --depth 32 --time 2s

say "Done: everything worked, and is cleaned up"
