"""Figures that are no rate of a client: first writes into holes, memory, the pause of a snapshot, a rebuild, a round
trip. Each returns a dictionary; what could not be measured says so under `failed`."""
import contextlib, os, re, shutil, statistics, subprocess, tempfile, threading, time

from . import client, ours
from .client import BenchError, FILL
from .contestants import Missing, Raw, Tgtd

# The scenarios' own way of measuring, so that a goal has one verdict; `ours` has made them known.
from harness import percentile
from held import under_load
from in_sync import ONE_BY_ONE, VERIFYING, beside_clients, beside_dd


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


def snapshot_pause(plan, place):
    """How long requests are held for each of some snapshots, in seconds: what `tests/e2e/pause.py` judges, in figures."""
    size = min(plan.size, 256 << 20)
    with started(ours.Volume, place, size) as volume:
        held = under_load(volume.host, volume.volume, size, 10 if plan.quick else 1000, 1 if plan.quick else 20)
    return {"snapshots": len(held.pauses), "folded": held.folded, "held_p50": statistics.median(held.pauses) / 1e3,
            "held_p99": percentile(held.pauses, 0.99) / 1e3, "held_longest": max(held.pauses) / 1e3, "felt_p999": held.felt / 1e3}


def rebuild(plan, place):
    """A replica is added to a full volume: how fast it is filled while there is no client, beside `dd`, and what clients see
    of it: what `tests/e2e/rebuild.py` judges, in figures."""
    size, seconds = (plan.size, 1) if plan.quick else (4 << 30, 20)
    with started(ours.VolumeSingle, place, size) as volume:
        client.run(volume.target(), FILL, size)
        # Clients count as active for a moment after their last request.
        time.sleep(1)
        pairs = beside_dd(volume.host, volume.volume, size, plan.rounds)
        volume.host.ctl("replica", "add", volume.volume)
        volume.host.healthy(volume.volume, 2, 1800)
        clients = {key: beside_clients(volume.host, volume.volume, size, seconds, plan.rounds, words)
                   for key, words in (("verifying", VERIFYING), ("one_by_one", ONE_BY_ONE))}
    ratios = [plain / took for plain, took in pairs]
    return {"bytes": size, "ratio": statistics.median(ratios), "spread": [min(ratios), max(ratios)],
            "rate": statistics.median(size / took for _, took in pairs),
            "copy_rate": statistics.median(size / plain for plain, _ in pairs),
            **{key: slower(rounds) for key, rounds in clients.items()}}


def slower(rounds):
    """How much longer p99 is during a rebuild; times in seconds."""
    ratios = [during / calm for calm, during, _ in rounds]
    calm, during, rate = map(statistics.median, zip(*rounds))
    return {"ratio": statistics.median(ratios), "spread": [min(ratios), max(ratios)], "p99_before": calm / 1e3,
            "p99_during": during / 1e3, "rate": rate}


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
