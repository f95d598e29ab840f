"""What the end-to-end scenarios share: a root of their own, the programs, and the certainty that nothing is left behind.

A scenario prints `SHOWN text` with its figures, `SKIP name: reason` for what cannot run here, and exits with status 1
at the first thing that is not as promised.
"""
import atexit, datetime, glob, hashlib, json, os, random, shutil, signal, subprocess, sys, tempfile, threading, time

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BIN = os.environ.get("LH_BIN", os.path.join(os.environ.get("CARGO_TARGET_DIR", os.path.join(TOP, "target")), "release"))
JUDGE = os.path.join(TOP, "tests", "judge", "judge.py")
FIXTURES = os.path.join(TOP, "tests", "fixtures")
sys.path.insert(0, os.path.join(TOP, "tests"))
from said import FULL, Load, expect, fail, full, have, run, say, shown, skip, wait_for  # noqa: E402, F401  (scenarios take them from here)


class Host:
    """One root with its instance manager and volumes."""

    def __init__(self, where="/var/tmp"):
        self.root = tempfile.mkdtemp(prefix="lh-e2e-", dir=where)
        self.prefix = "t" + os.path.basename(self.root)[-8:].replace("_", "x")
        self.volumes = []
        atexit.register(self.clean)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def name(self, word):
        volume = f"{self.prefix}-{word}"
        self.volumes.append(volume)
        return volume

    def ctl(self, *args, check=True, timeout=180):
        try:
            return run(os.path.join(BIN, "longhornctl"), "--root", self.root, *args, check=check, timeout=timeout)
        except SystemExit:
            # The root goes with the scenario, and with it what its processes said last.
            for when, text in self.log("")[-60:]:
                print(f"    {datetime.datetime.fromtimestamp(when, datetime.UTC):%H:%M:%S.%f} {text}", file=sys.stderr)
            self.show()
            raise

    def show(self):
        """Prints what runs, and what is said of the volumes."""
        for pid in self.processes():
            try:
                words = open(f"/proc/{pid}/cmdline", "rb").read().split(b"\0")[:4]
            except OSError:
                continue
            print(f"    runs: {pid} {b' '.join(words).decode(errors='replace')}", file=sys.stderr)
        for volume in self.volumes:
            command = [os.path.join(BIN, "longhornctl"), "--root", self.root, "-o", "json", "status", volume]
            try:
                said = subprocess.run(command, capture_output=True, text=True, timeout=20)
            except subprocess.TimeoutExpired:
                continue
            print(f"    {volume}: {' '.join((said.stdout + said.stderr).split())}", file=sys.stderr)

    def json(self, *args):
        return json.loads(self.ctl("-o", "json", *args).stdout)

    def status(self, volume):
        return self.json("status", volume)

    def up(self, volume, *args):
        self.ctl("up", volume, *args)
        return self.status(volume)

    def healthy(self, volume, replicas=3, seconds=120):
        def settled():
            s = self.status(volume)
            return s["robustness"] == "healthy" and sum(r["mode"] == "RW" for r in s["replicas"]) == replicas and s
        return wait_for(f"{volume} healthy with {replicas} replicas", settled, seconds)

    def socket(self, volume):
        return f"/run/longhorn/{volume}.nbd.sock"

    def processes(self):
        """Pids of every process of this root."""
        found = []
        for path in glob.glob("/proc/[0-9]*/cmdline"):
            try:
                words = open(path, "rb").read().split(b"\0")
            except OSError:
                continue
            text = b" ".join(words).decode(errors="replace")
            if words[0].startswith(BIN.encode()) and (self.root in text or any(v in text for v in self.volumes)):
                found.append(int(path.split("/")[2]))
        return [p for p in found if p != os.getpid()]

    def kill_everything(self):
        """kill -9 of every process, again and again until none is left (managers restart the others)."""
        for _ in range(100):
            pids = self.processes()
            if not pids:
                return
            for pid in pids:
                kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        fail(f"processes do not die: {self.processes()}")

    def log(self, name):
        """What the log of a process, or of every process whose name begins so, has: (seconds, text), oldest first."""
        lines = []
        for path in glob.glob(os.path.join(self.root, "log", name + "*.log")):
            for line in open(path, errors="replace"):
                words = line.split(maxsplit=3)
                try:
                    when = datetime.datetime.fromisoformat(words[0].replace("Z", "+00:00"))
                except (ValueError, IndexError):
                    continue
                lines.append((when.timestamp(), words[-1].rstrip()))
        return sorted(lines)

    def replica_pids(self, volume):
        return {r["name"]: r["pid"] for r in self.status(volume)["replicas"]}

    def clean(self):
        for line in open("/proc/mounts"):
            if line.split()[0].startswith("/dev/longhorn/" + self.prefix):
                subprocess.run(["umount", "-l", line.split()[1]], capture_output=True)
        for pid in self.processes():
            kill(pid, signal.SIGCONT)
        for volume in self.volumes:
            try:
                subprocess.run([os.path.join(BIN, "longhornctl"), "--root", self.root, "down", volume],
                               capture_output=True, timeout=30)
            except subprocess.TimeoutExpired:
                pass
        for _ in range(50):
            pids = self.processes()
            for pid in pids:
                kill(pid, signal.SIGKILL)
            if not pids:
                break
            time.sleep(0.1)
        if os.environ.get("LH_KEEP") != "1":
            shutil.rmtree(self.root, ignore_errors=True)


def kill(pid, sig):
    try:
        os.kill(pid, sig)
    except (ProcessLookupError, TypeError):
        pass


def stand_still(pid):
    """Stops a process, and waits until none of its threads does anything more: who sends the signal does not."""
    os.kill(pid, signal.SIGSTOP)

    def stands_still():
        try:
            stats = [open(path).read() for path in glob.glob(f"/proc/{pid}/task/*/stat")]
        except (FileNotFoundError, ProcessLookupError):
            return False
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)
    wait_for(f"process {pid} stands still", stands_still, 30)


def device_of_kernel():
    """Whether this kernel shows volumes as block devices: FUSE under a loop device is what they all have."""
    return os.path.exists("/dev/fuse") and os.path.exists("/dev/loop-control")


def judge(directory, *args):
    return run(sys.executable, JUDGE, directory, *args, check=False)


def contents(directory):
    """sha256 of head and snapshots as the judge reads them from a stopped replica."""
    done = judge(directory, "--print-sha")
    expect(done.returncode == 0, f"{directory}: {done.stdout}")
    return done.stdout


def own_data(directory):
    """sha256 of every layer's own data, for chains so long that reading the volume as each of them shows it takes minutes."""
    done = judge(directory)
    expect(done.returncode == 0, f"{directory}: {done.stdout}")
    sums = []
    for name in sorted(os.listdir(directory)):
        if name.endswith(".img"):
            data = hashlib.sha256()
            with open(os.path.join(directory, name), "rb") as file:
                end = os.fstat(file.fileno()).st_size
                at = 0
                while at < end:
                    try:
                        at = os.lseek(file.fileno(), at, os.SEEK_DATA)
                    except OSError:
                        break
                    block = os.pread(file.fileno(), 4096, at)
                    if block.strip(b"\0"):
                        data.update(at.to_bytes(8, "little") + block)
                    at += 4096
            sums.append(("head" if name.startswith("volume-head-") else name, data.hexdigest()))
    return tuple(sorted(sums))


def fio(name, seconds, *args, timeout=None):
    """Runs fio with verification and returns its JSON; any error or mismatch ends the scenario."""
    command = ["fio", f"--name={name}", "--output-format=json", "--randrepeat=0", f"--runtime={seconds}",
               "--time_based", *args]
    if any(a.startswith("--verify=") for a in args):
        # Without a backlog, fio 3.33 calls blocks of a second pass over a file wrong ("bad header rand_seed"), on any
        # plain file as well: it verifies them with the seeds of another order than it wrote them in.
        command += ["--verify_backlog=512", "--verify_fatal=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout or seconds * 4 + 300, cwd="/tmp")
    if done.returncode != 0:
        fail(f"fio {name}: status {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout[done.stdout.index("{"):])


def percentile(values, part):
    """The value below which this part of all values lies; the largest one if there are few."""
    return sorted(values)[min(int(len(values) * part), len(values) - 1)]


class Watch(threading.Thread):
    """Measures the longest pause of a single 4 KiB read or write at the end of a device while other things happen; only
    reads, where what is there belongs to somebody."""

    def __init__(self, path, offset, writes=True):
        super().__init__(daemon=True)
        self.writes = writes
        self.fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        self.offset, self.longest, self.stopped, self.error = offset, 0.0, False, None
        self.start()

    def run(self):
        import mmap
        page, turn = mmap.mmap(-1, 4096), 0
        while not self.stopped:
            turn += 1
            began = time.monotonic()
            try:
                if turn % 2 and self.writes:
                    os.pwritev(self.fd, [page], self.offset)
                else:
                    os.preadv(self.fd, [page], self.offset)
            except OSError as err:
                self.error = err
                return
            self.longest = max(self.longest, time.monotonic() - began)
            time.sleep(0.001)

    def take(self):
        longest, self.longest = self.longest, 0.0
        return longest

    def stop(self):
        self.stopped = True
        self.join(60)
        os.close(self.fd)
        if self.error:
            fail(f"an error on the device: {self.error}")


def rng(seed=None):
    """Random choices with a seed that is printed, so that a failure can be run again."""
    seed = int(os.environ.get("LH_SEED", seed or random.randrange(1 << 32)))
    say(f"seed {seed} (LH_SEED={seed} repeats it)")
    return random.Random(seed)
