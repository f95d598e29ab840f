"""Every command of libnbd against a server on a disk of zeroes, with and without structured replies.

usage: commands.py URI SIZE
"""

import sys

import nbd

uri, size = sys.argv[1], int(sys.argv[2])


def connect(structured=True, contexts=True):
    h = nbd.NBD()
    h.set_request_structured_replies(structured)
    if contexts and structured:
        h.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
    h.connect_uri(uri)
    return h


def read_chunks(h, length, offset, flags=0):
    seen = []

    def chunk(data, at, status, error):
        seen.append((at, len(data), status, error.value))
        return 0

    data = h.pread_structured(length, offset, chunk, flags)
    return data, seen


def extents_of(h, length, offset, flags=0):
    found = []
    h.block_status(length, offset, lambda context, at, entries, error: found.append((context, at, entries)), flags)
    assert len(found) == 1 and found[0][0] == nbd.CONTEXT_BASE_ALLOCATION, found
    entries = found[0][2]
    return list(zip(entries[::2], entries[1::2]))


for structured in (False, True):
    h = connect(structured)
    assert h.get_structured_replies_negotiated() is structured
    assert h.get_size() == size
    assert h.is_rotational() is False and h.is_read_only() is False
    assert h.can_flush() and h.can_fua() and h.can_trim() and h.can_zero() and h.can_fast_zero()
    assert h.can_multi_conn() and h.can_cache() and h.can_df() is structured
    assert h.get_block_size(nbd.SIZE_MINIMUM) == 512
    assert h.get_block_size(nbd.SIZE_PREFERRED) == 4096
    assert h.get_block_size(nbd.SIZE_MAXIMUM) == 1 << 20

    data = bytes(range(256)) * 16
    h.pwrite(data, 8192)
    assert h.pread(4096, 8192) == data
    h.pwrite(data, 65536 - 512, nbd.CMD_FLAG_FUA)
    assert h.pread(8192, 65536 - 4096)[3584:7680] == data
    big = bytes(i * 7 % 251 for i in range(4096)) * 256
    h.pwrite(big, 1 << 20)
    assert h.pread(1 << 20, 1 << 20) == big
    h.flush()
    h.cache(1 << 20, 0)
    h.zero(4096, 8192)
    assert h.pread(4096, 8192) == bytes(4096)
    h.pwrite(data, 8192)
    h.zero(512, 8192, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
    assert h.pread(4096, 8192) == bytes(512) + data[512:]
    h.zero(65536, 1 << 20, nbd.CMD_FLAG_FAST_ZERO)
    assert h.pread(65536, 1 << 20) == bytes(65536)
    h.trim(1 << 20, 1 << 20, nbd.CMD_FLAG_FUA)
    assert h.pread(1 << 20, 1 << 20) == bytes(1 << 20)
    h.trim(size, 0)
    assert h.pread(4096, 8192) == bytes(4096)
    if structured:
        h.pwrite(data, 4096)
        for flags in (0, nbd.CMD_FLAG_DF):
            got, chunks = read_chunks(h, 8192, 0, flags)
            assert got == bytes(4096) + data
            assert chunks == [(0, 8192, nbd.READ_DATA, 0)], chunks
        h.trim(size, 0)
        h.pwrite(bytes([1]) * 65536, 131072)
        hole = nbd.STATE_HOLE | nbd.STATE_ZERO
        assert extents_of(h, size, 0) == [(131072, hole), (65536, 0), (size - 196608, hole)]
        assert extents_of(h, 4096, 131072, nbd.CMD_FLAG_REQ_ONE) == [(4096, 0)]
        h.trim(size, 0)

    # Many at once, answered in whatever order.
    cookies = []
    for i in range(200):
        cookies.append(h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray([i % 251 + 1]) * 4096), i * 4096))
    while h.aio_in_flight() > 0:
        h.poll(-1)
        for cookie in list(cookies):
            if h.aio_command_completed(cookie):
                cookies.remove(cookie)
    for i in range(200):
        assert h.pread(4096, i * 4096) == bytes([i % 251 + 1]) * 4096
    h.trim(size, 0)
    h.shutdown()

# What one connection has flushed, another one reads.
a, b = connect(), connect()
a.pwrite(b"x" * 4096, 0)
a.flush()
assert b.pread(4096, 0) == b"x" * 4096
a.trim(size, 0)

# The handshake, step by step.
h = nbd.NBD()
h.set_opt_mode(True)
h.set_full_info(True)
h.connect_uri(uri)
names = []
assert h.opt_list(lambda name, description: names.append((name, description))) == 1
assert names == [("demo", "a disk in memory")], names
for name in ("demo", ""):
    h.set_export_name(name)
    h.opt_info()
    assert h.get_size() == size
    assert h.get_canonical_export_name() == "demo"
    assert h.get_export_description() == "a disk in memory"
contexts = []
h.add_meta_context("base:")
assert h.opt_list_meta_context(contexts.append) == 1 and contexts == ["base:allocation"]
h.set_export_name("other")
try:
    h.opt_info()
    raise AssertionError("another export's name was accepted")
except nbd.Error as error:
    assert error.errno == "ENOENT", error
h.set_export_name("demo")
h.opt_go()
assert h.pread(512, 0) == bytes(512)
h.shutdown()

h = nbd.NBD()
h.set_opt_mode(True)
h.connect_uri(uri)
h.opt_abort()
print("ok")
