"""Clients that do everything wrong against a replicated volume: each gets the error that is due, the others notice
nothing, memory stays bounded, the bytes are unharmed and the replicas equal."""
import os, resource, signal, socket, struct, time
from harness import Host, contents, expect, full, shown, stand_still, wait_for
import misuse_client as wire
from misuse_client import Gone, Nbd, Refused

SIZE = 64 << 20
# What a thousand connections, or clients that never read, may cost the engine beyond its pool: their own state.
GROWTH_MAX = 64 << 20
# Connections are dealt to the engine's queues.
os.environ["LONGHORN_QUEUES"] = "2"


def resident(pid):
    for line in open(f"/proc/{pid}/status"):
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return 0


def pattern(block):
    return struct.pack("<Q", block * 0x9E3779B97F4A7C15 % (1 << 64)) * 512


def fill(path, volume):
    client = Nbd(path, volume, "structured")
    for block in range(0, SIZE >> 20):
        client.write(block << 20, pattern(block))
    expect(client.call(wire.FLUSH).error == 0, "flush")
    return client


def unharmed(path, volume, after):
    client = Nbd(path, volume)
    for block in range(1, SIZE >> 20):
        expect(client.read(block << 20, 4096) == pattern(block), f"{after}: block at {block} MiB is not what was written")
    client.close()


def thousand(path, volume, pid):
    """As many connections as there may be; whoever is in is served."""
    before, held, refused, closed = resident(pid), [], 0, 0
    for _ in range(1100):
        try:
            held.append(Nbd(path, volume, "structured"))
        except Refused as reason:
            expect(reason.args[0] == wire.REP_POLICY, f"refused with {reason}")
            refused += 1
        except Gone:
            closed += 1
    expect(held and refused + closed > 0, f"{len(held)} in, {refused} refused, {closed} closed")
    # Handshakes that go no further.
    idle = []
    for _ in range(1000):
        s = socket.socket(socket.AF_UNIX)
        wire.connect(s, path)
        idle.append(s)
    for client in held:
        client.write(0, b"t" * 4096)
        expect(client.read(0, 4096) == b"t" * 4096, "a connection among many")
    grown = resident(pid) - before
    expect(grown <= GROWTH_MAX, f"{grown >> 20} MiB more in memory with {len(held)} clients and 1000 handshakes")
    for s in idle:
        s.close()
    for client in held:
        client.close()
    return len(held), refused, grown


def deaf(path, volume, pid):
    """Clients that send and never read: what they ask for waits, and costs little."""
    before, clients, sent = resident(pid), [], 0
    for kind, length in ((wire.READ, 1 << 20), (77, 512), (wire.STATUS, SIZE), (wire.READ, 4096)):
        client = Nbd(path, volume, "structured")
        client.socket.setblocking(False)
        quiet, request = time.monotonic(), b""
        while time.monotonic() - quiet < 0.5 and sent < 256 << 20:
            request = request or client.header(kind, 0, 0, length) * 64
            try:
                done = client.socket.send(request)
                sent, quiet, request = sent + done, time.monotonic(), request[done:]
            except BlockingIOError:
                time.sleep(0.01)
            except (BrokenPipeError, ConnectionResetError):
                break
        clients.append(client)
    expect(sent < 64 << 20, f"{sent >> 20} MiB of requests were taken from clients that read nothing")
    other = Nbd(path, volume, "extended")
    for i in range(full(200, 2000)):
        other.write(0, bytes([i % 251]) * 4096)
        expect(other.read(0, 4096) == bytes([i % 251]) * 4096, "beside deaf clients")
    grown = resident(pid) - before
    expect(grown <= GROWTH_MAX, f"{grown >> 20} MiB more in memory with clients that never read")
    for client in clients:
        client.close()
    return sent, grown


def sent_again(path, volume, pid):
    """A client hangs up behind a write, while another connection is there by which it may have sent it again: it is not done. Each of
    the two has a queue of its own, and the engine sees only at the end what has come."""
    other, client = Nbd(path, volume), Nbd(path, volume)
    other.write(0, b"n" * 4096)
    stand_still(pid)
    client.send(client.header(wire.WRITE, 0, 0, 4096) + b"o" * 4096)
    client.leave(lambda: os.kill(pid, signal.SIGCONT))
    expect(other.read(0, 4096) == b"n" * 4096, "a write was done whose client had left")
    other.close()


def main():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    host = Host()
    volume = host.name("misuse")
    status = host.up(volume, "--size", "64MiB", "--frontend", "nbd-server")
    path, pid = host.socket(volume), status["engine_pid"]
    wire.check(path, volume, SIZE)
    fill(path, volume).close()
    for _ in range(full(2, 10)):
        wire_misuse(path, volume)
        unharmed(path, volume, "refused requests")
    sent_again(path, volume, pid)
    unharmed(path, volume, "a client that left")
    clients, refused, grown_many = thousand(path, volume, pid)
    unharmed(path, volume, "a thousand connections")
    sent, grown_deaf = deaf(path, volume, pid)
    unharmed(path, volume, "clients that never read")
    wait_for("memory given back", lambda: Nbd(path, volume).read(0, 512), 60)
    now = host.healthy(volume)
    expect(now["engine_pid"] == pid, "the engine was started again")
    paths = [r["path"] for r in now["replicas"]]
    host.ctl("down", volume)
    expect(len({contents(p) for p in paths}) == 1, "replicas differ")
    shown(f"{clients} clients in, {refused} refused, +{grown_many >> 20} MiB; deaf clients: {sent >> 10} KiB taken, "
          f"+{grown_deaf >> 20} MiB; replicas equal")


def wire_misuse(path, volume):
    """The refusals once more, over data that must not change; block 0 is theirs."""
    for framing in wire.FRAMINGS:
        client = Nbd(path, volume, framing)
        for name, error, reply in wire.refusals(client, SIZE):
            expect(reply.error == error, f"{framing}, {name}: error {reply.error}, {error} is due")
        client.close()


main()
