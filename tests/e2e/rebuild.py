"""What bringing a replica in sync costs: beside `dd` with O_DIRECT on the same disk; the volume's own p99 meanwhile, under
fio with verification; what is copied after ten seconds away; and a chain of 250 layers."""
import mmap, os, re, signal, statistics, threading, time
from harness import Host, contents, expect, fio, full, have, kill, own_data, run, say, shown, skip, wait_for

MIB = 1 << 20


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


def alone(host):
    """No client: a replica is filled as fast as the disk copies."""
    size = full(384, 4096) * MIB
    volume = host.name("alone")
    path = host.up(volume, "--size", str(size), "--replicas", "1", "--frontend", "nbd-server")["replicas"][0]["path"]
    run("fio", "--name=fill", "--rw=write", "--bs=1m", "--iodepth=8", "--ioengine=nbd", uri(host, volume), f"--size={size}")
    head = os.path.join(path, "volume-head-000.img")
    copy = os.path.join(host.root, "copy.img")
    ratios, rates = [], []
    for _ in range(full(2, 5)):
        began = time.monotonic()
        run("dd", f"if={head}", f"of={copy}", "bs=1M", "iflag=direct", "oflag=direct", "conv=fdatasync")
        plain = time.monotonic() - began
        os.remove(copy)
        name = host.ctl("replica", "add", volume).stdout.strip()
        host.healthy(volume, 2)
        seconds, _, copied = rebuilt(host, volume, name)
        expect(copied == size, f"{copied} bytes copied of {size}")
        ratios.append(plain / seconds)
        rates.append(size / seconds / MIB)
        say(f"dd {size / plain / MIB:.0f} MiB/s, rebuild {rates[-1]:.0f} MiB/s")
        host.ctl("replica", "rm", volume, name)
    host.ctl("down", volume)
    host.ctl("rm", volume, "--yes")
    ratio, goal = statistics.median(ratios), full(0.25, 0.8)
    expect(ratio >= goal, f"a rebuild without clients has {ratio:.2f} of the rate of dd, promised {goal}")
    return f"{ratio:.2f} of dd ({statistics.median(rates):.0f} MiB/s)"


def p99(result):
    return max(result["jobs"][0][way]["clat_ns"].get("percentile", {}).get("99.000000", 0) for way in ("read", "write")) / 1e6


def beside_clients(host):
    """fio with verification at depth 32, in turns without and with a rebuild: its p99, and equal replicas in the end."""
    size, seconds = full(512, 4096) * MIB, full(4, 20)
    volume = host.name("busy")
    host.up(volume, "--size", str(size), "--replicas", "2", "--frontend", "nbd-server")
    run("fio", "--name=fill", "--rw=write", "--bs=1m", "--iodepth=8", "--ioengine=nbd", uri(host, volume), f"--size={size}")

    def load():
        return fio("verify", seconds, "--rw=randrw", "--bs=4k", "--iodepth=32", "--verify=crc32c",
                   "--size=128m", f"--offset={size - 128 * MIB}", "--ioengine=nbd", uri(host, volume))
    ratios, without, during, rates = [], [], [], []
    for _ in range(full(2, 5)):
        without.append(p99(load()))
        adding = threading.Thread(target=lambda: host.ctl("replica", "add", volume, timeout=1800))
        adding.start()
        joining = wait_for("a rebuild", lambda: [r for r in host.status(volume)["replicas"] if r["mode"] == "WO"], 60)[0]
        during.append(p99(load()))
        over = all(r["mode"] == "RW" for r in host.status(volume)["replicas"])
        adding.join()
        host.healthy(volume, 3, 1800)
        rates.append(size / rebuilt(host, volume, joining["name"])[0] / MIB)
        if over:
            say("the rebuild was over before fio was: its p99 is that of both")
        ratios.append(during[-1] / without[-1])
        say(f"p99 {without[-1]:.2f} ms, during a rebuild {during[-1]:.2f} ms, rebuild {rates[-1]:.0f} MiB/s")
        host.ctl("replica", "rm", volume, joining["name"])
    host.ctl("replica", "add", volume)
    paths = [r["path"] for r in host.healthy(volume, 3)["replicas"]]
    host.ctl("down", volume)
    expect(len({contents(p) for p in paths}) == 1, "replicas differ after a rebuild under load")
    host.ctl("rm", volume, "--yes")
    ratio, goal = statistics.median(ratios), full(6.0, 2.0)
    expect(ratio <= goal, f"p99 is {ratio:.1f} times as long during a rebuild, promised {goal}")
    return (f"p99 {statistics.median(without):.1f} ms, {statistics.median(during):.1f} ms during a rebuild of "
            f"{statistics.median(rates):.0f} MiB/s ({ratio:.2f} times)")


def away(host):
    """A replica that hangs for ten seconds under 1,000 random writes a second comes back by what it missed."""
    seconds = full(4, 10)
    volume = host.name("away")
    host.up(volume, "--size", "2GiB", "--replicas", "3", "--frontend", "nbd-server")
    results = []
    load = threading.Thread(target=lambda: results.append(fio(
        "load", seconds + 6, "--rw=randwrite", "--bs=4k", "--rate_iops=1000", "--iodepth=8", "--size=2g", "--ioengine=nbd",
        uri(host, volume))))
    load.start()
    time.sleep(3)
    replica = host.status(volume)["replicas"][1]
    kill(replica["pid"], signal.SIGSTOP)
    time.sleep(seconds)
    kill(replica["pid"], signal.SIGCONT)
    load.join()
    host.healthy(volume)
    took, looked, copied = rebuilt(host, volume, replica["name"])
    rate = results[0]["jobs"][0]["write"]["iops"]
    expect(rate > 500, f"the load had {rate:.0f} writes a second, meant 1,000")
    goal = 60e6 * seconds / 10
    expect(copied < goal, f"{copied / 1e6:.0f} MB copied after {seconds} s away, promised {goal / 1e6:.0f}")
    paths = [r["path"] for r in host.status(volume)["replicas"]]
    host.ctl("down", volume)
    expect(len({contents(p) for p in paths}) == 1, "replicas differ after one was away")
    host.ctl("rm", volume, "--yes")
    return f"{copied / 1e6:.1f} MB copied of {looked / 1e6:.1f} looked at after {seconds} s at {rate:.0f} writes/s, in {took:.1f} s"


def many_snapshots(host):
    """A chain of 250 layers of 1 MiB each."""
    layers = full(60, 250)
    volume = host.name("many")
    host.up(volume, "--size", "512MiB", "--replicas", "1", "--frontend", "fuse")
    fd = os.open(f"/dev/longhorn/{volume}", os.O_RDWR | os.O_DIRECT)
    page = mmap.mmap(-1, MIB)
    for n in range(layers):
        page.seek(0)
        page.write(os.urandom(4096) * 256)
        os.pwritev(fd, [page], n * MIB)
        if n < layers - 1:
            host.ctl("snapshot", "create", volume, f"s{n}")
    os.close(fd)
    name = host.ctl("replica", "add", volume).stdout.strip()
    paths = [r["path"] for r in host.healthy(volume, 2)["replicas"]]
    seconds, _, copied = rebuilt(host, volume, name)
    expect(copied == layers * MIB, f"{copied} bytes copied of {layers} MiB")
    host.ctl("down", volume)
    expect(len({own_data(p) for p in paths}) == 1, "replicas differ after a rebuild of many layers")
    host.ctl("rm", volume, "--yes")
    expect(seconds < 20, f"{layers} layers of 1 MiB took {seconds:.1f} s, promised 20")
    return f"{layers} layers of 1 MiB in {seconds:.1f} s"


def main():
    if not have("fio"):
        return skip("rebuild", "no fio")
    host = Host()
    parts = [alone, beside_clients, away, many_snapshots]
    chosen = os.environ.get("LH_PART")
    figures = []
    for part in parts:
        if chosen in (None, part.__name__):
            figures.append(part(host))
            say(figures[-1])
    shown("; ".join(figures))


main()
