"""A volume moves between two hosts while it is used: a relay shows it on the one while its engine is on the other, and an
engine in the relay's place, under its device, fences the one before. Registers are written on one host and read on the
other; engines and relays are killed; nobody without the key is served; what waits on the device that was left fails when its
stay is ended, or the volume comes back there. No I/O error else, no stale answer, replicas equal; the pauses are printed."""
import itertools, json, mmap, os, random, signal, threading, time
from by_hand import ByHand
from harness import BIN, Host, contents, expect, full, have, rng, run, say, shown, skip, stand_still, wait_for
from misuse_client import WRITE, Nbd
from namespaces import Hosts

DATA, RELAY = 10000, 10100
SIZE = 64 << 20
BLOCK = 4096
MIGRATIONS = full(4, 20)
GIVES_UP = 3


class Registers:
    """Blocks with numbers: what is read is at least what was acknowledged before, and at most what has been begun."""

    def __init__(self, first, count=64):
        self.first, self.count = first, count
        self.begun, self.acked = [0] * count, [0] * count
        self.wrong = []

    def offset(self, n):
        return (self.first + n) * BLOCK


class User(threading.Thread):
    """Writes or reads registers through a host's device until it is stopped; its longest pause is kept."""

    def __init__(self, registers, device, writes, dice):
        super().__init__(daemon=True)
        self.registers, self.writes, self.dice = registers, writes, random.Random(dice.randrange(1 << 30))
        self.fd = os.open(device, os.O_RDWR | os.O_DIRECT)
        self.page = mmap.mmap(-1, BLOCK)
        self.done, self.longest, self.stopped, self.error = 0, 0.0, False, None
        self.start()

    def run(self):
        try:
            while not self.stopped:
                began = time.monotonic()
                (self.write if self.writes else self.read)(self.dice.randrange(self.registers.count))
                self.longest = max(self.longest, time.monotonic() - began)
                self.done += 1
        except OSError as err:
            self.error = err
        os.close(self.fd)

    def write(self, n):
        r = self.registers
        r.begun[n] += 1
        self.page[:] = r.begun[n].to_bytes(8, "little") * (BLOCK // 8)
        os.pwritev(self.fd, [self.page], r.offset(n))
        if self.dice.randrange(50) == 0:
            os.fdatasync(self.fd)
        r.acked[n] = r.begun[n]

    def read(self, n):
        r = self.registers
        least = r.acked[n]
        os.preadv(self.fd, [self.page], r.offset(n))
        seen, most = self.page[:], r.begun[n]
        value = int.from_bytes(seen[:8], "little")
        if seen != seen[:8] * (BLOCK // 8) or not least <= value <= most:
            r.wrong.append(f"register {r.first + n}: {value}, not {least} to {most}")

    def take(self):
        longest, self.longest = self.longest, 0.0
        return longest

    def stop(self):
        self.stopped = True
        self.join(30)
        expect(not self.is_alive(), "a request is not answered")
        expect(self.error is None, f"an error on a device: {self.error}")


class Volume(ByHand):
    """Its processes on hosts 1 and 2; replicas on all three."""

    def __init__(self, host, hosts):
        super().__init__(host, "mig", SIZE, [f"{hosts.address(n)}:{DATA}" for n in (1, 2, 3)], hosts.apart)
        self.hosts, self.roots, self.running = hosts, {}, {}
        self.numbers, self.stays, self.late, self.moves = itertools.count(), {}, {}, 0
        for n in (1, 2):
            self.roots[n] = os.path.join(host.root, f"host{n}")
            os.mkdir(self.roots[n])
            self.begin_stay(n)

    def begin_stay(self, n):
        """The volume comes to host n, for the first time or from elsewhere."""
        self.stays[n] = str(next(self.numbers))

    def end_stay(self, n, stay):
        """What a node's manager does once it knows that the volume is elsewhere."""
        line = [*self.hosts.apart(n), os.path.join(BIN, "longhorn"), "end-stay", "--root", self.roots[n], "--stay", stay, self.name]
        return run(*line, check=False, timeout=20)

    def relay_address(self, n):
        return f"tcp:{self.hosts.address(n)}:{RELAY}"

    def line(self, n, *more, key=None, frontend="fuse"):
        self.control = os.path.join(self.roots[n], "e.sock")
        return [*self.hosts.apart(n), os.path.join(BIN, "longhorn"), "controller", "--root", self.roots[n],
                "--key-file", key or f"{self.record}/key", "--size", str(SIZE), "--frontend", frontend, "--insecure",
                "--engine-instance-name", f"{self.name}-e", "--listen", f"unix:{self.roots[n]}/e.sock",
                "--relay-listen", self.relay_address(n), "--stay", self.stays[n], *more, self.name]

    def start_engine(self, n, *more):
        members = [f"--replica={r['name']}={a}" for r, a in zip(self.replicas, self.addresses)]
        self.running[n] = self.spawn(self.line(n, "--authority", self.record, *members, *more))

    def next_generation(self):
        """What fences off whoever serves the volume now: without a number an engine leaves one that lives alone."""
        self.attachment = 1 + max(getattr(self, "attachment", 0), json.load(open(f"{self.record}/authority.json"))["epoch"]["generation"] >> 32)
        return self.attachment << 32

    def start_relay(self, n, source):
        self.running[n] = self.spawn(self.line(n, "--relay-from", self.relay_address(source)))

    def device(self, n):
        return self.hosts.path(n, f"/dev/longhorn/{self.name}")

    def info(self, n):
        done = run(os.path.join(BIN, "longhorn"), "--url", f"unix:{self.roots[n]}/e.sock", "info", check=False)
        return json.loads(done.stdout) if done.returncode == 0 else {}

    def wait_up(self, n):
        wait_for(f"the device of host {n}", lambda: self.info(n).get("frontendState") == "up", 30)

    def kill(self, n):
        self.running[n].kill()
        self.running[n].wait()

    def clean(self):
        """Nothing that ended well is left to be done."""
        for child in self.children:
            child.kill()
            child.wait()
        for n in self.roots:
            if n in self.hosts.holders and os.path.exists(self.device(n)):
                self.end_stay(n, self.stays[n])


def users(volume, registers, writer, reader, dice):
    return [User(registers, volume.device(writer), True, dice), User(registers, volume.device(reader), False, dice)]


def going_on(what, users):
    """Everybody gets answers, still or again."""
    before = [u.done for u in users]
    wait_for(f"{what}: answers", lambda: all(u.done > b + 5 or u.error for u, b in zip(users, before)), 30)
    for u in users:
        expect(u.error is None, f"{what}: an error on a device: {u.error}")


def killed(volume, n, again, users):
    """The longest pause of the users while a process of host n is killed and started again."""
    for u in users:
        u.take()
    volume.kill(n)
    again()
    going_on(f"after a kill on host {n}", users)
    return max(u.take() for u in users)


def nobody_without_the_key(volume, host, source, target):
    wrong = os.path.join(host.root, "wrong-key")
    with open(wrong, "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(os.urandom(32))
    volume.running[target] = volume.spawn(volume.line(target, "--relay-from", volume.relay_address(source), key=wrong))
    def told():
        log = open(os.path.join(host.root, "by-hand.log")).read()
        return all(f"{side}: the key is not this volume's" in log for side in ("turns this relay away", "a relay is turned away"))
    wait_for("a word of the wrong key", told, 30)
    status = wait_for("a word of the relay", lambda: volume.info(target), 30)
    expect(status["frontendState"] == "down" and not os.path.exists(volume.device(target)), "a wrong key is let in")
    volume.running[target].terminate()
    expect(volume.running[target].wait(20) == 0, "a relay that waits does not end")
    # Straight to NBD: the client's flags and an option, which a server behind the door would answer.
    client = ("import socket, sys; s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 5); s.settimeout(20); "
              "first = s.recv(40, socket.MSG_WAITALL); "
              "s.sendall(b'\\0\\0\\0\\3' + b'IHAVEOPT' + b'\\0\\0\\0\\3' + b'\\0' * 400); rest = b''\n"
              "while True:\n    try: more = s.recv(4096)\n    except ConnectionError: break\n"
              "    if not more: break\n    rest += more\nprint((first + rest).hex())")
    heard = bytes.fromhex(run(*volume.hosts.apart(target), "python3", "-c", client, volume.hosts.address(source),
                              str(RELAY), timeout=60).stdout.strip())
    expect(heard[:4] == b"LHhs" and b"NBDMAGIC" not in heard and b"IHAVEOPT" not in heard, f"NBD without the key: {heard}")


def ended_at_once(volume, n):
    """A stay that is over is ended before the volume comes back: whoever waits hears so, and nothing is left of it."""
    running, stay = volume.running[n], volume.stays[n]
    expect(running.poll() is not None and volume.late[n][1].error is None, "the device does not wait any more")
    expect(volume.end_stay(n, "another").returncode == 0, "a stay that is not this one")
    expect(os.path.exists(volume.device(n)) and volume.late[n][1].error is None, "another stay's end took the device away")
    done = volume.end_stay(n, stay)
    expect(done.returncode == 0, f"the stay does not end: {done.stderr}")
    for user in volume.late[n]:
        user.join(30)
        expect(user.error is not None, "what waits on a device whose stay has ended waits on")
    expect(not os.path.exists(volume.device(n)), "the device of a stay that has ended is there")


def nothing_late(volume, n, poison):
    """What waited on the device of before has failed, and was not carried out."""
    for user in volume.late.pop(n, []):
        user.join(30)
        expect(user.error is not None, "what waits on a device of before is answered, or waits for ever")
    with open(volume.device(n), "rb") as device:
        device.seek(poison.offset(0))
        expect(not any(device.read(poison.count * BLOCK)), "a write that waited on a device of before was carried out")


def sent_again_elsewhere(volume, source, target):
    """A client of a relay hangs up behind a write, and has sent it again to the engine by the time that the relay sees of it: what the
    engine has been written since stays."""
    volume.running[target] = relay = volume.spawn(volume.line(target, "--relay-from", volume.relay_address(source), frontend="nbd-server"))
    volume.wait_up(target)
    client = Nbd(volume.hosts.path(target, volume.host.socket(volume.name)), volume.name)
    device = os.open(volume.device(source), os.O_RDWR | os.O_DIRECT)
    page = mmap.mmap(-1, BLOCK)
    page[:] = b"n" * BLOCK
    stand_still(relay.pid)
    client.send(client.header(WRITE, 0, SIZE - BLOCK, BLOCK) + b"o" * BLOCK)
    os.pwritev(device, [page], SIZE - BLOCK)
    client.leave(lambda: relay.send_signal(signal.SIGCONT))
    os.preadv(device, [page], SIZE - BLOCK)
    expect(page[:] == b"n" * BLOCK, "a relay passes on a write whose client has left")
    os.close(device)
    relay.terminate()
    expect(relay.wait(30) == 0, "the relay does not end")


def no_revert_beside_a_relay(volume, source, target):
    """Who uses the volume through a relay would not see that its bytes are others, and the engine's host does not see who does."""
    def engine(*words, check=True):
        return run(os.path.join(BIN, "longhorn"), "--url", f"unix:{volume.roots[source]}/e.sock", *words, check=check)
    engine("snapshot", "create", "before")
    volume.start_relay(target, source)
    volume.wait_up(target)
    done = engine("snapshot", "revert", "before", check=False)
    expect(done.returncode == 1 and "relays" in done.stderr, f"reverted under a relay: {done.stderr}")
    volume.running[target].terminate()
    expect(volume.running[target].wait(30) == 0, "the relay does not end")
    wait_for("the revert", lambda: engine("snapshot", "revert", "before", check=False).returncode == 0, 10)


def used_and_told_to_end(volume, engine, relay, users):
    """A relay that is told to end stays while its device is used, and fails nothing, also where requests wait for an engine that is away."""
    volume.kill(engine)
    time.sleep(0.5)
    volume.running[relay].terminate()
    time.sleep(7)
    volume.start_engine(engine)
    going_on("after a relay in use was told to end while its engine was away", users)
    expect(volume.running[relay].poll() is None, "a relay ends though its device is in use")


def migrated(volume, source, target, dice, registers, poison):
    """Moves the volume under load: the pause that the target's user sees, from the end of the relay on."""
    volume.begin_stay(target)
    volume.start_relay(target, source)
    volume.wait_up(target)
    nothing_late(volume, target, poison)
    writer = User(registers, volume.device(target), True, dice)
    # Reads on beside the new engine, if the old one answers: never what is old.
    left = User(registers, volume.device(source), False, dice)
    reader = User(registers, volume.device(target), False, dice)
    going_on("before the migration", [writer, reader, left])
    time.sleep(0.3)
    writer.take(), reader.take()
    old = volume.running[source]
    volume.kill(target)
    volume.start_engine(target, "--generation", str(volume.next_generation()))
    going_on("after the migration", [writer, reader])
    pause = max(writer.take(), reader.take())
    expect(old.wait(20) == GIVES_UP, f"the engine before has ended with {old.returncode}")
    said = left.done
    going_on("without the engine before", [writer, reader])
    expect(left.done <= said + 1, "the engine before answers")
    late = User(poison, volume.device(source), True, dice)
    time.sleep(0.2)
    expect(late.done == 0, "a device without an engine takes writes")
    volume.late[source] = [left, late]
    volume.moves += 1
    if volume.moves == 1 or dice.random() < 0.5:
        ended_at_once(volume, source)
        done = volume.end_stay(target, volume.stays[target])
        expect(done.returncode == GIVES_UP and "has not ended" in done.stderr, f"beside its engine: {done.returncode} {done.stderr}")
    writer.stop(), reader.stop()
    return pause


def main():
    if not have("ip", "nsenter", "unshare", "losetup") or not os.path.exists("/dev/fuse"):
        return skip("migrate", "no ip, nsenter, unshare, losetup or /dev/fuse")
    host, dice = Host(), rng()
    hosts = Hosts(host.prefix)
    volume = Volume(host, hosts)
    try:
        for n in (1, 2, 3):
            volume.spawn(volume.replica(n, "--insecure"))
        volume.start_engine(1)
        wait_for("all replicas", volume.healthy, 60)
        volume.wait_up(1)
        nobody_without_the_key(volume, host, 1, 2)
        sent_again_elsewhere(volume, 1, 2)
        no_revert_beside_a_relay(volume, 1, 2)
        volume.start_relay(2, 1)
        volume.wait_up(2)
        one, two, moved, poison = Registers(0), Registers(1000), Registers(2000), Registers(3000)
        with_relay = users(volume, one, 1, 2, dice) + users(volume, two, 2, 1, dice)
        going_on("engine and relay", with_relay)
        engine_pause = killed(volume, 1, lambda: volume.start_engine(1), with_relay)
        relay_pause = killed(volume, 2, lambda: volume.start_relay(2, 1), with_relay)
        say(f"pauses: engine killed {engine_pause:.2f} s, relay killed {relay_pause:.2f} s")
        hosts.cut(2, True)
        time.sleep(1)
        hosts.cut(2, False)
        going_on("after the network was away", with_relay)
        used_and_told_to_end(volume, 1, 2, with_relay)
        # Back: nobody uses the relay's device any more.
        for user in with_relay[1:3]:
            user.stop()
        done = with_relay[0].done
        volume.running[2].terminate()
        expect(volume.running[2].wait(30) == 0, "the relay does not end")
        expect(not os.path.exists(volume.device(2)), "the relay's device stays")
        going_on("after the roll-back", [with_relay[0], with_relay[3]])
        expect(with_relay[0].done > done, "the engine is disturbed")
        for user in (with_relay[0], with_relay[3]):
            user.stop()
        # A relay whose engine is away holds up nobody who does not use it.
        volume.start_relay(2, 1)
        volume.wait_up(2)
        volume.kill(1)
        volume.running[2].terminate()
        expect(volume.running[2].wait(30) == 0, "a relay without its engine does not end")
        volume.start_engine(1)
        volume.wait_up(1)
        pauses = []
        for turn in range(MIGRATIONS):
            source, target = (1, 2) if turn % 2 == 0 else (2, 1)
            pauses.append(migrated(volume, source, target, dice, moved, poison))
        volume.stop()
    finally:
        volume.clean()
        hosts.remove()
    wrong = one.wrong + two.wrong + moved.wrong
    expect(not wrong, f"{len(wrong)} wrong answers: {wrong[:5]}")
    expect(len({contents(r["path"]) for r in volume.replicas}) == 1, "replicas differ")
    pauses.sort()
    shown(f"{MIGRATIONS} migrations under load, pause median {pauses[len(pauses) // 2] * 1000:.0f} ms, worst "
          f"{pauses[-1] * 1000:.0f} ms; engine killed {engine_pause * 1000:.0f} ms, relay killed {relay_pause * 1000:.0f} "
          f"ms; {sum(moved.begun) + sum(one.begun) + sum(two.begun)} writes, no error, nothing stale, replicas equal")


main()
