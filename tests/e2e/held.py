"""How long requests are held while a snapshot is taken, by the engine's own clock. `pause.py` judges it, and `scripts/bench`
shows it beside the other goals."""
import dataclasses, re, threading, time

from harness import expect, fio

KEPT = 3
# A volume has at most 250 snapshots, removed ones that are not folded yet included.
MOST = 200


@dataclasses.dataclass
class Held:
    """Milliseconds that requests were held for each snapshot, how many snapshots were folded away meanwhile, and the longest
    p99.9 of the clients' runs, in milliseconds."""
    pauses: list
    folded: int
    felt: float


def under_load(host, volume, size, count, seconds):
    """Takes so many snapshots of a volume over NBD, under fio's 4 KiB writes at depth 32 in runs of so many seconds, with
    snapshots removed and folded away behind."""
    uri = f"--uri=nbd+unix:///{volume}?socket={host.socket(volume)}"
    stop, results, folds = threading.Event(), [], []

    def load():
        while not stop.is_set():
            results.append(fio("load", seconds, "--rw=randwrite", "--bs=4k", "--iodepth=32", f"--size={size}", "--ioengine=nbd", uri))

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
                expect(all(thread.is_alive() for thread in threads), "the clients' load and the folds go on")
                time.sleep(0.5)
            host.ctl("snapshot", "create", volume, f"s{n:04}")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    pauses = [int(found[1]) / 1000 for _, text in host.log(volume + "-e")
              if (found := re.search(r"requests were held for (\d+) us", text))]
    expect(len(pauses) == count, f"the engine's log has {len(pauses)} pauses of {count}")
    felt = max(r["jobs"][0]["write"]["clat_ns"]["percentile"]["99.900000"] for r in results) / 1e6
    return Held(pauses, sum(folds), felt)
