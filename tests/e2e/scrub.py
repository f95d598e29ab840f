"""Rot in a snapshot of one replica: found and named, left alone until somebody asks, repaired from a sound replica, and with
--checksum full repaired by whoever reads it; no false alarm beside writes; files folded and copied by hand."""
import glob, json, os, struct, subprocess, threading
from harness import BIN, Host, contents, expect, full, rng, run, shown, wait_for

MIB, BLOCK = 1 << 20, 4096
TABLE = []
for byte in range(256):
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    TABLE.append(byte)


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def layer(directory, snapshot):
    return os.path.join(directory, f"volume-snap-{snapshot}.img")


def sums(directory, snapshot):
    """The file of the blocks' checksums that is of this very layer file."""
    stat = os.stat(layer(directory, snapshot))
    version = struct.pack("<Qqq", stat.st_size, stat.st_ctime_ns // 10**9, stat.st_ctime_ns % 10**9)
    return [p for p in glob.glob(os.path.join(directory, "engine", "sums-*")) if open(p, "rb").read(48)[24:48] == version]


def rot(directory, snapshot, at):
    """Flips a bit as a disk would: nobody is told, so the checksums still count for the file."""
    (path,) = sums(directory, snapshot)
    flip(directory, snapshot, at)
    stat = os.stat(layer(directory, snapshot))
    with open(path, "r+b") as f:
        page = bytearray(f.read(BLOCK))
        page[24:48] = struct.pack("<Qqq", stat.st_size, stat.st_ctime_ns // 10**9, stat.st_ctime_ns % 10**9)
        page[4092:] = struct.pack("<I", crc32c(page[8:24] + bytes(8) + page[:4092]))
        f.seek(0)
        f.write(page)
    expect(sums(directory, snapshot) == [path], "the rot can be seen from outside")


def flip(directory, snapshot, at):
    with open(layer(directory, snapshot), "r+b", buffering=0) as f:
        f.seek(at)
        (byte,) = f.read(1)
        f.seek(at)
        f.write(bytes([byte ^ 4]))
        os.fsync(f.fileno())


def block(directory, snapshot, at):
    with open(layer(directory, snapshot), "rb") as f:
        f.seek(at // BLOCK * BLOCK)
        return f.read(BLOCK)


class Scrubbed:
    def __init__(self, host, volume):
        self.host, self.volume = host, volume

    def scrub(self, *options, clean):
        done = self.host.ctl("-o", "json", "scrub", self.volume, "--wait", *options, check=False)
        expect((done.returncode == 0) == clean, f"scrub {options}: status {done.returncode}\n{done.stdout}{done.stderr}")
        return json.loads(done.stdout)


def write(volume, dice, count):
    fd = os.open(f"/dev/longhorn/{volume}", os.O_RDWR)
    for _ in range(count):
        os.pwrite(fd, dice.randbytes(MIB), MIB * dice.randrange(64))
    os.fsync(fd)
    os.close(fd)


def settle(host, volume):
    """Takes the marks of the intent bitmap back: in a marked chunk a checksum says nothing."""
    host.ctl("down", volume)
    host.up(volume)


def held(directory, snapshot):
    """Offsets of the blocks that a layer's file holds."""
    fd = os.open(layer(directory, snapshot), os.O_RDONLY)
    blocks, at, end = [], 0, os.fstat(fd).st_size
    while at < end:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            break
        hole = os.lseek(fd, at, os.SEEK_HOLE)
        blocks.extend(range(at, hole, BLOCK))
        at = hole
    os.close(fd)
    return blocks


def find_and_repair(host, volume, dice):
    s = Scrubbed(host, volume)
    write(volume, dice, 24)
    host.ctl("snapshot", "create", volume, "s1")
    write(volume, dice, 4)
    host.ctl("snapshot", "create", volume, "s2")
    found = s.scrub(clean=True)
    expect(found["findings"] == [] and found["notes"] == [], f"a sound volume: {found}")
    replicas = {r["name"]: r["path"] for r in host.status(volume)["replicas"]}
    names = sorted(replicas)
    for path in replicas.values():
        for snapshot in ["s1", "s2"]:
            expect(len(sums(path, snapshot)) == 1, f"{path}: no checksums of {snapshot}")
    recorded = {json.load(open(layer(p, "s1") + ".checksum"))["checksum"] for p in replicas.values()}
    expect(len(recorded) == 1, f"Longhorn's checksums differ: {recorded}")
    shown(f"a scrub takes the checksums of 2 snapshots on 3 replicas; {found['done'] >> 20} MiB compared, nothing found")

    settle(host, volume)
    at = held(replicas[names[1]], "s1")[0] + 5 * BLOCK + 77
    sound = block(replicas[names[0]], "s1", at)
    rot(replicas[names[1]], "s1", at)
    expected = dict(replica=names[1], snapshot="s1", offset=at // BLOCK * BLOCK, length=BLOCK, flaw="rotten")
    for _ in range(2):
        found = s.scrub(clean=False)
        expect(found["findings"] == [dict(expected, done="reported")], f"one rotten block: {found['findings']}")
    expect(block(replicas[names[1]], "s1", at) != sound, "a scrub without --repair has changed a block")
    found = s.scrub("--repair", clean=True)
    expect(found["findings"] == [dict(expected, done="repaired")], f"one repaired block: {found['findings']}")
    expect(block(replicas[names[1]], "s1", at) == sound, "the block is not what it was")
    expect(s.scrub(clean=True)["findings"] == [], "the repaired block is found again")
    shown("a flipped bit is named by replica, snapshot and offset, stays without --repair, is repaired with it")

    settle(host, volume)
    for name in names:
        rot(replicas[name], "s1", at)
    found = s.scrub("--repair", clean=False)
    expect([f["done"] for f in found["findings"]] == ["no_source"] * 3, f"no sound copy: {found['findings']}")
    expect(all(block(replicas[n], "s1", at) != sound for n in names), "a block was made of nothing")
    # The same bit again: it is as it was.
    rot(replicas[names[2]], "s1", at)
    found = s.scrub("--repair", clean=True)
    expect(all(block(replicas[n], "s1", at) == sound for n in names), f"one sound copy is enough: {found}")
    shown("three rotten copies are reported and left alone; with one sound copy back, the other two are repaired")

    # An administrator's change voids the checksums: the majority decides.
    flip(replicas[names[0]], "s2", held(replicas[names[0]], "s2")[0])
    found = s.scrub("--repair", clean=True)
    expect([(f["replica"], f["done"]) for f in found["findings"]] == [(names[0], "repaired")], str(found["findings"]))
    return replicas


def beside_writes(host, volume, dice):
    s, stop, count = Scrubbed(host, volume), threading.Event(), [0]

    def writer():
        fd = os.open(f"/dev/longhorn/{volume}", os.O_RDWR | os.O_DSYNC)
        data = dice.randbytes(4096)
        while not stop.is_set():
            os.pwrite(fd, data, BLOCK * dice.randrange(256))
            count[0] += 1
        os.close(fd)

    thread = threading.Thread(target=writer)
    thread.start()
    try:
        for n in range(full(3, 40)):
            if n % 2:
                host.ctl("snapshot", "create", volume, f"w{n}")
            found = s.scrub("--repair", clean=True)
            expect(found["findings"] == [], f"a false alarm: {found['findings']}")
    finally:
        stop.set()
        thread.join()
    shown(f"{full(3, 40)} scrubs beside {count[0]} writes and snapshots: no false alarm")


def by_readers(host, volume, replicas):
    host.ctl("down", volume)
    host.up(volume, "--checksum", "full")
    path = f"/dev/longhorn/{volume}"
    (directory, *_) = replicas.values()
    hides = set(held(directory, "s2"))
    # Later writes went to the first MiB.
    at = next(b for b in held(directory, "s1") if b > 8 * MIB and b not in hides)
    name, directory = sorted(replicas.items())[0]
    sound = block(directory, "s1", at)
    for d in replicas.values():
        wait_for("checksums after the start", lambda d=d: sums(d, "s1"), 30)
    rot(directory, "s1", at)

    def read():
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        done = subprocess.run(["dd", f"if={path}", "iflag=direct", "bs=4096", "count=1", f"skip={at // BLOCK}"],
                              capture_output=True)
        os.close(fd)
        expect(done.returncode == 0 and done.stdout == sound, "a reader got a rotten block or an error")
        return block(directory, "s1", at) == sound

    wait_for("the repair of a block that was read", read, 30)
    expect(host.healthy(volume), "a replica was put out for one block")
    shown("with --checksum full every read is right, the rotten block is repaired by its reader, no replica is put out")


def by_hand(host, volume, replicas):
    host.ctl("down", volume)
    (directory, *_) = replicas.values()
    there, socket = os.path.join(host.root, "copy.img"), os.path.join(host.root, "copy.sock")
    tool = os.path.join(BIN, "longhorn")
    for sent in [None, "0 B"]:
        receiver = subprocess.Popen([tool, "ssync", "receive", there, "--listen", f"unix:{socket}"],
                                    stderr=subprocess.PIPE, text=True)
        wait_for("the receiver", lambda: os.path.exists(socket), 10)
        done = run(tool, "ssync", "send", layer(directory, "s1"), "--to", f"unix:{socket}")
        expect(receiver.wait(30) == 0, "the receiver failed")
        expect(sent is None or f" {sent} of" in done.stderr, f"sent twice: {done.stderr}")
    run("cmp", layer(directory, "s1"), there)
    blocks = os.stat(there).st_blocks * 512
    expect(blocks <= os.stat(layer(directory, "s1")).st_blocks * 512 + MIB, "the copy is dense")
    run(tool, "sfold", layer(directory, "s2"), there)
    expect(block(directory, "s2", held(directory, "s2")[0]) in open(there, "rb").read(), "the child's blocks are there")
    refused = run(tool, "ssync", "send", there, "--to", "127.0.0.1:9", check=False)
    expect(refused.returncode == 1 and "--insecure" in refused.stderr, refused.stderr)
    shown("ssync copies a layer's file by its extents, and nothing twice; sfold folds one into the copy")


def rotten_source(host, dice):
    """A replica is brought in sync anew from one that has rotted since: its own copy is the last sound one."""
    volume = host.name("source")
    host.up(volume, "--size", "64MiB", "--replicas", "2")
    s = Scrubbed(host, volume)
    write(volume, dice, 16)
    host.ctl("snapshot", "create", volume, "s1")
    s.scrub(clean=True)
    settle(host, volume)
    (_, source), (name, target) = sorted((r["name"], r["path"]) for r in host.status(volume)["replicas"])
    at = held(source, "s1")[0] + 7 * BLOCK
    sound = block(source, "s1", at)
    rot(source, "s1", at)
    host.ctl("replica", "rebuild", volume, name)
    wait_for("the rebuild", lambda: any("differed and were copied" in text for _, text in host.log(volume + "-e")), 60)
    expect(block(target, "s1", at) == sound, "the last sound copy is gone")
    host.healthy(volume, 2)
    wait_for("the repair of the source", lambda: block(source, "s1", at) == sound, 60)
    host.ctl("down", volume)
    expect(contents(source) == contents(target), "the replicas differ")
    shown("a rebuild from a rotten source overwrites no sound block, and the source is repaired from the target afterwards")


def main():
    host, dice = Host(), rng()
    rotten_source(host, dice)
    volume = host.name("rot")
    host.up(volume, "--size", "64MiB")
    replicas = find_and_repair(host, volume, dice)
    beside_writes(host, volume, dice)
    by_readers(host, volume, replicas)
    by_hand(host, volume, replicas)
    shas = {contents(d) for d in replicas.values()}
    expect(len(shas) == 1, "the replicas differ at the end")


main()
