"""A cluster of three hosts of its own (scripts/cluster up 3 --hosts) with one volume, for the tests that load and break it."""
import glob, json, os, shutil, subprocess, sys, tempfile, time

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(TOP, "tests", "e2e"))
from harness import BIN, contents, expect, say
from kube import CORE, Kube, Refused

NODES = ("node-1", "node-2", "node-3")
# A fault is healed within so many seconds.
HEALED = 60


class Cluster:
    def __init__(self, volume):
        self.volume = volume
        self.home = tempfile.mkdtemp(prefix=f"lh-{volume}-", dir="/var/tmp")
        self.environment = {"LONGHORN_CLUSTER_PORT": "27443", **os.environ, "LONGHORN_CLUSTER": self.home,
                            "LONGHORN_PROGRAM": os.path.join(BIN, "longhorn"), "LONGHORN_MANAGER": ""}
        self.script("up", "3", "--hosts")
        self.kube = Kube(self.home)

    def script(self, *words):
        # What it starts goes on, and must not keep a pipe of this program open.
        with open(self.home + ".said", "a+") as log:
            done = subprocess.run([os.path.join(TOP, "scripts/cluster"), *words], env=self.environment, stdout=log,
                                  stderr=log, stdin=subprocess.DEVNULL, timeout=300)
        said = open(log.name).read()
        os.remove(log.name)
        expect(done.returncode == 0, f"scripts/cluster {' '.join(words)}: {said[-2000:]}")

    def number(self, part):
        """The process of a part that scripts/cluster started."""
        return int(open(f"{self.home}/run/{part}.pid").read())

    def process(self, node, word):
        """The number of the volume's engine (e) or replica (r) on a node; None: there is none."""
        for path in glob.glob(f"{self.home}/nodes/{node}/run/processes/{self.volume}-{word}-*.json"):
            try:
                process = json.load(open(path)).get("process")
            except (OSError, ValueError):
                return None
            return process and process["pid"]
        return None

    def nodes_ready(self):
        def ready(node):
            return any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"].get("conditions", []))
        return sum(ready(n) for n in self.kube.list("nodes"))

    def status(self):
        return (self.kube.get("volumes", self.volume) or {}).get("status") or {}

    def place(self):
        status = self.status()
        return status.get("state"), status.get("robustness"), status.get("currentNodeID")

    def wait(self, what, condition, seconds=HEALED):
        """Waits for it, whatever the API server does meanwhile; gives back how long that took."""
        began = time.monotonic()
        while True:
            trouble = None
            try:
                if condition():
                    return time.monotonic() - began
            except (OSError, Refused) as error:
                trouble = error
            if time.monotonic() - began > seconds:
                expect(False, f"{what}: not within {seconds} s: {trouble or json.dumps(self.status(), indent=1)}")
            time.sleep(0.1)

    def replicas_are_equal(self):
        paths = glob.glob(f"{self.home}/nodes/*/replicas/*")
        expect(len(paths) == 3, f"directories: {paths}")
        expect(len({contents(path) for path in paths}) == 1, "replicas differ")

    def nothing_is_left(self):
        """Once the volume is being deleted."""
        self.wait("the volume is gone", lambda: self.kube.get("volumes", self.volume) is None)
        for kind in ("engines", "replicas", "volumeattachments", "snapshots", "orphans"):
            left = [o["metadata"]["name"] for o in self.kube.list(kind)]
            expect(not left, f"{kind} are left: {left}")
        keys = self.kube.list("namespaces/longhorn-system/secrets", CORE)
        expect(not keys, f"secrets are left: {[k['metadata']['name'] for k in keys]}")
        # A node that was cut off hears late of what went meanwhile.
        for pattern in ("nodes/*/replicas/*", "nodes/*/run/processes/*.json"):
            self.wait(f"{pattern} is empty", lambda pattern=pattern: not glob.glob(f"{self.home}/{pattern}"), 30)

    def down(self, good):
        """Ends all of it; keeps the logs unless all was good."""
        if not good:
            kept = self.home + ".log"
            shutil.copytree(f"{self.home}/log", kept, dirs_exist_ok=True)
            for node in NODES:
                shutil.copytree(f"{self.home}/nodes/{node}/log", f"{kept}/{node}", dirs_exist_ok=True)
            say(f"logs: {kept}")
        self.script("down")
        shutil.rmtree(self.home, ignore_errors=True)
