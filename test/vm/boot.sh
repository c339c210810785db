#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# boot.sh [-t SECONDS] [-m MiB] [-s DIR] [-l LOGDIR] COMMAND…
#
# Boots the machine of build.sh, shares DIR (default: .) at /mnt/host, runs
# COMMAND there as root (by bash), prints its output and exits with its status.
# 124: it took longer than SECONDS (default 300); 125: the guest died.
# LOGDIR gets the console and the kernel's log. RBLK_VM_ARGS: more arguments for
# QEMU. Machines run one at a time: two would halve each other's speed.
set -u
here=$(cd "$(dirname "$0")" && pwd)
timeout=300 mem=2048 share=$PWD logs=
while getopts t:m:s:l: o; do
  case $o in
  t) timeout=$OPTARG ;;
  m) mem=$OPTARG ;;
  s) share=$(cd "$OPTARG" && pwd) || exit 2 ;;
  l) logs=$OPTARG ;;
  *) exit 2 ;;
  esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || { sed -n 3,10p "$0" >&2; exit 2; }
image=$("$here/build.sh") || exit 1

job=$(mktemp -d "${TMPDIR:-/tmp}/rblk-vm.XXXXXX")
qemu='' watch=''
cleanup() {
  [ -z "$watch" ] || kill "$watch" 2>/dev/null
  [ -z "$qemu" ] || kill "$qemu" 2>/dev/null
  if [ -n "$logs" ]; then mkdir -p "$logs" && cp "$job"/{console,dmesg} "$logs/" 2>/dev/null; fi
  rm -rf "$job"
}
trap cleanup EXIT
trap 'exit 130' INT TERM
exec 8>"${TMPDIR:-/tmp}/rblk-vm.lock"
flock 8
printf '%s\n' "$*" >"$job/cmd"

# run boots once: 0 when the guest left a status.
run() {
  rm -f "$job"/{out,status,timeout,dmesg}
  mkfifo "$job/out" # a chardev on stdio would block the guest when we are slow
  cat "$job/out" 8>&- &
  local cat=$!
  # shellcheck disable=SC2086
  qemu-system-x86_64 -machine q35,usb=off,vmport=off,graphics=off -accel tcg,thread=multi,tb-size=256 -cpu max \
    -smp "${RBLK_VM_CPUS:-2}" -m "$mem" -nodefaults -no-user-config -display none -no-reboot \
    -kernel "$image/vmlinux" -initrd "$image/initrd.cpio" \
    -append "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off nokaslr tsc=reliable random.trust_cpu=on cryptomgr.notests audit=0 selinux=0 apparmor=0 raid=noautodetect" \
    -chardev file,id=con,path="$job/console" -serial chardev:con \
    -drive if=none,id=root,format=raw,file="$image/root.ext4",snapshot=on,cache=unsafe -device virtio-blk-pci,drive=root \
    -device virtio-rng-pci -device virtio-serial-pci -chardev file,id=out,path="$job/out" -device virtserialport,chardev=out,name=out \
    -fsdev local,id=job,path="$job",security_model=none -device virtio-9p-pci,fsdev=job,mount_tag=job \
    -fsdev local,id=host,path="$share",security_model=none,multidevs=remap -device virtio-9p-pci,fsdev=host,mount_tag=host \
    ${RBLK_VM_ARGS:-} </dev/null 8>&- &
  qemu=$!
  (
    exec 8>&-
    sleep "$timeout" &
    trap "kill $! 2>/dev/null; exit" TERM
    wait
    touch "$job/timeout"
    kill "$qemu" 2>/dev/null
  ) &
  watch=$!
  wait "$qemu"
  qemu=
  (exec 9<>"$job/out") # lets cat end when QEMU died before it opened the FIFO
  wait "$cat"
  kill "$watch" 2>/dev/null
  wait "$watch" 2>/dev/null
  watch=
  [ -s "$job/status" ]
}

for _ in 1 2 3; do
  run && exit "$(cat "$job/status")"
  if [ -e "$job/timeout" ]; then
    echo "vm: not done after $timeout s" >&2
    tail -5 "$job/console" >&2
    exit 124
  fi
  # Emulated kernels now and then die while they boot, before anything of ours.
  grep -q 'vm-init: up' "$job/console" && break
  echo "vm: the guest did not boot; once more" >&2
done
echo "vm: the guest died" >&2
tail -20 "$job/console" >&2
exit 125
