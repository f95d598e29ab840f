#!/usr/bin/env python3
"""Judge of replica directories, by the rules of Longhorn's format (engine 1.12). It shares nothing with the Rust code.

    judge.py DIRECTORY [--expected expected.json] [--clean] [--print-sha]
    judge.py --self-test FIXTURES        all fixtures pass, 20 damaged copies fail for the right reason

A verdict is a line `ok: ...`, or one line `REASON: sentence` per fault and exit status 1. REASON is a fixed word,
so that a test can tell whether a directory failed for the right reason.
"""
import argparse, array, fcntl, hashlib, json, os, re, shutil, struct, subprocess, sys, tempfile, zlib

SECTOR = 4096
HEAD = re.compile(r"^volume-head-(\d{3})\.img$")
SNAP = re.compile(r"^volume-snap-([A-Za-z0-9][A-Za-z0-9_.-]*)\.img$")
RFC3339 = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)$")
VOLUME_KEYS = [("Size", int), ("Head", str), ("Dirty", bool), ("Rebuilding", bool), ("Error", str), ("Parent", str),
               ("SectorSize", int), ("BackingFilePath", str), ("Encrypted", bool)]
LAYER_KEYS = [("Name", str), ("Parent", str), ("Removed", bool), ("UserCreated", bool), ("Created", str), ("Labels", dict)]
CHECKSUM_KEYS = {"method", "checksum", "change_time", "last_hashed_at", "silently_corrupted"}


class Fault(Exception):
    def __init__(self, reason, sentence):
        super().__init__(sentence)
        self.reason = reason


def go_json(value):
    """The bytes that Go's encoding/json.Encoder writes for this value."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    for char in "&<>\u2028\u2029":
        text = text.replace(char, "\\u%04x" % ord(char))
    return text.encode() + b"\n"


def read_meta(directory, name, keys):
    path = os.path.join(directory, name)
    try:
        raw = open(path, "rb").read(1 << 20)
    except FileNotFoundError:
        raise Fault("meta-missing", f"{name} is not there")
    try:
        pairs = json.loads(raw, object_pairs_hook=list)
        value = json.loads(raw)
    except ValueError as err:
        raise Fault("meta-json", f"{name} is not JSON: {err}")
    if not isinstance(value, dict):
        raise Fault("meta-json", f"{name} is not an object")
    if [k for k, _ in pairs] != [k for k, _ in keys]:
        raise Fault("meta-keys", f"{name} has keys {[k for k, _ in pairs]}, Longhorn writes {[k for k, _ in keys]}")
    for key, kind in keys:
        v = value[key]
        good = (v is None or (isinstance(v, dict) and all(isinstance(x, str) for x in v.values()))) if kind is dict \
            else type(v) is kind
        if not good:
            raise Fault("meta-type", f"{name}: {key} is {v!r}")
    if go_json(value) != raw:
        raise Fault("meta-encoding", f"{name} is not encoded as Longhorn encodes it")
    return value


def extents(path):
    """Extents (offset, end) that the file system holds, written or not; on tmpfs by SEEK_DATA."""
    found = []
    with open(path, "rb") as f:
        size = os.fstat(f.fileno()).st_size
        start = 0
        while start < size:
            head = struct.pack("=QQLLLL", start, size - start, 1, 0, 256, 0)
            buf = array.array("B", head + bytes(56 * 256))
            try:
                fcntl.ioctl(f.fileno(), 0xC020660B, buf)  # FS_IOC_FIEMAP, FIEMAP_FLAG_SYNC
            except OSError:
                return seek_extents(f, size)
            raw = buf.tobytes()
            count = struct.unpack_from("=L", raw, 20)[0]
            if count == 0:
                break
            last = False
            for i in range(count):
                logical, _, length = struct.unpack_from("=QQQ", raw, 32 + 56 * i)
                flags = struct.unpack_from("=L", raw, 32 + 56 * i + 40)[0]
                found.append((logical, logical + length))
                start, last = logical + length, flags & 1
            if last:
                break
    return found


def seek_extents(f, size):
    found, at = [], 0
    while at < size:
        try:
            data = os.lseek(f.fileno(), at, os.SEEK_DATA)
        except OSError:
            break
        at = os.lseek(f.fileno(), data, os.SEEK_HOLE)
        found.append((data, at))
    return found


class Qcow2:
    """Uncompressed qcow2, version 2 and 3 (qemu docs/interop/qcow2.rst)."""

    def __init__(self, path):
        self.f = open(path, "rb")
        h = self.f.read(104)
        magic, version, backing, _, bits, self.size, crypt, l1_size, l1_at = struct.unpack_from(">4sIQIIQIIQ", h)
        if magic != b"QFI\xfb" or backing or crypt:
            raise Fault("backing", f"{path} is no plain qcow2 file")
        self.cluster, self.bits = 1 << bits, bits
        self.l1 = self.table(l1_at, l1_size)
        self.cache = {}

    def table(self, at, count):
        self.f.seek(at)
        return struct.unpack(">%dQ" % count, self.f.read(8 * count))

    def read(self, offset, length):
        out = b""
        while length:
            index, inside = divmod(offset, self.cluster)
            n = min(length, self.cluster - inside)
            l1, l2 = divmod(index, self.cluster // 8)
            at = self.l1[l1] & 0x00FFFFFFFFFFFE00 if l1 < len(self.l1) else 0
            entry = 0
            if at:
                if at not in self.cache:
                    self.cache[at] = self.table(at, self.cluster // 8)
                entry = self.cache[at][l2]
            if entry & (1 << 62):
                x = 62 - (self.bits - 8)
                host = entry & ((1 << x) - 1)
                sectors = ((entry & ((1 << 62) - 1)) >> x) + 1
                self.f.seek(host)
                raw = zlib.decompressobj(-12).decompress(self.f.read(sectors * 512 - (host & 511)), self.cluster)
                out += raw[inside:inside + n]
            elif entry & 1 or not entry & 0x00FFFFFFFFFFFE00:
                out += bytes(n)
            else:
                self.f.seek((entry & 0x00FFFFFFFFFFFE00) + inside)
                out += self.f.read(n)
            offset, length = offset + n, length - n
        return out


class Raw:
    def __init__(self, path):
        self.f = open(path, "rb")
        self.size = os.path.getsize(path)

    def read(self, offset, length):
        self.f.seek(offset)
        return self.f.read(length).ljust(length, b"\0")


def crc64_table():
    poly, table = 0xD800000000000000, []
    for i in range(256):
        c = i
        for _ in range(8):
            c = (c >> 1) ^ poly if c & 1 else c >> 1
        table.append(c)
    return table


CRC64 = crc64_table()


def crc64_zeros(crc, count):
    """The register after `count` zero bytes, by squaring the matrix of one (zlib's crc32_combine)."""
    matrix = []
    for bit in range(64):
        c = 1 << bit
        matrix.append((c >> 8) ^ CRC64[c & 0xFF])
    apply = lambda m, v: __import__("functools").reduce(lambda a, b: a ^ b, (m[i] for i in range(64) if v >> i & 1), 0)
    while count:
        if count & 1:
            crc = apply(matrix, crc)
        matrix = [apply(matrix, row) for row in matrix]
        count >>= 1
    return crc


def crc64_file(path):
    """CRC-64/ISO as Go's hash/crc64 computes it, holes as zeros."""
    crc, at, mask = (1 << 64) - 1, 0, (1 << 64) - 1
    with open(path, "rb") as f:
        size = os.fstat(f.fileno()).st_size
        for start, end in extents(path):
            end = min(end, size)
            crc = crc64_zeros(crc, start - at)
            f.seek(start)
            for byte in f.read(end - start):
                crc = CRC64[(crc ^ byte) & 0xFF] ^ (crc >> 8)
            at = end
        crc = crc64_zeros(crc, size - at)
    return "%016x" % (crc ^ mask)


class Replica:
    """A directory that keeps the rules; the constructor raises a Fault otherwise."""

    def __init__(self, directory, clean=False):
        self.dir = directory
        self.volume = read_meta(directory, "volume.meta", VOLUME_KEYS)
        self.check_volume(clean)
        self.collect()
        self.check_layers()
        self.check_chain()
        self.check_checksums()
        self.extents = {name: extents(os.path.join(directory, name)) for name in self.layers}
        self.check_extents()
        self.files = {name: open(os.path.join(directory, name), "rb") for name in self.layers}
        self.backing = self.open_backing()

    def check_volume(self, clean):
        v = self.volume
        if v["Size"] <= 0 or v["Size"] % SECTOR:
            raise Fault("size", f"volume size {v['Size']} is no positive multiple of {SECTOR}")
        if v["SectorSize"] != 512:
            raise Fault("sector-size", f"SectorSize {v['SectorSize']} is not 512")
        if not HEAD.match(v["Head"]):
            raise Fault("head-name", f"Head {v['Head']!r} is no head's name")
        if v["Error"]:
            raise Fault("error", f"volume.meta carries the error {v['Error']!r}")
        if clean and v["Dirty"]:
            raise Fault("dirty", "volume.meta says Dirty: not closed cleanly")
        if clean and v["Rebuilding"]:
            raise Fault("rebuilding", "volume.meta says Rebuilding: the files alone are not the volume")

    def collect(self):
        self.layers, self.checksums = {}, []
        names = sorted(os.listdir(self.dir))
        for name in names:
            path = os.path.join(self.dir, name)
            if name == "engine" and os.path.isdir(path) and not os.path.islink(path):
                self.check_engine(path)
                continue
            if os.path.islink(path) or not os.path.isfile(path):
                raise Fault("file-kind", f"{name} is no plain file")
            if HEAD.match(name) or SNAP.match(name):
                self.layers[name] = None
            elif name.endswith(".img.meta") and (HEAD.match(name[:-5]) or SNAP.match(name[:-5])):
                if name[:-5] not in names:
                    raise Fault("image-missing", f"{name} has no image")
            elif name.endswith(".img.checksum") and SNAP.match(name[:-9]):
                self.checksums.append(name)
            elif name == "revision.counter":
                self.check_counter(path)
            elif name != "volume.meta":
                raise Fault("unknown-file", f"{name} is no file of a replica")

    def check_engine(self, path):
        for root, _, names in os.walk(path):
            for name in names:
                if name.endswith((".meta", ".tmp", ".checksum")) or "volume-" in name:
                    raise Fault("engine-name", f"engine/{name} would be taken for a layer by Longhorn")

    def check_counter(self, path):
        raw = open(path, "rb").read()
        if len(raw) != 4096 or not re.match(rb"^\d+\0*$", raw):
            raise Fault("revision-counter", "revision.counter is not 4096 bytes of a decimal number")

    def check_layers(self):
        heads = [n for n in self.layers if HEAD.match(n)]
        if heads != [self.volume["Head"]]:
            raise Fault("head-count", f"heads {heads}, volume.meta names {self.volume['Head']}")
        for name in self.layers:
            meta = read_meta(self.dir, name + ".meta", LAYER_KEYS)
            if not RFC3339.match(meta["Created"]):
                raise Fault("created", f"{name}: Created {meta['Created']!r} is no RFC 3339 time")
            length = os.path.getsize(os.path.join(self.dir, name))
            if length > self.volume["Size"] or length % SECTOR:
                raise Fault("length", f"{name} is {length} bytes long in a volume of {self.volume['Size']}")
            if name in heads and length != self.volume["Size"]:
                raise Fault("length", f"head {name} is {length} bytes long, the volume {self.volume['Size']}")
            if name in heads and meta["Removed"]:
                raise Fault("head-removed", "the head is marked removed")
            self.layers[name] = meta
        if self.layers[self.volume["Head"]]["Name"] != self.volume["Head"]:
            raise Fault("head-name", "the head's meta has another name")
        if len(self.layers) > 250:
            raise Fault("count", f"{len(self.layers)} layers, Longhorn opens 250")

    def check_chain(self):
        if self.volume["Parent"] != self.layers[self.volume["Head"]]["Parent"]:
            raise Fault("parent", "volume.meta and the head's meta name different parents")
        for name, meta in self.layers.items():
            parent = meta["Parent"]
            if parent and (parent not in self.layers or not SNAP.match(parent)):
                raise Fault("parent", f"{name}: parent {parent!r} is no snapshot of this directory")
        for name in self.layers:
            seen, at = set(), name
            while at:
                if at in seen:
                    raise Fault("loop", f"the chain of {name} comes back to {at}")
                seen.add(at)
                at = self.layers[at]["Parent"]

    def check_checksums(self):
        for name in self.checksums:
            image = name[:-9]
            if image not in self.layers:
                raise Fault("checksum", f"{name} has no image")
            try:
                value = json.loads(open(os.path.join(self.dir, name), "rb").read())
            except ValueError as err:
                raise Fault("checksum", f"{name} is not JSON: {err}")
            if set(value) != CHECKSUM_KEYS or value["method"] != "crc64":
                raise Fault("checksum", f"{name} has not the form of a checksum file")
            # One of an image that was written to since is worth nothing, and is taken anew when somebody asks: it names the change of
            # the file that it is of. Copies of a directory have other times of change, and those of writing.
            written, hashed = (os.stat(os.path.join(self.dir, file)).st_mtime_ns for file in (image, name))
            if written <= hashed and value["checksum"] != crc64_file(os.path.join(self.dir, image)):
                raise Fault("checksum", f"{image} does not have the checksum that {name} names")

    def check_extents(self):
        for name, found in self.extents.items():
            if any(start % SECTOR for start, _ in found):
                raise Fault("alignment", f"{name} has an extent that begins inside a sector")

    def open_backing(self):
        path = self.volume["BackingFilePath"]
        if not path:
            return None
        path = os.path.join(self.dir, path)
        if not os.path.isfile(path):
            raise Fault("backing", f"backing file {path} is not there")
        return (Qcow2 if open(path, "rb").read(4) == b"QFI\xfb" else Raw)(path)

    def chain(self, name):
        names = []
        while name:
            names.append(name)
            name = self.layers[name]["Parent"]
        return names

    def content(self, name):
        """The whole volume as `name` (a layer's file) shows it."""
        size = self.volume["Size"]
        out = bytearray(size)
        if self.backing:
            out[:min(size, self.backing.size)] = self.backing.read(0, min(size, self.backing.size))
        for layer in reversed(self.chain(name)):
            length = os.path.getsize(os.path.join(self.dir, layer))
            for start, end in self.extents[layer]:
                end = min((end + SECTOR - 1) // SECTOR * SECTOR, length)
                self.files[layer].seek(start)
                out[start:end] = self.files[layer].read(end - start)
        return bytes(out)

    def snapshots(self):
        return {SNAP.match(n).group(1): n for n in self.layers if SNAP.match(n)}


def compare(replica, expected):
    def same(what, name, want):
        got = replica.content(name)
        if len(got) != want["length"] or hashlib.sha256(got).hexdigest() != want["sha256"]:
            step = want["chunk_size"]
            bad = [i * step for i, sha in enumerate(want["chunks_sha256"])
                   if hashlib.sha256(got[i * step:(i + 1) * step]).hexdigest() != sha]
            raise Fault("content", f"{what} differs in the chunks at {bad[:8]}")
    snapshots = expected["snapshots"]
    names = snapshots if isinstance(snapshots, dict) else {s["name"]: s for s in snapshots}
    if set(names) != set(replica.snapshots()):
        raise Fault("snapshots", f"snapshots {sorted(replica.snapshots())}, expected {sorted(names)}")
    same("the head", replica.volume["Head"], expected["head"]["content"])
    for name, want in names.items():
        meta = replica.layers[want["file"]]
        if meta["Removed"] != want["removed"] or (meta["Labels"] or {}) != (want["labels"] or {}):
            raise Fault("snapshots", f"snapshot {name}: removed or labels differ")
        same(f"snapshot {name}", want["file"], want["content"])


# ---- self-test -------------------------------------------------------------------------------------------------

def edit(name, change):
    def damage(d):
        path = os.path.join(d, name)
        value = json.load(open(path))
        change(value)
        open(path, "wb").write(go_json(value))
    return damage


def raw_edit(name, change):
    def damage(d):
        path = os.path.join(d, name)
        data = open(path, "rb").read()
        open(path, "wb").write(change(data))
    return damage


def overwrite(name, offset, data):
    def damage(d):
        with open(os.path.join(d, name), "r+b") as f:
            f.seek(offset)
            f.write(data)
    return damage


def rot(name, offset, data):
    """Other bytes that nobody has written."""
    def damage(d):
        path = os.path.join(d, name)
        times = os.stat(path)
        overwrite(name, offset, data)(d)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return damage


def damages():
    """(fixture, reason, damage) for replica-simple (s1 <- s2 <- s3 <- head-003) and replica-checksums (h1, h2, h3)."""
    s, m, h = "simple", "volume.meta", "volume-head-003.img"
    remove = lambda name: lambda d: os.remove(os.path.join(d, name))
    cut = lambda name, size: lambda d: os.truncate(os.path.join(d, name), size)
    touch = lambda name: lambda d: open(os.path.join(d, name), "w").close()
    sub = lambda a, b: lambda raw: raw.replace(a, b)
    return [
        (s, "meta-missing", remove(m)),
        (s, "meta-json", raw_edit(m, lambda raw: raw[:40])),
        (s, "meta-json", raw_edit("volume-snap-s2.img.meta", lambda raw: b"")),
        (s, "meta-keys", raw_edit(m, sub(b',"Encrypted":false', b""))),
        (s, "meta-keys", raw_edit(h + ".meta", sub(b'"Name"', b'"Title"'))),
        (s, "meta-type", raw_edit(m, sub(b'"Dirty":false', b'"Dirty":0'))),
        (s, "meta-type", raw_edit("volume-snap-s1.img.meta", sub(b'"golden"', b"1"))),
        (s, "meta-encoding", raw_edit("volume-snap-s1.img.meta", sub(b"\\u0026", b"&"))),
        (s, "size", edit(m, lambda v: v.update(Size=-4096))),
        (s, "size", edit(m, lambda v: v.update(Size=16777216 + 512))),
        (s, "sector-size", edit(m, lambda v: v.update(SectorSize=4096))),
        (s, "head-name", edit(m, lambda v: v.update(Head="../volume-head-003.img"))),
        (s, "head-count", lambda d: (remove(h)(d), remove(h + ".meta")(d))),
        (s, "head-count", lambda d: shutil.copy(os.path.join(d, h), os.path.join(d, "volume-head-004.img"))),
        (s, "image-missing", remove("volume-snap-s2.img")),
        (s, "meta-missing", remove("volume-snap-s2.img.meta")),
        (s, "parent", edit(m, lambda v: v.update(Parent="volume-snap-s2.img"))),
        (s, "parent", edit("volume-snap-s2.img.meta", lambda v: v.update(Parent="volume-snap-none.img"))),
        (s, "loop", edit("volume-snap-s1.img.meta", lambda v: v.update(Parent="volume-snap-s3.img"))),
        (s, "length", cut(h, 8388608)),
        (s, "created", edit(h + ".meta", lambda v: v.update(Created="yesterday"))),
        (s, "unknown-file", touch("volume-snap-s1.img.tmp")),
        (s, "content", overwrite("volume-snap-s1.img", 0, b"\x55" * 4096)),
        (s, "rebuilding", edit(m, lambda v: v.update(Rebuilding=True))),
        (s, "file-kind", lambda d: os.symlink("/etc/passwd", os.path.join(d, "volume-snap-x.img"))),
        (s, "engine-name", lambda d: (os.mkdir(d + "/engine"), touch("engine/x.meta")(d))),
        ("checksums", "checksum", rot("volume-snap-h1.img", 0, b"\x55" * 4096)),
    ]


def unpack(fixtures, name, where):
    folder = os.path.join(fixtures, f"replica-{name}")
    subprocess.run(["tar", "-xJf", os.path.join(folder, f"replica-{name}.tar.xz"), "-C", where], check=True)
    return os.path.join(where, "replica"), json.load(open(os.path.join(folder, "expected.json")))


def judge(directory, expected, clean):
    replica = Replica(directory, clean)
    if expected:
        compare(replica, expected)
    return replica


def self_test(fixtures):
    bad = 0
    names = sorted(n[len("replica-"):] for n in os.listdir(fixtures) if n.startswith("replica-"))
    for name in names:
        with tempfile.TemporaryDirectory() as where:
            directory, expected = unpack(fixtures, name, where)
            try:
                judge(directory, expected, clean=name != "dirty")
                print(f"ok: fixture {name}")
            except Fault as fault:
                bad += 1
                print(f"FAIL: fixture {name}: {fault.reason}: {fault}")
    for number, (name, reason, damage) in enumerate(damages(), 1):
        with tempfile.TemporaryDirectory() as where:
            directory, expected = unpack(fixtures, name, where)
            damage(directory)
            try:
                judge(directory, expected, clean=True)
                verdict = "passed"
            except Fault as fault:
                verdict = fault.reason
            bad += verdict != reason
            print(f"{'ok' if verdict == reason else 'FAIL'}: damage {number}: wanted {reason}, judged {verdict}")
    print(f"{len(names)} fixtures, {len(damages())} damaged copies, {bad} wrong verdicts")
    return 1 if bad or not names else 0


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("directory", nargs="?")
    args.add_argument("--expected")
    args.add_argument("--clean", action="store_true", help="must be closed cleanly and not be marked Rebuilding")
    args.add_argument("--print-sha", action="store_true", help="print sha256 of the head and of every snapshot")
    args.add_argument("--self-test", metavar="FIXTURES")
    a = args.parse_args()
    if a.self_test:
        return self_test(a.self_test)
    if not a.directory:
        args.error("a directory is needed")
    try:
        replica = judge(a.directory, json.load(open(a.expected)) if a.expected else None, a.clean)
    except Fault as fault:
        print(f"{fault.reason}: {fault}")
        return 1
    if a.print_sha:
        print("head", hashlib.sha256(replica.content(replica.volume["Head"])).hexdigest())
        for name, file in sorted(replica.snapshots().items()):
            print(name, hashlib.sha256(replica.content(file)).hexdigest())
    else:
        print(f"ok: {len(replica.layers)} layers, {replica.volume['Size']} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
