"""The power of a host goes while blocks below snapshots are overwritten, unmapped and zeroed, and snapshots are taken, removed
and folded, on real ext4 and XFS: a disk that records every write and flush lies below the file system. What it may have held
at many moments is mounted, and each replica's directory opened: every block is old or new, what was flushed is there,
every snapshot is what it was, and replicas differ only in chunks that the intent bitmap marks. From some of them the
volume is started: then all replicas are equal, and no more chunks were compared than are marked.

The volume is a device in one part, in another an NBD export with several connections, of which one flushes for all."""
import atexit, fcntl, mmap, os, re, shutil, struct, subprocess, tempfile, time
import misuse_client as wire
from harness import BIN, Host, expect, full, have, rng, run, say, shown, skip, wait_for

MIB, BLOCK = 1 << 20, 4096
DISK, VOLUME, CHUNK = 512 * MIB, 16 * MIB, 4 * MIB
# Changed under the recorder: two chunks of the intent bitmap.
HOT = 2 * CHUNK // BLOCK
WRITE, FUA, ZERO, FLUSH = 1, 2, 3, 4
BLKDISCARD, BLKZEROOUT = 0x1277, 0x127F
NOTHING = bytes(BLOCK)
MAGIC = 0x4C48706F77657200


def content(block, number):
    return struct.pack("<QQ", MAGIC + block, number) * (BLOCK // 16)


# Connections are dealt to the engine's queues.
os.environ["LONGHORN_QUEUES"] = "2"
COLD = b"".join(content(block, 0) for block in range(HOT, VOLUME // BLOCK))


class Recorder:
    """A disk in a file that is shown through FUSE and a loop device, and the record of its changes."""

    def __init__(self, place):
        self.name = "rec" + os.path.basename(place)[-6:].replace("_", "x")
        self.file, self.record = os.path.join(place, "disk"), os.path.join(place, "record")
        open(self.file, "wb").close()
        os.truncate(self.file, DISK)
        program = os.path.join(BIN, "examples", "fuse-memory")
        self.child = subprocess.Popen([program, "serve", self.name, "--size", str(DISK), "--file", self.file, "--record",
                                       self.record], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        atexit.register(self.stop)
        line = self.child.stdout.readline()
        expect(line.startswith("ready "), f"the recording disk does not start: {line}")
        self.node = line.split()[1]

    def stop(self):
        if self.child.poll() is None:
            try:
                self.child.communicate("stop\n", timeout=30)
            except subprocess.TimeoutExpired:
                self.child.kill()

    def length(self):
        return os.path.getsize(self.record)

    def entries(self, length):
        """(nanoseconds, what, offset, length, place of the bytes in the record), as far as the record went then."""
        found, at = [], 0
        with open(self.record, "rb") as f:
            while at + 32 <= length:
                f.seek(at)
                when, what, offset, size = struct.unpack("<4Q", f.read(32))
                found.append((when, what, offset, size, at + 32))
                at += 32 + (size if what in (WRITE, FUA) else 0)
        return found


class Replay:
    """What the recorded disk may have held at any moment, later ones after earlier ones."""

    def __init__(self, recorder, entries, place):
        self.recorder, self.entries, self.done = recorder, entries, 0
        self.stable, self.left = os.path.join(place, "stable"), os.path.join(place, "left")
        open(self.stable, "wb").close()
        os.truncate(self.stable, DISK)

    def cut(self, at, dice):
        """An image of the disk whose power went before entry `at`: all that was flushed, and of the rest the beginning, or
        any part."""
        flushed = max([n for n in range(self.done, at) if self.entries[n][1] == FLUSH], default=self.done)
        self.apply(self.stable, self.entries[self.done:flushed])
        self.done = flushed
        rest = self.entries[flushed:at]
        if dice.random() < 0.5:
            kept = dice.random()
            rest = [e for e in rest if e[1] == FUA or dice.random() < kept]
        run("cp", "--sparse=always", self.stable, self.left)
        self.apply(self.left, rest)
        return self.left

    def apply(self, image, entries):
        with open(self.recorder.record, "rb") as record, open(image, "r+b", buffering=0) as disk:
            for _, what, offset, length, at in entries:
                if what in (WRITE, FUA):
                    record.seek(at)
                    os.pwrite(disk.fileno(), record.read(length), offset)
                elif what == ZERO:
                    run("fallocate", "--punch-hole", "--offset", offset, "--length", length, image)


class Snapshot:
    def __init__(self, number):
        self.number, self.began, self.answered, self.removing = number, time.time_ns(), None, None


class Node:
    """A volume as a device."""
    FRONTEND = "fuse"

    def __init__(self, _host, volume, _dice):
        self.fd, self.page = os.open(f"/dev/longhorn/{volume}", os.O_RDWR | os.O_DIRECT), mmap.mmap(-1, MIB)

    def read(self, offset, length):
        os.preadv(self.fd, [memoryview(self.page)[:length]], offset)
        return self.page[:length]

    def write(self, offset, data):
        self.page[:len(data)] = data
        os.pwritev(self.fd, [memoryview(self.page)[:len(data)]], offset)

    def clear(self, offset, length, discard):
        fcntl.ioctl(self.fd, BLKDISCARD if discard else BLKZEROOUT, struct.pack("QQ", offset, length))

    def flush(self):
        os.fsync(self.fd)

    def close(self):
        os.close(self.fd)


class Export:
    """A volume as an NBD export: any of several connections writes, another one flushes for them."""
    FRONTEND = "nbd-server"

    def __init__(self, host, volume, dice):
        self.flusher, *self.writers = [wire.Nbd(host.socket(volume), volume) for _ in range(4)]
        self.dice = dice

    def read(self, offset, length):
        return self.flusher.read(offset, length)

    def write(self, offset, data):
        self.dice.choice(self.writers).write(offset, data)

    def clear(self, offset, length, discard):
        kind = wire.TRIM if discard else wire.ZEROES
        expect(self.dice.choice(self.writers).call(kind, 0, offset, length).error == 0, "zeroes are refused")

    def flush(self):
        expect(self.flusher.call(wire.FLUSH).error == 0, "a flush has failed")

    def close(self):
        for connection in [self.flusher, *self.writers]:
            connection.close()


class Load:
    """Changes the hot blocks, one request after another, and knows what each may be at any moment. Every change has a number;
    0 is what was there at first."""

    def __init__(self, host, volume, disk, dice):
        self.host, self.volume, self.disk, self.dice = host, volume, disk, dice
        self.number, self.purge = 0, None
        # Of each block: (when it began, number, whether it made the block zero); of flushes: (when answered, number).
        self.changes = [[(0, 0, False)] for _ in range(HOT)]
        self.flushes, self.snapshots = [], {}

    def change(self):
        self.number += 1
        kind, first = self.dice.random(), self.dice.randrange(HOT)
        count = min(self.dice.randrange(1, 5 if kind < 0.75 else 33), HOT - first)
        now = time.time_ns()
        for block in range(first, first + count):
            self.changes[block].append((now, self.number, kind >= 0.75))
        if kind < 0.75:
            self.disk.write(first * BLOCK, b"".join(content(block, self.number) for block in range(first, first + count)))
        else:
            self.disk.clear(first * BLOCK, count * BLOCK, kind < 0.88)

    def flush(self):
        self.disk.flush()
        self.flushes.append((time.time_ns(), self.number))

    def snapshot(self):
        name = f"s{len(self.snapshots)}"
        snapshot = self.snapshots[name] = Snapshot(self.number)
        self.host.ctl("snapshot", "create", self.volume, name)
        snapshot.answered = time.time_ns()
        self.flushes.append((snapshot.answered, self.number))

    def fold(self):
        """Removes a snapshot, the newest one, too, and has it folded away behind what follows."""
        if self.purge and self.purge.poll() is None:
            return
        expect(not self.purge or self.purge.returncode == 0, "a purge has failed")
        live = [name for name, snapshot in self.snapshots.items() if snapshot.removing is None and name != "s0"]
        if len(live) < 2:
            return
        name = self.dice.choice(live)
        self.snapshots[name].removing = time.time_ns()
        self.host.ctl("snapshot", "rm", self.volume, name)
        self.purge = subprocess.Popen([os.path.join(BIN, "longhornctl"), "--root", self.host.root, "snapshot", "purge",
                                       self.volume], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def go(self, seconds):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for _ in range(self.dice.randrange(1, 60)):
                self.change()
            self.dice.choices([lambda: None, self.flush, self.snapshot, self.fold], [60, 25, 8, 7])[0]()

    def end(self):
        self.disk.close()
        if self.purge:
            self.purge.kill()
            self.purge.wait()

    def safe(self, cut, snapshot):
        """The last change that the head, or a snapshot, holds for certain if the power went then."""
        if snapshot and snapshot.answered and snapshot.answered <= cut:
            return snapshot.number
        return max([number for answered, number in self.flushes if answered <= cut], default=0)

    def allowed(self, block, cut, safe, snapshot):
        """What the head, or a snapshot, may have in a block if the power went then: numbers, and None for zeroes."""
        changes = [c for c in self.changes[block] if c[0] <= cut and (snapshot is None or c[1] <= snapshot.number)]
        kept = max([c for c in changes if c[1] <= safe], key=lambda c: c[1])
        return {None if zero else number for _, number, zero in [kept] + [c for c in changes if c[1] > safe]}

    def judge(self, file, cut, snapshot, where):
        """Fails unless an image is what it may be; its hot blocks."""
        with open(file, "rb") as f:
            image = f.read()
        expect(image[HOT * BLOCK:] == COLD, f"{where}: a block that nobody wrote is another")
        safe = self.safe(cut, snapshot)
        for block in range(HOT):
            data = image[block * BLOCK:(block + 1) * BLOCK]
            magic, number = struct.unpack("<QQ", data[:16])
            found = None if data == NOTHING else number
            whole = found is None or data == content(block, number)
            allowed = self.allowed(block, cut, safe, snapshot)
            expect(whole and found in allowed, f"{where}: block {block} holds "
                   f"{'zeroes' if found is None else number if whole else data[:32].hex()}, may be {allowed}")
        return image[:HOT * BLOCK]


def opened(directory, place, load, cut, where):
    """Opens a directory and judges its layers: the head's bytes and the marked chunks."""
    out = os.path.join(place, "out")
    shutil.rmtree(out, ignore_errors=True)
    os.mkdir(out)
    done = run(os.path.join(BIN, "replica-look"), directory, out, check=False)
    expect(done.returncode == 0, f"{where}: {directory} does not open: {done.stderr}")
    lines = [line.split() for line in done.stdout.splitlines()]
    live = {words[1] for words in lines if words[0] == "snapshot" and words[2] == "live"}
    for name, snapshot in load.snapshots.items():
        if snapshot.removing is not None and snapshot.removing <= cut:
            continue
        expect(snapshot.began <= cut or name not in live, f"{where}: snapshot {name} is there before it was taken")
        if snapshot.answered and snapshot.answered <= cut:
            expect(name in live, f"{where}: snapshot {name} is gone")
        if name in live:
            load.judge(os.path.join(out, f"snap-{name}"), cut, snapshot, f"{where}, snapshot {name}")
    marked = {chunk for words in lines if words[0] == "marked"
              for chunk in range(int(words[1]) // CHUNK, (int(words[1]) + int(words[2])) // CHUNK)}
    return load.judge(os.path.join(out, "head"), cut, None, where), marked


def started(host, volume, shown_as, load, cut, marked, paths, place, where):
    """Starts the volume: replicas are equal afterwards, and what was read is what they hold. The number of chunks compared."""
    shutil.rmtree(os.path.join(host.root, "log"), ignore_errors=True)
    host.up(volume)
    host.healthy(volume, 2)
    file = os.path.join(place, "device")
    disk = shown_as(host, volume, load.dice)
    with open(file, "wb") as copy:
        for offset in range(0, VOLUME, MIB):
            copy.write(disk.read(offset, MIB))
    disk.close()
    read = load.judge(file, cut, None, f"{where}, started")
    said = [int(m[1]) for _, text in host.log(volume + "-e") if (m := re.search(r"(\d+) chunks are in doubt", text))]
    expect(sum(said) <= len(marked), f"{where}: {said} chunks were compared, {marked} are marked")
    host.ctl("down", volume)
    for path in paths:
        held, _ = opened(path, place, load, cut, f"{where}, after a start")
        expect(held == read, f"{where}: after a start {path} holds something else than was read")
    return sum(said)


def scenario(kind, shown_as, dice):
    place = tempfile.mkdtemp(prefix="lh-cut-", dir="/dev/shm")
    atexit.register(shutil.rmtree, place, True)
    mount = os.path.join(place, "mnt")
    os.mkdir(mount)
    recorder = Recorder(place)
    run(f"mkfs.{kind}", "-q", recorder.node)
    run("mount", recorder.node, mount)
    atexit.register(subprocess.run, ["umount", "-l", mount], capture_output=True)
    host = Host(mount)
    volume = host.name("cut")
    status = host.up(volume, "--size", str(VOLUME), "--replicas", "2", "--frontend",
                     shown_as.FRONTEND)
    paths = [replica["path"] for replica in status["replicas"]]
    disk = shown_as(host, volume, dice)
    whole = b"".join(content(block, 0) for block in range(HOT)) + COLD
    for offset in range(0, VOLUME, MIB):
        disk.write(offset, whole[offset:offset + MIB])
    disk.flush()
    disk.close()
    # Nothing is marked after that.
    host.ctl("down", volume)
    host.up(volume)
    load = Load(host, volume, shown_as(host, volume, dice), dice)
    load.snapshot()
    run("sync", "-f", mount)
    first = len(recorder.entries(recorder.length()))
    load.go(full(3, 20))
    length = recorder.length()
    host.kill_everything()
    load.end()
    wait_for(f"{mount} is free", lambda: run("umount", mount, check=False).returncode == 0, 30)
    recorder.stop()
    entries = recorder.entries(length)
    folds = sum(snapshot.removing is not None for snapshot in load.snapshots.values())
    made = (f"{load.number} changes, {len(load.flushes)} flushes, {len(load.snapshots)} snapshots and {folds} removals were "
            f"{len(entries) - first} of the disk")
    say(f"{kind}: {made}")
    expect(len(entries) > first + 100, f"only {len(entries) - first} changes of the disk were recorded")
    replay, differ, compared, starts = Replay(recorder, entries, place), 0, 0, 0
    cuts = sorted(dice.sample(range(first + 1, len(entries)), full(10, 250)))
    for n, at in enumerate(cuts):
        left, when, where = replay.cut(at, dice), entries[at - 1][0], f"{kind}, cut before change {at} of {len(entries)}"
        # `mount -o loop` looks at the file of every loop device, also of those whose server is dead.
        node = run("losetup", "--find", "--show", left).stdout.strip()
        # Another mount namespace of this machine may still hold the disk of before, and XFS mounts no second one of its name.
        run("mount", *(["-o", "nouuid"] if kind == "xfs" else []), node, mount)
        heads, marks = zip(*[opened(path, place, load, when, f"{where}, {os.path.basename(path)}") for path in paths])
        marked = set().union(*marks)
        unequal = {b // CHUNK for b in range(0, HOT * BLOCK, BLOCK) if heads[0][b:b + BLOCK] != heads[1][b:b + BLOCK]}
        differ += bool(unequal)
        expect(unequal <= marked, f"{where}: replicas differ in chunks {unequal}, marked are {marked}")
        expect(len(marked) * CHUNK <= HOT * BLOCK, f"{where}: chunks {marked} are marked, two were changed")
        # The last one leaves nothing of the volume behind.
        if n % 12 == 5 or n == len(cuts) - 1:
            compared += started(host, volume, shown_as, load, when, marked, paths, place, where)
            starts += 1
        host.kill_everything()
        wait_for(f"{mount} is free", lambda: run("umount", mount, check=False).returncode == 0, 30)
        run("losetup", "--detach", node)
        os.remove(left)
    shutil.rmtree(place, ignore_errors=True)
    return (f"{kind} by {shown_as.FRONTEND}: {made}; of {len(cuts)} cuts replicas differed after {differ}; {starts} volumes "
            f"started, {compared} chunks compared")


def main():
    dice, figures = rng(), []
    for kind, shown_as in [("ext4", Node), ("xfs", Export)] + full([], [("ext4", Export), ("xfs", Node)]):
        if not have(f"mkfs.{kind}"):
            skip(f"powercut-{kind}", f"no mkfs.{kind}")
            continue
        figures.append(scenario(kind, shown_as, dice))
        say(figures[-1])
    shown("; ".join(figures))


main()
