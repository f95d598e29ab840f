"""What folding a removed snapshot and the head into one costs: on XFS, where space is shared, it grows with extents and not with
bytes; on ext4 it copies as fast as cp does; and a small head over a large snapshot costs what the head holds."""
import atexit, glob, mmap, os, re, shutil, statistics, subprocess, tempfile, time
from harness import Host, Watch, expect, full, have, run, say, shown, skip

MIB = 1 << 20
BLOCK = 4096


class Xfs:
    """An XFS that shares extents, in a sparse file on a loop device."""

    def __init__(self, size):
        self.place = tempfile.mkdtemp(prefix="lh-xfs-", dir="/var/tmp")
        self.mount = os.path.join(self.place, "mnt")
        atexit.register(self.clean)
        os.mkdir(self.mount)
        image = os.path.join(self.place, "image")
        with open(image, "wb") as f:
            f.truncate(size)
        run("mkfs.xfs", "-q", "-m", "reflink=1", image)
        run("mount", "-o", "loop", image, self.mount)

    def clean(self):
        subprocess.run(["umount", "-l", self.mount], capture_output=True)
        shutil.rmtree(self.place, ignore_errors=True)


def write(device, pieces):
    """Writes the ranges, (offset, length), with O_DIRECT."""
    page = mmap.mmap(-1, MIB)
    page.write(os.urandom(4096) * (MIB // 4096))
    fd = os.open(device, os.O_RDWR | os.O_DIRECT)
    for offset, length in pieces:
        for at in range(offset, offset + length, MIB):
            os.pwritev(fd, [memoryview(page)[:min(MIB, offset + length - at)]], at)
    os.fsync(fd)
    os.close(fd)


def folded(host, volume, name):
    """Seconds that folding the snapshot took, by the replica's log."""
    began = ended = None
    for when, text in host.log(volume + "-r"):
        began = when if f"folding snapshot {name}" in text else began
        ended = when if f"snapshot {name} is folded away" in text else ended
    expect(began and ended, f"the replica's log tells of no fold of {name}")
    return ended - began


def extents(path):
    """Rows of the map: the sum that filefrag prints counts what lies together on the disk once."""
    return len(re.findall(r"^ *\d+: ", run("filefrag", "-v", path).stdout, re.M))


def one_fold(host, word, size, pieces):
    """A snapshot of these pieces, and over it a head that holds a third as much behind them, so that the snapshot goes into it:
    seconds of its fold, and extents."""
    volume = host.name(word)
    held = sum(length for _, length in pieces)
    path = host.up(volume, "--size", str(size + held), "--replicas", "1", "--frontend", "fuse")["replicas"][0]["path"]
    write(f"/dev/longhorn/{volume}", pieces)
    host.ctl("snapshot", "create", volume, "s")
    write(f"/dev/longhorn/{volume}", [(pieces[0][0], BLOCK)] + [(size, held * 3 // 10 // BLOCK * BLOCK)])
    found = extents(os.path.join(path, "volume-snap-s.img"))
    host.ctl("snapshot", "rm", volume, "s")
    host.ctl("snapshot", "purge", volume, timeout=1800)
    seconds = folded(host, volume, "s")
    expect(not os.path.exists(os.path.join(path, "volume-snap-s.img")), "the snapshot is still there")
    host.ctl("down", volume)
    host.ctl("rm", volume, "--yes")
    return seconds, found


def shared():
    """The same number of extents at the same places: of 16 KiB each, and a thousand times as large."""
    count, apart = 640, full(2, 16) * MIB
    xfs = Xfs(full(4, 16) << 30)
    host = Host(xfs.mount)
    ratios = []
    for n in range(full(2, 5)):
        small, few = one_fold(host, f"small{n}", count * apart, [(i * apart, 16384) for i in range(count)])
        large, many = one_fold(host, f"large{n}", count * apart, [(i * apart, apart - BLOCK) for i in range(count)])
        # More extents, if the file system was short of long ones, are more work.
        ratios.append(large / small / max(1.0, many / few))
        say(f"{count * 16384 / MIB:.0f} MiB in {few} extents: {small:.3f} s; {count * apart / MIB:.0f} MiB in {many}: {large:.3f} s")
    ratio = statistics.median(ratios)
    goal = full(6.0, 3.0)
    expect(ratio <= goal, f"{count * apart / MIB:.0f} MiB take {ratio:.1f} times as long as 10 MiB, promised {goal}")
    return f"XFS: {count * apart >> 20} MiB in {ratio:.2f} times the time of {count * 16384 >> 20} MiB in as many extents"


def copied():
    """ext4: beside cp of as many bytes with an fsync, in turns, nothing of it in the page cache."""
    host, size = Host(), full(384, 4096) * MIB
    ratios, rates = [], []
    for n in range(full(2, 5)):
        source, target = os.path.join(host.root, "source"), os.path.join(host.root, "target")
        write_file(source, size)
        with open(source) as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.monotonic()
        run("cp", "--sparse=never", "--reflink=never", source, target)
        run("sync", target)
        plain = time.monotonic() - began
        os.remove(source)
        os.remove(target)
        seconds, _ = one_fold(host, f"copy{n}", size, [(0, size)])
        ratios.append(plain / seconds)
        rates.append(size / seconds / MIB)
        say(f"cp {size / plain / MIB:.0f} MiB/s, fold {rates[-1]:.0f} MiB/s")
    ratio, goal = statistics.median(ratios), full(0.25, 0.7)
    expect(ratio >= goal, f"a fold on ext4 has {ratio:.2f} of the rate of cp, promised {goal}")
    return f"ext4: {ratio:.2f} of cp ({statistics.median(rates):.0f} MiB/s)"


def small():
    """A head of one block over a large snapshot, beside a client that writes: what is copied and how long a write waits."""
    host, size = Host(), full(256, 2048) * MIB
    volume = host.name("small")
    path = host.up(volume, "--size", str(size), "--replicas", "1", "--frontend", "fuse")["replicas"][0]["path"]
    write(f"/dev/longhorn/{volume}", [(0, size)])
    longest, took = [], []
    for n in range(full(5, 20)):
        host.ctl("snapshot", "create", volume, "s")
        write(f"/dev/longhorn/{volume}", [(BLOCK * n, BLOCK)])
        inode = os.stat(os.path.join(path, "volume-snap-s.img")).st_ino
        watch = Watch(f"/dev/longhorn/{volume}", size - BLOCK)
        host.ctl("snapshot", "rm", volume, "s")
        host.ctl("snapshot", "purge", volume)
        watch.stop()
        longest.append(watch.longest * 1000)
        took.append(folded(host, volume, "s") * 1000)
        (head,) = glob.glob(os.path.join(path, "volume-head-*.img"))
        expect(os.stat(head).st_ino == inode, "the snapshot was copied into the head")
    host.ctl("down", volume)
    expect(max(longest) < full(5000, 1000), f"a write waited for {max(longest):.0f} ms")
    return (f"a head of one block over {size >> 20} MiB: {statistics.median(took):.0f} ms, a write beside it waits for at most "
            f"{statistics.median(longest):.0f} ms at the median, {max(longest):.0f} ms at worst")


def write_file(path, size):
    open(path, "wb").close()
    os.truncate(path, size)
    write(path, [(0, size)])


def main():
    figures = []
    for part in (shared, copied, small):
        if os.environ.get("LH_PART") not in (None, part.__name__):
            continue
        if part is shared and not have("mkfs.xfs", "filefrag"):
            skip("fold", "no mkfs.xfs or no filefrag: nothing on XFS")
            continue
        figures.append(part())
        say(figures[-1])
    shown("; ".join(figures))


main()
