# Part of tests/cluster/check: a volume with the quorum majority that has one replica is given two, one after the other, while it is used;
# then one of the three is enough to lose, and two that are lost for good do not keep the third from being attached.

counted() { # VOLUME: replicas in sync, as its engine says
  k get engines.longhorn.io "$1-e-0" -o 'jsonpath={.status.replicaModeMap}' | grep -o '"RW"' | wc -l
}
in_sync() { # VOLUME REPLICAS
  for _ in $(seq 450); do [ "$(counted "$1")" != "$2" ] || return 0; sleep 0.2; done
  k get engines.longhorn.io,replicas.longhorn.io -o yaml >&2; tail -n 40 "$LONGHORN_CLUSTER"/log/manager-*.log >&2
  fail "volume $1 has $(counted "$1") replicas in sync, not $2"
}
volume grows 67108864 1 "frontend: blockdev, quorum: majority" | k apply -f - >/dev/null
becomes 30 volumes.longhorn.io grows '{.status.state}' detached
ticket grows node-1
dd if=/dev/urandom of=/dev/longhorn/grows bs=1M count=64 oflag=direct conv=fsync status=none
held=$(sum grows)
begun=$(k get replicas.longhorn.io -l longhornvolume=grows -o 'jsonpath={.items[*].metadata.name}')
k patch volumes.longhorn.io grows --type merge -p '{"spec":{"numberOfReplicas":3}}' >/dev/null
in_sync grows 3
becomes 30 volumes.longhorn.io grows '{.status.robustness}' healthy
[ "$(sum grows)" = "$held" ] || fail "a volume that has grown replicas has other bytes"
# The engine that its manager starts again counts those that there are now, not the one that it began with, which has missed something.
process() { # NODE INSTANCE
  sed -n 's/.*"pid": *\([0-9]*\).*/\1/p' "$LONGHORN_CLUSTER/nodes/$1/run/processes/$2.json" | head -n 1
}
home=$(k get replicas.longhorn.io "$begun" -o 'jsonpath={.spec.nodeID}')
behind=$(process "$home" "$begun") engine=$(process node-1 grows-e-0)
kill -STOP "$behind"
in_sync grows 2
dd if=/dev/urandom of=/dev/longhorn/grows bs=1M count=64 oflag=direct conv=fsync status=none
held=$(sum grows)
kill -9 "$engine"
kill -CONT "$behind"
[ "$(sum grows)" = "$held" ] || fail "an engine that was started again has the bytes of the replica that it began with at first"
in_sync grows 3
becomes 30 volumes.longhorn.io grows '{.status.robustness}' healthy
ticket grows ""; ticket grows node-2
[ "$(sum grows)" = "$held" ] || fail "a volume that has grown replicas has other bytes on another node"
becomes 60 volumes.longhorn.io grows '{.status.robustness}' healthy
ticket grows ""

# Two are gone: their resources go, and what is left is the volume.
read -r kept lost <<<"$(k get replicas.longhorn.io -l longhornvolume=grows -o 'jsonpath={.items[*].metadata.name}')"
for replica in $lost; do
  k get replicas.longhorn.io "$replica" -o 'jsonpath={.spec.diskPath}/replicas/{.spec.dataDirectoryName}' | xargs rm -rf
done
k delete replicas.longhorn.io $lost --wait=false >/dev/null
ticket grows node-3
[ "$(sum grows)" = "$held" ] || fail "the last replica has other bytes"
in_sync grows 3
[ "$(sum grows)" = "$held" ] || fail "replicas that were filled from the last one have other bytes"
k get replicas.longhorn.io "$kept" >/dev/null || fail "the replica that had everything is gone"
ticket grows ""
k delete volumes.longhorn.io grows --timeout=120s >/dev/null
