"""How long requests are held while a snapshot is taken, under fio at depth 32, with snapshots removed and folded away
behind: by the engine's own clock, and as a client feels it."""
import re, threading, time
from harness import Host, contents, expect, fio, full, have, percentile, say, shown, skip

KEPT = 3
# A volume has at most 250 snapshots, removed ones that are not folded yet included.
MOST = 200


def main():
    if not have("fio"):
        return skip("pause", "no fio")
    host = Host()
    volume = host.name("pause")
    host.up(volume, "--size", "256MiB", "--replicas", "3", "--frontend", "nbd-server")
    uri = f"--uri=nbd+unix:///{volume}?socket={host.socket(volume)}"
    stop, results, folds = threading.Event(), [], []
    count = full(40, 1000)

    def load():
        while not stop.is_set():
            results.append(fio("load", full(5, 20), "--rw=randwrite", "--bs=4k", "--iodepth=32", "--size=256m", "--ioengine=nbd", uri))

    def fold():
        while not stop.is_set():
            snapshots = [s["name"] for s in host.json("snapshot", "ls", volume) if not s["removed"]]
            for name in snapshots[:-KEPT]:
                host.ctl("snapshot", "rm", volume, name)
            if len(snapshots) > KEPT:
                host.ctl("snapshot", "purge", volume, timeout=1800)
                folds.append(len(snapshots) - KEPT)
            stop.wait(0.2)
    threads = [threading.Thread(target=load), threading.Thread(target=fold)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(1)
        for n in range(count):
            while n % 20 == 0 and len(host.json("snapshot", "ls", volume)) > MOST:
                time.sleep(0.5)
            host.ctl("snapshot", "create", volume, f"s{n:04}")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    held = [int(found[1]) / 1000 for _, text in host.log(volume + "-e")
            if (found := re.search(r"requests were held for (\d+) us", text))]
    expect(len(held) == count, f"the engine's log has {len(held)} pauses of {count}")
    expect(sum(folds) > 0, "nothing was folded meanwhile")
    paths = [r["path"] for r in host.healthy(volume)["replicas"]]
    host.ctl("snapshot", "purge", volume, timeout=1800)
    host.ctl("down", volume)
    expect(len({contents(p) for p in paths}) == 1, "replicas differ after snapshots and folds under load")
    worst, half, goal = percentile(held, 0.99), percentile(held, 0.5), full(250.0, 10.0)
    felt = max(r["jobs"][0]["write"]["clat_ns"]["percentile"]["99.900000"] for r in results) / 1e6
    say(f"held: {half:.1f} ms at the median, {worst:.1f} ms at p99, {max(held):.1f} ms at most; fio's p99.9 {felt:.1f} ms")
    expect(worst <= goal, f"requests are held for {worst:.1f} ms at p99 of {count} snapshots, promised {goal}")
    shown(f"{count} snapshots, {sum(folds)} folded meanwhile: held {half:.1f} ms at the median, {worst:.1f} ms at p99")


main()
