"""What is done to a volume beyond reading and writing: snapshots of a frozen file system, labels, limits; salvage when
no replica is left that an engine would start from; release to Longhorn."""
import fcntl, hashlib, importlib.util, json, os, shutil, signal, socket, struct, subprocess, threading, time
from harness import BIN, Host, JUDGE, contents, expect, full, have, kill, rng, run, shown, skip, stand_still, wait_for

MIB = 1 << 20
BLKDISCARD, BLKZEROOUT = 0x1277, 0x127F
LONGHORN = os.path.join(BIN, "longhorn")


def loaded_judge():
    spec = importlib.util.spec_from_file_location("judge", JUDGE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def put(volume, at, data):
    fd = os.open(f"/dev/longhorn/{volume}", os.O_RDWR)
    try:
        os.pwrite(fd, data, at)
        os.fsync(fd)
    finally:
        os.close(fd)


def get(volume, at, length):
    fd = os.open(f"/dev/longhorn/{volume}", os.O_RDONLY)
    try:
        return os.pread(fd, length, at)
    finally:
        os.close(fd)


def refused(host, *args):
    done = host.ctl(*args, check=False)
    expect(done.returncode == 1, f"{args} should be refused: {done.stdout}{done.stderr}")
    return done.stderr + done.stdout


# ---- snapshots -------------------------------------------------------------------------------------------------

def writes_in_time(place, seconds):
    """True if a file can be made and synced within so long."""
    done = threading.Event()

    def write():
        fd = os.open(os.path.join(place, f"w{time.monotonic_ns()}"), os.O_CREAT | os.O_WRONLY)
        os.write(fd, b"x" * 4096)
        os.fsync(fd)
        os.close(fd)
        done.set()
    threading.Thread(target=write, daemon=True).start()
    return done.wait(seconds)


def needs_recovery(host, volume, snapshot):
    """Whether the journal of the snapshot's ext4 would have to be replayed."""
    image = os.path.join(host.root, "frozen.img")
    host.ctl("snapshot", "export", volume, snapshot, image)
    return "needs_recovery" in run("dumpe2fs", "-h", image).stdout


def frozen(host):
    if not have("mkfs.ext4", "dumpe2fs"):
        return skip("freeze", "no e2fsprogs")
    volume, place = host.name("frozen"), os.path.join(host.root, "my data")
    host.up(volume, "--size", "64MiB", "--replicas", "1", "--frontend", "fuse")
    device = f"/dev/longhorn/{volume}"
    run("mkfs.ext4", "-q", device)
    os.mkdir(place)
    run("mount", device, place)
    try:
        expect(writes_in_time(place, 30), "the file system does not write")
        host.ctl("snapshot", "create", volume, "hot")
        host.ctl("snapshot", "create", volume, "cold", "--freeze", "--label", "why=a & b", "--label", "k=")
        expect(writes_in_time(place, 30), "the file system is still frozen after its snapshot")
        labels = {s["name"]: s["labels"] for s in host.json("snapshot", "ls", volume)}
        expect(labels == {"hot": {}, "cold": {"why": "a & b", "k": ""}}, f"labels {labels}")
        expect("why=a & b" in host.ctl("snapshot", "tree", volume).stdout, "the tree shows no labels")
        expect(needs_recovery(host, volume, "hot"), "a mounted ext4 looks clean: the check says nothing")
        expect(not needs_recovery(host, volume, "cold"), "the frozen snapshot's journal is not empty")

        def freezer(limit):
            child = subprocess.Popen([LONGHORN, "fs-freeze", "--limit", str(limit), place], stdin=subprocess.PIPE,
                                     stdout=subprocess.PIPE, text=True)
            expect(child.stdout.readline() == "frozen\n", "the freezer does not freeze")
            return child
        # The time limit, with nobody who asks for the thaw.
        child = freezer(4000)
        expect(not writes_in_time(place, 0.5), "writes go on although it is frozen")
        expect(child.wait(20) == 3, "the freezer does not say that it was late")
        expect(writes_in_time(place, 20), "the time limit does not thaw")
        # The end of whoever froze.
        child = freezer(60000)
        child.stdin.close()
        expect(child.wait(20) == 0 and writes_in_time(place, 20), "the end of the engine does not thaw")
        # Mounted where the engine does not see it: what was to rest does not, so there is no snapshot.
        run("umount", place)
        elsewhere = subprocess.Popen(["unshare", "--mount", "--propagation", "private", "sh", "-c",
                                      'mount "$0" "$1" && echo mounted && read -r _', device, place],
                                     stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        expect(elsewhere.stdout.readline() == "mounted\n", "not mounted in another namespace")
        text = refused(host, "snapshot", "create", volume, "unseen", "--freeze")
        expect("does not see" in text, text)
        elsewhere.stdin.close()
        elsewhere.wait()
        run("mount", device, place)
        freezers_killed(host, volume, place)
        # Somebody else has frozen it: no snapshot, and it stays as they have it.
        run("fsfreeze", "--freeze", place)
        text = refused(host, "snapshot", "create", volume, "never", "--freeze")
        expect("frozen" in text or "freez" in text, text)
        expect(not writes_in_time(place, 0.5), "somebody else's freeze was thawed")
        # Engine and freezer killed at once: the next engine thaws.
        with open(f"/run/longhorn/{volume}.frozen", "w") as note:
            note.write(place)
        kill(host.status(volume)["engine_pid"], signal.SIGKILL)
        expect(writes_in_time(place, 60), "the next engine does not thaw what the one before has left frozen")
        expect(live(host, volume) == {"hot", "cold"}, f"a refused snapshot is there: {live(host, volume)}")
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", place], capture_output=True)
        run("umount", place)
    limits(host, volume)
    host.ctl("down", volume)
    shown("a snapshot of a frozen ext4 needs no journal, and there is none where it cannot freeze; it thaws by limit, by the engine's end, "
          "and after both died")


def live(host, volume):
    return {s["name"] for s in host.json("snapshot", "ls", volume) if not s.get("removed")}


def freezers_killed(host, volume, place):
    """The process that freezes is killed at any moment: what is called a snapshot of a frozen file system is one, and all write."""
    over, delay, made, late = threading.Event(), [0.0], 0, 0

    def killer():
        while not over.is_set():
            for pid in filter(str.isdigit, os.listdir("/proc")):
                try:
                    words = open(f"/proc/{pid}/cmdline", "rb").read().split(b"\0")
                    if b"fs-freeze" in words and place.encode() in words:
                        time.sleep(delay[0])
                        os.kill(int(pid), signal.SIGKILL)
                except (OSError, ProcessLookupError):
                    pass
    thread = threading.Thread(target=killer)
    thread.start()
    for n in range(20):
        name, delay[0] = f"killed-{n}", n % 10 * 0.02
        done = host.ctl("snapshot", "create", volume, name, "--freeze", check=False)
        expect((done.returncode == 0) == (name in live(host, volume)), f"{name}: {done.stdout}{done.stderr}")
        if done.returncode == 0:
            made += 1
            expect(not needs_recovery(host, volume, name), "the journal of a snapshot whose freezer was killed is not empty")
            host.ctl("snapshot", "rm", volume, name)
        late += "removed again" in done.stderr
        expect(writes_in_time(place, 30), "the file system is frozen though its freezer is dead")
    over.set()
    thread.join()
    print(f"of 20 snapshots whose freezers were killed {made} were taken in time, and {late} too late")


def limits(host, volume):
    """Changed while the volume is up; they hold after a restart, and removed snapshots do not count."""
    host.ctl("up", volume, "--snapshot-max-count", "2")
    expect("limit" in refused(host, "snapshot", "create", volume, "third"), "no word of the limit")
    before = host.status(volume)["engine_pid"]
    kill(before, signal.SIGKILL)

    def is_back():
        now = host.status(volume)
        return now["state"] == "attached" and now["engine_pid"] != before
    wait_for("the engine is back", is_back, 60)
    expect("limit" in refused(host, "snapshot", "create", volume, "third"), "the limit is gone with the engine")
    host.ctl("snapshot", "rm", volume, "hot")
    with open(f"/dev/longhorn/{volume}", "r+b", buffering=0) as device:
        device.seek(16 << 20)
        device.write(os.urandom(4 << 20))
        os.fsync(device)
    host.ctl("snapshot", "create", volume, "third")
    host.ctl("up", volume, "--snapshot-max-count", "250", "--snapshot-max-size", "1MiB")
    expect("limit" in refused(host, "snapshot", "create", volume, "fourth"), "no word of the limit of size")
    host.ctl("up", volume, "--snapshot-max-size", "0")
    host.ctl("snapshot", "create", volume, "fourth")


# ---- salvage ---------------------------------------------------------------------------------------------------

def left_alone(host, volume):
    """Three replicas of which one after the other is put out: epochs {1,2,3}, {1,2}, {1}. What each has seen last."""
    names = sorted(r["name"] for r in host.healthy(volume)["replicas"])
    put(volume, 0, b"A" * 4096)
    for out, byte in [(names[2], b"B"), (names[1], b"C")]:
        stand_still(host.replica_pids(volume)[out])
        put(volume, 0, byte * 4096)
        mode = {r["name"]: r["mode"] for r in host.status(volume)["replicas"]}[out]
        expect(mode == "ERR", f"{out} has not answered and is {mode}")
    host.kill_everything()
    return names


def salvage(host):
    volume = host.name("salvage")
    host.up(volume, "--size", "16MiB", "--replicas", "3", "--frontend", "fuse")
    one, two, three = left_alone(host, volume)
    paths = {r["name"]: r["path"] for r in host.status(volume)["replicas"]}
    host.ctl("down", volume)
    # The authority is lost: the replicas alone say that one of them is sure.
    authority = os.path.join(host.root, "volumes", volume, "authority.json")
    with open(authority, "w") as f:
        f.write("{")
    found = salvaged(host, volume)
    expect(found["sure"] and found["chosen"] == [one], f"{found}")
    expect(get(volume, 0, 4096) == b"C" * 4096, "the sure replica's bytes are not there")
    host.healthy(volume)
    # Again, and the only one that is sure is lost with its disk.
    expect(left_alone(host, volume) == [one, two, three], "other replicas")
    host.ctl("down", volume)
    shutil.move(paths[one], paths[one] + ".lost")
    text = refused(host, "salvage", volume)
    expect("left out" in text and two in text, text)
    expect("left out" in refused(host, "salvage", volume, "--replica", two), "a guess without --force")
    expect("not" in refused(host, "salvage", volume, "--replica", one, "--force"), "a lost directory")
    found = salvaged(host, volume, "--force")
    expect(not found["sure"] and found["chosen"] == [two], f"{found}")
    expect(get(volume, 0, 4096) == b"B" * 4096, "the guess is not what the second replica held")
    host.healthy(volume)
    host.ctl("down", volume)
    shown("of epochs {1,2,3}, {1,2}, {1} the last member is sure; without it nobody is, and --force takes the second")


def salvaged(host, volume, *args):
    """What `salvage` decided, and the volume that it started."""
    found = host.json("salvage", volume, *args)
    expect(found["status"]["state"] == "attached", f"{found}")
    return found


def a_client_is_connected(host):
    """What a client has read would be other bytes after a revert, and it would not hear of it."""
    volume = host.name("connected")
    host.up(volume, "--size", "16MiB", "--replicas", "1", "--frontend", "nbd-server")
    host.ctl("snapshot", "create", volume, "s1")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(host.socket(volume))
        expect(client.recv(18)[:8] == b"NBDMAGIC", "the server does not greet")
        text = refused(host, "snapshot", "revert", volume, "s1")
        expect("NBD connections: 1" in text, text)
    wait_for("the revert", lambda: host.ctl("snapshot", "revert", volume, "s1", check=False).returncode == 0, 10)
    host.ctl("down", volume)


def a_replica_with_a_branch_dies(host):
    """Opened anew a replica tells its layers in another order than the one in which its engine has seen them made, where a revert
    has left a branch: the last one is the member that was lost all the same."""
    volume = host.name("branch")
    host.up(volume, "--size", "16MiB", "--replicas", "1", "--frontend", "nbd-server")
    for name in ("a", "b", "c"):
        host.ctl("snapshot", "create", volume, name)
    host.ctl("snapshot", "revert", volume, "a")
    for name in ("d", "e"):
        host.ctl("snapshot", "create", volume, name)
    generation = host.status(volume)["generation"]
    os.kill(host.status(volume)["replicas"][0]["pid"], signal.SIGKILL)
    host.ctl("snapshot", "create", volume, "f", timeout=60)
    expect(host.status(volume)["generation"] == generation, "it goes on with another engine")
    host.ctl("down", volume)


def an_older_directory(host, quorum, in_one_life):
    """A directory comes back, as of a disk that was not mounted, when another one has its replica's place and is a member of newer
    epochs: of another engine's, or, `in_one_life`, of the same one's."""
    volume = host.name(f"older-{quorum}-{'same' if in_one_life else 'other'}")
    host.up(volume, "--size", "16MiB", "--frontend", "fuse", "--quorum", quorum)
    put(volume, 0, b"1" * MIB)
    # Nothing is marked as written any more, which would be compared.
    host.ctl("down", volume)
    host.up(volume)
    replica = host.healthy(volume)["replicas"][2]
    place, generation = replica["path"], host.status(volume)["generation"]
    if in_one_life:
        os.rename(place, host.root + "/away")
        os.kill(replica["pid"], signal.SIGKILL)
        wait_for("another directory", lambda: os.path.isdir(place), 30)
    else:
        host.ctl("down", volume)
        os.rename(place, host.root + "/away")
        host.up(volume)
    host.healthy(volume)
    put(volume, 0, b"2" * MIB)
    expect((host.status(volume)["generation"] == generation) == in_one_life, f"{quorum}: another engine's life")
    host.ctl("down", volume)
    shutil.rmtree(place)
    os.rename(host.root + "/away", place)
    if quorum == "any":
        os.remove(os.path.join(host.root, "volumes", volume, "authority.json"))
    host.up(volume)
    # Each read asks another replica.
    for _ in range(8):
        expect(get(volume, 0, MIB) == b"2" * MIB, f"{quorum}: an older directory is read from")
    host.healthy(volume)
    paths = [r["path"] for r in host.status(volume)["replicas"]]
    host.ctl("down", volume)
    expect(len({contents(path) for path in paths}) == 1, f"{quorum}: replicas differ")
    released = host.json("release", volume)["released"]
    expect(sorted(released) == sorted(paths), f"{quorum}: {released} are Longhorn's")
    # They are taken back, and what the record said of them is said again.
    host.ctl("import", volume, *paths, "--quorum", quorum, "--block-size", "4096")
    host.up(volume)
    status = host.healthy(volume)
    expect((status["quorum"], status["block_size"]) == (quorum, 4096), f"{quorum}: {status}")
    expect(get(volume, 0, MIB) == b"2" * MIB, f"{quorum}: other bytes after an import")
    host.ctl("down", volume)


def an_older_authority(host):
    """The host's records are put back from a copy that was made when a replica that is out was a member."""
    volume = host.name("put-back")
    host.up(volume, "--size", "16MiB", "--frontend", "fuse")
    put(volume, 0, b"1" * MIB)
    # Nothing is marked as written any more, which would be compared.
    host.ctl("down", volume)
    host.up(volume)
    out = host.healthy(volume)["replicas"][2]
    authority = os.path.join(host.root, "volumes", volume, "authority.json")
    before = open(authority, "rb").read()
    # Its disk is away with it.
    os.rename(out["path"], out["path"] + ".away")
    with open(out["path"], "w"):
        os.kill(out["pid"], signal.SIGKILL)
    put(volume, 0, b"2" * MIB)
    expect(open(authority, "rb").read() != before, "a replica is out, and the epoch is what it was")
    host.ctl("down", volume)
    os.remove(out["path"])
    os.rename(out["path"] + ".away", out["path"])
    with open(authority, "wb") as f:
        f.write(before)
    host.up(volume)
    # Each read asks another replica.
    for _ in range(8):
        expect(get(volume, 0, MIB) == b"2" * MIB, "a replica is read from that was out")
    paths = [r["path"] for r in host.healthy(volume)["replicas"]]
    host.ctl("down", volume)
    expect(len({contents(path) for path in paths}) == 1, "replicas differ")
    shown("an epoch of before that is put back makes no member of a replica that is out")


# ---- release ---------------------------------------------------------------------------------------------------

def exported(host, volume):
    """The bytes of every snapshot that lasts, by name; the volume is up."""
    sums, image = {}, os.path.join(host.root, "release.img")
    for snapshot in host.json("snapshot", "ls", volume):
        if snapshot["removed"]:
            expect("being removed" in refused(host, "snapshot", "export", volume, snapshot["name"], image), snapshot["name"])
            continue
        host.ctl("snapshot", "export", volume, snapshot["name"], image)
        sums[snapshot["name"]] = hashlib.sha256(open(image, "rb").read()).hexdigest()
    return sums


def release(host, dice):
    size, volume = 16 * MIB, host.name("release")
    host.up(volume, "--size", str(size), "--replicas", "2", "--frontend", "fuse")
    fd = os.open(f"/dev/longhorn/{volume}", os.O_RDWR)
    for n in range(4):
        for _ in range(60):
            length = 4096 * dice.randrange(1, 32)
            at = 4096 * dice.randrange((size - length) // 4096 + 1)
            if dice.random() < 0.6:
                os.pwrite(fd, dice.randbytes(4096) * (length // 4096), at)
            else:
                os.fsync(fd)
                fcntl.ioctl(fd, dice.choice([BLKDISCARD, BLKZEROOUT]), struct.pack("QQ", at, length))
        os.fsync(fd)
        if n < 3:
            host.ctl("snapshot", "create", volume, f"s{n}")
    head = hashlib.sha256(os.pread(fd, size, 0)).hexdigest()
    os.close(fd)
    host.ctl("snapshot", "rm", volume, "s1")
    sums = exported(host, volume)
    paths = [r["path"] for r in host.status(volume)["replicas"]]
    expect("is up" in refused(host, "release", volume), "released while it is up")
    host.ctl("down", volume)
    marked = [json.load(open(os.path.join(p, "volume.meta")))["Rebuilding"] for p in paths]
    expect(all(marked), "no zero marks were made: the test shows nothing")
    # Broken off at any moment, and begun again.
    stops = full(6, 40)
    for n in range(stops):
        child = subprocess.Popen([os.path.join(BIN, "longhornctl"), "--root", host.root, "release", volume],
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(dice.random() * 0.06)
        child.kill()
        child.wait()
        if not os.path.exists(os.path.join(host.root, "volumes", volume, "volume.json")):
            break
        if json.load(open(os.path.join(host.root, "volumes", volume, "volume.json")))["state"] == "releasing":
            expect("release" in refused(host, "up", volume), "a volume that is being released starts")
    if os.path.exists(os.path.join(host.root, "volumes", volume, "volume.json")):
        done = host.json("release", volume)
        expect(sorted(done["released"]) == sorted(paths) and not done["left"], f"{done}")
    judge = loaded_judge()
    for path in paths:
        replica = judge.Replica(path, clean=True)
        expect(set(os.listdir(os.path.join(path, "engine"))) <= {"fence"}, f"ours is left in {path}")
        found = {n: hashlib.sha256(replica.content(f)).hexdigest() for n, f in replica.snapshots().items() if n in sums}
        expect(found == sums, f"{path}: snapshots differ as Longhorn reads them")
        found = hashlib.sha256(replica.content(replica.volume["Head"])).hexdigest()
        expect(found == head, f"{path}: the head differs as Longhorn reads it")
    host.ctl("import", volume, *paths)
    host.up(volume, "--frontend", "fuse")
    expect(hashlib.sha256(get(volume, 0, size)).hexdigest() == head, "taken back, the volume differs")
    host.ctl("down", volume)
    shown(f"released after {n + 1} interruptions: {len(sums)} snapshots and the head as Longhorn reads them, and back")


def main():
    host, dice = Host(), rng()
    frozen(host)
    salvage(host)
    a_client_is_connected(host)
    a_replica_with_a_branch_dies(host)
    for quorum in ("any", "majority", "unsafe"):
        an_older_directory(host, quorum, in_one_life=False)
        an_older_directory(host, quorum, in_one_life=True)
    shown("an older directory of a replica is brought in sync, and not read from, with each quorum, whichever engine let in the newer one")
    an_older_authority(host)
    release(host, dice)


main()
