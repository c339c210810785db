# SPDX-License-Identifier: Apache-2.0
# What goes wrong around a connection: no device, little memlock, delay, loss,
# links and devices that go away; and IPv6.
# timeout: 200
. ./lib.sh
gotest rdma-verbs -test.run '^TestVMNoDevice$'
wire rxe
gotest rdma-verbs -test.timeout 150s -test.run '^TestVM(Wire|DelayAndLoss|Blackout|Dark|ManyConnects|Memlock)$'
gotest rdma-verbs -test.timeout 60s -test.run '^TestVMLinkDown$'
unwire rxe
wire rxe
gotest rdma-verbs -test.timeout 60s -test.run '^TestVMDeviceRemoved$'
for _ in $(seq 100); do rdma link | grep -q rxea || break; sleep 0.1; done
! rdma link | grep rxea # the kernel could let go of it
ip link del va
one rxe
gotest rdma-verbs -test.timeout 30s -test.run '^TestVMIPv6$'
