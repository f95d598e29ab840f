"""What every scenario says and does in the same words: its figures, what it skips, and the first thing that is not as promised;
and the load that many of them are under."""
import contextlib, os, shutil, subprocess, sys, time

FULL = os.environ.get("LH_FULL") == "1"


def full(usual, everything):
    """A count or time: short in the usual run, as promised under LH_FULL=1."""
    return everything if FULL else usual


def say(text):
    print(time.strftime("%H:%M:%S"), text, flush=True)


def shown(text):
    """Figures; `scripts/test` prints the last ones."""
    print("SHOWN", text, flush=True)


def skip(name, reason):
    """What cannot run here; `scripts/test` counts it."""
    print(f"SKIP {name}: {reason}", flush=True)


def fail(text):
    print("NOT AS PROMISED:", text, flush=True)
    sys.exit(1)


def expect(condition, text):
    if not condition:
        fail(text)


def run(*command, check=True, timeout=600, **options):
    """Runs a command; with `check` its failure ends the scenario."""
    try:
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=timeout, **options)
    except subprocess.TimeoutExpired as late:
        said = b"".join(filter(None, (late.stdout, late.stderr))).decode(errors="replace")
        fail(f"{' '.join(map(str, command))}: not done after {timeout} s\n{said[-3000:]}")
    if check and done.returncode != 0:
        fail(f"{' '.join(map(str, command))}: status {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done


def have(*tools):
    return all(shutil.which(t) for t in tools)


def wait_for(what, condition, seconds=30):
    """What the condition gives once it is true; that it is not within so many seconds ends the scenario."""
    until = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > until:
            fail(f"{what}: not within {seconds} s")
        time.sleep(0.01)


class Load:
    """fio on a file in a directory, verifying what it wrote as it goes on, until it is told to end. Of options the last one
    of a name counts."""

    def __init__(self, where, size, *options, cwd="/tmp"):
        self.process = subprocess.Popen(
            ["fio", "--name=load", f"--directory={where}", f"--size={size}", "--rw=randwrite", "--bs=4k", "--iodepth=8",
             "--ioengine=libaio", "--direct=1", "--verify=crc32c", "--verify_fatal=1", "--verify_backlog=512",
             "--verify_dump=0", "--randrepeat=0", "--time_based", "--runtime=86400", "--fsync=128", *options],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd)

    def goes_on(self):
        if self.process.poll() is not None:
            fail(f"fio ended with {self.process.returncode}: {self.process.stdout.read()[-2000:]}")

    def ends_well(self):
        """Tells it to end; an error or a mismatch ends the scenario."""
        self.process.terminate()
        words = self.process.communicate(timeout=300)[0]
        expect("err= 0" in words and "verify" not in words.lower().replace("verify_", ""), f"fio: {words[-2000:]}")

    def kill(self):
        """Ends it, however it is. What waits for a device that does not answer is left behind."""
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
