"""A volume's life on each frontend that makes a device, in short: shown by what `auto` takes, mounted, written and
verified while its engine is killed and upgraded, grown while mounted, not stopped while in use, stopped, and nothing left.

    life_of_volumes.py [ublk|nbd|iscsi|fuse...]      without any, all
"""
import contextlib, os, shutil, signal, subprocess, sys, time
import initiator
from devices import (Load, Mounted, attribute, directory_of, expect, have, kernel_has, kernel_is, kernel_threads,
                     kernel_threads_are_again, nodes, run, shown, skip, wait_for)
from volumes import Volume, loses_requests_of_the_dead, stand_still, taken_by_auto

ORDER = ["ublk", "nbd", "iscsi", "fuse"]


@contextlib.contextmanager
def load_that_is_survived(fio, disk):
    """The load goes on while the engine is replaced; where that is no promise, it is held up, and nothing is in flight."""
    if not loses_requests_of_the_dead(disk.frontend):
        yield
        return
    stand_still(fio.process.pid)
    wait_for("nothing in flight", lambda: int(attribute(disk.device, "stat").split()[8]) == 0)
    yield
    fio.process.send_signal(signal.SIGCONT)


def goes_on(fio, disk):
    """The load and the device answer."""
    run("dd", f"if={disk.device}", "of=/dev/null", "bs=4k", "count=1", "iflag=direct", "status=none", timeout=60)
    fio.goes_on()


def lives(frontend):
    disk = Volume(frontend, size=320 << 20)
    with Mounted(disk.device, "xfs") as where:
        fio = Load(where, "8m", "--verify_backlog=256", "--fsync=64", "--thread", cwd="/dev/shm")
        try:
            time.sleep(1)
            with load_that_is_survived(fio, disk):
                disk.kill()
                disk.restart()
            goes_on(fio, disk)
            with load_that_is_survived(fio, disk):
                disk.upgrade()
            goes_on(fio, disk)
            if frontend != "ublk" or kernel_has("volumes-ublk-grows", "to grow in use", 6, 16):
                disk.resize(disk.size + (64 << 20))
                wait_for("the new size",
                         lambda: int(run("blockdev", "--getsize64", disk.device).stdout) == disk.size)
                run("xfs_growfs", where)
            else:
                # Who asked is told that the device is behind.
                done = disk.host.ctl("resize", disk.volume, str(disk.size + (64 << 20)), check=False)
                expect(done.returncode == 1 and "Linux 6.16" in done.stderr, f"{done.returncode} {done.stderr}")
            expect(disk.refuses_to_stop(), "a mounted device was taken away")
            goes_on(fio, disk)
            fio.ends_well()
        finally:
            fio.kill()
    run("xfs_repair", "-n", disk.device)
    disk.stop()


def waits_for_an_engine(disk):
    """A program whose request has come after the engine's death: it can neither close the device nor be killed."""
    dd = subprocess.Popen(["dd", "if=/dev/zero", f"of={disk.device}", "bs=4k", "count=1", "oflag=direct", "status=none"],
                          stderr=subprocess.DEVNULL)
    wait_for("a request that nobody answers", lambda: attribute(disk.device, "stat").split()[8] != "0")
    return dd


def is_not_taken_from_a_file_system_that_is_hidden(frontend):
    """Unmounted lazily it is in no list of mounts, and it goes on as long as a file of it is open. Nothing is reverted under it, and
    when the engine has died its device stays."""
    disk = Volume(frontend, volume="lazy", size=320 << 20)
    disk.host.ctl("snapshot", "create", disk.volume, "empty")
    there = Mounted(disk.device, "xfs")
    with open(os.path.join(there.__enter__(), "held"), "w"):
        run("umount", "-l", there.where)
        done = disk.host.ctl("snapshot", "revert", disk.volume, "empty", check=False)
        expect(done.returncode == 1 and "in use (xfs: " in done.stderr, f"reverted: {done.stdout}{done.stderr}")
        # A FUSE device fails everybody once its keeper is gone.
        if frontend != "fuse":
            disk.host.kill_everything()
            expect(disk.refuses_to_stop(), "a device was taken from a file system")
            disk.up()
    of_it = os.path.join("/sys/fs/xfs", os.path.basename(directory_of(disk.device)))
    wait_for("the file system's end", lambda: not os.path.exists(of_it))
    disk.stop()


def is_let_go_without_an_engine(frontend):
    """Everything of it has died, a FUSE device's keeper, too, and its replicas are out of reach, so that no engine shows it any more:
    its device is taken away, though not from who has it open, and its node, whose numbers another volume's device has next."""
    disk = Volume(frontend, volume="away", size=64 << 20)
    places = [replica["path"] for replica in disk.host.status(disk.volume)["replicas"]]
    disk.host.kill_everything()
    for place in places:
        os.rename(place, place + ".away")
    held = os.open(disk.device, os.O_RDONLY)
    # A FUSE device fails everybody since its keeper is gone.
    if frontend != "fuse":
        expect(disk.refuses_to_stop(), "a device was taken from who has it open")
    writer = waits_for_an_engine(disk) if frontend != "fuse" and kernel_is(6, 16) else None
    if not writer:
        os.close(held)
    # It says that nothing could be flushed.
    said = disk.host.ctl("down", disk.volume, check=False).stderr
    expect(not os.path.lexists(disk.device), f"{disk.device} is still there: {said}")
    if writer:
        expect(writer.wait(60) != 0 and f"(pid {writer.pid})" in said, f"dd ended with {writer.returncode}: {said}")
    expect(nodes() == [], f"left behind: {nodes()}")
    for place in places:
        # Their processes have made empty ones.
        shutil.rmtree(place, ignore_errors=True)
        os.rename(place + ".away", place)
    if writer and frontend == "nbd":
        # The kernel has the number free once nobody has it open.
        said = disk.host.ctl("up", disk.volume, check=False).stderr
        expect("is still open" in said and f"(pid {os.getpid()})" in said, f"who has it open is not named: {said}")
        os.close(held)
    disk.up()
    if writer and frontend != "nbd":
        os.close(held)
    disk.stop()


def nothing_is_left(frontend, threads):
    expect(nodes() == [], f"{frontend}: {nodes()}")
    left = os.listdir("/dev/longhorn") if os.path.isdir("/dev/longhorn") else []
    expect([name for name in left if not name.startswith(".")] == [], f"{frontend}: nodes {left}")
    kernel_threads_are_again(threads)
    loops = run("losetup", "--list", "--noheadings").stdout
    expect(loops == "", f"{frontend}: loop devices {loops}")


def the_kernel_saw_no_errors():
    errors = [line for line in run("dmesg").stdout.splitlines() if "I/O error" in line]
    expect(not errors, f"the kernel saw errors: {errors[:5]}")


def auto_takes_the_best():
    disk = Volume("auto", size=64 << 20, shown_by=taken_by_auto())
    disk.stop()


def main():
    if not have("fio", "mkfs.xfs"):
        skip("volumes", "no fio or mkfs.xfs")
        return
    lived, threads = [], kernel_threads()
    for frontend in sys.argv[1:] or ORDER:
        lacking = initiator.ready() if frontend == "iscsi" else None
        if lacking:
            skip(f"volumes-{frontend}", lacking)
            continue
        began = time.monotonic()
        lives(frontend)
        is_not_taken_from_a_file_system_that_is_hidden(frontend)
        the_kernel_saw_no_errors()
        is_let_go_without_an_engine(frontend)
        # What waited has failed.
        run("dmesg", "--clear")
        nothing_is_left(frontend, threads)
        print(f"{frontend}: {time.monotonic() - began:.1f} s", flush=True)
        lived.append(frontend)
    auto_takes_the_best()
    the_kernel_saw_no_errors()
    shown(f"{', '.join(lived)}: killed, upgraded and grown under fio on XFS, stopped, nothing left")


main()
