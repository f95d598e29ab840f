# Part of tests/cluster/check: the programs of a volume's engine and replicas are exchanged under a register check; what does not
# serve is taken back; volumes follow by themselves where a setting says so. The further images are copies of the one program,
# which managers started under other names lay on their nodes, and scripts that end.

check_load=${program%/*}/register-load
[ -x "$check_load" ] || fail "no $check_load: cargo build --release -p tests"
progress() { sed -n 's/.*"event":"progress".*"reads":\([0-9]*\).*/\1/p' "$LONGHORN_CLUSTER/log/load" | tail -n 1; }
# The load ends at the first wrong byte, and nobody answers it while nothing runs.
served() {
  local before after
  kill -0 "$load" 2>/dev/null || fail "the load ended after $1: $(tail -n 5 "$LONGHORN_CLUSTER/log/load")"
  before=$(progress)
  for _ in $(seq 50); do
    sleep 0.2
    after=$(progress)
    [ "${after:-0}" -le "${before:-0}" ] || return 0
  done
  fail "nothing is served after $1"
}
wish() { k patch volumes.longhorn.io "$1" --type merge -p "{\"spec\":{\"image\":\"$2\"}}" >/dev/null; }
# lay NAME LINE: a script under the name of an image on every node.
lay() {
  local root
  for root in "$LONGHORN_CLUSTER"/nodes/*/; do
    mkdir -p "$root/engine-binaries/images/longhorn-$1"
    printf '#!/bin/sh\n%s\n' "$2" >"$root/engine-binaries/images/longhorn-$1/longhorn"
    chmod 755 "$root/engine-binaries/images/longhorn-$1/longhorn"
  done
  k apply -f - >/dev/null <<IMAGE
apiVersion: longhorn.io/v1beta2
kind: EngineImage
metadata: {name: ei-longhorn$1}
spec: {image: "longhorn:$1"}
IMAGE
  becomes 30 engineimages.longhorn.io "ei-longhorn$1" '{.status.state}' deployed
}
upgraded='{.status.conditions[?(@.type=="Upgraded")].reason}'

volume live 67108864 3 | k apply -f - >/dev/null
volume follower 67108864 1 | k apply -f - >/dev/null
for name in live follower; do
  becomes 30 volumes.longhorn.io $name '{.status.state}' detached
  ticket $name node-1
done
becomes 60 volumes.longhorn.io live '{.status.robustness}' healthy
first=$(k get volumes.longhorn.io live -o 'jsonpath={.status.currentImage}')
"$check_load" --socket /run/longhorn/live.nbd.sock --export live --blocks 256 --connections 4 --depth 4 --seconds 100000 \
  --progress 0.25 >"$LONGHORN_CLUSTER/log/load" 2>&1 &
load=$!
helpers+=($load)
served "its start"

export LONGHORN_MANAGER="$program manager --instance-manager pod --image longhorn:next"
for node in node-1 node-2 node-3; do scripts/cluster stop-node $node; scripts/cluster start-node $node; done
becomes 60 engineimages.longhorn.io ei-longhornnext '{.status.state}' deployed
becomes 60 engines.longhorn.io live-e-0 '{.status.currentState} {.status.currentImage}' "running $first"
served "a restart of all managers"
# With the settings' webhook, which may have been away.
for _ in $(seq 100); do wish live longhorn:next 2>/dev/null && break; sleep 0.2; done
becomes 150 volumes.longhorn.io live "{.status.currentImage} $upgraded" "longhorn:next "
for record in "$LONGHORN_CLUSTER"/nodes/*/run/processes/live-*.json; do
  pid=$(sed -n 's/.*"pid": *\([0-9]*\).*/\1/p' "$record" | head -n 1)
  [[ $(readlink "/proc/$pid/exe") = */engine-binaries/images/longhorn-next/longhorn ]] || fail "$record runs $(readlink "/proc/$pid/exe")"
done
served "the upgrade"

lay bad 'echo "this program serves nobody" >&2; exit 1'
wish live longhorn:bad
becomes 60 engines.longhorn.io live-e-0 '{.status.failedImage} {.status.currentImage}' "longhorn:bad longhorn:next"
becomes 30 volumes.longhorn.io live "{.status.currentImage} $upgraded" "longhorn:next Failed"
served "an engine that does not start"
lay half "[ \"\$1\" = controller ] || exit 1; exec $program \"\$@\""
wish live longhorn:half
becomes 90 volumes.longhorn.io live "{.status.currentImage} $upgraded" "longhorn:next Failed"
becomes 60 volumes.longhorn.io live '{.status.robustness}' healthy
served "a replica that does not start"
wish live longhorn:next
becomes 60 volumes.longhorn.io live "{.status.currentImage} $upgraded" "longhorn:next "
becomes 30 volumes.longhorn.io live '{.status.robustness}' healthy
served "the way back"

becomes 10 volumes.longhorn.io follower '{.status.currentImage} {.status.robustness}' "$first healthy"
limit() { k patch settings.longhorn.io concurrent-automatic-engine-upgrade-per-node-limit --type merge -p "{\"value\":\"$1\"}" >/dev/null; }
limit 1
becomes 90 volumes.longhorn.io follower '{.spec.image} {.status.currentImage}' "longhorn:next longhorn:next"
limit 0
served "another volume's upgrade"
kill $load
grep -v '"event":"\(progress\|recovered\)"' "$LONGHORN_CLUSTER/log/load" && fail "the load said something else"
echo "pauses of requests while programs were exchanged: $(sed -n 's/.*"event":"recovered".*"ms":\([0-9.]*\).*/\1/p' "$LONGHORN_CLUSTER/log/load" | sort -n | tail -n 4 | tr '\n' ' ')ms"
ticket live ""; ticket follower ""
k delete volumes.longhorn.io live follower --timeout=60s >/dev/null
