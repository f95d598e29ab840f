"""Three hosts on this one: network namespaces behind one bridge, and mount namespaces where devices and sockets are a host's own."""
import os, subprocess
from harness import run, wait_for


class Hosts:
    """Three network namespaces behind one bridge of this host."""

    def __init__(self, prefix):
        # Names of network devices have at most 15 characters.
        self.tag = prefix[-5:]
        self.bridge = f"lhb{self.tag}"
        self.holders = {}
        self.net = 100 + os.getpid() % 100
        run("ip", "link", "add", self.bridge, "type", "bridge")
        run("ip", "addr", "add", f"10.{self.net}.0.254/24", "dev", self.bridge)
        run("ip", "link", "set", self.bridge, "up")
        for n in (1, 2, 3):
            name, outer, inner = self.name(n), f"lho{self.tag}{n}", f"lhi{self.tag}{n}"
            run("ip", "netns", "add", name)
            run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name)
            run("ip", "link", "set", outer, "master", self.bridge, "up")
            run("ip", "-n", name, "addr", "add", f"{self.address(n)}/24", "dev", inner)
            run("ip", "-n", name, "link", "set", inner, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")

    def name(self, n):
        return f"lh{self.tag}{n}"

    def address(self, n):
        return f"10.{self.net}.0.{n}"

    def cut(self, n, away):
        run("ip", "link", "set", f"lho{self.tag}{n}", "down" if away else "up")

    def apart(self, n):
        """What to put before a command that runs on host n, whose /dev/longhorn and /run/longhorn are its own."""
        if n not in self.holders:
            tmpfs = [f"mkdir -p {d} && mount -t tmpfs -o mode=755 none {d}" for d in ("/dev/longhorn", "/run/longhorn")]
            self.holders[n] = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{self.name(n)}", "unshare", "--mount", "--propagation", "private", "sh", "-c",
                 " && ".join(tmpfs) + " && echo apart && exec sleep 100000"], stdout=subprocess.PIPE, text=True)
            wait_for(f"host {n}", lambda: self.holders[n].stdout.readline() == "apart\n", 10)
        return ["nsenter", "--target", str(self.holders[n].pid), "--mount", "--net"]

    def path(self, n, path):
        """A path of host n, as this process finds it."""
        return f"/proc/{self.holders[n].pid}/root{path}"

    def remove(self):
        for holder in self.holders.values():
            holder.kill()
            holder.wait()
        for n in (1, 2, 3):
            subprocess.run(["ip", "netns", "del", self.name(n)], capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)
