# Part of tests/cluster/sidecars: csi-provisioner publishes what room each node has, as the driver tells it, and the scheduler heeds
# it where the setting says so.

# published CLASS: of each node the room, in bytes and sorted by node, as the objects have it.
published() {
  l get csistoragecapacities -o json | python3 -c '
import json, sys
units = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
def size(text):
    digits = text.rstrip("KMGTi")
    return int(digits) * units[text[len(digits):]]
for each in sorted(json.load(sys.stdin)["items"], key=lambda o: o["nodeTopology"]["matchLabels"]["kubernetes.io/hostname"]):
    if each["storageClassName"] == sys.argv[1]:
        print(each["nodeTopology"]["matchLabels"]["kubernetes.io/hostname"], size(each["maximumVolumeSize"]))' "$1"
}
# reserve NODE BYTES
reserve() {
  local disk; disk=$(l get nodes.longhorn.io "$1" -o 'go-template={{range $name, $_ := .spec.disks}}{{$name}}{{end}}')
  l patch nodes.longhorn.io "$1" --type merge -p "{\"spec\":{\"disks\":{\"$disk\":{\"storageReserved\":$2}}}}" >/dev/null
}
# offers NODE GIGABYTES: so much of its disk is not reserved, which is all that it can promise.
offers() {
  local maximum
  maximum=$(l get nodes.longhorn.io "$1" -o 'go-template={{range .status.diskStatus}}{{.storageMaximum}}{{end}}')
  reserve "$1" $((maximum - ($2 << 30)))
}

class local WaitForFirstConsumer 'numberOfReplicas: "1", dataLocality: strict-local'
class anywhere WaitForFirstConsumer 'numberOfReplicas: "1", dataLocality: disabled'
l patch settings.longhorn.io storage-over-provisioning-percentage --type merge -p '{"value":"100"}' >/dev/null
offers node-1 1; offers node-2 2; offers node-3 3
gib() { echo $(($1 << 30)); }
expected="node-1 $(gib 1)
node-2 $(gib 2)
node-3 $(gib 3)"
anywhere() { published anywhere | cut -d' ' -f2 | sort -u; }
# The provisioner looks once a minute, at one class after the other.
for _ in $(seq 180); do [ "$(published local):$(anywhere)" != "$expected:$(gib 3)" ] || break; sleep 1; done
[ "$(published local)" = "$expected" ] || fail "published is $(published local)"
[ "$(anywhere)" = "$(gib 3)" ] || fail "of volumes that lie anywhere $(published anywhere)"

# Whether that counts the setting says. Without it the pod goes where there is no room, and its claim waits for ever.
becomes 10 '{.spec.storageCapacity}' false csidriver driver.longhorn.io
l patch settings.longhorn.io csi-storage-capacity-tracking --type merge -p '{"value":"true"}' >/dev/null
becomes 30 '{.spec.storageCapacity}' true csidriver driver.longhorn.io
pod_for() { # NAME CLAIM NODE...
  local name=$1 claim=$2; shift 2
  kubectl apply -f - >/dev/null <<POD
apiVersion: v1
kind: Pod
metadata: {name: $name}
spec:
  affinity:
    nodeAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        nodeSelectorTerms: [{matchExpressions: [{key: kubernetes.io/hostname, operator: In, values: [$(IFS=,; echo "$*")]}]}]
  containers: [{name: main, image: none, volumeMounts: [{name: data, mountPath: /data}]}]
  volumes: [{name: data, persistentVolumeClaim: {claimName: $claim}}]
POD
}
class=local size=2500Mi claim large
pod_for large large node-1 node-2
said=
for _ in $(seq 60); do
  said=$(kubectl get pod large -o 'jsonpath={.status.conditions[?(@.type=="PodScheduled")].message}')
  grep -q 'did not have enough free storage' <<<"$said" && break
  sleep 1
done
grep -q 'did not have enough free storage' <<<"$said" || fail "a pod for a volume that no node takes: $said"
kubectl delete pod large --force --grace-period=0 >/dev/null 2>&1
pod_for large large node-1 node-2 node-3
becomes 120 '{.spec.nodeName}' node-3 pod large
becomes 120 '{.status.phase}' Bound pvc large
kubectl delete pod large --force --grace-period=0 >/dev/null 2>&1
kubectl delete pvc large --timeout=120s >/dev/null || fail "the claim stays"
l patch settings.longhorn.io csi-storage-capacity-tracking --type merge -p '{"value":"false"}' >/dev/null
becomes 30 '{.spec.storageCapacity}' false csidriver driver.longhorn.io
l patch settings.longhorn.io storage-over-provisioning-percentage --type merge -p '{"value":"1000"}' >/dev/null
kubectl delete storageclass local anywhere >/dev/null
for node in node-1 node-2 node-3; do reserve $node 0; done
