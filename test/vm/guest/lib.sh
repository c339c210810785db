# SPDX-License-Identifier: Apache-2.0
# Sourced by the tests: devices, and how to run a Go test binary.
set -eu
modprobe -a ib_uverbs rdma_ucm rdma_rxe sch_netem dummy veth

load() { # load TYPE: the driver of rxe or siw devices
  modprobe "$([ "$1" = rxe ] && echo rdma_rxe || echo "$1")"
}

# one TYPE: a single device TYPE0 on a dummy interface, 10.9.0.1 and fd09::1.
# Both ends talk through it.
one() {
  load "$1"
  ip link add rdma0 type dummy
  ip link set rdma0 mtu 4200 # an RDMA MTU of 4096, and headers
  ip addr add 10.9.0.1/24 dev rdma0
  ip -6 addr add fd09::1/64 dev rdma0 nodad
  ip link set rdma0 up
  rdma link add "${1}0" type "$1" netdev rdma0
}

# wire TYPE: devices TYPEa (10.9.0.1, on va) and TYPEb (10.9.0.2, on vb) in one
# network namespace, whose traffic really crosses the wire between va and vb.
# (rxe cannot be moved to a second namespace.) Addresses of this machine usually
# answer each other without a wire: rules send them out, neighbours are fixed.
wire() {
  load "$1"
  ip link add va type veth peer name vb
  ip link set va mtu 4200
  ip link set vb mtu 4200
  local d k
  for d in va vb all; do
    for k in accept_local=1 rp_filter=0 arp_ignore=1; do echo "${k#*=}" >"/proc/sys/net/ipv4/conf/$d/${k%=*}"; done
  done
  ip addr add 10.9.0.1/24 dev va
  ip addr add 10.9.0.2/24 dev vb
  ip link set va up
  ip link set vb up
  ip route add 10.9.0.2 dev va src 10.9.0.1 table 101
  ip route add 10.9.0.1 dev vb src 10.9.0.2 table 102
  ip rule add pref 10 iif lo from 10.9.0.1 to 10.9.0.2 lookup 101
  ip rule add pref 11 iif lo from 10.9.0.2 to 10.9.0.1 lookup 102
  ip rule add pref 100 from all lookup local
  ip rule del pref 0
  rdma link add "${1}a" type "$1" netdev va
  rdma link add "${1}b" type "$1" netdev vb
  ip neigh replace 10.9.0.2 lladdr "$(cat /sys/class/net/vb/address)" dev va nud permanent
  ip neigh replace 10.9.0.1 lladdr "$(cat /sys/class/net/va/address)" dev vb nud permanent
}

# unwire TYPE takes the wire away again.
unwire() {
  rdma link del "${1}a"
  rdma link del "${1}b"
  ip link del va
  ip rule add pref 0 from all lookup local
  for p in 10 11 100; do ip rule del pref $p; done
}

# gotest BINARY ARGS…: runs $STAGE/BINARY.test from memory: 9p is slow.
gotest() {
  local b=$1
  shift
  [ -x "/tmp/$b.test" ] || cp "$STAGE/$b.test" "/tmp/$b.test"
  (cd /tmp && "./$b.test" -test.v "$@")
}
