"""ext4 and XFS on a volume: a tree of 300 MiB in 20,000 files survives `down`, the death of every process, and the loss
of a replica's directory."""
import hashlib, os, shutil, subprocess
from harness import Host, expect, full, have, run, say, shown, skip, wait_for

FILES, BYTES = full(4000, 20000), full(60 << 20, 300 << 20)


def make_tree(top):
    block = os.urandom(1 << 20)
    sums = {}
    for n in range(FILES):
        folder = os.path.join(top, f"d{n % 97}")
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"f{n}")
        size = BYTES // FILES
        start = (n * 7919) % (len(block) - size)
        data = n.to_bytes(8, "little") + block[start:start + size - 8]
        with open(path, "wb") as f:
            f.write(data)
        sums[os.path.relpath(path, top)] = hashlib.sha256(data).digest()
    return sums


def check_tree(top, sums):
    found = 0
    for name, want in sums.items():
        with open(os.path.join(top, name), "rb") as f:
            expect(hashlib.sha256(f.read()).digest() == want, f"{name} differs")
        found += 1
    expect(found == FILES, "files are missing")


def scenario(host, kind):
    volume = host.name(kind)
    status = host.up(volume, "--size", "1GiB", "--replicas", "3")
    device = status["device"]
    expect(device == f"/dev/longhorn/{volume}", f"device is {device}")
    mount = os.path.join(host.root, "mnt-" + kind)
    os.makedirs(mount)
    run(f"mkfs.{kind}", "-q", device)
    run("mount", device, mount)
    sums = make_tree(mount)
    refused = host.ctl("down", volume, check=False)
    expect(refused.returncode == 1 and mount in refused.stderr + refused.stdout,
           f"down of a mounted volume: {refused.returncode} {refused.stderr}")
    run("umount", mount)
    host.ctl("down", volume)
    expect(not os.path.exists(device), f"{device} is still there after down")
    say("killing every process")
    host.kill_everything()

    host.up(volume)
    fsck = ["fsck.ext4", "-fn"] if kind == "ext4" else ["xfs_repair", "-n"]
    run(*fsck, device)
    run("mount", device, mount)
    check_tree(mount, sums)

    say("deleting a replica's directory")
    lost = host.status(volume)["replicas"][0]
    shutil.rmtree(lost["path"])
    pid = lost["pid"]
    subprocess.run(["kill", "-9", str(pid)], check=False)

    def is_noticed():
        now = host.status(volume)
        return now["robustness"] != "healthy" or now["replicas"][0]["pid"] not in (None, pid)
    wait_for("the loss is noticed", is_noticed, 30)
    subprocess.run(["sh", "-c", "echo 3 > /proc/sys/vm/drop_caches"], check=False)
    check_tree(mount, sums)
    host.healthy(volume)
    run("umount", mount)
    run(*fsck, device)
    host.ctl("down", volume)
    host.ctl("rm", volume, "--yes")
    expect(not any(volume in n for n in os.listdir(os.path.join(host.root, "replicas"))), "rm left a directory")


def main():
    host = Host()
    for kind in ("ext4", "xfs"):
        if not have(f"mkfs.{kind}"):
            skip(f"filesystem-{kind}", f"no mkfs.{kind}")
            continue
        scenario(host, kind)
    shown(f"{FILES} files, {BYTES >> 20} MiB on ext4 and XFS: fsck clean, all sums equal")


main()
