"""Replicas on disks of their own, ext4 and XFS, that fail and that hang (device-mapper), while a whole volume is used and flushed. One of
three: no error, no long wait, and it is back by itself once its file system is mounted anew. All of them: what is asked waits, and goes on;
and where the journal of a file system that failed took answered writes with it, the next flush says so."""
import errno, json, mmap, os, random, subprocess, threading, time
from devices import WORK, expect, full, have, run, shown, skip, wait_for
from volumes import BIN, Volume, contents, taken_by_auto

MIB, BLOCK = 1 << 20, 4096
SIZE = 64 * MIB
# Of the scratch disk, for each replica: XFS makes no smaller ones than 300 MiB.
DISK = 400 * MIB
# What the load uses, and behind it what is lost in the end.
BLOCKS, LOST, LOST_BLOCKS = 2048, 32 * MIB, 64
# Seconds of load, and that a disk hangs: longer than a request is waited for.
SECONDS, HANGS = full(12, 60), 12
# Seconds that a request may take while one of three disks hangs, on a busy machine.
LONGEST = 15


class Disk:
    """A part of the scratch disk, with a file system on it."""

    def __init__(self, number, kind):
        self.name, self.first = f"disk{number}", number * DISK // 512
        run("dmsetup", "create", self.name, "--table", self.table("linear"))
        # Nobody like udev makes the node.
        run("dmsetup", "mknodes")
        self.device, self.where, self.kind = f"/dev/mapper/{self.name}", os.path.join(WORK, self.name), kind
        os.makedirs(self.where)
        run(*(["mkfs.ext4", "-q", "-F"] if kind == "ext4" else ["mkfs.xfs", "-q", "-f"]), self.device)
        self.mount()

    def table(self, target):
        return f"0 {DISK // 512} " + (f"linear /dev/ubda {self.first}" if target == "linear" else "error")

    def mount(self):
        # ext4 keeps what it has not been asked to flush in memory, as it does under load.
        run("mount", *(["-o", "commit=300"] if self.kind == "ext4" else []), self.device, self.where)

    def becomes(self, target):
        self.hangs()
        run("dmsetup", "load", self.name, "--table", self.table(target))
        self.answers()

    def hangs(self):
        run("dmsetup", "suspend", "--noflush", "--nolockfs", self.name)

    def answers(self):
        run("dmsetup", "resume", self.name)

    def is_mended(self):
        """Nobody holds a file system that fails: it is unmounted, and mounted once its disk works."""
        wait_for(f"{self.where} unmounted", lambda: run("umount", self.where, check=False).returncode == 0, 60)
        self.becomes("linear")
        self.mount()


class Load(threading.Thread):
    """Registers, and somebody who flushes all the time: what is written without is at risk for long."""

    def __init__(self, device):
        super().__init__(daemon=True)
        # The registers begin with zeroes.
        run("blkdiscard", "--zeroout", "--length", BLOCKS * BLOCK, device)
        seed = random.randrange(1 << 30)
        self.registers = subprocess.Popen([os.path.join(BIN, "register-device"), device, str(BLOCKS), "8", str(SECONDS), str(seed)],
                                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.file, self.flushes, self.error = os.open(device, os.O_RDWR), 0, None
        self.start()

    def run(self):
        while self.registers.poll() is None and not self.error:
            try:
                os.fsync(self.file)
            except OSError as e:
                self.error = e
            self.flushes += 1
            time.sleep(0.2)

    def ends_well(self):
        """The longest request, in seconds."""
        said = self.registers.communicate(timeout=300)[0]
        self.join(120)
        os.close(self.file)
        expect(self.registers.returncode == 0, f"register-device: {said[-2000:]}")
        expect(not self.error and self.flushes, f"flush {self.flushes}: {self.error}")
        return json.loads(said)["longest_ms"] / 1000


def mode(disk, replica):
    return next(r["mode"] for r in disk.host.status(disk.volume)["replicas"] if r["name"] == replica)


def one_fails(volume, replica, disk):
    load = Load(volume.device)
    time.sleep(2)
    disk.becomes("error")
    wait_for(f"{replica} on {disk.kind} is out", lambda: mode(volume, replica) != "RW", 30)
    disk.is_mended()
    longest = load.ends_well()
    volume.host.healthy(volume.volume)
    return longest


def one_hangs(volume, replica, disk):
    load = Load(volume.device)
    time.sleep(2)
    disk.hangs()
    wait_for(f"{replica} is out", lambda: mode(volume, replica) != "RW", 30)
    # Nobody waits for it who only looks.
    run(os.path.join(BIN, "longhornctl"), "--root", volume.host.root, "ls", timeout=20)
    disk.answers()
    longest = load.ends_well()
    volume.host.healthy(volume.volume)
    expect(longest < LONGEST, f"a request took {longest} s while one of three disks hung")
    return longest


def all_hang(volume, disks):
    load = Load(volume.device)
    time.sleep(2)
    for disk in disks:
        disk.hangs()
    time.sleep(HANGS)
    for disk in disks:
        disk.answers()
    longest = load.ends_well()
    volume.host.healthy(volume.volume)
    return longest


class Program:
    """Has the device open all the time, as a file system does."""

    def __init__(self, device):
        self.file, self.page = os.open(device, os.O_RDWR | os.O_DIRECT), mmap.mmap(-1, BLOCK)

    def write(self, block, byte):
        self.page[:] = bytes([byte]) * BLOCK
        os.pwritev(self.file, [self.page], LOST + block * BLOCK)

    def has(self, block, byte):
        os.preadv(self.file, [self.page], LOST + block * BLOCK)
        return self.page[:] == bytes([byte]) * BLOCK

    def flushes(self):
        try:
            os.fsync(self.file)
            return True
        except OSError as e:
            expect(e.errno == errno.EIO, f"fsync: {e}")
            return False


def all_fail(volume, disks):
    """What is flushed stays. What was answered after that may be gone with the journals: then the flush that is asked next fails."""
    program = Program(volume.device)
    for block in range(LOST_BLOCKS):
        program.write(2 * block, 1)
    expect(program.flushes(), "a flush failed before anything did")
    for block in range(LOST_BLOCKS):
        program.write(2 * block + 1, 2)
    for disk in disks:
        disk.becomes("error")
    # Who asks now waits, so that no disk is left unasked.
    asks = threading.Thread(target=program.write, args=(2 * LOST_BLOCKS, 3), daemon=True)
    asks.start()
    wait_for("no replica left", lambda: volume.host.status(volume.volume)["robustness"] == "faulted", 60)
    for disk in disks:
        disk.is_mended()
    volume.host.healthy(volume.volume)
    asks.join(60)
    expect(not asks.is_alive(), "a write waits for ever")
    expect(all(program.has(2 * block, 1) for block in range(LOST_BLOCKS)), "what was flushed is gone")
    lost = sum(not program.has(2 * block + 1, 2) for block in range(LOST_BLOCKS))
    told = not program.flushes()
    expect(told or not lost, f"{lost} answered blocks are gone, and a flush says that all is well")
    os.close(program.file)
    return lost


def main():
    if not have("dmsetup", "mkfs.ext4", "mkfs.xfs") or run("dmsetup", "version", check=False).returncode != 0:
        return skip("disks", "no device-mapper, or no dmsetup")
    disks = [Disk(0, "ext4"), Disk(1, "xfs"), Disk(2, "ext4")]
    volume = Volume(taken_by_auto(), size=SIZE, replicas=1)
    first = volume.host.status(volume.volume)["replicas"][0]["name"]
    replicas = [volume.host.ctl("replica", "add", volume.volume, "--dir", os.path.join(disk.where, "r")).stdout.strip()
                for disk in disks]
    volume.host.ctl("replica", "rm", volume.volume, first)
    volume.replicas = len(disks)
    failing = max(one_fails(volume, replicas[n], disks[n]) for n in (0, 1))
    hanging = one_hangs(volume, replicas[2], disks[2])
    waiting = all_hang(volume, disks)
    lost = all_fail(volume, disks)
    paths = [replica["path"] for replica in volume.host.status(volume.volume)["replicas"]]
    volume.down()
    expect(len({contents(path) for path in paths}) == 1, "replicas differ")
    volume.remove()
    for disk in disks:
        run("umount", disk.where)
        run("dmsetup", "remove", disk.name)
    shown(f"{volume.name}: a disk of three fails, and one hangs: no error, the longest request {failing:.1f} and {hanging:.1f} s; all hang: "
          f"{waiting:.1f} s; all fail, mounted anew: what was flushed is there, {lost} of {LOST_BLOCKS} blocks that were not are gone, "
          f"and the next flush tells")


main()
