"""This project's volumes as contestants, and its frontends alone over a disk in memory."""
import os, subprocess, sys

from . import machine
from .client import BenchError, Target, file_job, nbd_job
from .contestants import Contestant, Missing, accepts, free_port, wait_for

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.append(os.path.join(TOP, "tests", "e2e"))
from by_hand import ByHand  # noqa: E402
from harness import BIN, Host  # noqa: E402  (the tests' way of leaving nothing behind)

# What `scripts/bench` builds before it starts anything: the programs, and frontends over a disk in memory.
BUILDS = [["-p", "longhorn", "-p", "tests", "-p", "benches", "--bins"],
          ["-p", "nbd-frontend", "-p", "fuse-frontend", "-p", "iscsi-frontend", "-p", "ublk-frontend", "--examples"]]


class Volume(Contestant):
    """A volume of three replicas in a root of its own."""
    key, name, frontend, replicas = "longhorn", "longhorn, 3 replicas, NBD", "nbd-server", 3

    def start(self):
        super().start()
        self.host = Host(self.folder)
        self.volume = self.host.name(self.key.replace("longhorn", "v"))
        done = self.host.ctl("up", self.volume, "--size", str(self.size), "--replicas", str(self.replicas),
                             "--frontend", self.frontend, check=False)
        if done.returncode != 0:
            raise Missing(f"longhornctl up: {done.stderr.strip()}")
        self.status = self.host.status(self.volume)

    def target(self):
        if self.frontend == "nbd-server":
            return Target([nbd_job(f"nbd+unix:///{self.volume}?socket={self.host.socket(self.volume)}")])
        return Target([file_job(self.status["device"])])

    def pids(self):
        return [self.status["engine_pid"], *[r["pid"] for r in self.status["replicas"]]]

    def pss(self):
        """Proportional set size of engine and replicas, in bytes."""
        return sum(map(machine.pss, self.pids()))

    def stop(self):
        if hasattr(self, "host"):
            self.host.clean()
        super().stop()


class VolumeDevice(Volume):
    key, name, frontend = "longhorn-device", "longhorn, 3 replicas, /dev/longhorn (FUSE + loop)", "fuse"


class VolumeTcp(Volume):
    """The same with replicas on TCP, as on three hosts."""
    key, name = "longhorn-tcp", "longhorn, 3 replicas over TCP, NBD"

    def start(self):
        Contestant.start(self)
        self.host = Host(self.folder)
        self.by_hand = ByHand(self.host, "t", self.size, [f"127.0.0.1:{port}" for port in (free_port(), free_port(), free_port())])
        self.by_hand.start()

    def target(self):
        return Target([nbd_job(self.by_hand.uri())])

    def pids(self):
        return [child.pid for child in self.by_hand.children]

    def stop(self):
        if hasattr(self, "by_hand"):
            self.by_hand.stop()
        super().stop()


class VolumeSingle(Volume):
    key, name, replicas = "longhorn-1", "longhorn, 1 replica, NBD", 1


def example(name):
    """The path of a program that `scripts/bench` has built."""
    path = os.path.join(BIN, "examples", name)
    if not os.path.exists(path):
        raise Missing(f"{path} is not built")
    return path


class MemoryNbd(Contestant):
    """The NBD frontend over a disk in memory: no replica, no order, no fan-out."""
    key, name = "longhorn-nbd", "longhorn's NBD frontend alone"

    def start(self):
        super().start()
        path = self.socket("nbd")
        self.spawn(example("nbd-memory"), path, self.size)
        wait_for("the memory disk's socket", lambda: accepts(path))

    def target(self):
        return Target([nbd_job(f"nbd+unix:///memory?socket={self.socket('nbd')}")])


class MemoryIscsi(Contestant):
    """The iSCSI frontend over a disk in memory."""
    key, name = "longhorn-iscsi", "longhorn's iSCSI frontend alone"

    def start(self):
        super().start()
        address = f"127.0.0.1:{free_port()}"
        self.spawn(example("iscsi-memory"), address, self.size)
        self.url = f"iscsi://{address}/iqn.2019-10.io.longhorn:memory/1"


class MemoryFuse(Contestant):
    """The FUSE frontend and its loop device over a disk in memory."""
    key, name = "longhorn-fuse", "longhorn's FUSE frontend alone, loop"

    def start(self):
        super().start()
        self.volume = f"bench-{os.getpid()}"
        child = subprocess.Popen(
            [example("fuse-memory"), "serve", self.volume, "--size", str(self.size),
             "--socket", self.socket("keeper"), "--node", self.socket("node")],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=open(self.socket("stderr"), "ab"))
        self.children.append(child)
        wait_for("the memory disk's device", lambda: self.is_up(child))

    def is_up(self, child):
        if child.poll() is not None:
            raise Missing("fuse-memory: " + open(self.socket("stderr")).read().strip()[-300:])
        return os.path.exists(self.socket("node"))

    def target(self):
        return Target([file_job(self.socket("node"))])

    def stop(self):
        for child in self.children:
            try:
                child.communicate(b"stop\n", timeout=20)
            except (subprocess.TimeoutExpired, BrokenPipeError):
                child.kill()
        super().stop()


def start(contestant):
    """Starts a contestant; what was started of it is stopped again if it cannot."""
    try:
        contestant.start()
    except (Missing, BenchError):
        contestant.stop()
        raise
    except SystemExit as e:
        contestant.stop()
        raise BenchError(f"{contestant.name} did not start") from e
