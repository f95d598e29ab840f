"""A volume whose processes are started by hand, as a control plane on several hosts does: replicas on TCP. Its record and
its directories are those of a root on this host."""
import os, subprocess
from harness import BIN, run, wait_for


class ByHand:
    """`addresses` are the replicas' data addresses, ADDRESS:PORT; `inside(n)` is put before the command of the n-th, from 1."""

    def __init__(self, host, name, size, addresses, inside=lambda n: []):
        self.host, self.size, self.inside, self.children = host, size, inside, []
        self.name = host.name(name)
        self.addresses = [f"tcp:{a}" for a in addresses]
        host.ctl("up", self.name, "--size", str(size), "--replicas", str(len(addresses)), "--frontend", "none")
        self.replicas = host.status(self.name)["replicas"]
        host.ctl("down", self.name)
        self.record = os.path.join(host.root, "volumes", self.name)
        self.engine_root = os.path.join(host.root, "engine")
        os.mkdir(self.engine_root)
        self.control = os.path.join(self.engine_root, "e.sock")

    def spawn(self, words):
        with open(os.path.join(self.host.root, "by-hand.log"), "ab") as log:
            self.children.append(subprocess.Popen(words, stdout=log, stderr=log))
        return self.children[-1]

    def replica(self, n, *more):
        """The command line of a replica, from 1."""
        replica = self.replicas[n - 1]
        return [*self.inside(n), os.path.join(BIN, "longhorn"), "replica", "--volume-name", self.name,
                "--replica-instance-name", replica["name"], "--listen", f"unix:{self.host.root}/r{n}.sock",
                "--data-listen", self.addresses[n - 1], "--key-file", f"{self.record}/key", *more, replica["path"]]

    def engine(self, *more):
        """The command line of the engine."""
        members = [f"--replica={r['name']}={a}" for r, a in zip(self.replicas, self.addresses)]
        return [os.path.join(BIN, "longhorn"), "controller", "--root", self.engine_root, "--authority", self.record,
                "--key-file", f"{self.record}/key", "--size", str(self.size), "--frontend", "nbd-server",
                "--listen", f"unix:{self.control}", *members, *more, self.name]

    def start(self):
        for n in range(1, len(self.replicas) + 1):
            self.spawn(self.replica(n, "--insecure"))
        self.spawn(self.engine("--insecure"))
        wait_for(f"{self.name} with all replicas", self.healthy, 60)

    def modes(self):
        done = run(os.path.join(BIN, "longhorn"), "--url", f"unix:{self.control}", "ls", check=False)
        return [line.split()[1] for line in done.stdout.splitlines() if line.startswith("tcp:")]

    def healthy(self):
        return self.modes() == ["RW"] * len(self.replicas)

    def uri(self):
        return f"nbd+unix:///{self.name}?socket={self.host.socket(self.name)}"

    def stop(self):
        for child in reversed(self.children):
            child.terminate()
        for child in reversed(self.children):
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
