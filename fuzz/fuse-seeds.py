#!/usr/bin/env python3
"""Writes fuzz/corpus/fuse and fuzz/corpus/keeper: requests of the kernel as include/uapi/linux/fuse.h declares them, and messages as
docs/formats/fuse.md lists them, by hand."""
import struct
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
ANSWER, FAILS, LONGER = 3, 7, 11


class Kernel:
    def __init__(self):
        self.unique = 2

    def request(self, opcode, body=b"", node=1, kind=0):
        self.unique += 2
        whole = struct.pack("<IIQQIIIHH", 40 + len(body), opcode, self.unique, node, 0, 0, 0, 0, 0) + body
        return bytes([kind]) + struct.pack("<H", len(whole)) + whole

    def read(self, offset, size):
        return self.request(15, struct.pack("<QQIIQII", 0, offset, size, 0, 0, 0, 0))

    def write(self, offset, data):
        return self.request(16, struct.pack("<QQIIQII", 0, offset, len(data), 0, 0, 0, 0) + data)

    def fallocate(self, mode, offset, length):
        return self.request(43, struct.pack("<QQQII", 0, offset, length, mode, 0))

    def init(self, minor, flags, flags2=None):
        more = b"" if flags2 is None else struct.pack("<I44x", flags2)
        return self.request(26, struct.pack("<IIII", 7, minor, 131072, flags) + more, node=0, kind=2)


def file(name, content):
    path = CORPUS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def message(*lines):
    return "\n".join(lines).encode() + b"\n\n"


def main():
    k = Kernel()
    done = bytes([ANSWER])
    file("fuse/session", b"\0" + b"".join([
        k.init(45, 0x73FFFFFB, 0x1F), k.request(3, bytes(16)), k.request(14, bytes(8)), k.request(1, b"name\0", node=1),
        k.write(4096, b"x" * 4096), k.read(4096, 4096), done, done, k.request(20, bytes(16)), done,
        k.fallocate(3, 0, 8192), done, k.fallocate(0x11, 0, 8192), done, k.fallocate(0, 0, 8192),
        k.request(22, struct.pack("<II", 0, 0) + b"security.capability\0"), k.request(17), k.request(25, bytes(24)),
        k.request(18, bytes(24)), k.request(2, bytes(8)), k.request(42, bytes(8)), k.request(36, bytes(8)), k.request(38)]))
    file("fuse/small", b"\1" + b"".join([
        k.init(23, 0x20), k.read(0, 4096), k.read(4000, 4096), k.read(8192, 512), k.write(0, b""), bytes([LONGER]), bytes([FAILS]),
        k.write(1 << 40, b"y" * 512), bytes([FAILS]), k.request(99), k.request(20, bytes(16)), k.request(20, bytes(16)),
        k.request(20, bytes(16)), k.request(20, bytes(16)), k.request(20, bytes(16))]))
    file("keeper/attach", b"\1" + message("attach", "owner /var/lib/longhorn"))
    file("keeper/adopt", b"\0" + message("adopt", "owner /var/lib/longhorn", "connection 51", "minor 45", "flags 4194336",
                                         "max_write 262144", "loop 3", "sequence 17") + message("info"))
    file("keeper/told", b"\1" + message("ok", "version 1", "volume demo", "owner /var/lib/a b", "node /dev/longhorn/demo", "pid 77",
                                        "served 1", "engine 78", "connection 51", "minor 45", "flags 4194336", "max_write 262144"))
    file("keeper/refused", b"\1" + message("error", "kind in-use", "text "))


main()
