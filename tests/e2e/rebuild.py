"""What bringing a replica in sync costs: beside `dd` with O_DIRECT on the same disk; the volume's own p99 meanwhile, under
fio with verification; what is copied after ten seconds away; and a chain of 250 layers."""
import mmap, os, signal, statistics, threading, time
from harness import Host, contents, expect, fio, full, have, kill, own_data, run, say, shown, skip
from in_sync import MIB, VERIFYING, beside_clients, beside_dd, rebuilt, uri


def filled(host, word, size, replicas):
    """A volume whose every block was written."""
    volume = host.name(word)
    host.up(volume, "--size", str(size), "--replicas", str(replicas), "--frontend", "nbd-server")
    run("fio", "--name=fill", "--rw=write", "--bs=1m", "--iodepth=8", "--ioengine=nbd", uri(host, volume), f"--size={size}")
    return volume


def alone(host):
    """No client: a replica is filled as fast as the disk copies."""
    size = full(384, 4096) * MIB
    volume = filled(host, "alone", size, 1)
    pairs = beside_dd(host, volume, size, full(2, 5))
    host.ctl("down", volume)
    host.ctl("rm", volume, "--yes")
    ratio, goal = statistics.median(plain / seconds for plain, seconds in pairs), full(0.25, 0.8)
    rate = statistics.median(size / seconds for _, seconds in pairs)
    expect(ratio >= goal, f"a rebuild without clients has {ratio:.2f} of the rate of dd, promised {goal}")
    return f"{ratio:.2f} of dd ({rate / MIB:.0f} MiB/s)"


def with_clients(host):
    """fio with verification at depth 32, in turns without and with a rebuild: its p99, and equal replicas in the end."""
    size = full(512, 4096) * MIB
    volume = filled(host, "busy", size, 2)
    rounds = beside_clients(host, volume, size, full(4, 20), full(2, 5), VERIFYING)
    host.ctl("replica", "add", volume)
    paths = [r["path"] for r in host.healthy(volume, 3)["replicas"]]
    host.ctl("down", volume)
    expect(len({contents(p) for p in paths}) == 1, "replicas differ after a rebuild under load")
    host.ctl("rm", volume, "--yes")
    ratio, goal = statistics.median(during / calm for calm, during, _ in rounds), full(6.0, 2.0)
    expect(ratio <= goal, f"p99 is {ratio:.1f} times as long during a rebuild, promised {goal}")
    calm, during, rate = map(statistics.median, zip(*rounds))
    return f"p99 {calm:.1f} ms, {during:.1f} ms during a rebuild of {rate / MIB:.0f} MiB/s ({ratio:.2f} times)"


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
    least = full(100, 500)
    expect(rate > least, f"the load had {rate:.0f} writes a second, meant 1,000, and at least {least}")
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
    goal = full(120, 20)
    expect(seconds < goal, f"{layers} layers of 1 MiB took {seconds:.1f} s, promised {goal}")
    return f"{layers} layers of 1 MiB in {seconds:.1f} s"


def main():
    if not have("fio"):
        return skip("rebuild", "no fio")
    host = Host()
    parts = [alone, with_clients, away, many_snapshots]
    chosen = os.environ.get("LH_PART")
    figures = []
    for part in parts:
        if chosen in (None, part.__name__):
            figures.append(part(host))
            say(figures[-1])
    shown("; ".join(figures))


main()
