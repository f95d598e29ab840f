"""Everything at once: three hands that take, remove, fold and export snapshots, grow, clone, scrub and upgrade the volume and add, rebuild
and take out replicas, beside one that kills and stops its processes, under register loads; then without a load, and they stop and
start it besides, and make it what a snapshot is. Whatever is asked is done or refused in a sentence; no block reads wrong, a
snapshot has the same bytes each time that it is exported or cloned, the volume has those of the one that it was made, and once all
is calm it heals, and its replicas are equal. LH_SECONDS=n goes on for so long."""
import collections, hashlib, os, random, re, signal, subprocess, threading, time
from harness import BIN, Host, contents, device_of_kernel, expect, full, kill, rng, say, shown, wait_for

MIB = 1 << 20
SECONDS = int(os.environ.get("LH_SECONDS", full(40, 900)))
SIZE, LARGEST = 32 * MIB, 64 * MIB
HANDS = 3
# The part of the time that the volume is in use.
IN_USE = 0.7
# A command that waits for a volume to heal may wait as long as the faults go on, and then for the healing.
PATIENCE = 300

# In no refusal: what the transport met is nothing that people can act on.
NEVER = ("panicked", "transport error", "code: '")
# Nor this, while nobody takes the volume down: it is up, whatever dies.
DOWN = "is not up"


def sum_of(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Volume:
    """The volume, and what is known of its snapshots."""

    def __init__(self, host, name):
        self.host, self.name = host, name
        self.lock = threading.Lock()
        self.size = SIZE
        # Whether a load uses it; without one it may be down.
        self.in_use = True
        # sha256 of each snapshot that was exported, in the size that the export had.
        self.sums = {}
        self.done, self.refused = collections.Counter(), collections.defaultdict(collections.Counter)
        self.wrong = []

    def ctl(self, *words):
        """What the command printed; `None`: it was refused."""
        what = " ".join(words[:2]) if words[0] in ("snapshot", "replica") else words[0]
        began = time.monotonic()
        done = self.host.ctl(*words, check=False, timeout=PATIENCE)
        took = time.monotonic() - began
        with self.lock:
            if done.returncode == 0:
                self.done[what] += 1
                return done.stdout
            said = done.stderr.strip().splitlines() or [""]
            sentence = re.sub(r"[0-9a-f]{8}\b|\d+", "N", said[-1].replace(self.host.root, "ROOT").replace(self.name, "VOLUME"))
            self.refused[what][sentence] += 1
            never = (*NEVER, DOWN) if self.in_use else NEVER
            if done.returncode != 1 or not done.stderr.strip() or any(word in done.stderr for word in never):
                self.wrong.append(f"{' '.join(words)} after {took:.1f} s: status {done.returncode}: {done.stderr}")
            return None

    def names(self):
        listed = self.host.ctl("-o", "json", "snapshot", "ls", self.name, check=False, timeout=PATIENCE)
        return re.findall(r'"name": ?"([^"]+)"[^}]*?"removed": ?false', listed.stdout) if listed.returncode == 0 else []

    def replicas(self):
        status = self.host.ctl("-o", "json", "status", self.name, check=False, timeout=PATIENCE)
        return re.findall(r'"name": ?"([^"]+-r-[0-9a-f]{8})"', status.stdout) if status.returncode == 0 else []

    def export(self, snapshot, file):
        """The size and the sum of a snapshot's bytes; `None`: the export was refused."""
        if self.ctl("snapshot", "export", self.name, snapshot, file) is None:
            return None
        found = os.path.getsize(file), sum_of(file)
        self.holds(snapshot, "an export", *found)
        return found

    def holds(self, snapshot, what, size, found):
        """That it is what the snapshot was when it was first looked at."""
        with self.lock:
            known = self.sums.setdefault((snapshot, size), found)
            if known != found:
                self.wrong.append(f"{what} of snapshot {snapshot}, {size} bytes: {found}, and was {known}")


class Hand(threading.Thread):
    """Asks for one thing after the other."""

    def __init__(self, volume, number, dice, until):
        super().__init__(daemon=True)
        self.volume, self.number, self.dice, self.until, self.turn = volume, number, dice, until, 0
        self.file = os.path.join(volume.host.root, f"hand-{number}.img")

    def new_name(self):
        """One that nobody had before: hands begin to count anew when the volume is not in use any more."""
        return f"{'s' if self.volume.in_use else 't'}{self.number}-{self.turn}"

    def some(self, names):
        return self.dice.choice(names) if names else None

    def take(self):
        self.volume.ctl("snapshot", "create", self.volume.name, self.new_name())

    def remove(self):
        if (names := self.volume.names()) and len(names) > 3:
            self.volume.ctl("snapshot", "rm", self.volume.name, self.some(names))

    def purge(self):
        self.volume.ctl("snapshot", "purge", self.volume.name)

    def export(self):
        if snapshot := self.some(self.volume.names()):
            self.volume.export(snapshot, self.file)

    def look(self):
        self.volume.ctl(*self.dice.choice([("status", self.volume.name), ("ls",), ("replica", "ls", self.volume.name),
                                           ("snapshot", "tree", self.volume.name), ("snapshot", "ls", self.volume.name)]))

    def differ(self):
        names = self.volume.names()
        if len(names) > 1:
            self.volume.ctl("snapshot", "diff", self.volume.name, *self.dice.sample(names, 2))

    def grow(self):
        with self.volume.lock:
            self.volume.size = min(self.volume.size + MIB, LARGEST)
            size = self.volume.size
        self.volume.ctl("resize", self.volume.name, str(size))

    def add(self):
        if len(self.volume.replicas()) < 5:
            self.volume.ctl("replica", "add", self.volume.name)

    def take_out(self):
        names = self.volume.replicas()
        if len(names) > 2:
            self.volume.ctl("replica", "rm", self.volume.name, self.some(names))

    def rebuild(self):
        if replica := self.some(self.volume.replicas()):
            self.volume.ctl("replica", "rebuild", self.volume.name, replica)

    def scrub(self):
        more = self.dice.choice([("--wait",), ("--wait", "--repair"), ("--cancel",), ("--status",)])
        self.volume.ctl("scrub", self.volume.name, *more)

    def upgrade(self):
        self.volume.ctl("upgrade", self.volume.name)

    def clone(self):
        snapshot = self.some(self.volume.names())
        if not snapshot:
            return
        new = f"{self.volume.name}-{self.new_name()}"
        self.volume.host.volumes.append(new)
        if self.volume.ctl("clone", f"{self.volume.name}@{snapshot}", new) is None:
            return
        status = self.volume.host.ctl("-o", "json", "status", new, check=False, timeout=PATIENCE)
        for path in re.findall(r'"path": ?"([^"]+)"', status.stdout):
            if self.volume.ctl("replica", "export", path, self.file) is not None:
                self.volume.holds(snapshot, "a clone", os.path.getsize(self.file), sum_of(self.file))
        self.volume.ctl("rm", new, "--yes")

    def stop(self):
        self.volume.ctl("down", self.volume.name)

    def start_again(self):
        self.volume.ctl("up", self.volume.name)

    def revert(self):
        """The volume is then what the snapshot is. One hand alone does this, and nobody else changes a byte."""
        snapshot, new = self.some(self.volume.names()), f"r{self.number}-{self.turn}"
        if not snapshot or (before := self.volume.export(snapshot, self.file)) is None:
            return
        if self.volume.ctl("snapshot", "revert", self.volume.name, snapshot) is None:
            return
        if self.volume.ctl("snapshot", "create", self.volume.name, new) is None:
            return
        after = self.volume.export(new, self.file)
        if after not in (None, before):
            self.volume.wrong.append(f"reverted to {snapshot}, which is {before}, and is {after}")

    def run(self):
        things = [(self.take, 20), (self.remove, 14), (self.purge, 8), (self.export, 12), (self.look, 8), (self.differ, 4), (self.grow, 4),
                  (self.add, 6), (self.take_out, 6), (self.rebuild, 5), (self.scrub, 6), (self.upgrade, 2), (self.clone, 4)]
        if not self.volume.in_use:
            things = [(thing, often) for thing, often in things if thing != self.grow] + [(self.stop, 4), (self.start_again, 12)]
            if self.number == 0:
                things.append((self.revert, 20))
        try:
            while time.monotonic() < self.until:
                self.turn += 1
                self.dice.choices([thing for thing, _ in things], [often for _, often in things])[0]()
        except BaseException as e:
            # Of a thread that ends so nobody would hear.
            self.volume.wrong.append(f"hand {self.number}, at its turn {self.turn}: {e!r}")
            raise


def disturb(volume, dice, until, loads, done):
    """Kills and stops what the volume lives by, one at a time, until a load has ended; counts what was done."""
    while time.monotonic() < until and all(load.poll() is None for load in loads):
        time.sleep(dice.uniform(0.5, 4))
        what = dice.choice(["replica killed", "replica killed", "replica stopped", "engine killed", "manager killed"])
        who = {"replica": "longhorn replica", "engine": "longhorn controller", "manager": "longhorn instance-manager"}[what.split()[0]]
        pids = [pid for pid in volume.host.processes() if f"{who} " in words_of(pid)]
        if not pids:
            continue
        pid = dice.choice(pids)
        done[what] += 1
        if what.endswith("stopped"):
            kill(pid, signal.SIGSTOP)
            time.sleep(dice.uniform(0.1, 3))
            kill(pid, signal.SIGCONT)
        else:
            kill(pid, signal.SIGKILL)
        if what == "manager killed":
            # As the host's service manager does.
            volume.ctl("up", volume.name)


def words_of(pid):
    try:
        return open(f"/proc/{pid}/cmdline", "rb").read().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def layers(replica):
    return sorted(name for name in os.listdir(replica) if name.startswith("volume-snap-") and name.endswith(".img"))


def loads_of(host, volume, frontend, dice):
    """What uses the volume: blocks, and beside them sectors, eight of which share a block of the replicas."""
    seconds, seed = str(SECONDS * IN_USE + 10), lambda: str(dice.randrange(1 << 30))
    if frontend == "fuse":
        commands = [["register-device", f"/dev/longhorn/{volume.name}", "256", "8", seconds, seed()]]
    else:
        common = ["register-load", "--socket", host.socket(volume.name), "--export", volume.name, "--connections", "2", "--depth", "3",
                  "--seconds", seconds]
        commands = [[*common, "--blocks", "256", "--seed", seed()],
                    [*common, "--blocks", "512", "--register", "512", "--first", str(16 * MIB), "--seed", seed()]]
    return [subprocess.Popen([os.path.join(BIN, name), *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for name, *words in commands]


def all_at_once(volume, dice, part, loads, faults):
    """So much of the time."""
    until = time.monotonic() + SECONDS * part
    hands = [Hand(volume, n, random.Random(dice.randrange(1 << 30)), until) for n in range(HANDS)]
    for hand in hands:
        hand.start()
    disturb(volume, dice, until, loads, faults)
    # What a load has found is told now: the hands would go on without it to the end of the part.
    failed = [load for load in loads if load.poll()]
    expect(not failed, "\n".join(f"{load.args[0]}: {load.communicate()[0]}" for load in failed))
    for hand in hands:
        hand.join(2 * PATIENCE)
        expect(not hand.is_alive(), "a command never ends")
    for load in loads:
        out = load.communicate(timeout=PATIENCE)[0]
        expect(load.returncode == 0, f"{load.args[0]}: {out}")


def main():
    host, dice, faults = Host(), rng(), collections.Counter()
    volume = Volume(host, host.name("soak"))
    quorum = dice.choice(["any", "majority"])
    frontend = dice.choice(["nbd-server", "fuse"] if device_of_kernel() else ["nbd-server"])
    host.up(volume.name, "--size", str(SIZE), "--frontend", frontend, "--quorum", quorum)
    all_at_once(volume, dice, IN_USE, loads_of(host, volume, frontend, dice), faults)
    volume.in_use = False
    all_at_once(volume, dice, 1 - IN_USE, [], faults)
    for what, sentences in sorted(volume.refused.items()):
        for sentence, often in sentences.most_common():
            say(f"{what}, {often} times: {sentence.strip()}")
    expect(not volume.wrong, "\n".join(volume.wrong))
    host.up(volume.name)
    wait_for("the volume healthy", lambda: host.status(volume.name)["robustness"] == "healthy", 120)
    host.ctl("snapshot", "purge", volume.name)
    paths = [r["path"] for r in host.status(volume.name)["replicas"]]
    wait_for("every replica folded as far", lambda: len({tuple(layers(p)) for p in paths}) == 1, 120)
    for snapshot in volume.names():
        expect(volume.export(snapshot, os.path.join(host.root, "last.img")), f"snapshot {snapshot} cannot be exported")
    expect(not volume.wrong, "\n".join(volume.wrong))
    for log in ("instance-manager", volume.name):
        bad = [text for _, text in host.log(log) if "panicked" in text]
        expect(not bad, f"the log of {log}: {bad}")
    host.ctl("down", volume.name)
    expect(len({contents(p) for p in paths}) == 1, "replicas differ")
    refused = sum(sum(s.values()) for s in volume.refused.values())
    asked = ", ".join(f"{n} {what}" for what, n in sorted(volume.done.items()))
    shown(f"{frontend}, quorum {quorum}: {sum(volume.done.values())} commands done ({asked}), {refused} refused, {sum(faults.values())} "
          f"faults ({', '.join(f'{n} {what}' for what, n in sorted(faults.items()))}): nothing read wrong, {len(volume.sums)} snapshots "
          f"as they were, {len(paths)} replicas equal")


main()
