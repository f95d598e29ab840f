# Part of tests/cluster/check: volumes that nobody uses become whole again by themselves where the setting asks for it, and
# whoever wants one goes first.

offline() { k patch settings.longhorn.io offline-replica-rebuilding --type merge -p "{\"value\":\"$1\"}" >/dev/null; }
# whole VOLUME SECONDS: three replicas hold everything, the volume rests, and nothing of a rebuild is left.
whole() {
  local left=$(($2 * 5)) seen=
  while :; do
    seen=$(k get replicas.longhorn.io -l "longhornvolume=$1" \
      -o 'go-template={{range .items}}{{if .spec.healthyAt}}{{if .spec.failedAt}}-{{else}}+{{end}}{{else}}-{{end}}{{end}}')
    seen="$seen $(k get volumes.longhorn.io "$1" -o 'jsonpath={.status.state} {.status.conditions[?(@.type=="OfflineRebuilding")].reason}')"
    seen="$seen $(k get volumeattachments.longhorn.io "$1" -o 'jsonpath={.spec.attachmentTickets}')"
    [[ $seen =~ ^"+++ detached  "("{}")?$ ]] && return 0
    left=$((left - 1)); [ $left -gt 0 ] || { k get volumes.longhorn.io,replicas.longhorn.io,volumeattachments.longhorn.io -o yaml >&2; fail "$1 is not whole at rest: \"$seen\""; }
    sleep 0.2
  done
}
# told VOLUME REASON
told() { [ -n "$(k get events --field-selector "involvedObject.name=$1,reason=$2" -o name)" ] || fail "nobody was told of $1: $2"; }
names() { k get replicas.longhorn.io -l "longhornvolume=$1" -o 'jsonpath={.items[*].metadata.name}'; }

volume rests 268435456 2 "frontend: blockdev" | k apply -f - >/dev/null
becomes 30 volumes.longhorn.io rests '{.status.state}' detached
ticket rests node-1
dd if=/dev/urandom of=/dev/longhorn/rests bs=1M count=256 oflag=direct conv=fsync status=none
written=$(sum rests)
ticket rests ""

# Nothing is done unasked; asked for, one more replica is filled without anybody who uses the volume.
k patch volumes.longhorn.io rests --type merge -p '{"spec":{"numberOfReplicas":3}}' >/dev/null
sleep 20
[ "$(names rests | wc -w)" = 2 ] || fail "a replica was made though the setting is off: $(names rests)"
offline true
becomes 20 settings.longhorn.io offline-replica-rebuilding '{.status.applied}' true
becomes 60 volumes.longhorn.io rests '{.status.frontendDisabled} {.status.conditions[?(@.type=="OfflineRebuilding")].status}' "true True"
becomes 10 volumes.longhorn.io rests '{.spec.lastAttachedBy}' volume-rebuilding-controller
whole rests 120
told rests OfflineRebuilding
told rests OfflineRebuilt

# A replica is lost. In the middle of its rebuild somebody wants the volume, elsewhere, and has it.
lost=$(names rests); lost=${lost%% *}
k delete replicas.longhorn.io "$lost" --timeout=30s >/dev/null
becomes 60 volumes.longhorn.io rests '{.status.state} {.status.robustness} {.status.frontendDisabled}' "attached degraded true"
at=$(k get volumes.longhorn.io rests -o 'jsonpath={.status.currentNodeID}')
elsewhere=node-3; [ "$at" != node-3 ] || elsewhere=node-2
ticket rests $elsewhere
told rests OfflineRebuildingInterrupted
becomes 20 volumeattachments.longhorn.io rests '{.spec.attachmentTickets.volume-rebuilding-controller}{.status.attachmentTicketStatuses.t.satisfied}' true
[ "$(sum rests)" = "$written" ] || fail "other bytes after a rebuild that was interrupted"
ticket rests ""
whole rests 120

# A replica that failed while its node was away is filled again when it is back, and none is made beside it.
k patch settings.longhorn.io replica-replenishment-wait-interval --type merge -p '{"value":"5"}' >/dev/null
ticket rests node-1
before=$(names rests)
on_3=$(k get replicas.longhorn.io -l longhornvolume=rests -o 'jsonpath={.items[?(@.spec.nodeID=="node-3")].metadata.name}')
scripts/cluster stop-node node-3
# Nobody is to start it again: its instance manager first.
kill -9 "$(cat "$LONGHORN_CLUSTER/run/instance-manager-node-3.pid")"
kill -9 "$(sed -n 's/.*"pid": *\([0-9]*\).*/\1/p' "$LONGHORN_CLUSTER/nodes/node-3/run/processes/$on_3.json" | head -n 1)"
becomes 60 volumes.longhorn.io rests '{.status.robustness}' degraded
dd if=/dev/urandom of=/dev/longhorn/rests bs=1M count=8 seek=3 oflag=direct conv=fsync,notrunc status=none
written=$(sum rests)
becomes 60 volumes.longhorn.io rests '{.status.conditions[?(@.type=="Scheduled")].status}' False
ticket rests ""
becomes 60 volumes.longhorn.io rests '{.status.conditions[?(@.type=="OfflineRebuilding")].reason}' NoPlace
scripts/cluster start-node node-3
becomes 90 volumes.longhorn.io rests '{.status.conditions[?(@.type=="OfflineRebuilding")].status}' True
whole rests 120
[ "$(names rests)" = "$before" ] || fail "the replicas were $before, and are $(names rests)"
k patch settings.longhorn.io replica-replenishment-wait-interval --type merge -p '{"value":"600"}' >/dev/null
for node in node-3 node-2; do
  ticket rests $node
  becomes 30 volumes.longhorn.io rests '{.status.robustness}' healthy
  [ "$(sum rests)" = "$written" ] || fail "other bytes on $node after rebuilds at rest"
  ticket rests ""
done
offline false
k delete volumes.longhorn.io rests --timeout=120s >/dev/null
