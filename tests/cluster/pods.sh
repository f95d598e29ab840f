# Part of tests/cluster/check: a volume's device is lost under its pods, and those that somebody makes anew begin anew; and pods
# of a node that is down are freed. Of the kubelet and of the controllers there is only what they would write.

kubectl create namespace apps >/dev/null
kubectl -n apps create serviceaccount default >/dev/null
p() { kubectl -n apps "$@"; }
persistent() { # VOLUME CLAIM: as the provisioner and the binder leave it
  kubectl apply -f - >/dev/null <<VOLUME
apiVersion: v1
kind: PersistentVolume
metadata: {name: pv-$1}
spec:
  capacity: {storage: 64Mi}
  accessModes: [ReadWriteOnce]
  csi: {driver: driver.longhorn.io, volumeHandle: $1}
  claimRef: {namespace: apps, name: $2}
VOLUME
}
pod() { # NAME NODE CLAIM OWNER-KIND: it runs since now
  local owner=
  [ -z "${4:-}" ] || owner="ownerReferences: [{apiVersion: apps/v1, kind: $4, name: o, uid: 11111111-2222-3333-4444-555555555555, controller: true}],"
  p apply -f - >/dev/null <<POD
apiVersion: v1
kind: Pod
metadata: {name: $1, $owner namespace: apps}
spec:
  nodeName: $2
  containers: [{name: c, image: none}]
  volumes: [{name: v, persistentVolumeClaim: {claimName: $3}}]
POD
  p patch pod "$1" --subresource=status -p "{\"status\":{\"phase\":\"Running\",\"startTime\":\"$(date -u +%Y-%m-%dT%H:%M:%SZ)\"}}" >/dev/null
}
# leaves SECONDS POD: it is asked to go
leaves() {
  for _ in $(seq $(($1 * 5))); do
    [ -z "$(p get pod "$2" -o 'jsonpath={.metadata.deletionTimestamp}' 2>/dev/null)" ] || return 0
    sleep 0.2
  done
  p get pods -o wide >&2; fail "the pod $2 stays"
}
stays() { [ -z "$(p get pod "$1" -o 'jsonpath={.metadata.deletionTimestamp}')" ] || fail "the pod $1 was deleted"; }

volume mounted 67108864 1 "frontend: fuse" | k apply -f - >/dev/null
becomes 30 volumes.longhorn.io mounted '{.status.state}' detached
ticket mounted node-1
persistent mounted data
pod set-0 node-1 data StatefulSet
pod spared-0 node-1 data DaemonSet
pod alone node-1 data
pod other-0 node-1 another StatefulSet
k patch settings.longhorn.io blacklist-for-auto-delete-pod-when-volume-detached-unexpectedly --type merge -p '{"value":"apps/DaemonSet;batch/Job"}' >/dev/null
device=$(k get engines.longhorn.io mounted-e-0 -o 'jsonpath={.status.device}')
[ -n "$device" ] || fail "the engine does not tell its device"
# An engine that dies alone leaves the device to the next one.
engine() { sed -n 's/.*"pid": *\([0-9]*\).*/\1/p' "$LONGHORN_CLUSTER/nodes/node-1/run/processes/mounted-e-0.json" | head -n 1; }
generation=$(k get engines.longhorn.io mounted-e-0 -o 'jsonpath={.status.generation}')
kill -9 "$(engine)"
for _ in $(seq 150); do [ "$(k get engines.longhorn.io mounted-e-0 -o 'jsonpath={.status.generation}')" != "$generation" ] && break; sleep 0.2; done
becomes 60 engines.longhorn.io mounted-e-0 '{.status.currentState} {.status.device} {.status.deviceLostAt}' "running $device "
# With the process that holds its connection to the kernel, the device is gone.
keepers() {
  for process in /proc/[0-9]*; do
    tr '\0' ' ' <"$process/cmdline" 2>/dev/null | grep -q "fuse-keeper --root $LONGHORN_CLUSTER.* mounted" && echo "${process#/proc/}" || true
  done
}
held=$(keepers)
[ -n "$held" ] || fail "no process keeps the connection of the volume's FUSE file"
sleep 1
# shellcheck disable=SC2046
kill -9 $held $(engine)
becomes 60 volumes.longhorn.io mounted '{.status.state}' attached
leaves 60 set-0
[ "$(k get engines.longhorn.io mounted-e-0 -o 'jsonpath={.status.device}')" != "$device" ] || fail "it is the same device"
[ -n "$(k get volumes.longhorn.io mounted -o 'jsonpath={.status.remountRequestedAt}')" ] || fail "nobody is asked to mount it anew"
p delete pod set-0 --force --grace-period=0 >/dev/null 2>&1
sleep 2
pod set-0 node-1 data StatefulSet
sleep 12
for name in set-0 spared-0 alone other-0; do stays $name; done

# A node is down: Kubernetes has given its pods up, and the policy frees those of StatefulSets.
k patch settings.longhorn.io node-down-pod-deletion-policy --type merge -p '{"value":"delete-statefulset-pod"}' >/dev/null
kubectl apply -f - >/dev/null <<ATTACHMENT
apiVersion: storage.k8s.io/v1
kind: VolumeAttachment
metadata: {name: csi-down}
spec: {attacher: driver.longhorn.io, nodeName: node-3, source: {persistentVolumeName: pv-down}}
ATTACHMENT
persistent down down
pod down-0 node-3 down StatefulSet
pod down-1 node-3 down ReplicaSet
scripts/cluster stop-node node-3
for name in down-0 down-1; do p delete pod $name --wait=false --grace-period=1 >/dev/null; done
for _ in $(seq 300); do p get pod down-0 >/dev/null 2>&1 || break; sleep 0.2; done
! p get pod down-0 >/dev/null 2>&1 || fail "the pod of a node that is down stays"
! kubectl get volumeattachments.storage.k8s.io csi-down >/dev/null 2>&1 || fail "the volume stays attached to a node that is down"
p get pod down-1 >/dev/null || fail "a pod that the policy does not name was freed"
scripts/cluster start-node node-3
p delete pod --all --force --grace-period=0 >/dev/null 2>&1
kubectl delete persistentvolumes pv-mounted pv-down --wait=false >/dev/null
ticket mounted ""
k delete volumes.longhorn.io mounted --timeout=60s >/dev/null
