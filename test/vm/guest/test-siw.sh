# SPDX-License-Identifier: Apache-2.0
# Software iWARP: the conformance suite, five times.
# timeout: 240
. ./lib.sh
one siw
export RBLK_VERBS_ADDR=10.9.0.1
gotest rdma-verbs -test.run '^TestConformance$' -test.count=${COUNT:-5} -test.timeout 220s ${ARGS:-}
