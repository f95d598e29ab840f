"""The engine is replaced under a mounted file system while fio verifies: killed again and again, upgraded to another
program and back, and offered a program that does not work. No I/O error, no mismatch, replicas equal; the pauses are
printed."""
import os, signal, subprocess, time
from harness import BIN, Host, Load, Watch, contents, device_of_kernel, expect, full, have, kill, rng, run, shown, skip, wait_for

KILLS = full(4, 100)
UPGRADES = full(2, 10)
# Seconds from the replacement to the first answer, where all figures are asked for.
MEDIAN, WORST = 1.0, 5.0
SIZE = 1 << 30


def killed(host, volume, watch, engine):
    """The pause of one kill, and the next engine."""
    watch.take()
    kill(engine, signal.SIGKILL)

    def next_engine():
        now = host.status(volume)
        return now["device"] and now["engine_pid"] not in (None, engine) and now["engine_pid"]
    pid = wait_for("the next engine", next_engine, 60)
    # What waited is answered, and has been counted.
    time.sleep(0.2)
    return watch.take(), pid


def upgraded(host, volume, watch, *options):
    before = host.status(volume)
    watch.take()
    host.ctl("upgrade", volume, *options)
    after = host.status(volume)
    expect(after["generation"] > before["generation"], f"generation {before['generation']}, then {after['generation']}")
    expect(after["engine_pid"] != before["engine_pid"], "the same engine")
    expect(after["device"] == before["device"], "another device")
    time.sleep(0.2)
    return watch.take(), after["engine_pid"]


def program_of(pid):
    return os.readlink(f"/proc/{pid}/exe")


def a_broken_program_changes_nothing(host, volume, watch, where):
    """It tells its version and then fails: the program before takes the volume back."""
    broken = os.path.join(host.root, "broken")
    with open(broken, "w") as file:
        file.write('#!/bin/sh\n[ "$1" = --version ] && { echo longhorn 99.0.0; exit 0; }\necho "error: no" >&2; exit 3\n')
    os.chmod(broken, 0o755)
    before = program_of(host.status(volume)["engine_pid"])
    done = host.ctl("upgrade", volume, "--binary", broken, check=False)
    expect(done.returncode == 1 and "runs with the program that it had before" in done.stderr, done.stderr)
    expect(program_of(host.status(volume)["engine_pid"]) == before, "another program")
    done = host.ctl("upgrade", volume, "--binary", "/bin/true", check=False)
    expect(done.returncode == 1 and "is no longhorn program" in done.stderr, done.stderr)
    with open(os.path.join(where, "after"), "w") as file:
        file.write("still there")
    return watch.take()


def median(times):
    return sorted(times)[len(times) // 2]


def main():
    if not device_of_kernel() or not have("fio", "mkfs.xfs"):
        skip("upgrade", "no /dev/fuse or loop devices, fio or mkfs.xfs")
        return
    dice, host = rng(), Host()
    volume = host.name("up")
    status = host.up(volume, "--size", str(SIZE), "--frontend", "fuse")
    device, engine = status["device"], status["engine_pid"]
    run("mkfs.xfs", "-q", "-f", device)
    where = os.path.join(host.root, "mnt")
    os.mkdir(where)
    run("mount", device, where)
    pauses, changes = [], []
    fio, watch = Load(where, "64m"), Watch(device, 0, writes=False)
    try:
        for _ in range(KILLS):
            time.sleep(dice.uniform(0.1, 0.6))
            fio.goes_on()
            pause, engine = killed(host, volume, watch, engine)
            pauses.append(pause)
        for turn in range(UPGRADES):
            fio.goes_on()
            other = os.path.join(BIN, "longhorn")
            pause, engine = upgraded(host, volume, watch, *(["--binary", other] if turn % 2 == 0 else []))
            expect((host.root in program_of(engine)) == (turn % 2 == 0), f"engine {program_of(engine)}")
            changes.append(pause)
        a_broken_program_changes_nothing(host, volume, watch, where)
        time.sleep(1)
        fio.goes_on()
        fio.ends_well()
    finally:
        fio.kill()
        watch.stop()
        subprocess.run(["umount", where], capture_output=True)
    run("xfs_repair", "-n", device)
    paths = [r["path"] for r in host.healthy(volume)["replicas"]]
    host.ctl("down", volume)
    expect(len({contents(p) for p in paths}) == 1, "replicas differ")
    if full(False, True):
        expect(median(pauses) <= MEDIAN and max(pauses) <= WORST, f"pauses {sorted(pauses)}")
    shown(f"FUSE, XFS, fio: {KILLS} kills, pause median {median(pauses):.2f} s, worst {max(pauses):.2f} s; {UPGRADES} "
          f"upgrades, median {median(changes):.2f} s, worst {max(changes):.2f} s; a broken program was taken back")


main()
