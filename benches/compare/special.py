"""Figures that are no rate of a client: first writes into holes, memory, the pause of a snapshot, a rebuild, a round
trip. Each returns a dictionary; what could not be measured says so under `failed`."""
import contextlib, mmap, os, re, shutil, signal, statistics, subprocess, tempfile, threading, time

from . import client, ours
from .client import BenchError, FILL
from .contestants import Missing, Raw, Tgtd


class NotMeasured(Exception):
    """Why there is no figure."""


@contextlib.contextmanager
def started(kind, place, size):
    folder = tempfile.mkdtemp(prefix="lh-bench-", dir=place)
    contestant = kind(folder, size)
    try:
        try:
            ours.start(contestant)
        except (Missing, BenchError) as e:
            raise NotMeasured(str(e)) from e
        yield contestant
    finally:
        contestant.stop()
        shutil.rmtree(folder, ignore_errors=True)


def holes(plan, place):
    """Every block of a new volume with one replica is written once, at random, beside a new sparse file."""
    work = client.workload("holes", "first write into a hole, depth 32", "randwrite", "4k", 32)
    work = client.Workload(work.key, work.name, (*work.args, "--norandommap=0"), True)
    size = min(plan.size, 256 << 20)
    found = {"raw": [], "longhorn-1": []}
    for _ in range(plan.rounds):
        for kind in (Raw, ours.VolumeSingle):
            with started(kind, place, size) as contestant:
                found[kind.key].append(client.run(contestant.target(), work, size, contestant.pids()).iops)
    pairs = [b / a for a, b in zip(found["raw"], found["longhorn-1"])]
    return {"raw": statistics.median(found["raw"]), "longhorn": statistics.median(found["longhorn-1"]),
            "ratio": statistics.median(pairs), "spread": [min(pairs), max(pairs)]}


def memory(plan, place):
    """PSS of engine and three replicas of a volume of 1 GiB while 4 KiB writes are running, and after."""
    with started(ours.Volume, place, 1 << 30) as volume:
        worst = 0
        load = threading.Thread(target=lambda: client.run(volume.target(), client.WRITE_32, 1 << 30,
                                                          runtime=max(plan.seconds, 1)))
        load.start()
        while load.is_alive():
            worst = max(worst, volume.pss())
            time.sleep(0.2)
        load.join()
        return {"bytes": max(worst, volume.pss())}


class Probe(threading.Thread):
    """Writes a block of a device again and again, one at a time, and keeps when each began and how long it took."""

    def __init__(self, path, offset):
        super().__init__(daemon=True)
        self.fd, self.offset, self.stopped, self.took = os.open(path, os.O_RDWR | os.O_DIRECT), offset, False, []
        self.start()

    def run(self):
        page = mmap.mmap(-1, 4096)
        while not self.stopped:
            began = time.monotonic()
            os.pwritev(self.fd, [page], self.offset)
            self.took.append((began, time.monotonic() - began))
            time.sleep(0.0005)

    def longest(self, since, until):
        return max((took for began, took in self.took if began + took >= since and began <= until), default=0)

    def percentile(self, since, until, part):
        times = sorted(took for began, took in self.took if since <= began <= until)
        return times[min(int(len(times) * part), len(times) - 1)] if times else 0

    def stop(self):
        self.stopped = True
        self.join(60)
        os.close(self.fd)


@contextlib.contextmanager
def probed(volume, size, depth):
    """A steady client on the device, and a probe beside it."""
    device = volume.status["device"]
    words = ["fio", "--name=load", "--ioengine=io_uring", "--direct=1", f"--filename={device}", "--rw=randwrite",
             "--bs=4k", f"--iodepth={depth}", f"--size={size - (1 << 20)}", "--time_based", "--runtime=600"]
    load = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/tmp")
    probe = Probe(device, size - (1 << 20))
    try:
        yield probe
    finally:
        load.send_signal(signal.SIGINT)
        load.wait()
        probe.stop()


def snapshot_pause(plan, place):
    """The longest write beside each of some snapshots, under 4 KiB writes at depth 8."""
    size = min(plan.size, 256 << 20)
    with started(ours.VolumeDevice, place, size) as volume, probed(volume, size, 8) as probe:
        time.sleep(0.5)
        pauses, began = [], time.monotonic()
        for number in range(5 if plan.quick else 100):
            since = time.monotonic()
            volume.host.ctl("snapshot", "create", volume.volume, f"s{number}")
            time.sleep(0.02)
            pauses.append(probe.longest(since, time.monotonic()))
        pauses.sort()
        return {"snapshots": len(pauses), "p50": statistics.median(pauses),
                "p99": pauses[min(int(len(pauses) * 0.99), len(pauses) - 1)],
                "probe_p99": probe.percentile(began, time.monotonic(), 0.99)}


def rebuild(plan, place):
    """A replica is added to a full volume: how fast everything is copied to it while there is no client, beside `dd` with
    O_DIRECT of as much on the same disk; and, with another one, what writes at depth 1 see of it."""
    size = min(plan.size, 4 << 30)
    with started(ours.VolumeDevice, place, size) as volume:
        client.run(volume.target(), FILL, size)
        copy = copy_rate(place, size)
        # Clients count as active for a moment after their last request.
        time.sleep(1)
        name, begin, end = add_replica(volume)
        took = end - begin
        volume.host.ctl("replica", "rm", volume.volume, name)
        probe = Probe(volume.status["device"], size - (1 << 20))
        try:
            calm = time.monotonic()
            time.sleep(1 if plan.quick else 5)
            asked = time.monotonic()
            _, copying, done = add_replica(volume)
            before, during = probe.percentile(calm, asked, 0.99), probe.percentile(copying, done, 0.99)
        finally:
            probe.stop()
    return {"bytes": size, "seconds": took, "rate": size / took, "copy_rate": copy, "ratio": size / took / copy,
            "p99_before": before, "p99_during": during, "rate_beside_clients": size / (done - copying)}


def add_replica(volume):
    """Adds a replica and waits until it is in sync: its name, when it was first seen, and when it was RW."""
    known = {r["name"] for r in volume.status["replicas"]}
    words = [os.path.join(ours.BIN, "longhornctl"), "--root", volume.host.root, "replica", "add", volume.volume]
    adding = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    seen, until = None, time.monotonic() + 900
    try:
        while time.monotonic() < until:
            new = [r for r in volume.host.status(volume.volume)["replicas"] if r["name"] not in known]
            if new and new[0]["mode"] in ("WO", "RW"):
                seen = seen or time.monotonic()
                if new[0]["mode"] == "RW":
                    return new[0]["name"], seen, time.monotonic()
            if adding.poll() not in (None, 0):
                raise NotMeasured("longhornctl replica add: " + adding.stderr.read().strip()[-300:])
            time.sleep(0.02)
    finally:
        adding.kill()
        adding.wait()
    raise NotMeasured("the added replica is not in sync after 900 s")


def copy_rate(place, size):
    """Bytes per second of a copy with O_DIRECT of a file that was written, on the same file system."""
    with tempfile.TemporaryDirectory(prefix="lh-bench-", dir=place) as folder:
        raw = Raw(folder, size)
        raw.start()
        target = raw.target()
        client.run(target, FILL, size)
        source = os.path.join(raw.folder, "raw")
        began = time.monotonic()
        done = subprocess.run(["dd", f"if={source}", f"of={source}.copy", "bs=1M", "iflag=direct", "oflag=direct"],
                              capture_output=True, text=True)
        if done.returncode != 0:
            raise NotMeasured(f"dd: {done.stderr.strip()}")
        return size / (time.monotonic() - began)


def round_trip(_plan, _place):
    """A message of 64 bytes and its answer over TCP on the loopback interface, in seconds."""
    done = subprocess.run([os.path.join(ours.BIN, "round-trip")], capture_output=True, text=True)
    if done.returncode != 0:
        raise NotMeasured(done.stderr.strip())
    return {"seconds": float(done.stdout)}


def bare_fan_out(plan, place):
    """A blocking fan-out without any protocol worth the name: 32 writes of 4 KiB at a time over TCP to three processes
    that write them to files."""
    seconds = max(plan.seconds, 0.3)
    rates = []
    for _ in range(plan.rounds):
        done = subprocess.run([os.path.join(ours.BIN, "bare-fan-out"), place, str(seconds)], capture_output=True,
                              text=True)
        if done.returncode != 0:
            raise NotMeasured(done.stderr.strip())
        rates.append(float(done.stdout))
    return {"iops": statistics.median(rates), "spread": [min(rates), max(rates)]}


def iscsi(plan, place):
    """4 KiB requests at depth 32 by QEMU's initiator, on tgtd over a file in RAM and on the iSCSI frontend over a disk in
    memory: it is the frontend that is measured."""
    count = 2000 if plan.quick else 60000
    found = {(work, kind.key): [] for work in ("write", "read") for kind in (Tgtd, ours.MemoryIscsi)}
    for _ in range(plan.rounds):
        for kind in (Tgtd, ours.MemoryIscsi):
            with started(kind, place, 256 << 20) as contestant:
                for work in ("write", "read"):
                    found[work, kind.key].append(count / initiated(contestant.url, work, count))
    rates = {work: [b / a for a, b in zip(found[work, "tgtd"], found[work, "longhorn-iscsi"])] for work in ("write", "read")}
    return {work: {"ratio": statistics.median(pairs), "spread": [min(pairs), max(pairs)],
                   "tgtd": statistics.median(found[work, "tgtd"]),
                   "longhorn": statistics.median(found[work, "longhorn-iscsi"])} for work, pairs in rates.items()}


def initiated(url, work, count):
    """Seconds that QEMU's initiator takes for so many requests."""
    words = ["qemu-img", "bench", "-f", "raw", "-t", "none", "-c", str(count), "-d", "32", "-s", "4096", url]
    for _ in range(20):
        done = subprocess.run(words[:2] + (["-w"] if work == "write" else []) + words[2:], capture_output=True, text=True)
        if done.returncode == 0:
            return float(re.search(r"Run completed in ([\d.]+) seconds", done.stdout).group(1))
        # The target may not listen yet.
        time.sleep(0.2)
    raise NotMeasured(f"qemu-img bench: {done.stderr.strip()}")


def measure(what, plan, place):
    try:
        return what(plan, place)
    except (NotMeasured, BenchError, OSError) as e:
        return {"failed": str(e)}
    except SystemExit as e:
        return {"failed": f"a command of the volume failed: {e}"}
