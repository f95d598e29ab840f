"""What the guest's scenarios share: the two servers, their devices, and the certainty that nothing is left behind.

A scenario prints `SHOWN text` with its figures, `SKIP name: reason` for what cannot run here, and exits with status 1 at
the first thing that is not as promised. Everything here runs where the kernel has the devices: `run.py` sees to that.
"""
import atexit, glob, os, re, select, shutil, subprocess, sys, tempfile, time

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
EXAMPLES = os.environ.get("LH_EXAMPLES", os.path.join(os.environ.get("CARGO_TARGET_DIR", os.path.join(TOP, "target")),
                                                      "release", "examples"))
sys.path.insert(0, os.path.join(TOP, "tests"))
from said import FULL, Load, expect, fail, full, have, run, shown, skip, wait_for  # noqa: E402, F401  (scenarios take them from here)

WORK = tempfile.mkdtemp(prefix="lh-guest-", dir="/dev/shm")
atexit.register(shutil.rmtree, WORK, ignore_errors=True)


CPUS = os.cpu_count()


def kernel_is(*version):
    """True from this version of Linux on."""
    return tuple(int(n) for n in re.findall(r"\d+", os.uname().release)[:2]) >= version


def kernel_has(name, what, *version):
    """The same; else says what is not tested."""
    there = kernel_is(*version)
    if not there:
        skip(name, f"{what} needs Linux {'.'.join(map(str, version))}")
    return there


def has_cpus(name, count):
    """True with so many processors; else says so."""
    if CPUS < count:
        skip(name, f"this kernel has {CPUS} processor" + "s" * (CPUS > 1))
    return CPUS >= count


def example(name):
    path = os.path.join(EXAMPLES, name)
    if not os.path.exists(path):
        fail(f"{path} is not built: tests/guest/run.py builds it")
    return path


class Process:
    """A server that says lines and takes orders."""

    def __init__(self, *command):
        self.log = open(os.path.join(WORK, os.path.basename(command[0]) + ".log"), "a")
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
                                        text=True, bufsize=1)
        atexit.register(self.kill)

    @property
    def pid(self):
        return self.process.pid

    def hear(self, word, seconds=60):
        """The next line, which begins with the word."""
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            fail(f"{self.process.args[0]} does not say {word!r} within {seconds} s")
        line = self.process.stdout.readline().strip()
        if not line.startswith(word):
            fail(f"{self.process.args[0]} said {line!r}, not {word!r}; its log: {self.errors()}")
        return line

    def say(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, line, word, seconds=60):
        self.say(line)
        return self.hear(word, seconds)

    def errors(self):
        self.log.flush()
        with open(self.log.name) as log:
            return log.read()[-2000:]

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            try:
                pipe.close()
            except OSError:
                pass

    def end(self, seconds=60):
        expect(self.process.wait(seconds) == 0, f"{self.process.args[0]} ended with {self.process.returncode}: "
                                                f"{self.errors()}")
        self.kill()


class Ublk:
    """A ublk device over a file, in memory if no other is named."""
    name = "ublk"

    def __init__(self, volume="vol", size=512 << 20, queues=2, depth=64, block=512, null=False, threads=0, file=None,
                 more=()):
        self.volume, self.size, self.block = volume, size, block
        self.options = ["--queues", str(queues), "--depth", str(depth), "--block-size", str(block)]
        self.options += ["--null", "yes"] if null else ["--file", file or os.path.join(WORK, volume), *more]
        self.start(threads)

    def start(self, threads=0, extra=()):
        self.server = Process(example("ublk-memory"), "serve", self.volume, "--size", str(self.size), *self.options,
                              "--threads", str(threads), *extra)
        line = self.server.hear("ready")
        self.device = line.split()[1]
        self.numbers = line.split()[2]

    def kill(self):
        self.server.kill()

    def restart(self):
        self.start()

    def resize(self, size):
        self.server.ask(f"resize {size}", "resized")
        self.size = size

    def stop(self):
        self.server.ask("stop", "stopped")
        self.server.end()

    def refuses_to_stop(self):
        return "in use" in self.server.ask("stop", "refused")

    def settle(self):
        pass


class Nbd:
    """An NBD device of the kernel's client, over a file in memory, and somebody who looks after its connections."""
    name = "nbd"

    def __init__(self, volume="vol", size=512 << 20, connections=2, timeout=1, **_):
        self.volume, self.size = volume, size
        self.socket = os.path.join(WORK, volume + ".sock")
        self.connections = ["--connections", str(connections)]
        self.timeout = timeout
        self.serve()
        self.keeper = Process(example("nbd-kernel"), "keep", volume, self.socket, *self.connections,
                              "--timeout", str(timeout))
        self.device = self.keeper.hear("connected").split()[1]

    def serve(self):
        self.server = Process(example("nbd-kernel"), "serve", self.socket, os.path.join(WORK, self.volume), str(self.size))
        self.server.hear("serving")

    def kill(self):
        self.server.kill()

    def restart(self):
        self.serve()
        self.keeper.hear("reconnected")

    def resize(self, size):
        self.server.ask(f"resize {size}", "resized")
        run(example("nbd-kernel"), "resize", self.volume, size)
        self.size = size

    def stop(self):
        run(example("nbd-kernel"), "disconnect", self.volume)
        self.keeper.end()
        self.server.kill()

    def settle(self):
        pass


KINDS = {"ublk": Ublk, "nbd": Nbd}


def attribute(device, name):
    """What the kernel tells of a device, whatever its node is called."""
    with open(os.path.join(directory_of(device), name)) as file:
        return file.read().strip()


def directory_of(device):
    numbers = os.stat(device).st_rdev
    return os.path.realpath(f"/sys/dev/block/{os.major(numbers)}:{os.minor(numbers)}")


def fio(name, device, *options, verify=True):
    """Runs fio, what it writes verified; any error or mismatch ends the scenario."""
    command = ["fio", f"--name={name}", f"--filename={device}", "--direct=1", "--randrepeat=0", "--ioengine=libaio",
               "--output-format=terse", *options]
    if verify:
        command += ["--verify=crc32c", "--verify_fatal=1", "--verify_dump=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=WORK)
    expect(done.returncode == 0, f"fio {name}: status {done.returncode}\n{done.stdout[-500:]}\n{done.stderr[-1500:]}")


class Mounted:
    """A file system on a device, mounted while the block runs."""

    def __init__(self, device, kind=None):
        self.device, self.where = device, os.path.join(WORK, "mnt-" + os.path.basename(device))
        os.makedirs(self.where, exist_ok=True)
        if kind:
            options = ["-q", "-F"] if kind == "ext4" else ["-q", "-f"]
            run(f"mkfs.{kind}", *options, device)

    def __enter__(self):
        run("mount", self.device, self.where)
        return self.where

    def __exit__(self, *_):
        run("umount", self.where, timeout=600)


def fds(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def kernel_threads():
    """Threads of the kernel that belong to devices, by name, without the workers that serve whoever comes, which have the name
    of the last one, and without a loop device's rescuer, which stays as long as its node."""
    found = {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            name, rest = open(path).read().split("(", 1)[1].rsplit(") ", 1)
        except (OSError, IndexError, ValueError):
            continue
        of_kernel = rest.split()[1] == "2"
        of_device = any(word in name for word in ("ublk", "nbd", "loop", "scsi"))
        if of_kernel and of_device and not re.match(r"kworker/(\d|u|R-loop)", name):
            found[name] = found.get(name, 0) + 1
    return found


def kernel_threads_are_again(before, seconds=30):
    until = time.monotonic() + seconds
    while (now := kernel_threads()) != before:
        expect(time.monotonic() < until, f"threads of the kernel: {before} before, {now} now")
        time.sleep(0.05)


def ring_work(pid):
    """Ticks that threads have used which io_uring has made for a process: none, where everything is done at once or waited for
    by poll. One that has once done something for the driver's control device may stay, and sleep."""
    ticks = 0
    for place in glob.glob(f"/proc/{pid}/task/*"):
        # proc_pid_stat(5): user and system time are the 14th and 15th field, and the name, in brackets, is the second.
        name, _, rest = open(os.path.join(place, "stat")).read().partition("(")[2].rpartition(")")
        if name.startswith("iou-"):
            ticks += sum(int(field) for field in rest.split()[11:13])
    return ticks


def nodes():
    return sorted(n for n in os.listdir("/dev") if n.startswith(("ublkb", "ublkc")))
