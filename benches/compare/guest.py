"""Devices of the ublk driver, measured where the kernel has it: on this machine, or in a guest (`scripts/guest`), where all
contestants and their client run on the same two processors.

The peer is rublk, the targets of the libublk crate's authors: `null` keeps nothing, `loop` is a file. Ours serve the same
without an engine (`ublk-memory`); the last one is a volume with one replica on this host, beside a file of its own size.
"""
import dataclasses, glob, json, os, subprocess, sys

from . import client
from .client import BenchError, Target, file_job
from .contestants import Contestant, Missing, Raw, wait_for
from .ours import Volume, example
from .rounds import Cell, Group

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CACHE = os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "longhorn-tests")
RUBLK = os.path.join(CACHE, "rublk", "bin", "rublk")

KEY = "ublk"

# Between the guest's other words and the group that it has measured.
MARK = "measured: "

QUEUES, DEPTH = 2, 128

# MiB of the guest: half of it is its /dev/shm, in which four contestants have a disk of 1 GiB each.
MEMORY = 9216

# What `scripts/guest run` ends with where no guest can be had.
NO_GUEST = 77


def nodes():
    return set(glob.glob("/dev/ublkb*"))


class Rublk(Contestant):
    """A target of rublk's, which says nothing when it is ready: its node appears."""
    words = ()

    def start(self):
        if not os.path.exists(RUBLK):
            raise Missing("no rublk: scripts/prepare bench builds it")
        super().start()
        before = nodes()
        child = self.spawn(RUBLK, "add", *self.words_for(), "--foreground", "-q", str(QUEUES), "-d", str(DEPTH))
        found = lambda: self.device_since(before, child)
        wait_for("rublk's device", found)
        self.node = found()

    def words_for(self):
        return self.words

    def device_since(self, before, child):
        if child.poll() is not None:
            raise Missing("rublk: " + open(os.path.join(self.folder, "stderr")).read().strip()[-300:])
        return next(iter(nodes() - before), None)

    def target(self):
        return Target([file_job(self.node)])

    def stop(self):
        if hasattr(self, "node"):
            number = self.node.removeprefix("/dev/ublkb")
            subprocess.run([RUBLK, "del", "-n", number], capture_output=True, timeout=30)
        super().stop()


class RublkNull(Rublk):
    key, name, words = "rublk-null", "rublk null", ("null",)


class RublkLoop(Rublk):
    key, name = "rublk-loop", "rublk loop, a file in memory"

    def words_for(self):
        return ("loop", "-f", self.raw_file("disk"))


class Ours(Contestant):
    """`ublk-memory`: the ublk frontend over a disk that is no volume."""

    def start(self):
        super().start()
        words = [example("ublk-memory"), "serve", f"bench-{self.key}", "--size", str(self.size), "--queues", str(QUEUES),
                 "--depth", str(DEPTH), *self.store()]
        child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                 stderr=open(os.path.join(self.folder, "stderr"), "a"))
        self.children.append(child)
        said = child.stdout.readline().split()
        if said[:1] != ["ready"]:
            raise Missing("ublk-memory: " + open(os.path.join(self.folder, "stderr")).read().strip()[-300:])
        self.node = said[1]

    def store(self):
        raise NotImplementedError

    def target(self):
        return Target([file_job(self.node)])

    def stop(self):
        for child in self.children:
            try:
                child.communicate("stop\n", timeout=20)
            except (subprocess.TimeoutExpired, BrokenPipeError):
                child.kill()
        super().stop()


class OursNull(Ours):
    key, name = "longhorn-null", "longhorn's ublk frontend, null"

    def store(self):
        return ["--null", "yes"]


class OursLoop(Ours):
    key, name = "longhorn-loop", "longhorn's ublk frontend, a file in memory"

    def store(self):
        return ["--file", self.raw_file("disk")]


class VolumeUblk(Volume):
    key, name, frontend, replicas = "longhorn-ublk", "longhorn, 1 replica, ublk", "ublk", 1


def group():
    small = [client.WRITE_1, client.WRITE_32, client.READ_1, client.READ_32]
    return Group(KEY, "Devices of the ublk driver, in RAM", "/dev/shm",
                 [RublkNull, OursNull, RublkLoop, OursLoop, Raw, VolumeUblk], small)


def measure(the_plan, here):
    """Measures the group with `here`, on this machine or in a guest; `None` where none can be had, and the guest has said
    why."""
    if here_has_ublk():
        found = group()
        here(found, the_plan)
        return found
    words = [os.path.join(TOP, "scripts", "guest"), "run", "--mem", str(MEMORY), "--timeout", "3000", "--",
             sys.executable, os.path.join(TOP, "scripts", "bench"), "--inside", "--force", "--no-build",
             "--rounds", str(the_plan.rounds), "--seconds", str(the_plan.seconds), *(["--quick"] if the_plan.quick else [])]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
    for line in done.stdout.splitlines():
        if line.startswith(MARK):
            return from_json(json.loads(line.removeprefix(MARK)))
    if done.returncode != NO_GUEST:
        raise BenchError(f"the guest ended with status {done.returncode}: {done.stdout.strip()[-300:]}")
    return None


def here_has_ublk():
    return os.path.exists("/dev/ublk-control")


def inside(the_plan, here):
    """What the guest runs: measures, and says the result on a line of its own."""
    found = group()
    here(found, the_plan)
    print(MARK + json.dumps(as_json(found)), flush=True)


def as_json(found):
    cells = [[contestant, work, cell.failed, [dataclasses.asdict(s) for s in cell.samples]]
             for (contestant, work), cell in found.results.items()]
    commands = [[*key, text] for key, text in found.commands.items()]
    return {"cells": cells, "absent": found.absent, "commands": commands, "kernel": os.uname().release}


def from_json(told):
    found = group()
    found.title += f" (Linux {told['kernel']}, in a guest)"
    found.absent = told["absent"]
    for contestant, work, failed, samples in told["cells"]:
        found.results[contestant, work] = Cell([client.Sample(**s) for s in samples], failed)
    found.commands = {(contestant, work): text for contestant, work, text in told["commands"]}
    return found
