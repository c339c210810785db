# SPDX-License-Identifier: Apache-2.0
# Offsets of 4 GiB ± 1 in one region, on each kind of device. The whole region
# is pinned, hence the memory.
# memory: 8192
# timeout: 240
. ./lib.sh
export RBLK_VERBS_ADDR=10.9.0.1 RBLK_VERBS_BIG=1
for dev in rxe siw; do
  one $dev
  gotest rdma-verbs -test.run '^TestConformance$/^BigRegion$' -test.timeout 100s
  rdma link del ${dev}0
  ip link del rdma0
done
