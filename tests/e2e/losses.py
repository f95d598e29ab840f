"""What was answered and not flushed is lost with the power of every replica's host, while whoever has the device open lives on:
fsync says so. Also where the engine has died in between, and not where all had been flushed."""
import errno, mmap, os, signal
from harness import Host, device_of_kernel, expect, kill, run, shown, skip, stand_still, wait_for

BLOCK = 4096


class Program:
    """Has the device open all the time, as a file system or a database does."""

    def __init__(self, device):
        self.file = os.open(device, os.O_RDWR | os.O_DIRECT)
        self.memory = mmap.mmap(-1, BLOCK)

    def writes(self, block, byte):
        self.memory[:] = bytes([byte]) * BLOCK
        expect(os.pwritev(self.file, [self.memory], block * BLOCK) == BLOCK, "a short write")

    def flushes(self):
        """Whether fsync ends well; nothing but EIO tells of a loss."""
        try:
            os.fsync(self.file)
            return True
        except OSError as e:
            expect(e.errno == errno.EIO, f"fsync: {e}")
            return False


def lose_power(host, volume, engine_too=False):
    """Processes die, and replicas do not know their boot: to the next ones their hosts have lost the power. That takes nothing
    here, since the page cache lives on: it is what may be lost."""
    before = host.status(volume)
    # An engine that has not noticed yet says what it said before, while the next replicas run already.
    connected = lambda: sum(text.endswith("is connected") for _, text in host.log(volume))
    wanted = connected() + len(before["replicas"])
    # At one moment: who comes back while another one still stands would have its bytes from there, and nothing were lost.
    for replica in before["replicas"]:
        stand_still(replica["pid"])
    for replica in before["replicas"]:
        os.unlink(os.path.join(replica["path"], "engine", "whole"))
        kill(replica["pid"], signal.SIGKILL)
    if engine_too:
        kill(before["engine_pid"], signal.SIGKILL)
    pids = [before["engine_pid"]] * engine_too + [r["pid"] for r in before["replicas"]]

    def is_back():
        now = host.status(volume)
        own = [now["engine_pid"]] * engine_too + [r["pid"] for r in now["replicas"]]
        return now["robustness"] == "healthy" and None not in own and not set(own) & set(pids) and connected() >= wanted
    wait_for("the volume goes on", is_back, 60)


def noted(host, volume):
    return os.path.exists(os.path.join(host.root, "run", f"{volume}.lost"))


def main():
    if not device_of_kernel():
        return skip("losses", "no /dev/fuse and /dev/loop-control here")
    for replicas in (1, 3):
        told(replicas)
    for kind in ("ext4", "xfs"):
        a_file_system_stops_and_is_whole(kind)
    shown("with 1 and 3 replicas: fsync fails after a loss, also by the next engine, and ends well where all was flushed; "
          "ext4 and XFS stop, and have all that they had synced when they are mounted again")


def told(replicas):
    host = Host()
    volume = host.name(f"loss{replicas}")
    status = host.up(volume, "--size", "64MiB", "--replicas", str(replicas), "--frontend", "fuse")
    program = Program(status["device"])
    program.writes(0, 1)
    expect(program.flushes(), "nothing is lost yet")
    lose_power(host, volume)
    expect(program.flushes(), "all had been flushed")
    expect(not noted(host, volume), "nothing is lost, and it is noted")

    program.writes(1, 2)
    lose_power(host, volume)
    expect(noted(host, volume), "the next engine would not know")
    # The engine that knows of it dies before it could tell; its replicas live on.
    before = host.status(volume)["engine_pid"]
    kill(before, signal.SIGKILL)
    wait_for("the next engine", lambda: host.status(volume)["engine_pid"] not in (None, before), 60)
    expect(not program.flushes(), "fsync promises what may be gone")
    expect(not program.flushes(), "a second program would not be told")
    wait_for("the note goes once it is told", lambda: not noted(host, volume), 30)
    lines = [text for _, text in host.log(volume) if "flushes fail for a minute" in text]
    expect(lines, "the engine's log says nothing")
    expect("not flushed" in host.status(volume)["remark"], "the status says nothing")

    # All at once, the engine too, as where it runs on one of the hosts; the device and who has it open stay.
    program.writes(2, 3)
    lose_power(host, volume, engine_too=True)
    expect(not program.flushes(), "fsync promises what may be gone")
    os.close(program.file)

    # Whoever opens it after a stop was promised nothing.
    host.ctl("down", volume)
    status = host.up(volume)
    program = Program(status["device"])
    program.writes(3, 4)
    expect(program.flushes(), "a loss of others is told to a newcomer")
    expect(host.status(volume)["remark"] == "", "the status goes on with what is over")
    os.close(program.file)
    host.clean()


def a_file_system_stops_and_is_whole(kind):
    host = Host()
    volume = host.name(kind)
    device = host.up(volume, "--size", "512MiB", "--replicas", "1", "--frontend", "fuse")["device"]
    run(f"mkfs.{kind}", "-q", device)
    where = os.path.join(host.root, "mounted")
    os.mkdir(where)
    run("mount", device, where)
    names = [f"file{n}" for n in range(100)]

    def synced(word):
        for name in names:
            with open(os.path.join(where, name), "w") as file:
                file.write(word * 1000)
        return run("sync", "-f", where, check=False).returncode == 0
    expect(synced("kept"), "nothing is lost yet")
    # What lies in the device's cache and not in the kernel's: a file system writes its own blocks just so.
    run("dd", "if=/dev/zero", f"of={where}/direct", "bs=4k", "count=10", "oflag=direct")
    lose_power(host, volume)
    try:
        went_on = synced("gone")
    except OSError as e:
        expect(e.errno in (errno.EROFS, errno.EIO), f"{kind}: {e}")
        went_on = False
    expect(not went_on, f"{kind} trusts what may be gone")
    run("umount", where)
    wait_for("nobody has the device open any more", lambda: host.status(volume)["remark"] == "", 60)
    run("mount", device, where)
    for name in names:
        text = open(os.path.join(where, name)).read()
        expect(text[:4] in ("kept", "gone"), f"{kind} lost {name}: {text[:20]!r}")
    expect(synced("more"), f"{kind} cannot be written once it is mounted again")
    expect(host.status(volume)["remark"] == "", "the status goes on with what is over")
    run("umount", where)
    host.clean()


main()
