"""A volume against a model in memory: random writes, zeroes and discards on its device, snapshots taken, removed, folded
away, reverted to, and the volume grown, up and down; every snapshot exported again and again, replicas equal at the end."""
import fcntl, os, struct
from harness import Host, contents, expect, full, rng, shown, wait_for

MIB = 1 << 20
BLKGETSIZE64, BLKDISCARD, BLKZEROOUT = 0x80081272, 0x1277, 0x127F


class Model:
    def __init__(self, host, volume, size, dice):
        self.host, self.volume, self.dice = host, volume, dice
        self.head, self.snapshots, self.counter = bytearray(size), {}, 0
        self.done, self.kept = {}, 0

    def device(self):
        return f"/dev/longhorn/{self.volume}"

    def write(self):
        fd = os.open(self.device(), os.O_RDWR)
        try:
            for _ in range(self.dice.randrange(1, 40)):
                length = 4096 * self.dice.randrange(1, 64)
                at = 4096 * self.dice.randrange((len(self.head) - length) // 4096 + 1)
                kind = self.dice.random()
                if kind < 0.7:
                    data = self.dice.randbytes(4096) * (length // 4096)
                    os.pwrite(fd, data, at)
                else:
                    data = bytes(length)
                    os.fsync(fd)
                    fcntl.ioctl(fd, BLKDISCARD if kind < 0.85 else BLKZEROOUT, struct.pack("QQ", at, length))
                self.head[at:at + length] = data
            os.fsync(fd)
        finally:
            os.close(fd)

    def snapshot(self):
        self.counter += 1
        name = f"s{self.counter}"
        self.host.ctl("snapshot", "create", self.volume, name)
        self.snapshots[name] = bytes(self.head)

    def live(self):
        return self.dice.choice(sorted(self.snapshots)) if self.snapshots else None

    def remove(self):
        name = self.live()
        if name:
            self.host.ctl("snapshot", "rm", self.volume, name)
            del self.snapshots[name]
            self.check_removed(name)

    def purge(self):
        """Only what several layers stand on is kept, and it is named."""
        def is_through():
            purged = self.host.json("snapshot", "purge", self.volume)
            kept = {k["name"] for replica in purged for k in replica["kept"]}
            left = {s["name"] for s in self.host.json("snapshot", "ls", self.volume) if s["removed"]}
            return [kept] if left == kept else None
        self.kept += len(wait_for("a purge leaves what it names", is_through, 60)[0])

    def revert(self):
        name = self.live()
        if name:
            self.host.ctl("snapshot", "revert", self.volume, name)
            grown = len(self.head)
            # The volume keeps its size; what a smaller snapshot does not have is zero.
            self.head = bytearray(self.snapshots[name].ljust(grown, b"\0"))

    def grow(self):
        if len(self.head) < 64 * MIB:
            size = len(self.head) + 4 * MIB
            self.host.ctl("resize", self.volume, str(size))
            self.head.extend(bytes(4 * MIB))
            # Who grows a file system next finds the room.
            if os.path.exists(self.device()):
                expect(self.device_size() == size, f"the device has {self.device_size()} bytes, not {size}")

    def device_size(self):
        fd = os.open(self.device(), os.O_RDONLY)
        try:
            return struct.unpack("Q", fcntl.ioctl(fd, BLKGETSIZE64, bytes(8)))[0]
        finally:
            os.close(fd)

    def down_and_up(self):
        self.host.ctl("down", self.volume)
        if self.dice.random() < 0.5:
            self.dice.choice([self.remove, self.grow, self.revert])()
        self.host.up(self.volume)

    def check_head(self, when):
        size = self.device_size()
        fd = os.open(self.device(), os.O_RDONLY)
        try:
            expect(size == len(self.head), f"{when}: the device has {size} bytes, not {len(self.head)}")
            data = os.pread(fd, size, 0)
            while len(data) < size:
                data += os.pread(fd, size - len(data), len(data))
        finally:
            os.close(fd)
        self.compare(when, "the head", data, self.head)

    def check_snapshot(self, when):
        name = self.live()
        if not name:
            return
        file = os.path.join(self.host.root, "export.img")
        self.host.ctl("snapshot", "export", self.volume, name, file)
        data = open(file, "rb").read()
        self.compare(when, f"snapshot {name}", data, self.snapshots[name].ljust(len(data), b"\0"))

    def check_removed(self, name):
        """A fold may have put what was written later into a removed snapshot: nobody gets its bytes, up or down."""
        file = os.path.join(self.host.root, "removed.img")
        for words in (("snapshot", "export", self.volume, name, file), ("snapshot", "diff", self.volume, name),
                      ("clone", f"{self.volume}@{name}", self.host.name("cloneremoved"))):
            done = self.host.ctl(*words, check=False)
            told = f"snapshot {name} is being removed" in done.stderr and "choose another" in done.stderr
            expect(done.returncode == 1 and told, f"{words}: {done.returncode}: {done.stderr}")
        expect(not os.path.exists(file), "a removed snapshot was exported")

    def check_clone(self):
        """A clone of a snapshot and one of the running volume, each started and read."""
        for name, expected in [(self.live(), None), (None, self.head)]:
            expected = self.snapshots[name].ljust(len(self.head), b"\0") if name else bytes(expected)
            clone = self.host.name("clone" + (name or "now"))
            self.host.ctl("clone", f"{self.volume}@{name}" if name else self.volume, clone)
            self.host.up(clone)
            self.host.healthy(clone, 2)
            with open(f"/dev/longhorn/{clone}", "rb") as f:
                self.compare("cloned", clone, f.read(), expected)
            self.host.ctl("down", clone)

    def check_diff(self):
        """Outside the ranges that `snapshot diff` names, two snapshots are equal."""
        names = sorted(self.snapshots)
        if len(names) < 2:
            return
        a, b = self.dice.sample(names, 2)
        one, other = self.snapshots[a].ljust(len(self.head), b"\0"), self.snapshots[b].ljust(len(self.head), b"\0")
        named = bytearray(len(self.head) // 4096)
        for change in self.host.json("snapshot", "diff", self.volume, a, b):
            first, last = change["offset"] // 4096, (change["offset"] + change["length"]) // 4096
            named[first:last] = b"\1" * (last - first)
            if change["kind"] == "zero":
                expect(not any(other[change["offset"]:change["offset"] + change["length"]]), f"{b} is not zero there")
        for i in range(len(named)):
            at = slice(i * 4096, i * 4096 + 4096)
            expect(named[i] or one[at] == other[at], f"block {i} differs between {a} and {b} and is not named")

    def compare(self, when, what, data, expected):
        if data == bytes(expected):
            return
        wrong = [i for i in range(0, len(expected), 4096) if data[i:i + 4096] != expected[i:i + 4096]]
        expect(False, f"{when}: {what} differs in {len(wrong)} blocks, the first at {wrong[0] if wrong else 'its end'}")

    def step(self, n):
        steps = [(self.write, 40), (self.snapshot, 20), (self.remove, 12), (self.purge, 10), (self.revert, 6),
                 (self.grow, 4), (self.down_and_up, 4)]
        step = self.dice.choices([s for s, _ in steps], [w for _, w in steps])[0]
        self.done[step.__name__] = self.done.get(step.__name__, 0) + 1
        step()
        when = f"after step {n}, {step.__name__}"
        self.check_head(when)
        self.check_snapshot(when)


def main():
    host, dice = Host(), rng()
    volume = host.name("snaps")
    host.up(volume, "--size", "16MiB", "--replicas", "2", "--frontend", "fuse")
    model = Model(host, volume, 16 * MIB, dice)
    steps = full(60, 1000)
    for n in range(steps):
        model.step(n)
    tree = host.ctl("snapshot", "tree", volume).stdout
    expect(all(name in tree for name in model.snapshots), f"the tree lacks a snapshot:\n{tree}")
    model.snapshot()
    model.check_clone()
    model.check_diff()
    model.purge()
    model.check_head("at the end")
    listed = {s["name"] for s in host.json("snapshot", "ls", volume) if not s["removed"]}
    # Growing takes one of its own, and so does cloning a volume that is up.
    own = {s["name"] for s in host.json("snapshot", "ls", volume) if s["name"] not in model.snapshots}
    expect(listed - own == set(model.snapshots), f"snapshots {listed}, the model has {set(model.snapshots)}")
    paths = [r["path"] for r in host.healthy(volume, 2)["replicas"]]
    host.ctl("down", volume)
    expect(len({contents(p) for p in paths}) == 1, "replicas differ")
    what = ", ".join(f"{n} {name}" for name, n in sorted(model.done.items()))
    shown(f"{steps} steps ({what}): head and snapshots as the model has them, replicas equal; "
          f"{model.kept} removed snapshots kept by purges because several layers stood on them")


main()
