# SPDX-License-Identifier: Apache-2.0
# READs of rdma/verbs beside perftest's, interleaved, on one rxe device. Prints
# the medians and their ratios; it judges nothing, since emulation is noisy.
# timeout: 200
. ./lib.sh
one rxe
export RBLK_VERBS_ADDR=10.9.0.1
rounds=${ROUNDS:-5}

# perf NAME ARGS…: the client's last line, without its server's.
perf() {
  local t=$1 s
  shift
  "$t" -d rxe0 -R -F "$@" >/dev/null 2>&1 &
  s=$!
  for _ in $(seq 50); do # until it listens
    timeout 20 "$t" -d rxe0 -R -F "$@" 10.9.0.1 2>/dev/null | grep -E '^ [0-9]' && break
    sleep 0.2
  done
  kill $s 2>/dev/null || true
  wait $s 2>/dev/null || true
}
ours() { (cd /tmp && ./rdma-verbs.test -test.run '^$' -test.bench "$1" -test.benchtime "$2") | awk '/^Bench/'; }
cp "$STAGE/rdma-verbs.test" /tmp/
for i in $(seq "$rounds"); do
  perf ib_read_lat -s 4096 -n 2000 | awk '{print "lat4k perftest", $6}' # average, µs
  ours ReadLatency/poll 2000x | awk '{print "lat4k verbs", $3/1000}'
  perf ib_read_lat -e -s 4096 -n 2000 | awk '{print "lat4k-events perftest", $6}'
  ours ReadLatency/event 2000x | awk '{print "lat4k-events verbs", $3/1000}'
  for s in 65536 1048576; do
    n=$((s == 65536 ? 1000 : 80))
    perf ib_read_bw -s $s -n $n | awk -v s=$s '{print "bw" s, "perftest", $4*1.048576}' # average, MB/s
    ours "ReadBandwidth/$((s / 1024))KiB" ${n}x | awk -v s=$s '{print "bw" s, "verbs", $5}'
  done
done | tee /tmp/rounds
awk '{v[$1" "$2]=v[$1" "$2]" "$3; k[$1]} END {
  for (m in k) {
    a=med(v[m" verbs"]); b=med(v[m" perftest"])
    printf "%s: verbs %.1f, perftest %.1f, ratio %.2f\n", m, a, b, b ? a/b : 0
  }}
  function med(s,  x,n) { n=split(s,x," "); asort(x); return x[int((n+1)/2)] }' /tmp/rounds
[ "$(wc -l </tmp/rounds)" -eq $((rounds * 8)) ]
