"""A device is what it says: sizes and flags, every byte comes back, discards and zeroes read as zero, partitions appear, file
systems live on it and grow with it.

    basics.py ublk|nbd|ublk-volume|nbd-volume|iscsi-volume|fuse-volume
"""
import os, struct, sys, time
from devices import (CPUS, Mounted, attribute, directory_of, expect, fio, has_cpus, have, kernel_has, run, shown, skip,
                     wait_for)
from volumes import KINDS

MIB = 1 << 20


def number(device, *options):
    return int(run("blockdev", *options, device).stdout)


def says_what_it_is(disk):
    device = disk.device
    expect(number(device, "--getsize64") == disk.size, f"size {number(device, '--getsize64')}")
    expect(number(device, "--getss") == 512, "logical block")
    # A loop device writes and flushes instead.
    expect(attribute(device, "queue/fua") == ("0" if disk.name == "fuse-volume" else "1"), "FUA")
    expect(attribute(device, "queue/write_cache") == "write back", "write cache")
    expect(attribute(device, "ro") == "0", "read only")
    expect(int(attribute(device, "queue/discard_max_bytes")) > 0, "discard")
    expect(int(attribute(device, "queue/write_zeroes_max_bytes")) > 0, "zeroes")
    if disk.name.startswith("ublk"):
        expect(number(device, "--getpbsz") == 4096, "physical block")
        expect(attribute(device, "queue/discard_granularity") == "4096", "discard granularity")
        expect(attribute(device, "queue/max_hw_sectors_kb") == "1024", "longest transfer")
        expect(attribute(device, "dev") == disk.numbers, "device numbers")
    if disk.name == "ublk":
        expect(len(os.listdir(os.path.join(directory_of(device), "mq"))) == min(2, CPUS), "queues")


def fill(device, offset, size):
    block = os.urandom(MIB)
    fd = os.open(device, os.O_WRONLY)
    for at in range(offset, offset + size, MIB):
        os.pwrite(fd, block, at)
    os.fsync(fd)
    os.close(fd)
    return block


def bytes_at(device, offset, size):
    """Read past the page cache."""
    done = run("sh", "-c", f"dd if={device} iflag=direct bs=4096 skip={offset // 4096} count={size // 4096} "
                           f"status=none | sha256sum; blockdev --flushbufs {device}")
    return done.stdout.split()[0]


def digest(data):
    import hashlib
    return hashlib.sha256(data).hexdigest()


def zeroes_read_as_zero(disk):
    device = disk.device
    for options in ([], ["-z"]):
        block = fill(device, 0, 8 * MIB)
        run("blkdiscard", "--force", *options, "--offset", 2 * MIB, "--length", 3 * MIB, device)
        expect(bytes_at(device, 2 * MIB, 3 * MIB) == digest(bytes(3 * MIB)), f"blkdiscard {options}: not zero")
        expect(bytes_at(device, MIB, MIB) == digest(block), f"blkdiscard {options}: the bytes before have changed")
        expect(bytes_at(device, 5 * MIB, MIB) == digest(block), f"blkdiscard {options}: the bytes behind have changed")
        # Of sectors, not blocks.
        block = fill(device, 0, MIB)
        run("blkdiscard", "--force", *options, "--offset", 512, "--length", 4096, device)
        if options:
            expected = block[:512] + bytes(4096) + block[4608:]
            expect(bytes_at(device, 0, MIB) == digest(expected), f"blkdiscard {options} of sectors")
    run("blkdiscard", "--force", device)
    expect(bytes_at(device, 0, 16 * MIB) == digest(bytes(16 * MIB)), "blkdiscard of all: not zero")


def every_byte_comes_back(disk):
    if not have("fio"):
        skip(f"{disk.name}-fio", "no fio")
        return
    fio("mixed", disk.device, "--rw=randwrite", "--bssplit=4k/60:512/10:64k/20:1m/10", "--size=64m", "--iodepth=16",
        "--numjobs=1", "--blockalign=512")
    if not has_cpus(f"{disk.name}-two-processors", 2):
        return
    # Two processors, two parts of the device, flushes between.
    fio("two", disk.device, "--rw=randwrite", "--bs=4k", "--size=16m", "--iodepth=16", "--numjobs=2",
        "--offset_increment=32m", "--fsync=64", "--cpus_allowed=0-1", "--cpus_allowed_policy=split")


def partitions_appear(disk):
    """A partition of a table on the device is a device of its own, and goes when the table goes."""
    if disk.name.startswith("fuse"):
        # A loop device looks for none unless it is told to (losetup --partscan).
        return
    whole = os.path.basename(directory_of(disk.device))
    part = whole + ("p1" if whole[-1].isdigit() else "1")
    place = os.path.join(directory_of(disk.device), part)
    start, sectors = 2048, 8192

    def write(at, data):
        fd = os.open(disk.device, os.O_WRONLY)
        os.pwrite(fd, data, at)
        os.fsync(fd)
        os.close(fd)
        run("blockdev", "--rereadpt", disk.device)

    entry = struct.pack("<B3sB3sII", 0, bytes(3), 0x83, bytes(3), start, sectors)
    write(0, bytes(446) + entry.ljust(64, b"\0") + b"\x55\xaa")
    wait_for("the partition", lambda: os.path.exists(place) and os.path.exists("/dev/" + part))
    expect([int(open(os.path.join(place, name)).read()) for name in ("start", "size")] == [start, sectors], "its place")
    block = fill("/dev/" + part, 0, MIB)
    expect(bytes_at(disk.device, start * 512, MIB) == digest(block), "the partition's bytes are elsewhere")
    write(0, bytes(512))
    wait_for("no partition", lambda: not os.path.exists(place))


def grow(disk, where, kind):
    before = os.statvfs(where)
    size = disk.size + (128 << 20)
    disk.resize(size)
    wait_for("the new size", lambda: number(disk.device, "--getsize64") == size)
    run("xfs_growfs", where) if kind == "xfs" else run("resize2fs", disk.device)
    after = os.statvfs(where)
    grown = (after.f_blocks - before.f_blocks) * after.f_frsize
    expect(grown > 100 << 20, f"{kind} grew by {grown} bytes")


def file_system_grows(disk, kind):
    if not have(f"mkfs.{kind}"):
        skip(f"{disk.name}-{kind}", f"no mkfs.{kind}")
        return
    mounted = Mounted(disk.device, kind)
    with mounted as where:
        run("cp", "-r", "/usr/include/linux", where)
        run("fstrim", where)
        if not disk.name.startswith("ublk") or kernel_has(f"{disk.name}-{kind}-grows", "to grow in use", 6, 16):
            grow(disk, where, kind)
    with mounted as where:
        run("diff", "-r", "/usr/include/linux", os.path.join(where, "linux"))
    check = ["xfs_repair", "-n"] if kind == "xfs" else ["fsck.ext4", "-fn"]
    run(*check, disk.device)


def what_was_set_before_is_gone(kind):
    """Numbers of NBD and loop devices are used again, and the kernel keeps with them what somebody has set."""
    disk = KINDS[kind]()
    directory = directory_of(disk.device)
    ours = {name: attribute(disk.device, name) for name in ("ro", "queue/write_cache", "queue/max_sectors_kb")}
    run("blockdev", "--setro", disk.device)
    for name, value in (("write_cache", "write through"), ("max_sectors_kb", "8")):
        with open(os.path.join(directory, "queue", name), "w") as setting:
            setting.write(value)
    disk.stop()
    disk = KINDS[kind]()
    if directory_of(disk.device) != directory:
        skip(f"{kind}-settings", "another number this time")
    says_what_it_is(disk)
    expect({name: attribute(disk.device, name) for name in ours} == ours, "what was set before is still there")
    disk.stop()


def timed(name, story):
    began = time.monotonic()
    story()
    print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)


def main():
    if sys.argv[1].startswith(("nbd", "fuse")):
        timed("what was set before is gone", lambda: what_was_set_before_is_gone(sys.argv[1]))
    disk = KINDS[sys.argv[1]]()
    for story in (says_what_it_is, zeroes_read_as_zero, every_byte_comes_back, partitions_appear):
        timed(story.__name__, lambda: story(disk))
    for kind in ("ext4", "xfs"):
        timed(f"{kind} grows", lambda: file_system_grows(disk, kind))
    disk.stop()
    errors = [line for line in run("dmesg").stdout.splitlines() if "I/O error" in line]
    expect(not errors, f"the kernel saw errors: {errors[:5]}")
    shown(f"{disk.name}: sizes, flags, discards, zeroes, partitions; fio without a mismatch; ext4 and XFS grew while mounted")


main()
