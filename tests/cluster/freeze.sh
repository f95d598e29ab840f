# Part of tests/cluster/sidecars: file systems that pods write rest while a snapshot is taken, where the class, the volume or the
# setting says so, and only then; and no snapshot is taken of one that cannot rest.

copies=()
# copied SNAPSHOT: a volume made of a VolumeSnapshot, attached as a device that nobody has mounted: $copy.
copied() {
  local content handle
  becomes 120 '{.status.readyToUse}' true volumesnapshots.snapshot.storage.k8s.io "$1"
  content=$(kubectl get volumesnapshots.snapshot.storage.k8s.io "$1" -o 'jsonpath={.status.boundVolumeSnapshotContentName}')
  handle=$(kubectl get volumesnapshotcontents.snapshot.storage.k8s.io "$content" -o 'jsonpath={.status.snapshotHandle}')
  l apply -f - >/dev/null <<COPY
apiVersion: longhorn.io/v1beta2
kind: Volume
metadata: {name: copy-$1}
spec: {size: "335544320", numberOfReplicas: 1, frontend: blockdev, dataSource: "$handle"}
COPY
  copies+=("copy-$1")
  becomes 120 '{.status.state} {.status.cloneStatus.state}' "detached completed" volumes.longhorn.io "copy-$1" -n longhorn-system
  l patch volumeattachments.longhorn.io "copy-$1" --type merge \
    -p '{"spec":{"attachmentTickets":{"t":{"id":"t","type":"csi-attacher","nodeID":"node-1"}}}}' >/dev/null
  becomes 120 '{.status.state}' attached volumes.longhorn.io "copy-$1" -n longhorn-system
  copy=/dev/longhorn/copy-$1
}
# reads DEVICE FILE KIND: the sum of a file of a copy.
reads() {
  local options=ro
  [ "$3" != xfs ] || options=ro,nouuid
  mkdir -p "$place/copy"
  mount -t "$3" -o "$options" "$1" "$place/copy" || fail "the copy $1 is not mounted"
  if [ -e "$place/copy/$2" ]; then sum "$place/copy/$2"; else echo nothing; fi
  umount "$place/copy" && rmdir "$place/copy"
}
# rests CLAIM ignored|enabled|disabled
rests() { l patch volumes.longhorn.io "$(volume_of "$1")" --type merge -p "{\"spec\":{\"freezeFilesystemForSnapshot\":\"$2\"}}" >/dev/null; }
# dirty FILE: 8 MiB that are in memory alone; prints their sum.
dirty() { dd if=/dev/urandom of="$1" bs=1M count=8 status=none && sum "$1"; }
# What writes all the while, in small pieces.
writer() { local i; for i in $(seq 100000); do echo "$i" >>"$1/log" && sync "$1/log" && sleep 0.02 || return 0; done; }

class rests Immediate 'numberOfReplicas: "2", fsType: ext4, freezeFilesystemForSnapshot: enabled'
class rests-xfs Immediate 'numberOfReplicas: "2", fsType: xfs'
class=rests size=320Mi claim frozen
class=rests-xfs size=320Mi claim frozen-xfs
becomes 60 '{.status.phase}' Bound pvc frozen
becomes 10 '{.spec.freezeFilesystemForSnapshot}' enabled volumes.longhorn.io "$(volume_of frozen)" -n longhorn-system
starts writes-frozen node-1 frozen
frozen_at=$at
writer "$frozen_at" & writing=$!
written=$(dirty "$frozen_at/dirty")
snapshot cold longhorn frozen
copied cold
# ext4 says in its first block whether its journal is to be replayed.
! dumpe2fs -h "$copy" 2>/dev/null | grep -q needs_recovery || fail "the journal of what rested is not empty"
[ "$(reads "$copy" dirty ext4)" = "$written" ] || fail "what was written before the snapshot is not in it"
at_most=$(wc -l <"$frozen_at/log")
sleep 1
[ "$(wc -l <"$frozen_at/log")" -gt "$at_most" ] || fail "nothing is written any more"

# The volume's own word goes before the setting's.
rests frozen disabled
l patch settings.longhorn.io freeze-filesystem-for-snapshot --type merge -p '{"value":"true"}' >/dev/null
dirty "$frozen_at/later" >/dev/null
snapshot hot longhorn frozen
copied hot
dumpe2fs -h "$copy" 2>/dev/null | grep -q needs_recovery || fail "a file system that did not rest looks clean: the check says nothing"
kill $writing; wait $writing 2>/dev/null || true

# The setting, for volumes that leave it to that.
starts writes-frozen-xfs node-2 frozen-xfs
written=$(dirty "$at/dirty")
snapshot cold-xfs longhorn frozen-xfs
copied cold-xfs
[ "$(reads "$copy" dirty xfs)" = "$written" ] || fail "what was written before the snapshot of the XFS is not in it"
ends writes-frozen-xfs node-2 frozen-xfs

# Somebody else froze it: no snapshot, who wants one hears why, and it stays as it is until that is over.
rests frozen ignored
fsfreeze --freeze "$frozen_at"
snapshot refused longhorn frozen
told volumesnapshots.snapshot.storage.k8s.io refused 'the file system was not frozen'
touch "$frozen_at/held" & held=$!
sleep 1
[ ! -e "$frozen_at/held" ] || fail "somebody else's freeze was thawed"
[ "$(kubectl get volumesnapshots.snapshot.storage.k8s.io refused -o 'jsonpath={.status.readyToUse}')" != true ] || fail "a snapshot of what did not rest"
fsfreeze --unfreeze "$frozen_at"
wait $held
becomes 120 '{.status.readyToUse}' true volumesnapshots.snapshot.storage.k8s.io refused
l patch settings.longhorn.io freeze-filesystem-for-snapshot --type merge -p '{"value":"false"}' >/dev/null

for copy in "${copies[@]}"; do
  l patch volumeattachments.longhorn.io "$copy" --type merge -p '{"spec":{"attachmentTickets":{"t":null}}}' >/dev/null
  becomes 60 '{.status.state}' detached volumes.longhorn.io "$copy" -n longhorn-system
  l delete volumes.longhorn.io "$copy" --timeout=60s >/dev/null || fail "$copy stays"
done
ends writes-frozen node-1 frozen
kubectl delete volumesnapshots.snapshot.storage.k8s.io cold hot cold-xfs refused --timeout=120s >/dev/null || fail "snapshots stay"
kubectl delete pvc frozen frozen-xfs --timeout=120s >/dev/null || fail "claims stay"
