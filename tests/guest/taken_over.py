"""A device whose server, or whose maker, dies at the wrong moment: requests wait for the next server, which may serve a larger
disk; a device that was not made ready is made ready by the next one.

    taken_over.py nbd|nbd-volume|ublk-volume|iscsi-volume|fuse-volume
"""
import contextlib, json, os, shutil, signal, subprocess, sys, time
import initiator
from devices import WORK, Nbd, Process, attribute, directory_of, example, expect, kernel_is, nodes, run, shown, skip, wait_for
from volumes import Host, Volume, stand_still

MIB = 1 << 20
# What the server takes at once, and how long a request waits before the kernel looks at its connection.
LONGEST_KB, TIMER_MS = 1024, 1000


def set_to(device, name, value):
    with open(os.path.join(directory_of(device), "queue", name), "w") as file:
        file.write(str(value))


def as_if_never_made_ready(device):
    """As the kernel makes it, with what somebody has set who had the number before."""
    run("blockdev", "--setro", device)
    set_to(device, "write_cache", "write through")
    set_to(device, "max_sectors_kb", attribute(device, "queue/max_hw_sectors_kb"))
    set_to(device, "io_timeout", 30000)
    expect(int(attribute(device, "queue/max_sectors_kb")) > LONGEST_KB, "the kernel sends no longer requests than the server takes")


def is_ready(device):
    expect(int(attribute(device, "queue/max_sectors_kb")) <= LONGEST_KB, "longer requests than the server takes")
    expect(int(attribute(device, "queue/io_timeout")) == TIMER_MS, "the timer")
    expect(attribute(device, "ro") == "0", "read only")
    expect(attribute(device, "queue/write_cache") == "write back", "no flushes are sent")
    run("dd", "if=/dev/zero", f"of={device}", "bs=8M", "count=2", "oflag=direct", "conv=fsync", "status=none")
    run("dd", f"if={device}", "of=/dev/null", "bs=8M", "count=2", "iflag=direct", "status=none")


def requests_wait_for_the_next_server():
    """Writes and a flush begun without a server end well with the next one, which has more bytes than the one before."""
    disk = Nbd("waits", size=64 * MIB, connections=1)
    disk.kill()
    writer = subprocess.Popen(["dd", "if=/dev/urandom", f"of={disk.device}", "bs=64k", "count=16", "oflag=direct",
                               "conv=fsync", "status=none"])
    time.sleep(0.3)
    expect(writer.poll() is None, "a write ended without a server")
    disk.size += 32 * MIB
    disk.restart()
    expect(writer.wait(60) == 0, "the write failed")
    wait_for("the disk's size", lambda: int(attribute(disk.device, "size")) * 512 == disk.size)
    disk.stop()


def a_server_that_dies_while_its_size_is_awaited():
    """A larger size needs everything in flight to be answered. A server that dies meanwhile is replaced all the same: nobody
    holds the locks of the kernel's that the next one needs."""
    disk = Nbd("dies", size=64 * MIB, connections=1)
    # It dies with a request in its hands: that comes again when the kernel's timer has run out.
    stand_still(disk.server.pid)
    writer = subprocess.Popen(["dd", "if=/dev/urandom", f"of={disk.device}", "bs=64k", "count=16", "oflag=direct",
                               "conv=fsync", "status=none"])
    wait_for("a request in flight", lambda: attribute(disk.device, "inflight").split()[1] != "0")
    disk.kill()
    disk.size += 32 * MIB
    disk.serve()
    time.sleep(0.3)
    disk.kill()
    disk.serve()
    expect(writer.wait(60) == 0, "the write failed")
    wait_for("the disk's size", lambda: int(attribute(disk.device, "size")) * 512 == disk.size)
    disk.stop()


def a_device_whose_maker_died_is_made_ready():
    disk = Nbd("unready", size=64 * MIB, connections=1)
    disk.keeper.kill()
    disk.kill()
    as_if_never_made_ready(disk.device)
    disk.serve()
    disk.keeper = Process(example("nbd-kernel"), "keep", disk.volume, disk.socket, "--connections", "1", "--timeout", "1")
    disk.keeper.hear("reconnected")
    is_ready(disk.device)
    disk.stop()


def without_engine(disk, meanwhile):
    """The engine dies, and the next one comes once that has been done."""
    manager = disk.manager()
    stand_still(manager)
    disk.kill()
    meanwhile(disk.device)
    os.kill(manager, signal.SIGCONT)
    disk.restart()
    wait_for("the volume is shown again", lambda: disk.host.status(disk.volume)["device"])


def a_volume_whose_engine_died_too_early_is_made_ready():
    disk = Volume("nbd", size=64 * MIB)
    without_engine(disk, as_if_never_made_ready)
    is_ready(disk.device)
    # What its users set stays, as long as the server takes what they send.
    run("blockdev", "--setro", disk.device)
    set_to(disk.device, "max_sectors_kb", 64)
    disk.kill()
    disk.restart()
    wait_for("the volume is shown again", lambda: disk.host.status(disk.volume)["device"])
    found = attribute(disk.device, "ro"), attribute(disk.device, "queue/max_sectors_kb")
    expect(found == ("1", "64"), f"what was set is gone: {found}")
    disk.stop()


@contextlib.contextmanager
def without_the_kernels_node(device):
    """As in a container that has a /dev of its own, whose kernel has the driver since later."""
    name = os.path.join("/dev", os.path.basename(directory_of(device)))
    node = os.stat(name)
    os.unlink(name)
    try:
        yield
    finally:
        if not os.path.exists(name):
            os.mknod(name, node.st_mode, node.st_rdev)


def a_device_that_only_the_volume_has_a_node_of_is_taken_over():
    disk = Volume("nbd", size=64 * MIB)
    with without_the_kernels_node(disk.device):
        disk.kill()
        disk.restart()
        wait_for("the volume is shown again", lambda: disk.host.status(disk.volume)["device"])
        expect(disk.device_numbers() == disk.numbers, f"{disk.numbers} before, {disk.device_numbers()} now")
        run("dd", f"if={disk.device}", "of=/dev/null", "bs=4k", "count=4", "iflag=direct", "status=none", timeout=60)
        disk.stop()


def a_volume_whose_node_stays_is_stopped_when_it_goes():
    """A node that is mounted upon cannot be removed. What is left to be done then is done when it is asked for again."""
    disk = Volume("nbd", size=64 * MIB)
    run("mount", "--bind", disk.device, disk.device)
    done = disk.host.ctl("down", disk.volume, check=False)
    run("umount", disk.device)
    expect(done.returncode == 1 and disk.device in done.stderr, f"{done.returncode} {done.stderr}")
    disk.host.ctl("down", disk.volume)
    expect(not os.path.exists(f"/proc/{disk.engine}"), "the engine has not ended")
    expect(not os.path.lexists(disk.device), f"{disk.device} is still there")
    disk.up()
    disk.stop()


# Seconds between two looks of an engine at its device, and more.
LOOK = 8


def a_volume_whose_node_is_removed_has_it_again():
    """It comes back by itself, and a volume that is stopped before that is stopped all the same; but not one whose device is in use."""
    disk = Volume(sys.argv[1].removesuffix("-volume"), size=64 * MIB)
    os.unlink(disk.device)
    wait_for("the node is back", lambda: os.path.exists(disk.device), LOOK)
    expect(disk.device_numbers() == disk.numbers, f"{disk.numbers} before, {disk.device_numbers()} now")
    held = os.open(disk.device, os.O_RDONLY)
    os.unlink(disk.device)
    expect(disk.refuses_to_stop(), "a device that is open was taken away")
    os.close(held)
    os.unlink(disk.device)
    disk.stop()


def a_device_that_is_merely_open_is_not_taken_away():
    disk = Volume("ublk", size=64 * MIB)
    held = os.open(disk.device, os.O_RDONLY)
    done = disk.engine_line("frontend", "shutdown", check=False)
    expect(done.returncode != 0 and f"(pid {os.getpid()})" in done.stderr, f"{done.returncode} {done.stderr}")
    run("dd", f"if={disk.device}", "of=/dev/null", "bs=4k", "count=4", "iflag=direct", "status=none", timeout=60)
    os.close(held)
    disk.stop()


def a_device_whose_requests_wait_goes_once_they_are_answered():
    """A program has closed the device, and the kernel still writes what it had written: nobody is found who has it open. Linux 7.0 refuses
    by itself to stop the device then."""
    if kernel_is(7, 0):
        return skip("ublk-volume-life-waits", "this kernel stops no device that it has not closed yet")
    disk = Volume("ublk", size=64 * MIB)
    replicas = [replica["pid"] for replica in disk.host.status(disk.volume)["replicas"]]
    for pid in replicas:
        stand_still(pid)
    writer = subprocess.Popen(["dd", "if=/dev/zero", f"of={disk.device}", "bs=64k", "count=16", "status=none"])
    open_files = f"/proc/{writer.pid}/fd"
    wait_for("it has written and closed", lambda: attribute(disk.device, "stat").split()[8] != "0" and not any(
        os.path.realpath(os.path.join(open_files, fd)) == disk.device for fd in os.listdir(open_files)))
    done = disk.engine_line("frontend", "shutdown", check=False)
    for pid in replicas:
        os.kill(pid, signal.SIGCONT)
    expect(done.returncode != 0 and "in flight" in done.stderr, f"{done.returncode} {done.stderr}")
    expect(writer.wait(60) == 0, "what was written is lost")
    wait_for("the device is gone", lambda: nodes() == [] and not disk.host.status(disk.volume)["device"])
    expect(disk.host.status(disk.volume)["engine_pid"] == disk.engine, "another engine has come")
    disk.show()
    disk.stop()


def what_waits_is_left_to_the_engine_that_can_show_the_device():
    """An engine takes the device over and cannot show it: a node that is mounted upon cannot be made anew. What has waited for it, and
    was perhaps handed to it, is carried out by the one that can, and fails nobody."""
    disk = Volume(sys.argv[1].removesuffix("-volume"), size=64 * MIB)
    run("mount", "--bind", disk.device, disk.device)
    disk.kill()
    writer = subprocess.Popen(["dd", "if=/dev/urandom", f"of={disk.device}", "bs=64k", "count=64", "oflag=direct", "conv=fsync",
                               "status=none"])

    def refused():
        with open(os.path.join(disk.host.root, "log", f"{disk.volume}-e-0.log"), errors="replace") as file:
            return file.read().count("ended: cannot make the device node")

    wait_for("two engines that cannot show it", lambda: refused() >= 2, 60)
    expect(writer.poll() is None, f"a write ended with {writer.poll()} where nobody shows the device")
    # The writer has it open by what is mounted.
    run("umount", "-l", disk.device)
    expect(writer.wait(60) == 0, f"the write failed: {writer.returncode}")
    disk.restart()
    wait_for("the volume is shown again", lambda: disk.host.status(disk.volume)["device"])
    disk.stop()


@contextlib.contextmanager
def iscsiadm_that_refuses(option):
    """The host's own, for all but this."""
    real = shutil.which("iscsiadm")
    aside = os.path.join(WORK, "iscsiadm")
    shutil.move(real, aside)
    with open(real, "w") as file:
        file.write(f'#!/bin/sh\nfor word; do [ "$word" = "{option}" ] && {{ echo "not now" >&2; exit 1; }}; done\nexec {aside} "$@"\n')
    os.chmod(real, 0o755)
    try:
        yield
    finally:
        shutil.move(aside, real)


def a_logout_that_is_done_by_halves_is_ended_by_who_asks_again():
    """The initiator has logged out, and does not forget the target. The log says what failed, and blames nobody else."""
    if os.environ.get("LH_GUEST") != "1":
        return skip("iscsi-volume-life-by-halves", "this host's iscsiadm is left as it is")
    disk = Volume("iscsi", size=64 * MIB)
    with iscsiadm_that_refuses("--op=delete"):
        done = disk.engine_line("frontend", "shutdown", check=False)
        expect(done.returncode != 0 and "not now" in done.stderr, f"{done.returncode} {done.stderr}")
        time.sleep(LOOK)
    said = [text for _, text in disk.host.log(f"{disk.volume}-e-0")]
    expect(any("not hidden" in text and "not now" in text for text in said), f"that is not said: {said[-5:]}")
    expect(not any("somebody else" in text for text in said), f"others are blamed: {said[-5:]}")
    disk.hide()
    disk.show()
    disk.stop()


@contextlib.contextmanager
def not_asked_for_its_size(disk):
    """As where the initiator is away: what is written to have the disk asked is taken, and nobody asks."""
    rescan, instead = os.path.join(directory_of(disk.device), "device", "rescan"), os.path.join(WORK, "rescan")
    with open(instead, "w"):
        run("mount", "--bind", instead, rescan)
    try:
        yield
    finally:
        run("umount", rescan)


def a_disk_that_could_not_be_asked_for_its_size_is_asked_again():
    """By the engine that has grown the volume, and by the next one, which comes while the initiator is just about to log in again."""
    disk = Volume("iscsi", size=64 * MIB)

    def grow(size):
        disk.size = size
        disk.host.ctl("resize", disk.volume, str(size), check=False)
        expect(int(attribute(disk.device, "size")) * 512 < size, "the disk has its size though nobody has asked it")

    def has_grown():
        wait_for("the disk's size", lambda: int(attribute(disk.device, "size")) * 512 == disk.size, 2 * LOOK)

    with not_asked_for_its_size(disk):
        grow(96 * MIB)
    has_grown()
    manager = disk.manager()
    with not_asked_for_its_size(disk):
        grow(128 * MIB)
        stand_still(manager)
        disk.kill()
    os.kill(manager, signal.SIGCONT)
    disk.restart()
    has_grown()
    disk.stop()


def whoever_has_no_iscsid_is_told_so():
    """iscsiadm alone logs in nowhere. That is said before anything is made, and not when the engine tries."""
    initiator.unpack()
    if subprocess.run(["pidof", "iscsid"], capture_output=True).returncode == 0:
        return skip("iscsi-volume-life-without-iscsid", "it runs here")
    host = Host(WORK)

    def found():
        said = json.loads(host.ctl("-o", "json", "doctor", check=False).stdout)
        return next(finding for finding in said if finding["check"] == "iscsi")

    # No initiator at all.
    if found()["detail"].startswith("not here"):
        return skip("iscsi-volume-life-without-iscsid", found()["detail"])
    expect(found()["verdict"] == "WARN" and "systemctl" in found()["next"], f"{found()}")
    volume = host.name("idle")
    done = host.ctl("up", volume, "--size", "64MiB", "--frontend", "iscsi", check=False)
    expect(done.returncode == 1 and "a running iscsid (systemctl" in done.stderr, f"{done.returncode} {done.stderr}")
    expect(host.json("ls") == [], "a volume was made")
    lacking = initiator.ready()
    expect(lacking is not None or found()["verdict"] == "OK", f"{found()}")


def a_disk_whose_engine_died_too_early_is_patient():
    """As the kernel makes it, a disk gives a command up after 30 s; the engine does so after 300."""
    disk = Volume("iscsi", size=64 * MIB)
    timeout = lambda: int(attribute(disk.device, "device/timeout"))  # noqa: E731
    told = timeout()
    expect(told > 300, f"the disk's patience is {told} s")

    def set_timeout(seconds):
        with open(os.path.join(directory_of(disk.device), "device/timeout"), "w") as file:
            file.write(str(seconds))

    without_engine(disk, lambda _: set_timeout(30))
    expect(timeout() == told, f"the disk's patience is {timeout()} s, and was {told}")
    without_engine(disk, lambda _: set_timeout(told + 1))
    expect(timeout() == told + 1, "who wants more patience has it")
    disk.stop()


@contextlib.contextmanager
def set_by_the_host(name, value):
    """What an administrator has set for the sessions of other targets, in the file that records of targets begin with."""
    path = "/etc/iscsi/iscsid.conf"
    with open(path) as file:
        before = file.read()
    with open(path, "w") as file:
        file.writelines(line for line in before.splitlines(True) if not line.startswith(name))
        file.write(f"{name} = {value}\n")
    try:
        yield
    finally:
        with open(path, "w") as file:
            file.write(before)


def what_the_host_has_set_for_others_is_not_for_volumes():
    """Sessions that look for no disks by themselves; several of them to a target, each with a disk of its own; and such as are given
    up when a target was away for some logins."""
    if os.environ.get("LH_GUEST") != "1":
        return skip("iscsi-volume-life-with-other-settings", "this host's are left as they are")
    with set_by_the_host("node.session.scan", "manual"):
        Volume("iscsi", volume="scanned", size=64 * MIB).stop()
    with set_by_the_host("node.session.nr_sessions", "2"):
        disk = Volume("iscsi", volume="once", size=64 * MIB)
        sessions = os.listdir("/sys/class/iscsi_session")
        expect(len(sessions) == 1, f"sessions: {sessions}")
        disk.stop()
    with set_by_the_host("node.session.reopen_max", "1"):
        disk = Volume("iscsi", volume="away", size=64 * MIB)
        for pid in disk.manager(), disk.engine:
            os.kill(pid, signal.SIGKILL)
        writer = subprocess.Popen(["dd", "if=/dev/zero", f"of={disk.device}", "bs=64k", "count=16", "oflag=direct", "status=none"])
        # Nobody listens: each login is refused at once, and the next one comes after 3 s.
        time.sleep(15)
        disk.up()
        expect(writer.wait(60) == 0, "a write failed, as it does where the session was given up")
        disk.stop()


STORIES = {"nbd": [requests_wait_for_the_next_server, a_server_that_dies_while_its_size_is_awaited, a_device_whose_maker_died_is_made_ready],
           "nbd-volume": [a_volume_whose_engine_died_too_early_is_made_ready,
                          a_device_that_only_the_volume_has_a_node_of_is_taken_over,
                          a_volume_whose_node_stays_is_stopped_when_it_goes,
                          a_volume_whose_node_is_removed_has_it_again,
                          what_waits_is_left_to_the_engine_that_can_show_the_device],
           "fuse-volume": [a_volume_whose_node_is_removed_has_it_again],
           "ublk-volume": [a_volume_whose_node_is_removed_has_it_again, a_device_that_is_merely_open_is_not_taken_away,
                           a_device_whose_requests_wait_goes_once_they_are_answered],
           "iscsi-volume": [whoever_has_no_iscsid_is_told_so, a_disk_whose_engine_died_too_early_is_patient,
                            a_volume_whose_node_is_removed_has_it_again,
                            a_logout_that_is_done_by_halves_is_ended_by_who_asks_again,
                            a_disk_that_could_not_be_asked_for_its_size_is_asked_again,
                            what_the_host_has_set_for_others_is_not_for_volumes]}


def main():
    stories = STORIES[sys.argv[1]]
    for story in stories:
        began = time.monotonic()
        story()
        print(f"{story.__name__}: {time.monotonic() - began:.1f} s", flush=True)
    errors = [line for line in run("dmesg").stdout.splitlines() if "I/O error" in line]
    expect(not errors, f"the kernel saw errors: {errors[:5]}")
    shown(f"{sys.argv[1]}: {len(stories)} stories of servers that die at the wrong moment")


main()
