"""What bringing a replica in sync takes, by the engine's log: beside `dd` on the same disk, and beside clients. `rebuild.py`
judges it, and `scripts/bench` shows it beside the other goals."""
import os, re, threading, time

from harness import expect, fio, run, say, wait_for

MIB = 1 << 20

# Clients beside a rebuild: what the goal means by them, and the hardest to be kept waiting, one write after the other.
VERIFYING = ("--rw=randrw", "--bs=4k", "--iodepth=32", "--verify=crc32c")
ONE_BY_ONE = ("--rw=randwrite", "--bs=4k", "--iodepth=1")


def uri(host, volume):
    return f"--uri=nbd+unix:///{volume}?socket={host.socket(volume)}"


def rebuilt(host, volume, name):
    """Seconds, bytes looked at and bytes copied of the replica's last rebuild, by the engine's log."""
    began = ended = looked = copied = None
    for when, text in host.log(volume + "-e"):
        if f"replica {name} is brought in sync from" in text:
            began, ended = when, None
        if found := re.search(rf"replica {name}: of (\d+) bytes looked at, (\d+) differed", text):
            looked, copied = map(int, found.groups())
        if f"replica {name} is in sync" in text:
            ended = when
    expect(began and ended and looked is not None, f"the engine's log tells of no rebuild of {name}")
    return ended - began, looked, copied


def beside_dd(host, volume, size, rounds):
    """In turns, without a client: seconds of a copy with O_DIRECT of the file of a volume that was written whole and has one
    replica and no snapshot, and of filling a second replica. A pair for each round."""
    head = os.path.join(host.status(volume)["replicas"][0]["path"], "volume-head-000.img")
    copy = os.path.join(host.root, "copy.img")
    pairs = []
    for _ in range(rounds):
        began = time.monotonic()
        run("dd", f"if={head}", f"of={copy}", "bs=1M", "iflag=direct", "oflag=direct", "conv=fdatasync")
        plain = time.monotonic() - began
        os.remove(copy)
        name = host.ctl("replica", "add", volume, timeout=1800).stdout.strip()
        host.healthy(volume, 2, 1800)
        seconds, _, copied = rebuilt(host, volume, name)
        expect(copied == size, f"{copied} bytes copied of {size}")
        pairs.append((plain, seconds))
        say(f"dd {size / plain / MIB:.0f} MiB/s, rebuild {size / seconds / MIB:.0f} MiB/s")
        host.ctl("replica", "rm", volume, name)
    return pairs


def p99(result):
    """Milliseconds, of reads or of writes, whichever is longer."""
    return max(result["jobs"][0][way]["clat_ns"].get("percentile", {}).get("99.000000", 0) for way in ("read", "write")) / 1e6


def beside_clients(host, volume, size, seconds, rounds, clients):
    """In turns, fio's runs of so many seconds on the last 128 MiB of a healthy volume, without a rebuild and while another
    replica is filled: for each round both p99 in milliseconds, and the rate of the rebuild in bytes a second."""
    part = min(128 * MIB, size // 2)
    before = len(host.status(volume)["replicas"])

    def load():
        return fio("clients", seconds, *clients, f"--size={part}", f"--offset={size - part}", "--ioengine=nbd", uri(host, volume))
    found = []
    for _ in range(rounds):
        calm = p99(load())
        known = {r["name"] for r in host.status(volume)["replicas"]}
        adding = threading.Thread(target=lambda: host.ctl("replica", "add", volume, timeout=1800))
        adding.start()
        joining = wait_for("a rebuild", lambda: [r for r in host.status(volume)["replicas"]
                                                 if r["name"] not in known and r["mode"] in ("WO", "RW")], 60)[0]
        during = p99(load())
        if all(r["mode"] == "RW" for r in host.status(volume)["replicas"]):
            say("the rebuild was over before fio was: its p99 is that of both")
        adding.join()
        host.healthy(volume, before + 1, 1800)
        rate = size / rebuilt(host, volume, joining["name"])[0]
        found.append((calm, during, rate))
        say(f"p99 {calm:.2f} ms, during a rebuild {during:.2f} ms, rebuild {rate / MIB:.0f} MiB/s")
        host.ctl("replica", "rm", volume, joining["name"])
    return found
