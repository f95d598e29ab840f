"""Runs the guest's scenarios: on this machine if its kernel has the devices, else in a guest (`scripts/guest`).

    run.py [NAME...]      names as --list gives them; without any, all under LH_FULL=1, else the short ones
    run.py --list

LH_FULL=1 for the counts that are promised. LH_EXAMPLES: where built examples are; without it they, and the programs, are
built.
"""
import os, subprocess, sys, time

HERE = os.path.dirname(os.path.abspath(__file__))
TOP = os.path.dirname(os.path.dirname(HERE))
PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else "python3"
FULL = os.environ.get("LH_FULL") == "1"

# Name: scenario, its arguments, seconds that it may take (with the counts that are promised).
SCENARIOS = {
    "volumes": ("life_of_volumes.py", [], 900, 900),
    "ublk-basics": ("basics.py", ["ublk"], 400, 400),
    "ublk-life": ("life.py", ["ublk"], 400, 400),
    "ublk-recovery": ("recovery.py", ["ublk"], 300, 1500),
    "ublk-stress": ("stress.py", ["ublk"], 500, 3000),
    "ublk-cycles": ("cycles.py", ["ublk"], 400, 3000),
    "ublk-pressure": ("pressure.py", ["ublk"], 420, 480),
    "auto": ("choice.py", [], 300, 300),
    "disks": ("disks.py", [], 400, 600),
    "nbd-life": ("taken_over.py", ["nbd"], 300, 300),
    "nbd-volume-life": ("taken_over.py", ["nbd-volume"], 300, 300),
    "nbd-volume-away": ("taken_away.py", ["nbd-volume"], 300, 300),
    "ublk-volume-life": ("taken_over.py", ["ublk-volume"], 300, 300),
    "iscsi-volume-life": ("taken_over.py", ["iscsi-volume"], 300, 300),
    "fuse-volume-life": ("taken_over.py", ["fuse-volume"], 300, 300),
    "ublk-volume-away": ("taken_away.py", ["ublk-volume"], 300, 300),
    "fuse-volume-away": ("taken_away.py", ["fuse-volume"], 300, 300),
    "nbd-basics": ("basics.py", ["nbd"], 400, 400),
    "nbd-recovery": ("recovery.py", ["nbd"], 300, 1500),
    "nbd-cycles": ("cycles.py", ["nbd"], 400, 3000),
}
for _frontend in ("ublk", "nbd", "iscsi", "fuse"):
    SCENARIOS[f"{_frontend}-volume-basics"] = ("basics.py", [f"{_frontend}-volume"], 600, 600)
    SCENARIOS[f"{_frontend}-volume-pressure"] = ("pressure.py", [f"{_frontend}-volume"], 420, 480)
    SCENARIOS[f"{_frontend}-volume-queues"] = ("queues.py", [f"{_frontend}-volume"], 400, 600)
    SCENARIOS[f"{_frontend}-volume-cycles"] = ("cycles.py", [f"{_frontend}-volume"], 600, 5400)
    # Killed under load, a FUSE server loses a request in a guest (`volumes.py`); tests/e2e/upgrade.py does that elsewhere.
    if _frontend != "fuse":
        SCENARIOS[f"{_frontend}-volume-recovery"] = ("recovery.py", [f"{_frontend}-volume"], 500, 3000)

    if _frontend in ("nbd", "fuse"):
        SCENARIOS[f"{_frontend}-volume-careless"] = ("pressure.py", ["careless", f"{_frontend}-volume"], 420, 480)

# A guest that has not ended when its time is up is what these look for: nobody there has any memory left, and whoever would
# judge has none either. What they say is read when their time is up.
MAY_HANG = [name for name in SCENARIOS if name.endswith("-careless")]

# What the usual run of all tests has time for: whole volumes on every frontend, 2 minutes.
SHORT = ["volumes"]

# Memory in MiB and scratch disk of those that need others than 2048 and none.
MACHINES = {"ublk-pressure": (256, "1200M"), "volumes": (3072, None), "disks": (3072, "1300M")}
MACHINES |= {name: (4096, None) for name in SCENARIOS if "-volume-" in name}
MACHINES |= {name: (384, "1500M") for name in SCENARIOS if name.endswith(("-volume-pressure", "-careless"))}

SKIPPED, NO_TIME = 77, 124
GUEST = os.path.join(TOP, "scripts", "guest")
# Seconds that the kernel may take to be built, where it was not yet.
PREPARING = 1200
# Seconds that a guest may take to start and end, on a busy machine.
STARTING = 120


def build(wanted):
    if "LH_EXAMPLES" in os.environ:
        return True
    frontends = ["-p", "nbd-frontend", "-p", "fuse-frontend", "-p", "iscsi-frontend", "-p", "ublk-frontend"]
    programs = ["--bins", "-p", "longhorn", "-p", "tests", "-p", "benches"]
    for what in ([] if wanted == SHORT else [["--examples", *frontends]]) + [programs]:
        if subprocess.run(["cargo", "build", "--release", *what], cwd=TOP).returncode != 0:
            return False
    return True


def prepare():
    """Sees to it that there is a kernel to run in. SKIPPED, with the reason said, where none can be had."""
    try:
        status = subprocess.run([GUEST, "prepare"], timeout=PREPARING).returncode
    except subprocess.TimeoutExpired:
        print(f"SKIP guest: its kernel is not built after {PREPARING} s; scripts/guest prepare does that", flush=True)
        return SKIPPED
    if status == 0 and subprocess.run([GUEST, "run", "--timeout", str(STARTING), "--", "true"]).returncode != 0:
        print("SKIP guest: its kernel does not start on this machine; what it said last is above", flush=True)
        return SKIPPED
    return status


def run(name):
    script, arguments, usual, everything = SCENARIOS[name]
    seconds = everything if FULL else usual
    memory, scratch = MACHINES.get(name, (2048, None))
    machine = ["--mem", str(memory), *(["--scratch", scratch] if scratch else [])]
    command = [GUEST, "run", *machine, "--timeout", str(seconds), "--", PYTHON,
               os.path.join(HERE, script), *arguments]
    began = time.monotonic()
    done = subprocess.run(command, cwd=TOP, text=True, stdout=subprocess.PIPE if name in MAY_HANG else None)
    print(done.stdout or "", end="", flush=True)
    status = done.returncode
    took = time.monotonic() - began
    # The load has to have begun, and to have taken the memory.
    if status == NO_TIME and "in flight; MiB free" in (done.stdout or ""):
        print(f"SHOWN without memory of its own a volume waits for itself: nothing after {seconds} s", flush=True)
        status = 0
    elif status == NO_TIME:
        print(f"NOT AS PROMISED: {name} has not ended after {seconds} s", flush=True)
    print(f"{name}: {'ok' if status == 0 else f'status {status}'}, {took:.0f} s", flush=True)
    return status


def main():
    names = sys.argv[1:]
    if names == ["--list"]:
        print("\n".join(SCENARIOS))
        return 0
    unknown = [n for n in names if n not in SCENARIOS]
    if unknown:
        print(f"no scenario {', '.join(unknown)}: {', '.join(SCENARIOS)}", file=sys.stderr)
        return 2
    wanted = names or list(SCENARIOS if FULL else SHORT)
    prepared = prepare()
    if prepared != 0:
        return 0 if prepared == SKIPPED else 1
    if not build(wanted):
        return 1
    failed = []
    for name in wanted:
        status = run(name)
        if status == SKIPPED:
            # The reason has been told; it holds for all that are left, and not for what has failed before.
            break
        if status != 0:
            failed.append(name)
    if failed:
        print("failed:", ", ".join(failed), flush=True)
    return 1 if failed else 0


sys.exit(main())
