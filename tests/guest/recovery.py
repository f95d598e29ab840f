"""The server of a device under a mounted XFS is killed again and again while fio verifies: no error, no mismatch, and the
pause is measured.

    recovery.py ublk|nbd|ublk-volume|nbd-volume|iscsi-volume
"""
import mmap, os, random, signal, subprocess, sys, threading, time
from devices import Load, Mounted, attribute, expect, full, have, run, shown, skip, wait_for
from volumes import KINDS

KILLS = full(8, 100)
# Seconds from a kill to the first answer: median and worst. NBD's are its request timer of 1 s and 2 s more.
PROMISED = {"ublk": (1.0, 5.0), "nbd": (3.0, 3.0), "iscsi": (3.0, 3.0)}


class Watch(threading.Thread):
    """Reads a block of the device, past the cache, over and over, and keeps the longest time that it took."""

    def __init__(self, device):
        super().__init__(daemon=True)
        self.fd = os.open(device, os.O_RDONLY | os.O_DIRECT)
        self.longest, self.reads, self.ended, self.error = 0.0, 0, False, None
        self.start()

    def run(self):
        page = mmap.mmap(-1, 4096)
        while not self.ended:
            began = time.monotonic()
            try:
                os.preadv(self.fd, [page], 0)
            except OSError as error:
                self.error = error
                return
            self.longest = max(self.longest, time.monotonic() - began)
            self.reads += 1
            time.sleep(0.002)

    def take(self):
        longest, self.longest = self.longest, 0.0
        return longest

    def next_read(self, seconds):
        seen, until = self.reads, time.monotonic() + seconds
        # One may have been answered before the kill and not been counted yet.
        while self.reads < seen + 2:
            expect(self.error is None, f"an error on the device: {self.error}")
            expect(time.monotonic() < until, f"no answer within {seconds} s of the restart")
            time.sleep(0.005)

    def stop(self):
        self.ended = True
        self.join(60)
        os.close(self.fd)
        expect(self.error is None, f"an error on the device: {self.error}")


def dies_with_everything_in_hand(disk):
    """As generic_06: the kernel's driver has nothing left to tell it that the server is gone."""
    replicas = [replica["pid"] for replica in disk.host.status(disk.volume)["replicas"]]
    for pid in replicas:
        os.kill(pid, signal.SIGSTOP)
    writer = subprocess.Popen(["fio", "--name=flood", f"--filename={disk.device}", "--rw=randwrite", "--bs=4k", "--size=64m",
                               "--iodepth=1024", "--ioengine=libaio", "--direct=1", "--io_size=16m"],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/dev/shm")
    in_flight = lambda: int(attribute(disk.device, "inflight").split()[1])  # noqa: E731
    last = [-1, 0]

    def no_more_come():
        last[:] = [in_flight(), last[1] + 1 if in_flight() == last[0] else 0]
        return last[0] > 64 and last[1] > 20

    wait_for("as many requests as it takes", no_more_come)
    disk.kill()
    for pid in replicas:
        os.kill(pid, signal.SIGCONT)
    disk.restart()
    words = writer.communicate(timeout=60)[0]
    expect(writer.returncode == 0, f"fio: {words[-2000:]}")
    shown(f"{disk.name}: kill -9 of the server with {last[0]} requests in its hands")


def main():
    kind = sys.argv[1]
    if not have("fio", "mkfs.xfs"):
        skip(f"{kind}-recovery", "no fio, or no mkfs.xfs")
        return
    seed = int(os.environ.get("LH_SEED", random.randrange(1 << 32)))
    print(f"seed {seed} (LH_SEED={seed} repeats it)", flush=True)
    dice = random.Random(seed)
    disk = KINDS[kind]()
    pauses = []
    if kind == "ublk-volume":
        dies_with_everything_in_hand(disk)
    with Mounted(disk.device, "xfs") as where:
        fio, watch = Load(where, "48m", cwd="/dev/shm"), Watch(disk.device)
        for _ in range(KILLS):
            time.sleep(dice.uniform(0.1, 0.6))
            fio.goes_on()
            watch.take()
            disk.kill()
            disk.restart()
            watch.next_read(60)
            pauses.append(watch.take())
        time.sleep(1)
        fio.goes_on()
        fio.ends_well()
        watch.stop()
    run("xfs_repair", "-n", disk.device)
    disk.stop()
    errors = [line for line in run("dmesg").stdout.splitlines() if "I/O error" in line]
    expect(not errors, f"the kernel saw errors: {errors[:5]}")
    pauses.sort()
    median, worst = pauses[len(pauses) // 2], pauses[-1]
    promised = PROMISED[kind.removesuffix("-volume")]
    # A guest on a busy machine is slower than any promise; the figures count where all of them are asked for.
    if full(False, True):
        expect(median <= promised[0] and worst <= promised[1], f"pauses: median {median:.2f} s, worst {worst:.2f} s")
    shown(f"{kind}: {KILLS} times kill -9 of the server under fio on XFS: no error, no mismatch; pause median "
          f"{median:.2f} s, worst {worst:.2f} s")


main()
