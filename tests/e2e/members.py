"""Replicas added, rebuilt and taken out while fio verifies: no error, no mismatch, an engine that is killed in between
knows them all, and at the end all replicas are equal, snapshots included."""
import itertools, os, re, resource, signal, subprocess, threading, time
from harness import BIN, Host, contents, expect, fio, full, have, kill, run, say, shown, skip, stand_still, wait_for


def unchanged(pid):
    """The numbers of a process's open files; `None` while they change."""
    looks = []
    for _ in range(2):
        looks.append({int(name) for name in os.listdir(f"/proc/{pid}/fd")})
        time.sleep(0.5)
    return looks[0] if looks[0] == looks[1] else None


def one_fails(host):
    """A replica that cannot make a record durable has failed, whatever becomes of its disk: its process ends, and the next one comes back."""
    volume = host.name("failing")
    host.up(volume, "--size", "64MiB", "--frontend", "none")
    failing, other, leaver = host.status(volume)["replicas"]
    pid = failing["pid"]
    # Once its connections are made, the next file is one too many: the limit is about numbers, of which the lowest free one is
    # taken. That another replica leaves is recorded in a new file.
    numbers = wait_for("nothing more to be opened", lambda: unchanged(pid), 30)
    free = next(n for n in itertools.count() if n not in numbers)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    host.ctl("replica", "rm", volume, leaver["name"])
    healthy = host.healthy(volume, 2)["replicas"]
    now = {r["name"]: r["pid"] for r in healthy}
    expect(now.keys() == {failing["name"], other["name"]}, f"the volume has {now}")
    expect(now[failing["name"]] != pid and now[other["name"]] == other["pid"], f"{pid} has failed, and now there are {now}")
    said = open(os.path.join(host.root, "log", failing["name"] + ".log")).read()
    expect(re.search("the replica has failed: .*Too many open files", said), f"its log says {said}")
    host.ctl("down", volume)
    expect(len({contents(r["path"]) for r in healthy}) == 1, "replicas differ")


def engine_is_exchanged(host):
    """The engine dies after it has let a replica go, and the next one is started by a record that has it still: it lets it go, too."""
    if not have("strace"):
        return skip("engine_is_exchanged", "no strace")
    volume = host.name("exchanged")
    host.up(volume, "--size", "64MiB", "--quorum", "majority", "--frontend", "none")
    before = host.status(volume)
    leaver = before["replicas"][0]
    known = lambda: engines_replicas(host, volume)
    # It has asked the engine before it deletes anything.
    deletes = "unlink,unlinkat,rmdir"
    command = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"inject={deletes}:delay_enter=8s:when=1",
               os.path.join(BIN, "longhornctl"), "--root", host.root, "replica", "rm", volume, leaver["name"]]
    removes = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for("the engine without it", lambda: len(known()) == 2, 30)
    kill(before["engine_pid"], signal.SIGKILL)
    wait_for("an engine by the record", lambda: len(known()) == 3, 30)
    expect(removes.poll() is None, "the record has the replica, and the command has ended")
    said = removes.communicate(timeout=120)[1]
    expect(removes.returncode == 0, said)
    expect(len(known()) == 2, f"the engine has {known()} though {leaver['name']} is gone")
    host.healthy(volume, 2)
    host.ctl("down", volume)


def engines_replicas(host, volume):
    """The addresses of the replicas that the engine has."""
    done = run(os.path.join(BIN, "longhorn"), "--url", f"unix:{host.root}/run/{volume}-e-0.grpc.sock", "ls", check=False)
    return re.findall(r"\S+\.sock", done.stdout)


def disk_is_away(host, volume, replica, place):
    """The disk of a replica that was added to the volume while it runs is unmounted, and its process starts again: nothing is made at its
    place, which is on another disk. It is back by itself when the disk is."""
    host.healthy(volume, 2)
    modes = [os.stat(os.path.join(place, name)).st_mode & 0o077 for name in [".", *os.listdir(place)]]
    expect(not any(modes), f"others may read what lies in {place}")
    os.rename(place, place + "-away")
    kill(host.replica_pids(volume)[replica], signal.SIGKILL)

    def told():
        remark = next(r["remark"] for r in host.status(volume)["replicas"] if r["name"] == replica)
        return "mount its disk" in remark
    wait_for("status tells that the disk is away", told, 30)
    # For some starts of the process more.
    time.sleep(3)
    expect(told() and not os.path.exists(place), f"{place} was made at the place of a disk that is not mounted")
    os.rename(place + "-away", place)
    host.healthy(volume, 2)


def another_disk_is_the_way_out(host):
    """The disk of the only replica is full, blocks and holes in turns, and writes wait for space: a replica on another disk is brought in
    sync all the same, they are done there, and the full one is put out."""
    small = os.path.join(host.root, "small")
    os.mkdir(small)
    if run("mount", "-t", "tmpfs", "-o", "size=48m", "small", small, check=False).returncode != 0:
        return skip("another_disk_is_the_way_out", "mounting needs root")
    try:
        volume = host.name("crowded")
        host.up(volume, "--size", "256MiB", "--replicas", "1", "--frontend", "nbd-server")
        first = host.status(volume)["replicas"][0]["name"]
        added = host.ctl("replica", "add", volume, "--dir", os.path.join(small, "replica")).stdout.strip()
        host.healthy(volume, 2)
        host.ctl("replica", "rm", volume, first)
        client = ["--ioengine=nbd", f"--uri=nbd+unix:///{volume}?socket={host.socket(volume)}", "--size=128m"]
        fio("gaps", 1, "--rw=write:60k", "--bs=4k", *client)
        load = threading.Thread(target=fio, args=("waits", 10, "--rw=randwrite", "--bs=256k", "--iodepth=8", "--verify=crc32c", *client))
        load.start()
        wait_for("the disk to be full", lambda: "full" in str(host.status(volume)), 60)
        # What waits has been tried again by then.
        time.sleep(3)
        host.ctl("replica", "add", volume)
        load.join()
        modes = {r["name"]: r["mode"] for r in host.status(volume)["replicas"]}
        expect(modes.pop(added) != "RW" and list(modes.values()) == ["RW"], f"the full one is {added}, and there are {modes}")
        host.ctl("replica", "rm", volume, added)
        host.healthy(volume, 1)
        host.ctl("down", volume)
    finally:
        run("umount", "-l", small, check=False)


def main():
    if not have("fio"):
        return skip("members", "no fio")
    host = Host()
    volume = host.name("members")
    host.up(volume, "--size", "256MiB", "--replicas", "2", "--frontend", "nbd-server")
    stopped = threading.Event()
    results = []

    def load():
        while not stopped.is_set():
            results.append(fio("verify", 4, "--rw=randrw", "--bsrange=4k-64k", "--iodepth=16", "--verify=crc32c",
                               "--size=128m", "--ioengine=nbd",
                               f"--uri=nbd+unix:///{volume}?socket={host.socket(volume)}"))
    worker = threading.Thread(target=load)
    worker.start()
    try:
        rounds = full(1, 10)
        for n in range(rounds):
            host.ctl("snapshot", "create", volume, f"before-{n}")
            name = host.ctl("replica", "add", volume).stdout.strip()
            host.healthy(volume, 3)
            say(f"{name} added")
            host.ctl("replica", "rebuild", volume, name)
            host.healthy(volume, 3)
            first = host.status(volume)["replicas"][0]
            host.ctl("replica", "rm", volume, first["name"])
            expect(not os.path.exists(first["path"]), f"{first['path']} is still there")
            names = {r["name"] for r in host.healthy(volume, 2)["replicas"]}
            expect(first["name"] not in names and name in names, f"the volume has {names}")
    finally:
        stopped.set()
        worker.join()
    expect(all(r["jobs"][0]["error"] == 0 for r in results), "fio saw an error")

    # The next engine has the record's replicas, not those of the first start.
    pid = host.status(volume)["engine_pid"]
    kill(pid, signal.SIGKILL)
    wait_for("another engine", lambda: host.status(volume)["engine_pid"] not in (None, pid), 30)
    after = {r["name"] for r in host.healthy(volume, 2)["replicas"]}
    expect(after == names, f"a new engine has {after}, not {names}")

    one, other = sorted(names)
    host.ctl("replica", "rm", volume, one)
    refused = host.ctl("replica", "rm", volume, other, check=False)
    expect(refused.returncode == 1 and other in refused.stderr, f"the last replica: {refused.stderr}")
    added = host.ctl("replica", "add", volume, "--dir", os.path.join(host.root, "elsewhere")).stdout.strip()
    expect(os.path.exists(os.path.join(host.root, "elsewhere", "volume.meta")), "no replica where --dir says")
    disk_is_away(host, volume, added, os.path.join(host.root, "elsewhere"))
    taken = host.ctl("replica", "add", volume, "--dir", os.path.join(host.root, "elsewhere"), check=False)
    expect(taken.returncode == 1 and "not empty" in taken.stderr, f"a taken directory: {taken.stderr}")
    paths = [r["path"] for r in host.healthy(volume, 2)["replicas"]]
    host.ctl("down", volume)
    refused = host.ctl("replica", "rm", volume, added, check=False)
    expect(refused.returncode == 1 and f"longhornctl --root {host.root} up" in refused.stderr, f"on a stopped volume: {refused.stderr}")
    expect(len({contents(p) for p in paths}) == 1, "replicas differ")
    one_fails(host)
    engine_is_exchanged(host)
    another_disk_is_the_way_out(host)
    shown(f"{rounds} replicas added, rebuilt and taken out under {len(results)} runs of fio; replicas equal")


main()
