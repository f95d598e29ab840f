# Part of tests/cluster/check: pods of instance managers are made from the shipped template, and `kubectl drain` evicts them when
# nothing is lost with the node, and not before. Kubernetes' own disruption controller says so; of the kubelet there is only
# that a pod runs and, once it is to go, is gone.

kubelet() {
  local names
  while sleep 0.5; do
    names=$(k get pods -o go-template='{{range .items}}{{if .metadata.deletionTimestamp}}{{.metadata.name}} {{end}}{{end}}' 2>/dev/null || true)
    # shellcheck disable=SC2086
    [ -z "$names" ] || k delete pod --force --grace-period=0 $names >/dev/null 2>&1 || true
    names=$(k get pods --field-selector status.phase=Pending -o name 2>/dev/null || true)
    for name in $names; do
      k patch "$name" --subresource=status -p '{"status":{"phase":"Running","conditions":[{"type":"Ready","status":"True"}]}}' >/dev/null 2>&1 || true
    done
  done
}
# drain NODE SECONDS
drain() { kubectl drain "$1" --ignore-daemonsets --timeout="$2s" 2>&1; }
kept() { denied "violate the pod's disruption budget" drain "$1" 8; }
undrained() { # NODE: it is used again
  kubectl uncordon "$1" >/dev/null
  becomes 30 poddisruptionbudgets "instance-manager-$1" '{.status.currentHealthy} {.status.disruptionsAllowed}' "1 0"
}
policy() { k patch settings.longhorn.io node-drain-policy --type merge -p "{\"value\":\"$1\"}" >/dev/null; }
where() { k get replicas.longhorn.io -l "longhornvolume=$1" -o 'jsonpath={.items[*].spec.nodeID}'; }

# Built before it is begun: behind `&` the time of the build would be that of the checks.
tools=$(tests/cluster/tools/build kube-controller-manager)
"$tools/kube-controller-manager" --kubeconfig "$KUBECONFIG" --controllers=disruption \
  --leader-elect=false --secure-port=0 >"$LONGHORN_CLUSTER/log/kube-controller-manager.log" 2>&1 &
helpers+=($!)
kubelet &
helpers+=($!)
k create serviceaccount default >/dev/null
kubectl apply -l app.kubernetes.io/component=instance-manager -f deploy/manager.yaml >/dev/null
for node in node-1 node-2 node-3; do
  becomes 30 pods "instance-manager-$node" '{.spec.nodeName} {.status.phase}' "$node Running"
  undrained $node
done
becomes 30 settings.longhorn.io node-drain-policy '{.value} {.status.applied}' "block-if-contains-last-replica true"

volume last 67108864 1 "frontend: blockdev" | k apply -f - >/dev/null
becomes 30 volumes.longhorn.io last '{.status.state}' detached
home=$(where last)
away=node-$((${home#node-} % 3 + 1))
ticket last "$away"
dd if=/dev/urandom of=/dev/longhorn/last bs=1M count=64 oflag=direct conv=fsync status=none
written=$(sum last)
# The volume is attached there; then it is not, and the node of its only replica is kept.
kept "$away"
undrained "$away"
# Nobody will let go of it any more: Kubernetes has the volume, and no attachment of it. While it has one, the node is kept.
kubectl apply -f - >/dev/null <<ATTACHED
apiVersion: v1
kind: PersistentVolume
metadata: {name: of-last}
spec:
  capacity: {storage: 64Mi}
  accessModes: [ReadWriteOnce]
  persistentVolumeReclaimPolicy: Retain
  csi: {driver: driver.longhorn.io, volumeHandle: last}
---
apiVersion: storage.k8s.io/v1
kind: VolumeAttachment
metadata: {name: of-last}
spec: {attacher: driver.longhorn.io, nodeName: $away, source: {persistentVolumeName: of-last}}
ATTACHED
denied "violate the pod's disruption budget" drain "$away" 95
kubectl delete volumeattachments.storage.k8s.io of-last >/dev/null
drain "$away" 150 >/dev/null || fail "a ticket whose attachment is gone keeps $away from being drained"
[ -z "$(k get volumeattachments.longhorn.io last -o 'jsonpath={.spec.attachmentTickets.t}')" ] || fail "the ticket is left"
becomes 60 volumes.longhorn.io last '{.status.state}' detached
kubectl delete pv of-last --wait=false >/dev/null
kubectl patch pv of-last --type merge -p '{"metadata":{"finalizers":null}}' >/dev/null
undrained "$away"
ticket last ""
drain "$away" 30 >/dev/null || fail "nothing of a volume is on $away, and it is not drained"
sleep 2
! k get pod "instance-manager-$away" >/dev/null 2>&1 || fail "a pod was made on a cordoned node"
undrained "$away"
becomes 30 pods "instance-manager-$away" '{.status.phase}' Running
kept "$home"
policy always-allow
drain "$home" 30 >/dev/null || fail "not drained, with always-allow"
undrained "$home"
# The last replica is moved away, and the node goes.
policy block-for-eviction-if-contains-last-replica
drain "$home" 120 >/dev/null || { k get volumes.longhorn.io,replicas.longhorn.io >&2; fail "the last replica did not leave $home"; }
now=$(where last)
[ -n "$now" ] && [[ " $now " != *" $home "* ]] || fail "replicas of the last volume are on: $now"
undrained "$home"
policy block-if-contains-last-replica
becomes 60 volumes.longhorn.io last '{.status.state}' detached
ticket last "$home"
[ "$(sum last)" = "$written" ] || fail "the replica that moved has other bytes"
ticket last ""
k delete volumes.longhorn.io last --timeout=60s >/dev/null
k delete podtemplates longhorn-instance-manager >/dev/null
