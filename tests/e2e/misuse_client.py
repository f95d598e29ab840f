"""An NBD client written from the protocol document alone (doc/proto.md of the NBD project): simple, structured and
extended framing, and no manners. It shares nothing with the server, so that both have to have read the same document.
"""
import errno, socket, struct, time

OPTION_MAGIC, REPLY_MAGIC = 0x49484156454F5054, 0x0003E889045565A9
COMPACT, EXTENDED = 0x25609513, 0x21E41C71
SIMPLE_REPLY, STRUCTURED_REPLY, EXTENDED_REPLY = 0x67446698, 0x668E33EF, 0x6E8A278C
OPT_ABORT, OPT_INFO, OPT_GO, OPT_STRUCTURED, OPT_LIST_META, OPT_SET_META, OPT_EXTENDED = 2, 6, 7, 8, 9, 10, 11
REP_ACK, REP_INFO, REP_META, REP_POLICY, REP_EXT_REQD = 1, 3, 4, (1 << 31) + 2, (1 << 31) + 10
INFO_BLOCK_SIZE = 3
READ, WRITE, DISC, FLUSH, TRIM, CACHE, ZEROES, STATUS = range(8)
FUA, NO_HOLE, DF, REQ_ONE, FAST_ZERO, PAYLOAD = (1 << bit for bit in range(6))
CHUNK_NONE, CHUNK_DATA, CHUNK_HOLE, CHUNK_STATUS, CHUNK_STATUS_EXT = 0, 1, 2, 5, 6
CHUNK_ERROR, CHUNK_ERROR_OFFSET = (1 << 15) + 1, (1 << 15) + 2
HOLE, ZERO = 1, 2
FRAMINGS = ("simple", "structured", "extended")


class Refused(Exception):
    """An option was refused; the argument is the reply's kind."""


class Gone(Exception):
    """The server has closed the connection."""


class Reply:
    def __init__(self):
        self.error, self.text, self.at, self.data, self.extents, self.raw = 0, "", None, b"", [], b""


def connect(client, path):
    """Connects, with patience while the listener's queue is full; that the engine did not die meanwhile is looked at later."""
    until = time.monotonic() + 5
    while True:
        try:
            return client.connect(path)
        except (ConnectionRefusedError, BlockingIOError):
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


class Nbd:
    def __init__(self, path, export, framing="simple", contexts=True, timeout=30):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(timeout)
        connect(self.socket, path)
        self.framing, self.cookie, self.reads = framing, 0x0102030405060708, {}
        greeting = self.take(18)
        assert greeting[:16] == b"NBDMAGICIHAVEOPT" and struct.unpack(">H", greeting[16:])[0] & 3 == 3, greeting
        self.send(struct.pack(">I", 3))
        if framing != "simple":
            self.option(OPT_STRUCTURED if framing == "structured" else OPT_EXTENDED)
            if contexts:
                self.option(OPT_SET_META, text(export) + struct.pack(">I", 1) + text("base:allocation"))
        for kind, data in self.option(OPT_GO, text(export) + struct.pack(">HH", 1, INFO_BLOCK_SIZE)):
            if kind == REP_INFO and data[:2] == b"\0\0":
                self.size, self.flags = struct.unpack(">QH", data[2:])

    # The wire.
    def send(self, data):
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Gone from error

    def take(self, length):
        data = bytearray()
        while len(data) < length:
            try:
                part = self.socket.recv(length - len(data))
            except ConnectionResetError as error:
                raise Gone from error
            if not part:
                raise Gone
            data += part
        return bytes(data)

    def close(self):
        self.socket.close()

    def leave(self, resume):
        """Hangs up in sight of a server that does not look yet; it does, and closes, after this."""
        self.socket.shutdown(socket.SHUT_WR)
        resume()
        try:
            while self.socket.recv(4096):
                pass
        except ConnectionResetError:
            pass
        self.close()

    def is_closed(self):
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def option(self, number, data=b""):
        """Sends an option; the replies before the acknowledgement."""
        self.send(struct.pack(">QII", OPTION_MAGIC, number, len(data)) + data)
        replies = []
        while True:
            magic, echoed, kind, length = struct.unpack(">QIII", self.take(20))
            assert magic == REPLY_MAGIC and echoed == number, (magic, echoed)
            body = self.take(length)
            if kind >> 31:
                raise Refused(kind)
            if kind == REP_ACK:
                return replies
            replies.append((kind, body))

    # Requests.
    def header(self, kind, flags, offset, length):
        self.cookie += 1
        if kind == READ:
            self.reads[self.cookie] = length
        if self.framing == "extended":
            return struct.pack(">IHHQQQ", EXTENDED, flags, kind, self.cookie, offset, length)
        return struct.pack(">IHHQQI", COMPACT, flags, kind, self.cookie, offset, length)

    def call(self, kind, flags=0, offset=0, length=0, payload=None):
        """One request and its reply."""
        if payload is not None:
            length = len(payload)
            if self.framing == "extended":
                flags |= PAYLOAD
        self.send(self.header(kind, flags, offset, length) + (payload or b""))
        return self.reply(self.cookie)

    def read(self, offset, length):
        reply = self.call(READ, 0, offset, length)
        assert reply.error == 0, (offset, length, reply.error, reply.text)
        return reply.data

    def write(self, offset, data, flags=0):
        reply = self.call(WRITE, flags, offset, payload=data)
        assert reply.error == 0, (offset, len(data), reply.error, reply.text)

    def reply(self, cookie=None):
        """All chunks of the next reply, put together."""
        reply = Reply()
        while True:
            head = self.take(16)
            magic, = struct.unpack(">I", head[:4])
            if magic == SIMPLE_REPLY:
                assert self.framing != "extended", "a simple reply where headers are extended"
                reply.error, answered = struct.unpack(">IQ", head[4:])
                length = self.reads.pop(answered, None)
                assert cookie in (None, answered), (cookie, answered)
                assert self.framing == "simple" or length is None, "a simple reply to a read"
                if length is not None and reply.error == 0:
                    reply.data = self.take(length)
                reply.raw += head
                return reply
            flags, kind, answered = struct.unpack(">HHQ", head[4:])
            assert cookie in (None, answered), (cookie, answered)
            if magic == STRUCTURED_REPLY and self.framing == "structured":
                head += self.take(4)
                length, = struct.unpack(">I", head[16:])
            elif magic == EXTENDED_REPLY and self.framing == "extended":
                head += self.take(16)
                _, length = struct.unpack(">QQ", head[16:])
            else:
                raise AssertionError(f"{magic:#x} begins no reply with {self.framing} framing")
            body = self.take(length)
            reply.raw += head + body
            self.chunk(reply, kind, body)
            if flags & 1:
                self.reads.pop(answered, None)
                return reply

    def chunk(self, reply, kind, body):
        if kind == CHUNK_NONE:
            assert not body
        elif kind == CHUNK_DATA:
            reply.at, reply.data = struct.unpack(">Q", body[:8])[0], body[8:]
        elif kind == CHUNK_STATUS and self.framing == "structured":
            reply.extents = list(struct.iter_unpack(">II", body[4:]))
        elif kind == CHUNK_STATUS_EXT and self.framing == "extended":
            count, = struct.unpack(">I", body[4:8])
            reply.extents = list(struct.iter_unpack(">QQ", body[8:]))
            assert len(reply.extents) == count
        elif kind in (CHUNK_ERROR, CHUNK_ERROR_OFFSET):
            reply.error, length = struct.unpack(">IH", body[:6])
            reply.text = body[6:6 + length].decode()
            rest = body[6 + length:]
            assert len(rest) == (8 if kind == CHUNK_ERROR_OFFSET else 0) and reply.error
            if rest:
                reply.at, = struct.unpack(">Q", rest)
        else:
            raise AssertionError(f"chunk {kind} with {self.framing} framing")


def text(words):
    return struct.pack(">I", len(words)) + words.encode()


def status_with_payload(client, offset, length, contexts):
    """A block status request whose payload names the contexts (extended headers only)."""
    payload = struct.pack(">Q", length) + b"".join(struct.pack(">I", c) for c in contexts)
    return client.call(STATUS, 0, offset, payload=payload)


def context_id(client_path, export):
    """What the server calls base:allocation: the number in its reply to the selection."""
    raw = Nbd.__new__(Nbd)
    raw.socket = socket.socket(socket.AF_UNIX)
    raw.socket.settimeout(30)
    raw.socket.connect(client_path)
    raw.take(18)
    raw.send(struct.pack(">I", 3))
    raw.option(OPT_EXTENDED)
    (kind, body), = raw.option(OPT_SET_META, text(export) + struct.pack(">I", 1) + text("base:allocation"))
    raw.close()
    assert kind == REP_META and body[4:] == b"base:allocation", (kind, body)
    return struct.unpack(">I", body[:4])[0]


def refusals(client, size):
    """Every misuse of the transmission phase: name, the error that is due, and what to send."""
    most = 1 << 20
    cases = [
        ("read beyond the end", errno.EINVAL, (READ, 0, size - 512, 1024)),
        ("read behind the end", errno.EINVAL, (READ, 0, size, 512)),
        ("read at the end of numbers", errno.EINVAL, (READ, 0, (1 << 64) - 512, 512)),
        ("trim behind the end", errno.EINVAL, (TRIM, 0, size, 512)),
        ("zeroes behind the end", errno.ENOSPC, (ZEROES, 0, size, 512)),
        ("cache behind the end", errno.EINVAL, (CACHE, 0, size, 512)),
        ("read unaligned", errno.EINVAL, (READ, 0, 1, 512)),
        ("read of a byte", errno.EINVAL, (READ, 0, 0, 1)),
        ("trim unaligned", errno.EINVAL, (TRIM, 0, 0, 100)),
        ("zeroes unaligned", errno.EINVAL, (ZEROES, 0, 7, 512)),
        ("read too long", errno.EINVAL, (READ, 0, 0, most + 512)),
        ("unknown command", errno.EINVAL, (99, 0, 0, 512)),
        ("unknown flag of a read", errno.EINVAL, (READ, 1 << 14, 0, 512)),
        ("flag of another command", errno.EINVAL, (TRIM, REQ_ONE, 0, 512)),
        ("flush of a part", errno.EINVAL, (FLUSH, 0, 0, 512)),
    ]
    for name, error, (kind, flags, offset, length) in cases:
        yield name, error, client.call(kind, flags, offset, length)
    for name, error, flags, offset, length in [
        ("write beyond the end", errno.ENOSPC, 0, size - 512, 1024),
        ("write at the end of numbers", errno.ENOSPC, 0, (1 << 64) - 512, 512),
        ("write unaligned", errno.EINVAL, 0, 100, 512),
        ("write of a byte", errno.EINVAL, 0, 0, 1),
        ("write too long", errno.EINVAL, 0, 0, most + 512),
        ("write far too long", errno.EINVAL, 0, 0, 33 << 20),
        ("unknown flag of a write", errno.EINVAL, 1 << 9, 0, 4096),
    ]:
        yield name, error, client.call(WRITE, flags, offset, payload=b"\xee" * length)
    if client.framing != "simple":
        yield "status behind the end", errno.EINVAL, client.call(STATUS, 0, size, 512)
    if client.framing == "extended":
        yield "payload where none belongs", errno.EINVAL, client.call(TRIM, 0, 0, payload=b"x" * 4096)


def check_extended(path, export, size):
    """What extended headers add, and the bytes of replies as the document has them."""
    client = Nbd(path, export, "extended")
    context = context_id(path, export)
    client.cookie = 0x0102030405060707
    flush = client.call(FLUSH)
    assert flush.raw.hex() == "6e8a278c" "0001" "0000" "0102030405060708" + "00" * 16, flush.raw.hex()
    client.write(4096, b"e" * 4096)
    client.cookie = 0x1112131415161716
    read = client.call(READ, DF, 4096, 512)
    head = "6e8a278c" "0001" "0001" "1112131415161717" "0000000000001000" "0000000000000208" "0000000000001000"
    assert read.raw.hex() == head + "65" * 512, read.raw[:48].hex()
    # QEMU does not set the flag that a write must have; its bytes follow all the same.
    client.send(client.header(WRITE, FUA, 8192, 512) + b"q" * 512)
    assert client.reply(client.cookie).error == 0 and client.read(8192, 512) == b"q" * 512
    # Lengths beyond 32 bits are lengths: too long for this volume, not cut off.
    assert client.call(TRIM, 0, 0, (1 << 32) + 512).error == errno.EINVAL or size > 1 << 32
    assert client.call(ZEROES, FAST_ZERO, 0, size).error == 0
    assert client.call(STATUS, 0, 0, size).extents and client.read(4096, 4096) == bytes(4096)
    whole = client.call(STATUS, 0, 0, size)
    assert sum(length for length, _ in whole.extents) == size, whole.extents
    one = client.call(STATUS, REQ_ONE, 0, size)
    assert len(one.extents) == 1 and one.extents[0][0] <= size
    assert status_with_payload(client, 0, size, [context]).extents == whole.extents
    none = status_with_payload(client, 0, size, [])
    assert none.error == 0 and not none.extents
    for wrong in ([context + 1], [context, context], [context] * 100):
        assert status_with_payload(client, 0, size, wrong).error == errno.EINVAL, wrong
    client.send(client.header(DISC, 0, 0, 0))
    assert client.is_closed()
    # After extended headers there is no way back to structured replies.
    late = Nbd.__new__(Nbd)
    late.socket = socket.socket(socket.AF_UNIX)
    late.socket.settimeout(30)
    late.socket.connect(path)
    late.take(18)
    late.send(struct.pack(">I", 3))
    late.option(OPT_EXTENDED)
    try:
        late.option(OPT_STRUCTURED)
        raise AssertionError("structured replies after extended headers")
    except Refused as refused:
        assert refused.args[0] == REP_EXT_REQD, refused
    late.close()


def check(path, export, size):
    """Everything of this file but floods, against any server of this project."""
    check_extended(path, export, size)
    for framing in FRAMINGS:
        client = Nbd(path, export, framing)
        assert client.size == size
        client.write(0, b"k" * 8192)
        for name, error, reply in refusals(client, size):
            assert reply.error == error, (framing, name, reply.error, reply.text)
            assert framing == "simple" or reply.text, (framing, name)
            assert client.read(0, 8192) == b"k" * 8192, (framing, name)
        for kind in (READ, TRIM, ZEROES, CACHE):
            assert client.call(kind, 0, 0, 0).error == 0, (framing, kind)
        client.close()
        for junk in (b"\x5a" * 64, struct.pack(">IHHQQI", COMPACT ^ 1, 0, 0, 1, 0, 512) + bytes(36)):
            client = Nbd(path, export, framing)
            client.send(junk)
            assert client.is_closed(), f"{framing}: bytes that are no request"
        client = Nbd(path, export, framing)
        flags = PAYLOAD if framing == "extended" else 0
        client.send(client.header(WRITE, flags, 0, (64 << 20) + 512))
        assert client.is_closed(), f"{framing}: a payload that nobody should have to read"
        # Gone in the middle: of a header, of a payload, with requests in flight.
        for cut in (1, 20, 100, 500_000):
            client = Nbd(path, export, framing)
            client.send((client.header(WRITE, flags, 0, 1 << 20) + b"\xee" * 500_000)[:cut])
            client.close()
        client = Nbd(path, export, framing)
        for _ in range(50):
            client.send(client.header(READ, 0, 0, 1 << 20))
        client.close()
        assert Nbd(path, export, framing).read(0, 8192) == b"k" * 8192, framing


if __name__ == "__main__":
    import sys
    check(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    print("ok")
