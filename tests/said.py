"""What every scenario says and does in the same words: its figures, what it skips, and the first thing that is not as promised."""
import os, shutil, subprocess, sys, time

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
