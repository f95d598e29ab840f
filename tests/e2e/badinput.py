"""Wrong input of every kind: one clear sentence on standard error, the right exit status, nothing lost or half created."""
import os, subprocess, tempfile
from harness import BIN, FIXTURES, Host, expect, run, shown


def main():
    host = Host()
    checked = 0

    def refused(status, *args, says, root=None):
        """The command fails with this status and one sentence that has every word of `says` in it."""
        nonlocal checked
        before = listing(host.root)
        command = [os.path.join(BIN, "longhornctl"), "--root", root or host.root, *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
        what = " ".join(args)
        expect(done.returncode == status, f"`{what}`: status {done.returncode}, wanted {status}\n{done.stderr}")
        text = done.stderr.strip()
        for word in says if isinstance(says, (list, tuple)) else [says]:
            expect(word.lower() in text.lower(), f"`{what}` says nothing of {word!r}:\n{text}")
        expect("panicked" not in text and "backtrace" not in text, f"`{what}`:\n{text}")
        if status == 1:
            expect(len(text.splitlines()) <= 3, f"`{what}` says too much:\n{text}")
        expect(listing(host.root) == before, f"`{what}` left something: {listing(host.root) ^ before}")
        checked += 1

    def listing(root):
        found = set()
        for folder in ("volumes", "replicas"):
            top = os.path.join(root, folder)
            found |= {f"{folder}/{n}" for n in os.listdir(top)} if os.path.isdir(top) else set()
        return found

    v = host.name("bad")
    host.up(v, "--size", "64MiB", "--frontend", "nbd-server")

    # sizes and names
    for size, word in [("10G", "10GiB"), ("5000", "8192"), ("0", "4096"), ("-1", "size"), ("1e9", "size"),
                       ("99999999999TiB", "large"), ("9223372036854775807", "large"), ("", "size")]:
        refused(2, "up", host.name("size"), f"--size={size}", says=word)
    for name in ("../x", "a/b", ".hidden", "-x", "", "x" * 65, "a b", "ü"):
        refused(2, "up", "--size=64MiB", "--", name, says="name")
    refused(1, "up", host.name("nosize"), says="--size")
    refused(1, "up", host.name("huge"), "--size", "1048576TiB", "--frontend", "none", says=["file system"])
    refused(2, "up", host.name("many"), "--size", "64MiB", "--replicas", "21", says="20")
    refused(2, "up", host.name("none"), "--size", "64MiB", "--replicas", "0", says="replicas")
    refused(2, "up", host.name("front"), "--size", "64MiB", "--frontend", "floppy", says="frontend")
    refused(2, "up", host.name("patient"), "--size", "64MiB", "--io-timeout", str(2**64 - 1), says=["--io-timeout", "4294967295"])
    for whom in (v, "--all"):
        refused(2, "down", whom, "--wait", str(2**64 - 1), says=["--wait", "4294967295"])
    refused(2, "frobnicate", says="frobnicate")
    refused(1, "status", "nosuchvolume", says="nosuchvolume")
    refused(1, "down", "nosuchvolume", says="nosuchvolume")
    refused(1, "rm", "nosuchvolume", "--yes", says="nosuchvolume")

    # a running volume
    refused(1, "rm", v, "--yes", says="down")
    refused(1, "up", v, "--size", "128MiB", says="resize")
    refused(1, "up", v, "--replicas", "2", says="replica")
    host.ctl("up", v)

    # snapshots
    host.ctl("snapshot", "create", v, "one")
    refused(1, "snapshot", "create", v, "one", says="one")
    refused(2, "snapshot", "create", v, "../one", says="name")
    for words in (["rm"], ["revert"], ["diff"]):
        refused(1, "snapshot", *words, v, "nosuch", says=[f"no snapshot nosuch: `longhornctl --root {host.root} snapshot ls"])
    refused(1, "clone", f"{v}@nosuch", host.name("clone"), says=["no snapshot nosuch", "snapshot ls"])
    host.ctl("snapshot", "create", v, "gone")
    host.ctl("snapshot", "rm", v, "gone")
    refused(1, "snapshot", "create", v, "gone", says=["removed", "snapshot purge", "another name"])
    refused(1, "trim", "volume", v, says=["no device", "nbd-server", "fstrim"])
    refused(1, "snapshot", "export", v, "nosuch", os.path.join(host.root, "out.img"), says="nosuch")
    refused(1, "snapshot", "export", v, "one", "/nonexistent/folder/out.img", says="/nonexistent")
    refused(1, "snapshot", "export", v, "one", "-", says="pipe")
    replica = host.status(v)["replicas"][0]["path"]
    for taken in (f"{replica}/volume.meta", f"{replica}/engine/epoch", f"{host.root}/volumes/{v}/authority.json"):
        refused(1, "snapshot", "export", v, "one", taken, says="choose another place")

    # a directory of another volume, hostile and damaged directories
    host.ctl("down", v)
    directory = host.status(v)["replicas"][0]["path"]
    refused(1, "import", host.name("again"), directory, says=v)
    refused(1, "import", host.name("nodir"), "/nonexistent", says="/nonexistent")
    empty = tempfile.mkdtemp(dir=host.root)
    refused(1, "import", host.name("empty"), empty, says="volume.meta")
    linked = tempfile.mkdtemp(dir=host.root)
    run("tar", "-xJf", os.path.join(FIXTURES, "replica-simple", "replica-simple.tar.xz"), "-C", linked)
    one, other = os.path.join(linked, "replica"), os.path.join(linked, "other")
    run("cp", "-al", one, other)
    refused(1, "import", host.name("linked"), one, other, says="one file")
    for word, damage in hostile():
        copy = tempfile.mkdtemp(dir=host.root)
        run("tar", "-xJf", os.path.join(FIXTURES, "replica-simple", "replica-simple.tar.xz"), "-C", copy)
        target = os.path.join(copy, "replica")
        damage(target)
        refused(1, "import", host.name("hostile"), target, says=word)
    refused(1, "replica", "export", empty, os.path.join(host.root, "out.img"), says="volume.meta")

    no_root(host, refused)
    no_place(host, refused)

    # another program on the data socket, a process that is not ours, a second manager, a full file system
    processes(host)
    full_disk(host)
    host.ctl("up", v)
    host.ctl("down", v)
    refused(1, "rm", v, says="--yes")
    host.ctl("rm", v, "--yes")
    shown(f"{checked} refusals, each with its sentence; nothing left behind")


def no_place(host, refused):
    """A replica where nothing can be made: its volume is told why, and is as it was."""
    volume, place = host.name("place"), tempfile.mkdtemp(dir=host.root)
    host.up(volume, "--size", "16MiB", "--replicas", "1", "--frontend", "none")
    run("mount", "-t", "tmpfs", "-o", "ro,mode=700", "tmpfs", place)
    try:
        refused(1, "replica", "add", volume, "--dir", os.path.join(place, "replica"), says=["another replica", "read-only"])
        expect(len(host.healthy(volume, replicas=1)["replicas"]) == 1, "it has a replica that was not made")
    finally:
        run("umount", place)
        host.ctl("down", volume)
        host.ctl("rm", volume, "--yes")


def no_root(host, refused):
    """Roots that cannot be: each is told why, by `up` and by `doctor`, and nothing is made there."""
    place = tempfile.mkdtemp(dir=host.root)
    volume = host.name("root")
    file, link, other = (os.path.join(place, name) for name in ("file", "link", "read-only"))
    open(file, "w").close()
    os.symlink(os.path.join(place, "nothing"), link)
    os.mkdir(other)
    run("mount", "-t", "tmpfs", "-o", "ro,mode=700", "tmpfs", other)
    try:
        for root, words in ((file, [file, "no directory", "--root"]), (link, [link, "no directory", "--root"]),
                            (os.path.join(file, "below"), ["not a directory"]), (other, [other, "is read-only; mount it", "--root"]),
                            (os.path.join(other, "below"), ["is read-only; mount it", "--root"])):
            refused(1, "up", volume, "--size", "16MiB", root=root, says=words)
        # Bytes that no text has, as Python writes them.
        for words in (["ls"], ["up", volume, "--size", "16MiB"]):
            refused(2, *words, root=os.path.join(place, "r\udcff"), says=["--root", "not UTF-8"])
        doctor = run(os.path.join(BIN, "longhornctl"), "--root", other, "doctor", check=False).stdout
        line = next(line for line in doctor.splitlines() if line.startswith("root "))
        expect("FAIL" in line and "read-only" in line, f"doctor of a read-only root: {line}")
        expect(sorted(os.listdir(place)) == ["file", "link", "read-only"], f"{os.listdir(place)}")
    finally:
        run("umount", other)


def hostile():
    def meta(name, old, new):
        def damage(d):
            path = os.path.join(d, name)
            text = open(path).read()
            assert old in text
            open(path, "w").write(text.replace(old, new))
        return damage
    return [
        ("volume.meta", lambda d: os.truncate(os.path.join(d, "volume.meta"), 30)),
        ("volume.meta", lambda d: open(os.path.join(d, "volume.meta"), "wb").write(b"{" * (1 << 20))),
        ("head", meta("volume.meta", "volume-head-003.img", "../../etc/passwd")),
        ("size", meta("volume.meta", "16777216", "-4096")),
        ("size", meta("volume.meta", "16777216", "9223372036854775807")),
        ("volume-snap-s2.img", lambda d: os.remove(os.path.join(d, "volume-snap-s2.img"))),
        ("loop", meta("volume-snap-s1.img.meta", '"Parent":""', '"Parent":"volume-snap-s3.img"')),
    ]


def processes(host):
    """The instance manager starts nothing but our own program, and there is one per root."""
    second = subprocess.run([os.path.join(BIN, "longhorn"), "instance-manager", "--root", host.root],
                            capture_output=True, text=True, timeout=20)
    expect(second.returncode != 0 and "instance manager" in second.stderr.lower(), f"a second manager: {second}")


def full_disk(host):
    """A volume on a small tmpfs: writes wait when it is full, and go on when there is space; nothing is lost."""
    small = tempfile.mkdtemp(dir=host.root)
    run("mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", small)
    try:
        ctl = [os.path.join(BIN, "longhornctl"), "--root", small]
        volume = host.name("full")
        run(*ctl, "up", volume, "--size", "64MiB", "--replicas", "1", "--frontend", "nbd-server")
        uri = f"nbd+unix:///{volume}?socket=/run/longhorn/{volume}.nbd.sock"
        script = f"h.connect_uri('{uri}')\nh.pwrite(b'a' * 1048576, 0)\nh.flush()\nprint(h.pread(512, 0)[:4])"
        done = run("/usr/bin/python3", "-m", "nbd", "-c", script)
        expect("aaaa" in done.stdout, "a write to a small disk failed")
        writer = subprocess.Popen(["/usr/bin/python3", "-m", "nbd", "-c", f"h.connect_uri('{uri}')\nfor i in range(1, 40): h.pwrite(b'b' * 1048576, i << 20)"],
                                  stderr=subprocess.PIPE)
        try:
            writer.wait(timeout=6)
            expect(False, f"40 MiB on a disk of 24 MiB: {writer.stderr.read()}")
        except subprocess.TimeoutExpired:
            pass
        run("mount", "-o", "remount,size=128m", small)
        expect(writer.wait(timeout=30) == 0, "the waiting writes did not go on when there was space")
        done = run("/usr/bin/python3", "-m", "nbd", "-c", f"h.connect_uri('{uri}')\nassert h.pread(512, 0) == b'a' * 512 and h.pread(512, 39 << 20) == b'b' * 512")
        run(*ctl, "down", volume)
    finally:
        subprocess.run(["pkill", "-9", "-f", small], check=False)
        subprocess.run(["umount", "-l", small], check=False)


main()
