"""Every misuse that libnbd can be talked into: the right error, and the connection goes on.

usage: misuse.py URI SIZE
"""

import errno
import sys

import nbd

uri, size = sys.argv[1], int(sys.argv[2])
MAX = 1 << 20


def connect(structured=True):
    h = nbd.NBD()
    h.set_request_structured_replies(structured)
    if structured:
        h.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
    h.connect_uri(uri)
    # Nothing is caught on this side.
    h.set_strict_mode(0)
    return h


def fails(h, wanted, call, *args):
    try:
        call(*args)
    except nbd.Error as error:
        assert error.errno == errno.errorcode[wanted], (call.__name__, args, error)
    else:
        raise AssertionError(f"{call.__name__}{args[-2:]} succeeded")
    assert h.aio_is_ready(), "the connection is lost"
    assert h.pread(512, 0) == b"w" * 512


for structured in (False, True):
    h = connect(structured)
    h.pwrite(b"w" * 512, 0)
    # Beyond the end.
    fails(h, errno.EINVAL, h.pread, 1024, size - 512)
    fails(h, errno.EINVAL, h.pread, 512, size)
    fails(h, errno.ENOSPC, h.pwrite, bytes(1024), size - 512)
    fails(h, errno.ENOSPC, h.pwrite, bytes(512), size)
    fails(h, errno.EINVAL, h.trim, 1024, size - 512)
    fails(h, errno.ENOSPC, h.zero, 1024, size - 512)
    fails(h, errno.EINVAL, h.cache, 1024, size - 512)
    # Unaligned.
    fails(h, errno.EINVAL, h.pread, 1, 0)
    fails(h, errno.EINVAL, h.pread, 512, 1)
    fails(h, errno.EINVAL, h.pwrite, b"x", 0)
    fails(h, errno.EINVAL, h.pwrite, bytes(513), 0)
    fails(h, errno.EINVAL, h.pwrite, bytes(512), 100)
    fails(h, errno.EINVAL, h.trim, 100, 0)
    fails(h, errno.EINVAL, h.zero, 512, 3)
    # Oversize: refused, the bytes swallowed.
    fails(h, errno.EINVAL, h.pread, MAX + 512, 0)
    fails(h, errno.EINVAL, h.pwrite, bytes(MAX + 512), 0)
    fails(h, errno.EINVAL, h.pwrite, bytes(32 << 20), 0)
    # Flags that mean nothing here.
    fails(h, errno.EINVAL, h.pread, 512, 0, nbd.CMD_FLAG_NO_HOLE)
    fails(h, errno.EINVAL, h.pwrite, bytes(512), 0, nbd.CMD_FLAG_FAST_ZERO)
    fails(h, errno.EINVAL, h.trim, 512, 0, nbd.CMD_FLAG_REQ_ONE)
    fails(h, errno.EINVAL, h.flush, nbd.CMD_FLAG_DF)
    fails(h, errno.EINVAL, h.pread, 512, 0, 1 << 11)
    if structured:
        status = lambda length, offset: h.block_status(length, offset, lambda *a: 0)
        fails(h, errno.EINVAL, status, 1024, size - 512)
        fails(h, errno.EINVAL, status, 100, 0)
    # Nothing is done to nothing.
    h.zero(0, 0)
    h.trim(0, 0)
    assert h.pread(512, 0) == b"w" * 512
    h.shutdown()

h = nbd.NBD()
try:
    h.connect_uri(uri.replace("/demo", "/other"))
    raise AssertionError("another export's name was accepted")
except nbd.Error as error:
    assert error.errno == "ENOENT", error

# A server without TLS says so, and a client that insists gives up.
h = nbd.NBD()
h.set_tls(nbd.TLS_REQUIRE)
try:
    h.connect_uri(uri)
    raise AssertionError("TLS where there is none")
except nbd.Error:
    pass

# Gone in the middle of a payload.
for _ in range(20):
    h = connect()
    h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(MAX)), 65536)
    del h
h = connect()
assert h.pread(512, 0) == b"w" * 512
print("ok")
