"""Directories written here, judged by the rules of Longhorn's format; Longhorn's directories opened by the programs."""
import hashlib, json, os, shutil, subprocess, tempfile
from harness import FIXTURES, Host, contents, expect, judge, run, shown


def imported(host, name):
    """A fixture imported, read through the engine, exported snapshot by snapshot: the bytes that Longhorn wrote."""
    folder = os.path.join(FIXTURES, f"replica-{name}")
    expected = json.load(open(os.path.join(folder, "expected.json")))
    where = tempfile.mkdtemp(dir=host.root)
    run("tar", "-xJf", os.path.join(folder, f"replica-{name}.tar.xz"), "-C", where)
    directory = os.path.join(where, "replica")
    out = os.path.join(where, "out.img")

    def same(want, what):
        got = hashlib.sha256(open(out, "rb").read()).hexdigest()
        expect(got == want["sha256"], f"{name}: {what} differs")

    before = listing(directory)
    host.ctl("replica", "export", directory, out)
    same(expected["head"]["content"], "the head, offline")
    expect(listing(directory) == before, f"{name}: an offline export changed the directory")
    volume = host.name(f"fx-{name}")
    host.ctl("import", volume, directory)
    expect(listing(directory) == before, f"{name}: import changed the directory before up")
    host.up(volume, "--frontend", "nbd-server")
    run("qemu-img", "convert", "-O", "raw", f"nbd+unix:///{volume}?socket={host.socket(volume)}", out)
    same(expected["head"]["content"], "the head, over NBD")
    snapshots = expected["snapshots"]
    snapshots = snapshots if isinstance(snapshots, list) else [{"name": k, **v} for k, v in snapshots.items()]
    listed = {s["name"] for s in host.json("snapshot", "ls", volume)}
    expect(listed >= {s["name"] for s in snapshots}, f"{name}: snapshots {listed}")
    for s in snapshots:
        done = host.ctl("snapshot", "export", volume, s["name"], out, check=not s["removed"])
        if s["removed"]:
            expect("being removed" in done.stderr, f"{name}: the removed snapshot {s['name']} is exported: {done.stderr}")
        else:
            same(s["content"], f"snapshot {s['name']}")
    if name.startswith("backing"):
        # What lies below all layers is in no layer that a rebuild copies.
        host.ctl("replica", "add", volume)
        expect(host.json("scrub", volume, "--wait")["bad_blocks"] == 0, f"{name}: a replica that was added differs")
    host.ctl("down", volume)
    for replica in host.status(volume)["replicas"]:
        host.ctl("replica", "export", replica["path"], out)
        same(expected["head"]["content"], f"{replica['name']}, {replica['mode']}")
    return len(snapshots) + 1


def listing(directory):
    return sorted((n, os.stat(os.path.join(directory, n)).st_mtime_ns) for n in os.listdir(directory))


def written_here(host):
    """A volume of ours with snapshots, zeroes and unmaps: the judge passes it, with and without `engine/`."""
    volume = host.name("ours")
    host.up(volume, "--size", "64MiB", "--frontend", "nbd-server")
    uri = f"nbd+unix:///{volume}?socket={host.socket(volume)}"

    def nbdsh(script):
        run("/usr/bin/python3", "-m", "nbd", "-u", uri, "-c", script)
    nbdsh("h.pwrite(b'A' * 65536, 0); h.pwrite(b'B' * 4096, 1 << 20); h.zero(8192, 4096); h.flush()")
    host.ctl("snapshot", "create", volume, "one")
    nbdsh("h.pwrite(b'C' * 512, 512); h.pwrite(b'D' * 1048576, 32 << 20); h.flush()")
    host.ctl("snapshot", "create", volume, "two")
    nbdsh("h.pwrite(b'E' * 300000 + b'F' * 4128, 40 << 20)\nassert h.pread(512, 0) == b'A' * 512 and h.pread(512, 512) == b'C' * 512")
    paths = [r["path"] for r in host.status(volume)["replicas"]]
    host.ctl("down", volume)
    sums = set()
    for path in paths:
        verdict = judge(path, "--clean")
        expect(verdict.returncode == 0, f"{path}: {verdict.stdout}")
        sums.add(contents(path))
        bare = path + ".bare"
        shutil.copytree(path, bare, copy_function=lambda a, b: run("cp", "--sparse=always", "--preserve=all", a, b))
        shutil.rmtree(os.path.join(bare, "engine"))
        subprocess.run(["cp", "-a", "--sparse=auto", path + "/.", bare + "/"], check=True)
        shutil.rmtree(os.path.join(bare, "engine"))
        expect(contents(bare) == contents(path), f"{path}: without engine/ it reads otherwise")
        shutil.rmtree(bare)
    expect(len(sums) == 1, "replicas differ")

    host.up(volume)
    nbdsh("h.zero(65536, 0); h.trim(4096, 1 << 20); h.flush()\nassert h.pread(65536, 0) == bytes(65536) and h.pread(4096, 1 << 20) == bytes(4096)")
    host.ctl("down", volume)
    for path in paths:
        verdict = judge(path, "--clean")
        expect(verdict.stdout.startswith("rebuilding:"), f"zero bits are set and volume.meta does not say so: {verdict.stdout}")
    host.up(volume)
    nbdsh("assert h.pread(65536, 0) == bytes(65536) and h.pread(4096, 1 << 20) == bytes(4096)")
    host.ctl("down", volume)


def main():
    host = Host()
    names = sorted(n[len("replica-"):] for n in os.listdir(FIXTURES) if n.startswith("replica-"))
    read = 0
    for name in names:
        read += imported(host, name)
    written_here(host)
    shown(f"{read} heads and snapshots of Longhorn read equal; directories written here pass the judge")


main()
