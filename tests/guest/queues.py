"""A whole volume whose engine has two queues: overlapping writes and reads from both processors, each thread through a
descriptor of its own, while the engine is killed, are one history per block, and the replicas are equal afterwards.

    queues.py ublk-volume|nbd-volume|iscsi-volume|fuse-volume

NBD's and iSCSI's devices use one of the queues; they are here for the same load.
"""
import json, os, random, subprocess, sys, time
# Before the instance manager starts, whose engines have it from its environment.
os.environ.update(LONGHORN_QUEUES="2", LONGHORN_UBLK_QUEUE_DEPTH="16")
from devices import directory_of, expect, full, has_cpus, shown  # noqa: E402
from volumes import BIN, KINDS, contents, loses_requests_of_the_dead  # noqa: E402

SECONDS = full(15, 60)
KILLS = full(3, 12)
THREADS = 16
BLOCKS = 256


def main():
    kind = sys.argv[1]
    if not has_cpus(f"{kind}-queues", 2):
        return
    seed = int(os.environ.get("LH_SEED", random.randrange(1 << 32)))
    print(f"seed {seed} (LH_SEED={seed} repeats it)", flush=True)
    disk = KINDS[kind](size=64 << 20)
    queues = len(os.listdir(os.path.join(directory_of(disk.device), "mq")))
    expect(queues == 2 or kind != "ublk-volume", f"the device has {queues} queues")
    if kind == "ublk-volume":
        # One less where the driver needs a command back to learn of an engine's death.
        depth = int(open(os.path.join(directory_of(disk.device), "queue/nr_requests")).read())
        expect(depth in (15, 16), f"the device takes {depth} requests of a queue at a time")
    load = subprocess.Popen([os.path.join(BIN, "register-device"), disk.device, str(BLOCKS), str(THREADS), str(SECONDS),
                             str(seed)], stdout=subprocess.PIPE, text=True)
    kills = 0 if loses_requests_of_the_dead(disk.frontend) else KILLS
    for _ in range(kills):
        time.sleep(SECONDS / (KILLS + 1))
        disk.kill()
        disk.restart()
    said = load.communicate(timeout=300)[0]
    expect(load.returncode == 0, f"register-device: {said}")
    end = json.loads(said)
    paths = [replica["path"] for replica in disk.host.status(disk.volume)["replicas"]]
    disk.down()
    expect(len({contents(path) for path in paths}) == 1, "replicas differ")
    disk.remove()
    shown(f"{kind}: {queues} queues of the device, 2 of the engine: {end['blocks_written']} blocks written and {end['reads']} "
          f"read, overlapping, from both processors, through {kills} deaths of the engine: one history per block, "
          f"{len(paths)} replicas equal; longest request {end['longest_ms'] / 1000:.2f} s")


main()
