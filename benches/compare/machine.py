"""What the machine is, whether it is quiet, and what processors spend on whom."""
import os, platform, re, shutil, subprocess, sys, time

TICK = os.sysconf("SC_CLK_TCK")

# A load average above this means that somebody else takes a processor's time: figures would be theirs, too.
QUIET_LOAD = 1.0
# The load average of one minute forgets a build within this time; whoever still works then will go on working.
QUIET_WAIT_S = 300


def load():
    """The load average of the last minute."""
    return os.getloadavg()[0]


def wait_until_quiet(limit=QUIET_LOAD, seconds=QUIET_WAIT_S, say=lambda text: print(text, file=sys.stderr, flush=True)):
    """True once the load average is within the limit; False if it is not after this time."""
    until, last = time.monotonic() + seconds, None
    while load() > limit:
        left = until - time.monotonic()
        if left <= 0:
            return False
        now = f"load average {load():.1f}, waiting for {limit} ({left / 60:.0f} min left)"
        if last is None or time.monotonic() - last > 30:
            say(now)
            last = time.monotonic()
        time.sleep(min(2, max(left, 0.1)))
    return True


def cpu_of(pids):
    """Processor time of these processes so far, in seconds; one that has gone counts nothing."""
    ticks = 0
    for pid in pids:
        try:
            fields = open(f"/proc/{pid}/stat").read().rsplit(") ", 1)[1].split()
        except (OSError, IndexError):
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICK


def cpu_of_all():
    """Processor time that the whole machine was not idle so far, in seconds: kernel threads included."""
    fields = [int(n) for n in open("/proc/stat").readline().split()[1:]]
    user, nice, system, _idle, _iowait, irq, softirq = fields[:7]
    return (user + nice + system + irq + softirq) / TICK


def pss(pid):
    """Proportional set size of a process in bytes."""
    try:
        for line in open(f"/proc/{pid}/smaps_rollup"):
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def first_line(*command):
    if not shutil.which(command[0]):
        return None
    done = subprocess.run(command, capture_output=True, text=True)
    text = (done.stdout or done.stderr).strip()
    return text.splitlines()[0] if text else None


def facts(programs, disk):
    """What a reader needs to judge figures by, as pairs."""
    cpu = re.search(r"model name\s*:\s*(.*)", open("/proc/cpuinfo").read())
    memory = int(re.search(r"MemTotal:\s*(\d+)", open("/proc/meminfo").read()).group(1)) >> 20
    found = [
        ("kernel", platform.release()),
        ("processors", f"{os.cpu_count()} x {cpu.group(1) if cpu else platform.machine()}"),
        ("memory", f"{memory} GiB"),
        ("disk", file_system(disk)),
    ]
    for name, command in [
        ("longhorn", (programs + "/longhorn", "--version")), ("fio", ("fio", "--version")),
        ("qemu-nbd", ("qemu-nbd", "--version")), ("qemu-storage-daemon", ("qemu-storage-daemon", "--version")),
        ("nbdkit", ("nbdkit", "--version")), ("nbdfuse", ("nbdfuse", "--version")), ("rustc", ("rustc", "--version")),
    ]:
        found.append((name, first_line(*command) or "not there"))
    return found


def file_system(path):
    """Type and device of the file system below a path."""
    best = ("", "?", "?")
    for line in open("/proc/mounts"):
        device, mounted, kind = line.split()[:3]
        if (path + "/").startswith(mounted.rstrip("/") + "/") and len(mounted) >= len(best[0]):
            best = (mounted, kind, device)
    return f"{best[1]} on {best[2]} ({path})"
