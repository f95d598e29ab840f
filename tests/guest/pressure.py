"""A process dirties far more memory than there is through a file system on a device, with swap on the device where the
kernel has it: the server must never wait for memory that waits for its own device.

    pressure.py ublk|ublk-volume|nbd-volume|iscsi-volume|fuse-volume

in a guest with little memory and a scratch disk, /dev/ubda. Of a volume, engine and replica are both under pressure.
"""
import os, subprocess, sys
from devices import KINDS, Mounted, expect, fail, full, have, run, shown, skip
from volumes import Volume

SCRATCH = "/dev/ubda"
SECONDS = full(20, 60)
# After so long it is no load any more, it is a deadlock.
DEADLOCK = 300
SIZE = 1 << 30


def memory():
    """Bytes of memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# Writes files over and over and holds more and more anonymous memory, until both have come to what there is and the time
# is over: some of what it holds has to go to swap.
DIRTIER = """
import os, sys, time
where, seconds, memory = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
block, until, held, written, n = os.urandom(1 << 20), time.monotonic() + seconds, [], 0, 0
while time.monotonic() < until or written < memory or len(held) << 24 < memory * 9 // 10:
    with open(f"{where}/f{n % 4}", "wb", buffering=0) as file:
        for _ in range(32):
            written += file.write(block)
    n += 1
    if len(held) << 24 < memory * 9 // 10:
        held.append(bytearray(os.urandom(1 << 20)) * 16)
os.sync()
print(written, len(held) << 24)
"""


class OnScratch(KINDS["ublk"]):
    """The disk's bytes are on the scratch disk, not in memory."""

    def __init__(self, volume):
        super().__init__(volume, size=SIZE)

    def start(self, threads=0, extra=()):
        at = self.options.index("--file")
        self.options[at + 1] = SCRATCH
        self.options += ["--direct", "yes"]
        super().start(threads, extra)


class VolumeOnScratch(Volume):
    """The replica's directory is on a file system on the scratch disk."""

    def __init__(self, frontend):
        self.scratch = Mounted(SCRATCH, "xfs")
        super().__init__(frontend, volume="pressure", size=SIZE, where=self.scratch.__enter__(), replicas=1)

    def stop(self):
        super().stop()
        self.host.kill_everything()
        self.scratch.__exit__()


def main():
    kind = sys.argv[1]
    if not os.path.exists(SCRATCH) or not have("mkfs.xfs", "mkswap"):
        skip(f"{kind}-pressure", f"no {SCRATCH}, mkfs.xfs or mkswap")
        return
    disk = VolumeOnScratch(kind.removesuffix("-volume")) if kind.endswith("-volume") else OnScratch("pressure")
    there = memory()
    with Mounted(disk.device, "xfs") as where:
        swap = os.path.join(where, "swap")
        run("fallocate", "-l", 256 << 20, swap)
        os.chmod(swap, 0o600)
        run("mkswap", "-q", swap)
        swapped = run("swapon", swap, check=False).returncode == 0
        dirtier = subprocess.Popen([sys.executable, "-c", DIRTIER, where, str(SECONDS), str(there)],
                                   stdout=subprocess.PIPE, text=True)
        try:
            written, held = map(int, dirtier.communicate(timeout=DEADLOCK)[0].split())
        except subprocess.TimeoutExpired:
            fail(f"no end after {DEADLOCK} s: a deadlock; {run('free', '-m').stdout}")
        except ValueError:
            fail(f"the process was killed: {run('dmesg').stdout[-1500:]}")
        out = dict(line.split() for line in open("/proc/vmstat"))["pswpout"]
        if swapped:
            run("swapoff", swap, timeout=DEADLOCK)
    run("xfs_repair", "-n", disk.device)
    disk.stop()
    expect(not swapped or int(out) > 0, "there was so much memory that nothing went to swap")
    shown(f"{kind}: {written >> 20} MiB written and {held >> 20} MiB held with {there >> 20} MiB of memory, "
          f"{int(out) >> 8} MiB went to swap on the device: no deadlock")


main()
