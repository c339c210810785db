# SPDX-License-Identifier: Apache-2.0
# What goes wrong around a connection: no device, little memlock, delay, loss,
# links and devices that go away; and IPv6.
# timeout: 240
. ./lib.sh
gotest rdma-verbs -test.run '^TestVMNoDevice$'
wire rxe
gotest rdma-verbs -test.timeout 200s \
  -test.run '^TestVM(Wire|DelayAndLoss|LinkFlap|LinkDown|ManyConnects|Memlock|DeviceRemoved)$'
ip link del va
one rxe
gotest rdma-verbs -test.run '^TestVMIPv6$'
