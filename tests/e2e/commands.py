"""Command lines at their edges: what is said again changes nothing, what other tools say is understood, and nothing is waited
for without an end."""
import contextlib, glob, itertools, json, os, shutil, signal, socket, ssl, subprocess, time
from harness import BIN, Host, contents, device_of_kernel, expect, have, shown, skip, stand_still, wait_for


def refused(host, *args):
    done = host.ctl(*args, check=False)
    expect(done.returncode == 1, f"{' '.join(args)}: exit status {done.returncode}")
    return done.stderr


# An address of this machine that no other process of these tests has: what is free there stays free.
OWN = f"127.{os.getpid() >> 8 & 255}.{os.getpid() & 255}.1"


def free_address():
    """The first of five ports in a row."""
    while True:
        with contextlib.ExitStack() as open_sockets:
            first = open_sockets.enter_context(socket.create_server((OWN, 0))).getsockname()[1]
            try:
                for port in range(first + 1, first + 5):
                    open_sockets.enter_context(socket.create_server((OWN, port)))
            except (OSError, OverflowError):
                continue
            return f"{OWN}:{first}"


def said_again(host):
    volume = host.name("again")
    host.up(volume, "--size", "16MiB", "--replicas", "1")
    frontend = host.status(volume)["frontend"]
    pid = host.status(volume)["engine_pid"]
    host.up(volume, "--frontend", frontend)
    expect(host.status(volume)["engine_pid"] == pid, "another engine")
    expect("--frontend auto" in refused(host, "up", volume, "--frontend", "none"), "another frontend on a running volume")
    # Of two options of which one is refused the other one is not stored.
    most = host.status(volume)["snapshot_max_count"]
    refused(host, "up", volume, "--snapshot-max-count", "5", "--io-timeout", "7")
    expect(host.status(volume)["snapshot_max_count"] == most, host.status(volume))
    host.up(volume, "--snapshot-max-count", "5")
    expect(host.status(volume)["snapshot_max_count"] == 5, host.status(volume))
    host.ctl("down", volume)
    # Where a server listens belongs to the frontend that was told so.
    address = free_address()
    host.up(volume, "--frontend", "nbd-server", "--listen", address)
    expect(host.status(volume)["uri"].startswith(f"nbd://{address}/"), host.status(volume)["uri"])
    host.ctl("down", volume)
    host.up(volume)
    expect(host.status(volume)["uri"].startswith(f"nbd://{address}/"), "it listens elsewhere when it is started again")
    host.ctl("down", volume)
    host.up(volume, "--frontend", "nbd-server")
    expect(host.status(volume)["uri"].startswith("nbd+unix:"), host.status(volume)["uri"])
    host.ctl("down", volume)
    host.ctl("rm", volume, "--yes")
    shown("a frontend that is there already is no other one; --listen belongs to the frontend that it was said with")


def deaf_engine(host):
    volume = host.name("deaf")
    host.up(volume, "--size", "16MiB", "--replicas", "2", "--frontend", "nbd-server")
    engine = host.status(volume)["engine_pid"]
    stand_still(engine)
    words = os.path.join(host.root, "words")
    with open(words, "w") as stderr:
        asked = subprocess.Popen([os.path.join(BIN, "longhornctl"), "--root", host.root, "snapshot", "create", volume],
                                 stdout=subprocess.DEVNULL, stderr=stderr)
    wait_for("a word on what is waited for", lambda: "the engine has not answered yet" in open(words).read(), 60)
    os.kill(engine, signal.SIGCONT)
    expect(asked.wait(timeout=60) == 0, open(words).read())
    stand_still(engine)
    began = time.monotonic()
    done = subprocess.run([os.path.join(BIN, "longhornctl"), "--root", host.root, "down", volume], capture_output=True,
                          text=True, timeout=120)
    took = time.monotonic() - began
    expect(done.returncode == 0, done.stderr)
    expect(host.status(volume)["state"] == "detached", host.status(volume)["state"])
    host.up(volume)
    host.healthy(volume, replicas=2)
    host.ctl("down", volume)
    host.ctl("rm", volume, "--yes")
    shown(f"an engine that answers nothing is waited for with a word, and stopped all the same, in {took:.0f} s")


def other_words(host):
    """What Longhorn's longhornctl says."""
    volume, image = host.name("words"), os.path.join(host.root, "words.img")
    host.up(volume, "--size", "64MiB", "--replicas", "1")
    device = host.status(volume)["device"]
    expect("not mounted" in refused(host, "trim", "volume", volume), "trimmed without a file system")
    mount = os.path.join(host.root, "mount")
    os.mkdir(mount)
    subprocess.run(["mkfs.ext4", "-q", "-E", "nodiscard", device], check=True)
    subprocess.run(["mount", device, mount], check=True)
    try:
        trimmed = host.json("trim", "volume", "--name", volume)
        expect(trimmed["mount_point"] == mount and trimmed["bytes"] > 16 << 20, f"{trimmed}")
        expect("trimmed" in host.ctl("trim", "volume", volume).stdout, "no word of what was trimmed")
    finally:
        subprocess.run(["umount", mount], check=True)
    path = host.status(volume)["replicas"][0]["path"]
    host.ctl("down", volume)
    host.ctl("export", "replica", path, image)
    expect(os.path.getsize(image) == 64 << 20, "an image of another size")
    # Imported and let go again: nothing in the directory is ours.
    host.ctl("release", volume)
    before = sorted((entry.name, entry.stat().st_mtime_ns) for entry in os.scandir(path))
    host.ctl("import", volume, path)
    released = host.json("release", volume)
    expect(released["released"] == [path] and released["left"] == [], f"{released}")
    after = sorted((entry.name, entry.stat().st_mtime_ns) for entry in os.scandir(path))
    expect(before == after, f"{before} {after}")
    expect(volume not in [v["name"] for v in host.json("ls")], "it is known still")
    left = [path for folder in ("run", "log") for path in glob.glob(os.path.join(host.root, folder, f"{volume}-*"))]
    expect(left == [], f"left of a volume that there is no more: {left}")
    shown("trim volume, export replica; what was imported and never started is let go as it was")


def trusts_the_network(host):
    volume = host.name("trusts")
    other = os.path.join(host.root, "other")
    address = free_address()
    manager = subprocess.Popen([os.path.join(BIN, "longhorn"), "instance-manager", "--root", other, "--listen",
                                address, "--insecure"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ctl = [os.path.join(BIN, "longhornctl"), "--root", other]
    try:
        wait_for("a manager", lambda: os.path.exists(os.path.join(other, "run", "instance-manager.sock")), 20)
        subprocess.run([*ctl, "up", volume, "--size", "16MiB", "--replicas", "1", "--frontend", "none"], check=True,
                       capture_output=True)
        said = json.loads(subprocess.run([*ctl, "-o", "json", "status", volume], check=True, capture_output=True).stdout)
        expect(said["insecure"] == [f"instance manager on {address}"], f"{said['insecure']}")
        for offset in range(5):
            socket.create_connection((OWN, int(address.rpartition(":")[2]) + offset), 20).close()
        subprocess.run([*ctl, "down", volume], check=True, capture_output=True)
    finally:
        manager.terminate()
        manager.wait()
    shown("status names what obeys whoever reaches it")


def open_to_the_network(host):
    volume = host.name("open")
    address = free_address()
    for frontend, what in (("nbd-server", "NBD server"), ("iscsi-target", "iSCSI target")):
        size = ["--size", "16MiB", "--replicas", "1"] if frontend == "nbd-server" else []
        host.up(volume, *size, "--frontend", frontend, "--listen", address)
        expect(host.status(volume)["insecure"] == [f"{what} on {address}"], f"{host.status(volume)['insecure']}")
        said = refused(host, "up", host.name("late"), "--size", "16MiB", "--frontend", "nbd-server", "--listen", address)
        expect("another port" in said, said)
        host.ctl("down", volume)
    host.up(volume, "--frontend", "nbd-server")
    expect(host.status(volume)["insecure"] == [], "a unix socket is open to nobody")
    host.ctl("down", volume)
    host.ctl("rm", volume, "--yes")
    shown("status names the NBD servers and iSCSI targets that serve whoever reaches them")


def dies_again_and_again(host):
    """An engine that cannot start: whoever looks later is told why, too, and not only who started it."""
    volume = host.name("dies")
    host.up(volume, "--size", "16MiB", "--replicas", "1", "--frontend", "none")
    host.ctl("down", volume)
    # TEST-NET-1 (RFC 5737) is no machine's own. `up` takes no such address, so it is one that the host had when the volume was up last.
    path = os.path.join(host.root, "volumes", volume, "volume.json")
    record = json.load(open(path)) | {"frontend": "nbd-server", "listen": "192.0.2.1:10809"}
    with open(path, "w") as f:
        json.dump(record, f)
    why = "cannot listen on 192.0.2.1"
    said = refused(host, "up", volume)
    expect(why in said, said)
    wait_for("the reason", lambda: why in host.status(volume)["remark"], 20)
    host.ctl("down", volume)
    host.up(volume, "--frontend", "none")
    host.ctl("down", volume)
    host.ctl("rm", volume, "--yes")
    shown("status says why an engine does not start")


def waits_for_no_engine(host):
    """An engine that cannot start any more: whoever has the device open is told to close it, and nothing is ended before; what waits
    there for an answer holds its process for ever, and fails."""
    if not device_of_kernel():
        return skip("waits_for_no_engine", "no FUSE or loop device")
    volume = host.name("waits")
    status = host.up(volume, "--size", "16MiB", "--replicas", "2", "--frontend", "fuse")
    device, key = status["device"], os.path.join(host.root, "volumes", volume, "key")
    kept = open(key, "rb").read()
    # It cannot be read any more when it is wanted next.
    with open(key, "wb") as file:
        file.write(b"x")
    held = os.open(device, os.O_RDONLY)
    os.kill(status["engine_pid"], signal.SIGKILL)
    wait_for("an engine that has given up", lambda: "gave up" in host.status(volume)["remark"], 20)
    pids = host.replica_pids(volume)
    expect("in use" in refused(host, "down", volume), "taken from who has it open")
    expect(host.replica_pids(volume) == pids and None not in pids.values(), "its processes were ended before it was looked at")
    reader = subprocess.Popen(["dd", f"if={device}", "of=/dev/null", "bs=4k", "count=1", "iflag=direct"], stderr=subprocess.PIPE,
                              text=True)
    counts = f"/sys/dev/block/{os.major(os.stat(device).st_rdev)}:{os.minor(os.stat(device).st_rdev)}/inflight"
    wait_for("a request that waits", lambda: open(counts).read().split() != ["0", "0"], 20)
    done = host.ctl("down", volume)
    expect(f"dd (pid {reader.pid})" in done.stderr, f"who has lost something is not told: {done.stderr}")
    expect("Input/output error" in reader.communicate(timeout=30)[1] and reader.returncode == 1, "it waits still")
    expect(not os.path.exists(device) and host.status(volume)["state"] == "detached", "it is not down")
    os.close(held)
    with open(key, "wb") as file:
        file.write(kept)
    host.up(volume)
    host.healthy(volume, replicas=2)
    host.ctl("down", volume)
    host.ctl("rm", volume, "--yes")
    shown("a volume whose engine cannot start is let go by down: what waits at its device fails, and who can close it is asked to")


def under_another_name(host):
    """Directories that a volume has left are another one's by import: the first counts, unless another one is known to have more."""
    old, new = host.name("old"), host.name("new")
    replicas = host.up(old, "--size", "16MiB", "--replicas", "3")["replicas"]
    paths = [replica["path"] for replica in replicas]

    def write(word):
        with open(host.status(old)["device"], "r+b", buffering=0) as file:
            file.write(word * 1024)
            os.fsync(file)
    write(b"left")
    host.ctl("down", old)
    shutil.rmtree(paths[2])
    host.up(old)
    host.healthy(old, replicas=3)
    host.ctl("down", old)
    stale = paths[1] + ".stale"
    shutil.move(paths[1], stale)
    host.ctl("up", old)
    write(b"kept")
    host.ctl("down", old)
    # Nothing knows of the volume any more; its directories stay.
    shutil.rmtree(os.path.join(host.root, "volumes", old))
    shutil.rmtree(paths[1])
    host.ctl("import", new, stale, paths[0])
    left = host.json("release", new)
    expect(left["released"] == [] and [d["path"] for d in left["left"]] == [stale, paths[0]], f"{left}")
    host.ctl("import", new, stale, paths[0])
    said = refused(host, "up", new)
    expect(f"import {new} {paths[0]}" in said and f"release {new}" in said, said)
    host.ctl("down", new)
    host.ctl("release", new)
    host.ctl("import", new, paths[0], stale, paths[2])
    device = host.up(new)["device"]
    host.healthy(new, replicas=3)
    with open(device, "rb") as file:
        expect(file.read(4096) == b"kept" * 1024, "other bytes than the first one's")
    host.ctl("down", new)
    expect(len({contents(path) for path in (paths[0], stale, paths[2])}) == 1, "replicas differ")
    host.ctl("rm", new, "--yes")
    shown("directories of another volume are taken over by the first of them, and given back before")


def hidden(host):
    """A volume that was hidden says so, and is shown by up; a clone into it that names no snapshot leaves it as it was."""
    volume, source = host.name("hidden"), host.name("cloned")
    host.up(source, "--size", "16MiB", "--replicas", "1", "--frontend", "none")
    host.ctl("snapshot", "create", source, "one")
    host.up(volume, "--size", "16MiB", "--replicas", "1", "--frontend", "nbd-server")
    engine = [os.path.join(BIN, "longhorn"), "--url", f"unix:{host.root}/run/{volume}-e-0.grpc.sock"]
    subprocess.run([*engine, "frontend", "shutdown"], check=True, capture_output=True)
    remark = host.status(volume)["remark"]
    expect("hidden" in remark and f"up {volume}" in remark, remark)
    done = subprocess.run([*engine, "snapshot", "clone", "--snapshot-name", "won", "--from-controller-address",
                           f"unix:{host.root}/run/{source}-e-0.grpc.sock"], capture_output=True, text=True)
    expect(done.returncode != 0 and "won" in done.stderr, f"{done.returncode} {done.stderr}")
    layers = [snapshot["name"] for snapshot in host.json("snapshot", "ls", volume)]
    expect("clone-unfinished" not in layers, f"marked by a clone that could not begin: {layers}")
    expect("hidden" in host.status(volume)["remark"], host.status(volume)["remark"])
    up = host.up(volume)
    expect(up["state"] == "attached" and up["remark"] == "" and os.path.exists(host.socket(volume)), f"{up}")
    for name in (volume, source):
        host.ctl("down", name)
        host.ctl("rm", name, "--yes")
    shown("a hidden volume says so and is shown by up; a clone of no snapshot changes nothing")


def told_as_it_is(host):
    """What is told of a stopped volume is of a stopped volume, and its generation never goes back."""
    volume = host.name("told")
    host.up(volume, "--size", "16MiB", "--replicas", "1", "--frontend", "none")
    host.ctl("upgrade", volume)
    generation = host.status(volume)["generation"]
    host.ctl("down", volume)
    expect(host.status(volume)["generation"] >= generation, f"{host.status(volume)['generation']} after {generation}")
    grown = host.json("resize", volume, "32MiB")
    expect((grown["state"], grown["engine_pid"], grown["size"]) == ("detached", None, 32 << 20), f"{grown}")
    host.ctl("rm", volume, "--yes")
    shown("a volume that was grown offline is told as detached; the generation after an upgrade stays")


def answers(address, files, with_certificate):
    """True if whoever speaks HTTP/2 over TLS at this address is answered."""
    context = ssl.create_default_context(cafile=os.path.join(files, "ca.crt"))
    context.set_alpn_protocols(["h2"])
    if with_certificate:
        context.load_cert_chain(os.path.join(files, "tls.crt"), os.path.join(files, "tls.key"))
    try:
        with socket.create_connection((OWN, int(address.rpartition(":")[2])), 10) as plain:
            with context.wrap_socket(plain, server_hostname="localhost") as stream:
                # The client's preface and empty settings (RFC 9113, 3.4).
                stream.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
                return len(stream.recv(9)) > 0
    except (ssl.SSLError, ConnectionError):
        return False


def beside_tls(host):
    """Who turns on TLS on TCP goes on with the same commands: on the host they go over the unix socket."""
    if not have("openssl"):
        return skip("beside_tls", "no openssl")
    volume, other = host.name("tls"), os.path.join(host.root, "tls")
    files = os.path.join(host.root, "tls-files")
    os.mkdir(files)
    made = [["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", "/CN=authority",
             "-keyout", "ca.key", "-out", "ca.crt"],
            ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=longhorn-backend.longhorn-system",
             "-addext", "subjectAltName=DNS:longhorn-backend.longhorn-system,DNS:localhost", "-keyout", "tls.key", "-out", "tls.csr"],
            ["x509", "-req", "-in", "tls.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
             "-copy_extensions", "copyall", "-out", "tls.crt"]]
    for words in made:
        subprocess.run(["openssl", *words], cwd=files, check=True, capture_output=True)
    address = free_address()
    manager = subprocess.Popen([os.path.join(BIN, "longhorn"), "instance-manager", "--root", other, "--listen",
                                address, "--tls-dir", files], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ctl = [os.path.join(BIN, "longhornctl"), "--root", other, "-o", "json"]
    try:
        wait_for("a manager", lambda: os.path.exists(os.path.join(other, "run", "instance-manager.sock")), 20)
        for words in (["up", volume, "--size", "16MiB", "--replicas", "1"], ["snapshot", "create", volume, "s1"], ["status", volume]):
            done = subprocess.run([*ctl, *words], check=True, capture_output=True)
        status = json.loads(done.stdout)
        expect(status["insecure"] == [] and status["robustness"] == "healthy", f"{status}")
        info = subprocess.run([os.path.join(BIN, "longhorn"), "--url", f"unix:{other}/run/{volume}-e-0.grpc.sock", "info"],
                              check=True, capture_output=True)
        expect(json.loads(info.stdout)["name"] == volume, f"{info.stdout}")
        expect(answers(address, files, True), "who has a certificate is not let in")
        expect(not answers(address, files, False), "who has none is let in over TCP")
    finally:
        subprocess.run([*ctl, "down", volume], capture_output=True)
        manager.terminate()
        manager.wait()
    shown("beside TLS on TCP the same commands work on the host")


def seen_enough(host):
    """A reader that goes away, as `head -1` does, is no error, and is not waited for by what has nothing to write."""
    volume = host.name("seen")
    host.up(volume, "--size", "16MiB", "--replicas", "1", "--frontend", "none")
    info = [os.path.join(BIN, "longhorn"), "--url", f"unix:{host.root}/run/{volume}-e-0.grpc.sock", "info"]
    watch = [os.path.join(BIN, "longhornctl"), "--root", host.root, "status", volume, "--watch"]
    for words in (info, watch):
        reader, writer = os.pipe()
        command = subprocess.Popen(words, stdout=writer, stderr=subprocess.PIPE, text=True)
        os.close(writer)
        if words is watch:
            expect(os.read(reader, 4096), "nothing to read")
        os.close(reader)
        try:
            said = command.communicate(timeout=20)[1]
        except subprocess.TimeoutExpired:
            command.kill()
            command.wait()
            expect(False, f"{words} goes on though nobody reads")
        expect(command.returncode == 0 and said == "", f"{words}: {command.returncode} {said}")
    host.ctl("down", volume)
    host.ctl("rm", volume, "--yes")
    shown("a reader that has seen enough ends a command without an error")


def unwatched(host):
    volume = host.name("alone")
    host.up(volume, "--size", "16MiB", "--replicas", "1", "--frontend", "none")
    expect(host.status(volume)["remark"] == "", host.status(volume)["remark"])
    manager = int(open(os.path.join(host.root, "run", "instance-manager.lock")).readline())
    os.kill(manager, signal.SIGKILL)
    wait_for("its end", lambda: not os.path.exists(f"/proc/{manager}"), 10)
    expect("instance manager" in host.status(volume)["remark"], "nobody is told that nothing is started again")
    host.up(volume)
    expect(host.status(volume)["remark"] == "", host.status(volume)["remark"])
    host.ctl("down", volume)
    host.ctl("rm", volume, "--yes")
    shown("a volume whose manager was killed says so")


def unwatched_in_between(host):
    """A command has the volume's lock and waits for a replica that is gone, and so is the manager that would start it. `up`, as the host's
    service manager gives it, comes through; and without it the command gets a manager by itself."""
    for healer in ("up", None):
        volume = host.name(f"waits-{healer}")
        host.up(volume, "--size", "16MiB", "--replicas", "2", "--quorum", "majority", "--frontend", "none")
        host.ctl("snapshot", "create", volume, "one")
        manager = int(open(os.path.join(host.root, "run", "instance-manager.lock")).readline())
        stand_still(manager)
        os.kill(host.status(volume)["replicas"][0]["pid"], signal.SIGKILL)
        wait_for("the outage", lambda: "too few replicas" in host.status(volume)["remark"], 30)
        ctl = [os.path.join(BIN, "longhornctl"), "--root", host.root]
        removes = subprocess.Popen([*ctl, "snapshot", "rm", volume, "one"], stderr=subprocess.PIPE, text=True)
        time.sleep(1.5)
        expect(removes.poll() is None, "it does not wait for the replica")
        os.kill(manager, signal.SIGKILL)
        os.kill(manager, signal.SIGCONT)
        wait_for("the manager's end", lambda: not os.path.exists(f"/proc/{manager}"), 10)
        if healer:
            host.ctl(healer, volume, timeout=60)
        try:
            said = removes.communicate(timeout=60)[1]
        except subprocess.TimeoutExpired:
            removes.kill()
            expect(False, "a command waits for a replica that nobody starts")
        expect(removes.returncode == 0, said)
        host.ctl("down", volume)
        host.ctl("rm", volume, "--yes")
    shown("a command that waits for a replica has a manager that starts it")


def full_disk(host):
    """Replicas on a disk that is full: writes wait, and status says for what."""
    disk, place, volume = os.path.join(host.root, "disk.img"), os.path.join(host.root, "disk"), host.name("full")
    os.mkdir(place)
    with open(disk, "wb") as file:
        file.truncate(48 << 20)
    subprocess.run(["mkfs.ext4", "-q", disk], check=True)
    if subprocess.run(["mount", "-o", "loop", disk, place], capture_output=True).returncode != 0:
        return skip("full_disk", "no loop device can be mounted here")
    ctl = [os.path.join(BIN, "longhornctl"), "--root", place]
    ballast = os.path.join(place, "ballast")
    try:
        subprocess.run([*ctl, "up", volume, "--size", "64MiB", "--replicas", "2", "--frontend", "nbd-server"], check=True,
                       capture_output=True)
        status = lambda: json.loads(subprocess.run([*ctl, "-o", "json", "status", volume], check=True, capture_output=True).stdout)
        expect(status()["remark"] == "", status()["remark"])
        free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
        subprocess.run(["fallocate", "-l", str(free - (4 << 20)), ballast], check=True)
        writer = subprocess.Popen(["qemu-io", "-f", "raw", "-c", "write -P 7 0 16M", status()["uri"]], stdout=subprocess.DEVNULL)
        wait_for("a word of the full disk", lambda: "full" in status()["remark"], 30)
        expect(writer.poll() is None, "a write on a full disk was answered")
        os.unlink(ballast)
        expect(writer.wait(60) == 0, "it fails though there is space again")
        wait_for("no more of it", lambda: status()["remark"] == "", 30)
        # A replica elsewhere needs the root for no more than notes, and there is no room for them.
        subprocess.run(["dd", "if=/dev/zero", f"of={ballast}", "bs=4k"], stderr=subprocess.DEVNULL)
        elsewhere = os.path.join(host.root, "elsewhere")
        done = subprocess.run([*ctl, "replica", "add", volume, "--dir", elsewhere], capture_output=True, text=True)
        expect(done.returncode == 1 and f"the disk of {place} is full" in done.stderr and "os error" not in done.stderr, done.stderr)
        expect(not os.path.exists(elsewhere) and len(status()["replicas"]) == 2, "half a replica was added")
        # What waits keeps it from ending, for no longer than a command waits.
        writer = subprocess.Popen(["qemu-io", "-f", "raw", "-c", "write -P 7 48M 3M", status()["uri"]], stdout=subprocess.DEVNULL)
        wait_for("a word of the full disk", lambda: "full" in status()["remark"], 30)
        began = time.monotonic()
        done = subprocess.run([*ctl, "down", volume], capture_output=True, text=True)
        expect(done.returncode == 1 and "waits for space" in done.stderr and f"replica add {volume} --dir DIR" in done.stderr, done.stderr)
        expect(time.monotonic() - began < 60, "it takes too long to say so")
        os.unlink(ballast)
        # What it had not sent yet is refused.
        writer.wait(60)
        subprocess.run([*ctl, "down", volume], check=True, capture_output=True)
    finally:
        if os.path.exists(ballast):
            os.unlink(ballast)
        subprocess.run([*ctl, "down", volume], capture_output=True)
        manager = int(open(os.path.join(place, "run", "instance-manager.lock")).readline())
        os.kill(manager, signal.SIGTERM)
        wait_for("the manager's end", lambda: not os.path.exists(f"/proc/{manager}"), 20)
        subprocess.run(["umount", "-l", place], check=True)
    shown("status says that writes wait for space, and no more once there is some")


def out_of_full_disk(host):
    """The only replica lies on a disk that is full: whoever is held up by that is told what to do, and it helps."""
    if not device_of_kernel():
        return skip("out_of_full_disk", "no device can be made here")
    disk, place, volume = os.path.join(host.root, "small.img"), os.path.join(host.root, "small"), host.name("way")
    os.mkdir(place)
    with open(disk, "wb") as file:
        file.truncate(200 << 20)
    subprocess.run(["mkfs.ext4", "-q", disk], check=True)
    if subprocess.run(["mount", "-o", "loop", disk, place], capture_output=True).returncode != 0:
        return skip("out_of_full_disk", "no loop device can be mounted here")
    replica, elsewhere = os.path.join(place, "replica"), f"replica add {volume} --dir DIR"
    writer = None
    try:
        first = host.up(volume, "--size", "512MiB", "--replicas", "1")
        host.ctl("replica", "add", volume, "--dir", replica)
        host.ctl("replica", "rm", volume, first["replicas"][0]["name"])

        def write(at, count):
            return subprocess.Popen(["dd", "if=/dev/zero", f"of={first['device']}", "bs=1M", f"seek={at}", f"count={count}",
                                     "oflag=direct"], stderr=subprocess.DEVNULL)
        expect(write(0, 20).wait() == 0, "a write")
        host.ctl("snapshot", "create", volume, "s1")
        expect(write(100, 30).wait() == 0, "a write")
        host.ctl("snapshot", "create", volume, "s2")
        stat = os.statvfs(place)
        subprocess.run(["fallocate", "-l", str(stat.f_bavail * stat.f_frsize - (4 << 20)), os.path.join(place, "ballast")], check=True)
        host.ctl("snapshot", "rm", volume, "s1")
        said = refused(host, "snapshot", "purge", volume)
        expect(f"the disk of {replica} has no room" in said and elsewhere in said, said)
        said = refused(host, "replica", "add", volume, "--dir", os.path.join(place, "another"))
        expect("choose another place" in said, said)
        writer = write(200, 16)
        wait_for("a word of the full disk", lambda: elsewhere in host.status(volume)["remark"], 30)
        began = time.monotonic()
        said = refused(host, "down", volume, "--wait", "2")
        expect("is in use" in said and "disks of its replicas are full" in said and elsewhere in said, said)
        expect(time.monotonic() - began < 30 and writer.poll() is None, "it takes too long, or a write was answered")
        host.ctl("replica", "add", volume)
        expect(writer.wait(60) == 0, "a write fails though there is space elsewhere")
        host.ctl("replica", "rm", volume, next(r["name"] for r in host.status(volume)["replicas"] if r["path"] == replica))
        host.ctl("down", volume)
    finally:
        if os.path.exists(os.path.join(place, "ballast")):
            os.unlink(os.path.join(place, "ballast"))
        if writer:
            writer.wait(60)
        subprocess.run(["umount", "-l", place], check=True)
    shown("who waits for space is told to take another disk, and need not free any")


def on_itself(host):
    """A replica on the volume's own device would wait for itself."""
    if not device_of_kernel():
        return skip("on_itself", "no device can be made here")
    volume, other = host.name("own"), host.name("other")
    places = {v: os.path.join(host.root, f"on-{v}") for v in (volume, other)}
    for v, place in places.items():
        os.mkdir(place)
        device = host.up(v, "--size", "256MiB", "--replicas", "1")["device"]
        subprocess.run(["mkfs.ext4", "-q", device], check=True)
        subprocess.run(["mount", device, place], check=True)
    try:
        began = time.monotonic()
        said = refused(host, "replica", "add", volume, "--dir", os.path.join(places[volume], "replica"))
        expect(f"/dev/longhorn/{volume}, the volume's own device" in said and "another disk" in said, said)
        # One may lie on the other's, but not both.
        replica = host.ctl("replica", "add", volume, "--dir", os.path.join(places[other], "replica")).stdout.strip()
        said = refused(host, "replica", "add", other, "--dir", os.path.join(places[volume], "replica"))
        expect(f"lies on volume {volume}, which lies on volume {other} itself" in said, said)
        expect(time.monotonic() - began < 60, "it is tried first")
        expect([len(host.status(v)["replicas"]) for v in (volume, other)] == [2, 1], "it has a replica that lies on itself")
        host.ctl("replica", "rm", volume, replica)
    finally:
        for place in places.values():
            subprocess.run(["umount", place], check=False)
    for v in places:
        host.ctl("down", v)
    shown("no replica lies on its own volume's device, nor on a volume that does")


def killed(host, when, *args):
    """Killed as soon as `when` is true; false if it was through before."""
    command = subprocess.Popen([os.path.join(BIN, "longhornctl"), "--root", host.root, *args],
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not when() and command.poll() is None:
        time.sleep(0.002)
    command.kill()
    return command.wait() != 0


def killed_in_the_middle(host, when, again, *args):
    """The same of one that is not through. A busy machine may look too late: then what it did is undone, and it begins again."""
    for _ in range(10):
        if killed(host, when, *args):
            return
        again()
    expect(False, f"always through before it could be broken off: {args}")


def broken_off(host):
    """Commands that are killed half way are given again, or taken back by the one that they name."""
    volume, copy = host.name("broken"), host.name("copy")
    image = os.path.join(host.root, "broken.img")
    host.up(volume, "--size", "256MiB", "--replicas", "2")
    with open(host.status(volume)["device"], "r+b", buffering=0) as device:
        for _ in range(192):
            device.write(os.urandom(1 << 20))
        os.fsync(device)
    host.ctl("snapshot", "create", volume, "s1")

    def directories():
        return [d for d in os.listdir(os.path.join(host.root, "replicas")) if d.startswith(copy)]

    def half_a_clone():
        killed_in_the_middle(host, directories, lambda: host.ctl("rm", copy, "--yes"), "clone", f"{volume}@s1", copy)

    half_a_clone()
    said = refused(host, "up", copy)
    expect("clone again" in said and f"longhornctl --root {host.root} rm {copy}" in said, said)
    for words in (("resize", copy, "1GiB"), ("snapshot", "rm", copy, "s1"), ("release", copy), ("salvage", copy)):
        expect("clone again" in refused(host, *words), f"{words} changed half a clone")
    expect("clone again" in host.ctl("status", copy).stdout, "status does not say what it is")
    host.ctl("clone", f"{volume}@s1", copy)
    expect(len(directories()) == 2, f"left of the clone that was broken off: {directories()}")
    host.ctl("rm", copy, "--yes")
    half_a_clone()
    host.ctl("rm", copy, "--yes")
    expect(directories() == [], f"{directories()}")

    pause = time.monotonic() + 0.05
    if killed(host, lambda: time.monotonic() > pause, "snapshot", "export", volume, "s1", image):
        left = [name for name in os.listdir(host.root) if "broken.img" in name]
        expect(left == [], f"left of an export that was broken off: {left}")

    # Whoever asks for the end once more, while it is being carried out, hears how that went.
    for turn in range(8):
        engine = host.status(volume)["engine_pid"]
        device = host.status(volume)["device"]
        with open(device, "r+b", buffering=0) as file:
            for _ in range(16):
                file.write(os.urandom(1 << 20))
        killed(host, lambda: not os.path.exists(device), "down", volume)
        state = host.status(volume)["state"]
        expect(state in ("detaching", "detached"), f"told to stop, and said to be {state}")
        if turn % 2:
            # Who has thought better of it.
            host.up(volume)
            expect(os.path.exists(device) and host.status(volume)["engine_pid"] != engine, "no device")
        done = host.ctl("down", volume, check=False)
        expect(done.returncode == 0, f"down, once more: {done.stderr}")
        expect(not os.path.exists(f"/proc/{engine}"), "its engine runs")
        host.up(volume)
    host.ctl("down", volume)
    broken_off_while_stopped(host, volume)
    host.ctl("rm", volume, "--yes")
    shown("clone, export and down that were killed are given again, and nothing is left of them")


def broken_off_while_stopped(host, volume):
    """An operation on a stopped volume has replicas and an engine for itself: it is ended at any moment."""
    sizes = itertools.count(260, 2)

    def half_resized(began):
        """Of commands that were killed in the middle the last one's size."""
        for size in itertools.islice(sizes, 10):
            if killed(host, lambda: glob.glob(os.path.join(host.root, began)), "resize", volume, f"{size}MiB"):
                return f"{size}MiB"
        return expect(False, "always through before it could be broken off: resize")

    for began in (f"run/processes/{volume}-r-*", f"run/{volume}-e-0.grpc.sock"):
        host.ctl("resize", volume, half_resized(began))
        expect(host.status(volume)["engine_pid"] is None, "it is not stopped again")
        half_resized(began)
        expect(host.up(volume)["device"], "up without a device, after an operation on the stopped volume was broken off")
        host.ctl("down", volume)
    processes = os.path.join(host.root, "run/processes", volume)
    killed_in_the_middle(host, lambda: glob.glob(f"{processes}-r-*"), lambda: host.ctl("down", volume), "up", volume)
    if not glob.glob(f"{processes}-e-0*"):
        wait_for("a word of half an up", lambda: "without an engine" in host.status(volume)["remark"], 20)
        expect(host.status(volume)["state"] == "detached", host.status(volume)["state"])
    host.ctl("down", volume)
    expect(host.status(volume)["remark"] == "", host.status(volume)["remark"])


def deaf_manager(host):
    volume = host.name("mute")
    host.up(volume, "--size", "16MiB", "--replicas", "1", "--frontend", "none")
    manager = int(open(os.path.join(host.root, "run", "instance-manager.lock")).readline())
    stand_still(manager)
    try:
        said = refused(host, "up", volume)
        expect("instance manager" in said and "does not answer" in said, said)
        expect(host.status(volume)["robustness"] == "healthy", "status needs the manager")
    finally:
        os.kill(manager, signal.SIGCONT)
    host.ctl("down", volume)
    host.ctl("rm", volume, "--yes")
    shown("a manager that answers nothing is not waited for without an end")


def not_root(host):
    """Others are told what they lack, and may do what needs no root, whatever they can see of it."""
    def other(*args):
        done = subprocess.run([os.path.join(BIN, "longhornctl"), "--root", os.path.join(host.root, "below"), *args],
                              capture_output=True, text=True, user=65534, group=65534, extra_groups=[])
        return done
    try:
        said = other("ls")
    except PermissionError:
        return skip("not_root", "the programs lie where only root gets")
    expect(said.returncode == 1 and "sudo" in said.stderr, said.stderr)
    expect(other("completion", "bash").returncode == 0, "no completion without root")
    doctor = other("-o", "json", "doctor")
    expect({"check": "user", "verdict": "FAIL"}.items() <= json.loads(doctor.stdout)[0].items(), doctor.stdout)
    shown("others than root are told so")


def as_longhorn_says_it(host):
    """Longhorn's command lines of processes: what has no effect is accepted and named, what would have another is refused."""
    import by_hand
    volume = by_hand.ByHand(host, "flags", 16 << 20, [free_address()])
    replica = volume.replica(1, "--insecure", "--disableRevCounter", "--sync-agent-port-count", "7", "--data-server-protocol",
                             "tcp", "--snapshot-max-count", "2", "--snapshot-max-size", "0")
    # The name of the volume comes before the command.
    at = replica.index("--volume-name")
    replica = [replica[0], *replica[at:at + 2], *replica[1:at], *replica[at + 2:]]
    volume.spawn(replica)
    volume.spawn(volume.engine("--insecure", "--disableRevCounter", "--engine-replica-timeout", "8", "--data-server-protocol",
                               "tcp", "--file-sync-http-client-timeout", "30", "--rebuild-sync-concurrent-limit", "1",
                               "--upgrade", "--current-size", str(16 << 20)))
    wait_for(f"{volume.name} by Longhorn's words", volume.healthy, 60)
    longhorn = [os.path.join(BIN, "longhorn"), "--url", f"unix:{volume.control}"]
    for name in ("a", "b", "c"):
        done = subprocess.run([*longhorn, "snapshot", "create", name], capture_output=True, text=True)
        expect((done.returncode == 0) == (name != "c"), f"snapshot {name} where two are allowed: {done.stderr}")
    volume.stop()
    log = open(os.path.join(host.root, "by-hand.log")).read()
    for line in ("without effect here: --current-size, --upgrade, --disableRevCounter", "without effect here: --sync-agent-port-count"):
        expect(line in log, f"no line {line!r} in {log}")
    for words in (volume.engine("--salvageRequested"), volume.replica(1, "--encrypted"), volume.replica(1, "--backing-file", "/a")):
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        expect(done.returncode == 2 and "is Longhorn's" in done.stderr, f"{done.returncode} {done.stderr}")
    host.ctl("rm", volume.name, "--yes")
    shown("Longhorn's flags of engine and replica: idle ones are named, others are refused")


def found_below_the_root(host):
    """An engine that is started by hand needs no more than the volume's name and a socket: the root has the rest."""
    volume = host.name("found")
    replica = host.up(volume, "--size", "16MiB", "--replicas", "1", "--frontend", "none")["replicas"][0]
    host.ctl("down", volume)
    program, socket = os.path.join(BIN, "longhorn"), f"unix:{host.root}/found.sock"
    children = [subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for words in (
        [program, "replica", "--volume-name", volume, "--replica-instance-name", replica["name"], "--listen",
         f"unix:{host.root}/run/{replica['name']}.grpc.sock", "--data-listen", replica["address"], "--key-file",
         f"{host.root}/volumes/{volume}/key", replica["path"]],
        [program, "controller", "--root", host.root, "--listen", socket, "--frontend", "none", volume])]
    in_sync = lambda: " RW " in subprocess.run([program, "--url", socket, "ls"], capture_output=True, text=True).stdout
    wait_for(f"{volume} by its name alone", in_sync, 60)
    for child in reversed(children):
        child.terminate()
        expect(child.wait(60) == 0, f"{child.args}: {child.returncode}")
    host.ctl("rm", volume, "--yes")
    shown("an engine finds the key, record and size of its volume below the root")


def long_names(host):
    """The longest names below a long root: their sockets lie elsewhere, in a directory that is gone when the host starts again."""
    other = os.path.join(host.root, "a-root-with-a-name-that-is-rather-long")
    os.mkdir(other)
    volume = host.name("long".ljust(63 - len(host.prefix), "g"))
    holder = subprocess.Popen(["unshare", "--mount", "--propagation", "private", "sh", "-c",
                               "mkdir -p /run/longhorn && mount -t tmpfs -o mode=755 none /run/longhorn && echo apart && exec sleep 1000"],
                              stdout=subprocess.PIPE, text=True)
    try:
        expect(holder.stdout.readline() == "apart\n", "no mounts of one's own")
        apart = ["nsenter", "--target", str(holder.pid), "--mount"]

        def ctl(*args):
            done = subprocess.run([*apart, os.path.join(BIN, "longhornctl"), "--root", other, "-o", "json", *args], text=True,
                                  capture_output=True, timeout=120)
            expect(done.returncode == 0, f"{args}: {done.stderr}")
            return json.loads(done.stdout)

        healthy = lambda: ctl("status", volume)["robustness"] == "healthy"
        ctl("up", volume, "--size", "16MiB", "--replicas", "1", "--frontend", "none")
        before = ctl("status", volume)
        # As after a reboot, but for who started them: their next processes find no directory.
        subprocess.run([*apart, "rm", "-r", "/run/longhorn/sockets"], check=True)
        for pid in (before["replicas"][0]["pid"], before["engine_pid"]):
            os.kill(pid, signal.SIGKILL)
        wait_for("its processes again", healthy, 60)
        ctl("down", volume)
        subprocess.run([*apart, "rm", "-r", "/run/longhorn/sockets"], check=True)
        ctl("up", volume)
        expect(healthy(), "not healthy")
        ctl("down", volume)
        ctl("rm", volume, "--yes")
        manager = int(open(os.path.join(other, "run", "instance-manager.lock")).readline())
        os.kill(manager, signal.SIGTERM)
        wait_for("the manager's end", lambda: not os.path.exists(f"/proc/{manager}"), 20)
    finally:
        holder.kill()
        holder.wait()
    shown("the longest name starts below a long root, and again where /run is new")


def damaged_record(host):
    """A volume's record that cannot be read is in nobody's way: the volume is stopped, imported anew, or forgotten."""
    volume, beside = host.name("dam"), host.name("dam-beside")
    host.up(beside, "--size", "16MiB", "--replicas", "1", "--frontend", "none")
    replicas = host.up(volume, "--size", "16MiB", "--replicas", "2")["replicas"]
    with open(host.status(volume)["device"], "r+b", buffering=0) as device:
        device.write(b"kept" * 1024)
        os.fsync(device)
    record = os.path.join(host.root, "volumes", volume, "volume.json")
    directories = sorted(replica["path"] for replica in replicas)

    def damage():
        with open(record, "w") as file:
            file.write("{")

    damage()
    done = host.ctl("-o", "json", "ls", check=False)
    expect([v["name"] for v in json.loads(done.stdout)] == [beside], f"ls shows {done.stdout}")
    expect(done.returncode == 1 and record in done.stderr and "longhornctl --root" in done.stderr, done.stderr)
    for words in (("import", volume, *directories), ("rm", volume, "--yes")):
        said = refused(host, *words)
        expect(f"`longhornctl --root {host.root} down {volume}`" in said, said)
    expect("damaged" in host.ctl("down", volume).stderr, "down says nothing of the record")
    expect(record in refused(host, "down", volume), "a stopped one is stopped once more")
    host.ctl("import", volume, *directories)
    device = host.up(volume)["device"]
    host.healthy(volume, replicas=2)
    with open(device, "rb") as file:
        expect(file.read(4096) == b"kept" * 1024, "imported anew it has other bytes")
    host.ctl("down", volume)
    damage()
    expect("--yes" in refused(host, "rm", volume), "deleted unasked")
    gone = host.json("rm", volume, "--yes")
    expect(gone == {"volume": volume, "removed": [], "left": directories}, f"{gone}")
    expect(all(os.path.exists(os.path.join(d, "volume.meta")) for d in directories), "a replica was deleted")
    expect([v["name"] for v in host.json("ls")] == [beside], "it is known still")
    host.ctl("import", volume, *directories)
    host.ctl("rm", volume, "--yes")
    host.ctl("down", beside)
    host.ctl("rm", beside, "--yes")
    shown("a volume whose record is damaged is stopped, imported anew and forgotten, and hides no other one")


def main():
    host = Host()
    long_names(host)
    damaged_record(host)
    found_below_the_root(host)
    broken_off(host)
    deaf_manager(host)
    not_root(host)
    as_longhorn_says_it(host)
    said_again(host)
    dies_again_and_again(host)
    waits_for_no_engine(host)
    under_another_name(host)
    hidden(host)
    told_as_it_is(host)
    deaf_engine(host)
    other_words(host)
    trusts_the_network(host)
    open_to_the_network(host)
    beside_tls(host)
    seen_enough(host)
    unwatched(host)
    unwatched_in_between(host)
    full_disk(host)
    out_of_full_disk(host)
    on_itself(host)


main()
