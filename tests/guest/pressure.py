"""A process dirties far more memory than there is through a file system on a device, and holds more than there is, with swap
on the device: the server must never wait for memory that waits for its own device.

    pressure.py ublk|ublk-volume|nbd-volume|iscsi-volume|fuse-volume
    pressure.py careless FRONTEND-volume    the counterpart: engine and replica get no more memory than others do. They have
                                            to hang, or the load would find no fault in anything

in a guest with little memory and a scratch disk, /dev/ubda. Of a volume, engine and replica are both under pressure;
LH_SCRATCH_FS=xfs: its replica lies on XFS, not on ext4. Where
nobody gets memory any more, this program gets none either: then the guest's time limit tells, and the kernel's own words do
("page allocation stall").
"""
import ctypes, os, subprocess, sys, threading, time
from devices import KINDS, Mounted, directory_of, expect, fail, full, have, run, shown, skip
from volumes import Volume

SCRATCH = "/dev/ubda"
SECONDS = full(20, 60)
# Seconds in which a device that has requests answers none: it waits for itself. The scratch disk's longest flush on a busy
# machine is far below.
STUCK = 60
# Seconds that the load may take when it is only slow.
SLOW = 300
SIZE = 1 << 30


def memory():
    """Bytes of memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# Writes files over and over and holds more and more anonymous memory, until both have come to what there is and the time
# is over: some of what it holds has to go to swap. Children hold it, 64 MiB each: a process of User Mode Linux has a mapping
# on its host for every page, and a host allows 65,530 (vm.max_map_count); beyond, it faults for ever.
DIRTIER = """
import os, signal, sys, time
where, seconds, memory = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
block, until, holders, written, n = os.urandom(1 << 20), time.monotonic() + seconds, [], 0, 0
PIECE = 64 << 20

def holder():
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        held = [bytearray(os.urandom(1 << 20)) * 16 for _ in range(PIECE >> 24)]
        os.write(tell, b"held")
        signal.pause()
    os.close(tell)
    if not os.read(ready, 4):
        sys.exit("who held memory was killed")
    return child

def enough():
    return len(holders) * PIECE >= memory * 9 // 10

while time.monotonic() < until or written < memory or not enough():
    with open(f"{where}/f{n % 4}", "wb", buffering=0) as file:
        for _ in range(32):
            written += file.write(block)
    n += 1
    if n % 4 == 0 and not enough():
        holders.append(holder())
os.sync()
print(written, len(holders) * PIECE)
for child in holders:
    os.kill(child, signal.SIGKILL)
"""


def lock_memory():
    """What looks on must not wait for the device either: MCL_CURRENT, MCL_FUTURE, MCL_ONFAULT."""
    expect(ctypes.CDLL(None, use_errno=True).mlockall(7) == 0, "memory cannot be locked")


def numbers(path):
    with open(path) as file:
        return {line.split()[0].rstrip(":"): int(line.split()[1]) for line in file}


def journal_thread():
    """The thread of the kernel's that writes the journal of the scratch disk's ext4, if that is what it holds."""
    said = run("pgrep", "--parent", "2", f"^jbd2/{os.path.basename(SCRATCH)}-", check=False).stdout.split()
    return int(said[0]) if said else None


class Look(threading.Thread):
    """Looks whether the device answers, and says every 10 s how things are. A device that answers nothing ends it all."""

    def __init__(self, device, hangs):
        super().__init__(daemon=True)
        self.stat, self.hangs, self.ended = os.path.join(directory_of(device), "stat"), hangs, False
        self.journal, self.helped = journal_thread(), False
        self.start()

    def run(self):
        began = since = time.monotonic()
        before, turn = None, 0
        while not self.ended:
            words = [int(word) for word in open(self.stat).read().split()]
            # Documentation/block/stat.rst: ended reads, writes, discards, flushes; those in flight.
            done, in_flight = words[0] + words[4] + sum(words[11:17:4]), words[8]
            now = time.monotonic()
            if done != before or in_flight == 0:
                since = now
            before = done
            self.helped = self.helped or (self.journal and os.sched_getscheduler(self.journal) == os.SCHED_RR)
            if turn % 10 == 0:
                has = numbers("/proc/meminfo")
                print(f"{now - began:4.0f} s: {done} requests, {in_flight} in flight; MiB free {has['MemFree'] >> 10}, dirty "
                      f"{has['Dirty'] >> 10}, in writeback {has['Writeback'] >> 10}, swapped "
                      f"{(has['SwapTotal'] - has['SwapFree']) >> 10}", flush=True)
            if now - since > STUCK:
                self.hangs(in_flight)
            turn += 1
            time.sleep(1)


def who_waits():
    """Every task that waits uninterruptibly, with its stack, as the kernel tells it (SysRq w)."""
    log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    os.lseek(log, 0, os.SEEK_END)
    with open("/proc/sysrq-trigger", "w") as trigger:
        trigger.write("w")
    time.sleep(1)
    lines = []
    try:
        while True:
            lines.append(os.read(log, 8192).decode(errors="replace").split(";", 1)[-1].rstrip())
    except OSError:
        return "\n".join(lines)


def end_at_once(text):
    """Without unmounting: that would wait, too. The guest is switched off next."""
    print("NOT AS PROMISED:", text, who_waits(), sep="\n", flush=True)
    os._exit(1)


def must_not_hang(in_flight):
    end_at_once(f"{in_flight} requests, and no answer for {STUCK} s: a deadlock")


def has_to_hang(in_flight):
    shown(f"without memory of its own a volume waits for itself: {in_flight} requests, no answer for {STUCK} s")
    os._exit(0)


def on_scratch(kind):
    """A server whose disk is the scratch disk, used past the page cache."""
    return KINDS[kind]("pressure", size=SIZE, file=SCRATCH, more=["--direct", "yes"])


# What the replica lies on. XFS can stop a volume that is swapped to, which is the kernel's doing (docs/devices.md).
BELOW = os.environ.get("LH_SCRATCH_FS", "ext4")


class VolumeOnScratch(Volume):
    """The replica's directory is on a file system on the scratch disk."""

    def __init__(self, frontend):
        self.scratch = Mounted(SCRATCH, BELOW)
        super().__init__(frontend, volume="pressure", size=SIZE, where=self.scratch.__enter__(), replicas=1)

    def stop(self):
        super().stop()
        self.host.kill_everything()
        self.scratch.__exit__()


def press(device, hangs):
    """The load. Bytes written, held, and pages that went to swap."""
    there = memory()
    with Mounted(device, "xfs") as where:
        swap = os.path.join(where, "swap")
        run("fallocate", "-l", 256 << 20, swap)
        os.chmod(swap, 0o600)
        run("mkswap", "-q", swap)
        run("swapon", swap)
        look = Look(device, hangs)
        dirtier = subprocess.Popen([sys.executable, "-c", DIRTIER, where, str(SECONDS), str(there)],
                                   stdout=subprocess.PIPE, text=True)
        try:
            written, held = map(int, dirtier.communicate(timeout=SLOW)[0].split())
        except subprocess.TimeoutExpired:
            end_at_once(f"no end after {SLOW} s, though the device answers")
        except ValueError:
            fail(f"the process was killed: {run('dmesg').stdout[-1500:]}")
        swapped = numbers("/proc/vmstat")["pswpout"]
        run("swapoff", swap, timeout=SLOW)
    look.ended = True
    look.join()
    return written, held, swapped, look


def survives(kind):
    disk = VolumeOnScratch(kind.removesuffix("-volume")) if kind.endswith("-volume") else on_scratch(kind)
    written, held, swapped, look = press(disk.device, must_not_hang)
    if kind.endswith("-volume") and BELOW == "ext4":
        expect(look.journal, "ext4 has no thread for its journal")
        expect(look.helped, "the journal's thread, which the replica's flushes wait for, was never real time")
    run("xfs_repair", "-n", disk.device)
    disk.stop()
    expect(swapped > 0, "there was so much memory that nothing went to swap")
    shown(f"{kind}: {written >> 20} MiB written and {held >> 20} MiB held with {memory() >> 20} MiB of memory, "
          f"{swapped >> 8} MiB went to swap on the device: no deadlock")


def careless_hangs(kind):
    os.environ["LONGHORN_REALTIME"] = "never"
    press(VolumeOnScratch(kind.removesuffix("-volume")).device, has_to_hang)
    fail("a careless volume has survived: this load would find no fault in any other")


def main():
    careless, kind = sys.argv[1] == "careless", sys.argv[-1]
    if not os.path.exists(SCRATCH) or not have("mkfs.xfs", "mkswap"):
        skip(f"{kind}-pressure", f"no {SCRATCH}, mkfs.xfs or mkswap")
        return
    lock_memory()
    if careless:
        careless_hangs(kind)
    else:
        survives(kind)


main()
