#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# build.sh: the virtual machine that has what most machines lack: RDMA in
# software (rxe, siw), NBD, ublk, NVMe. Prints the image's directory.
#
# Made of Debian packages only: kernel 6.12, the packages of packages.txt, and
# siw, rtrs and rnbd built from Debian's own kernel source (no Debian kernel has
# them). Runs as root on Debian 12; installs what the host lacks. About 3 minutes
# from nothing, 1 with packages cached, nothing at all when the image is there.
#
#   RBLK_VM_CACHE=DIR   packages and images (default: .vm at the root of the tree)
#
# An image's name is a digest of what it is made from, and it appears by rename:
# an interrupted or changed build never leaves something half right behind.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=${RBLK_VM_CACHE:-$here/../../.vm}
mkdir -p "$cache"
cache=$(cd "$cache" && pwd)
kernel=6.12
jobs=$(nproc)

stamp=$(cat "$here"/{build.sh,packages.txt,guest/init,guest/initrd} | sha256sum | cut -c1-16)
image=$cache/image-$stamp
[ -e "$image/root.ext4" ] && { echo "$image"; exit 0; }

exec 9>"$cache/build.lock"
flock 9
[ -e "$image/root.ext4" ] && { echo "$image"; exit 0; } # somebody else built it meanwhile

say() { printf 'vm build [%3ds] %s\n' $SECONDS "$*" >&2; }
die() { echo "vm build: $*" >&2; exit 1; }
[ "$(id -u)" -eq 0 ] || die "must run as root (it unpacks packages with their owners)"

# ---- what the host needs
want=(qemu-system-x86 seabios busybox-static cpio zstd xz-utils e2fsprogs python3-minimal gcc make libc6-dev libelf-dev flex bison bc)
missing=()
for p in "${want[@]}"; do
  dpkg-query -W -f '${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing+=("$p")
done
if [ ${#missing[@]} -gt 0 ]; then
  say "installing ${missing[*]}"
  command -v apt-get >/dev/null || die "needs Debian 12, or the equivalents of: ${missing[*]}"
  { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends "${missing[@]}"; } >"$cache/host-packages.log" 2>&1 \
    || { tail -5 "$cache/host-packages.log" >&2; die "apt-get could not install: ${missing[*]}"; }
fi

# ---- an apt of our own: the host's sources and keys, its own state
mkdir -p "$cache"/apt/{lists/partial,archives/partial}
: >"$cache/apt/status"
apt=(-qq -o Dir::State="$cache/apt" -o Dir::State::lists="$cache/apt/lists" -o Dir::State::status="$cache/apt/status"
  -o Dir::Cache="$cache/apt" -o Dir::Cache::archives="$cache/apt/archives" -o APT::Sandbox::User=root
  -o APT::Install-Recommends=false -o APT::Architecture=amd64 -o Debug::NoLocking=true -o Acquire::Retries=3)
apt-get "${apt[@]}" update || die "apt-get update failed"
kpkg=$(apt-cache "${apt[@]}" depends "linux-image-$kernel-amd64" 2>/dev/null | awk '/Depends: linux-image/{print $2; exit}')
[ -n "$kpkg" ] || die "no linux-image-$kernel-amd64: the host's apt needs bookworm-security (deb.debian.org/debian-security)"
krel=${kpkg#linux-image-}
base=${krel%-amd64}
mapfile -t pkgs < <(grep -v '^#' "$here/packages.txt" | tr -s ' ' '\n' | sed '/^$/d')
apt-get "${apt[@]}" install --download-only -y "${pkgs[@]}" >/dev/null || die "packages cannot be downloaded"
mapfile -t guest < <(apt-get "${apt[@]}" install -s -y "${pkgs[@]}" | awk '/^Inst /{print $2}')
(
  cd "$cache/apt/archives"
  for p in "$kpkg" "linux-headers-$krel" "linux-headers-$base-common" "linux-kbuild-$base" "linux-source-$kernel"; do
    compgen -G "${p}_*.deb" >/dev/null || apt-get "${apt[@]}" download "$p"
  done
)
deb() { ls "$cache"/apt/archives/"${1%%:*}"_*.deb | tail -1; }
say "packages are there (kernel $krel)"

tmp=$(mktemp -d "$cache/tmp.XXXXXX")
trap 'rm -rf "$tmp"' EXIT
root=$tmp/root

# ---- root tree
unpack_root() {
  mkdir -p "$root"/usr/{bin,sbin,lib,lib64} "$root"/{dev,proc,sys,run,tmp,mnt/host,root,etc/nvme,var}
  local d p
  for d in bin sbin lib lib64; do ln -s usr/$d "$root/$d"; done
  for p in "${guest[@]}"; do
    dpkg-deb --fsys-tarfile "$(deb "$p")" | tar -x --keep-directory-symlink -C "$root" \
      --exclude=./usr/share/{doc,man,locale,info,perl5}
  done
  cp "$root/usr/share/base-passwd/passwd.master" "$root/etc/passwd"
  cp "$root/usr/share/base-passwd/group.master" "$root/etc/group"
  sed -i 's/^root:\*/root:/' "$root/etc/passwd"
  echo 'user:x:1000:1000::/tmp:/bin/bash' >>"$root/etc/passwd"
  echo vm >"$root/etc/hostname"
  printf '127.0.0.1 localhost vm\n::1 localhost\n' >"$root/etc/hosts"
  printf '%s: files\n' passwd group hosts services protocols >"$root/etc/nsswitch.conf"
  echo nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555 >"$root/etc/nvme/hostnqn"
  echo 11111111-2222-3333-4444-555555555555 >"$root/etc/nvme/hostid"
  ln -sf bash "$root/usr/bin/sh"
  ln -sf /proc/mounts "$root/etc/mtab"
  [ -e "$root/usr/bin/awk" ] || ln -s gawk "$root/usr/bin/awk"
  cp "$(command -v busybox)" "$root/usr/bin/busybox"
  install -m 755 "$here/guest/init" "$root/sbin/vm-init"
  chroot "$root" /sbin/ldconfig
}

# ---- the kernel, and the modules that tests of storage and RDMA can use
dirs=(crypto lib arch/x86/crypto fs/{9p,netfs,fuse,ext4,jbd2,xfs,configfs,nfs_common,mbcache} fs/mbcache.ko.xz
  net/{9p,core,ipv4,ipv6,sched,802,llc} drivers/infiniband/{core,sw,ulp} drivers/{block,nvme,md,dax,virtio,char}
  drivers/net/{veth,dummy,virtio_net,net_failover,ifb,macvlan}.ko.xz)
unpack_kernel() {
  mkdir -p "$tmp/kernel"
  dpkg -x "$(deb "$kpkg")" "$tmp/kernel"
  mod=$tmp/kernel/lib/modules/$krel
  [ -d "$mod" ] || mod=$tmp/kernel/usr/lib/modules/$krel
  gmod=$root/usr/lib/modules/$krel
  mkdir -p "$gmod"
  cp "$mod"/modules.{builtin,builtin.modinfo,order} "$gmod/"
  (cd "$mod" && for d in "${dirs[@]}"; do [ ! -e "kernel/$d" ] || find "kernel/$d" -name '*.ko*'; done | sort -u | tar cf - -T -) | tar xf - -C "$gmod"
  find "$gmod" -name '*.ko.xz' -print0 | xargs -0r -P "$jobs" -n 40 xz -d
}

# ---- siw, rtrs and rnbd, out of Debian's kernel source
build_modules() {
  local hdr=$tmp/hdr src=$tmp/src h p l t
  mkdir -p "$hdr" "$src"
  for p in "linux-headers-$krel" "linux-headers-$base-common" "linux-kbuild-$base"; do dpkg -x "$(deb "$p")" "$hdr"; done
  dpkg --fsys-tarfile "$(deb "linux-source-$kernel")" | tar xOf - "./usr/src/linux-source-$kernel.tar.xz" |
    tar -xJf - -C "$src" --strip-components=1 --wildcards '*/drivers/infiniband' '*/drivers/block/rnbd'
  h=$hdr/usr/src/linux-headers-$krel
  # Debian's makefiles and links name /usr/src and /usr/lib: point them here.
  sed -i "s#/usr/src/linux-headers#$hdr/usr/src/linux-headers#g" "$h/Makefile"
  for l in "$h"/{scripts,tools} "$hdr/usr/src/linux-headers-$base-common"/{scripts,tools}; do
    if [ -L "$l" ]; then t=$(readlink "$l"); case $t in /*) ln -sfn "$hdr$t" "$l" ;; esac; fi
  done
  echo 'obj-m += infiniband/sw/siw/ infiniband/ulp/rtrs/ block/rnbd/' >"$src/drivers/Makefile"
  make -C "$h" M="$src/drivers" KCFLAGS="-I$src/drivers/infiniband/ulp/rtrs" CONFIG_DEBUG_INFO_BTF_MODULES= \
    CONFIG_RDMA_SIW=m CONFIG_INFINIBAND_RTRS=m CONFIG_INFINIBAND_RTRS_CLIENT=m CONFIG_INFINIBAND_RTRS_SERVER=m \
    CONFIG_BLK_DEV_RNBD=y CONFIG_BLK_DEV_RNBD_CLIENT=m CONFIG_BLK_DEV_RNBD_SERVER=m -j"$jobs" modules >"$cache/modules.log" 2>&1 ||
    { tail -20 "$cache/modules.log" >&2; die "siw, rtrs and rnbd do not build"; }
  mkdir -p "$gmod/extra"
  find "$src/drivers" -name '*.ko' -exec cp {} "$gmod/extra/" \;
}

# ---- initrd: busybox and the modules of the root disk
make_initrd() {
  local i=$tmp/initrd m t
  mkdir -p "$i"/{bin,dev,proc,sys,root,m}
  cp "$(command -v busybox)" "$i/bin/busybox"
  ln -s busybox "$i/bin/sh"
  for t in virtio_pci virtio_blk virtio_console ext4; do
    chroot "$root" /sbin/modprobe -S "$krel" --show-depends "$t" 2>/dev/null || true
  done | awk '$1=="insmod" && !seen[$2]++{print $2}' | while read -r m; do
    cp "$root$m" "$i/m/"
    basename "$m" >>"$i/m/order"
  done
  install -m 755 "$here/guest/initrd" "$i/init"
  (cd "$i" && find . | cpio -o -H newc --quiet) >"$tmp/out/initrd.cpio"
}

# ---- the kernel's ELF: PVH boot skips a decompression that emulation makes slow
extract_vmlinux() {
  python3 - "$tmp/kernel/boot/vmlinuz-$krel" "$tmp/out/vmlinux" <<'PY'
import subprocess, sys
data = open(sys.argv[1], 'rb').read()
for magic, cmd in ((b'\x28\xb5\x2f\xfd', ['zstd', '-dcq']), (b'\xfd7zXZ\x00', ['xz', '-dcq', '--single-stream'])):
    at = data.find(magic)
    while at > 0:
        out = subprocess.run(cmd, input=data[at:], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
        if out[:4] == b'\x7fELF':
            open(sys.argv[2], 'wb').write(out)
            sys.exit(0)
        at = data.find(magic, at + 1)
sys.exit('no ELF kernel inside vmlinuz')
PY
}

mkdir -p "$tmp/out"
unpack_root
unpack_kernel
say "trees unpacked"
build_modules
chroot "$root" /sbin/depmod "$krel"
[ -s "$gmod/modules.dep" ] || die "depmod made no modules.dep"
say "siw, rtrs, rnbd built"
make_initrd
extract_vmlinux
mkfs.ext4 -q -F -O ^has_journal,^metadata_csum,^resize_inode -E lazy_itable_init=1,root_owner=0:0 -m 0 -d "$root" \
  "$tmp/out/root.ext4" $(($(du -sm "$root" | cut -f1) * 12 / 10 + 512))M >/dev/null 2>"$cache/mkfs.log" || { cat "$cache/mkfs.log" >&2; die "mkfs.ext4 failed"; }
mv "$tmp/out" "$image"
find "$cache" -maxdepth 1 -name 'image-*' ! -path "$image" -mtime +7 -exec rm -rf {} +
say "done: $image"
echo "$image"
