"""The image as whoever runs it would see it: the archive is read by the OCI image layout, its layers are unpacked into an
empty directory, and every program in it starts there, with nothing of this machine in reach (chroot). Needs root.

    tests/image/check.py [PROGRAMS]    the folder with longhorn and longhornctl (target/release)
"""
import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile

TREE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
# How each program says its version, and a word of what it says. What is not here is a program nobody has started.
VERSIONS = {
    "longhorn": (["--version"], "longhorn "),
    "longhornctl": (["--version"], "longhornctl "),
    "mount": (["-V"], "util-linux"),
    "umount": (["-V"], "util-linux"),
    "blkid": (["-V"], "util-linux"),
    "blockdev": (["-V"], "util-linux"),
    "mkfs.ext4": (["-V"], "mke2fs"),
    "fsck.ext4": (["-V"], "e2fsck"),
    "fstrim": (["-V"], "util-linux"),
    "resize2fs": (["-h"], "resize2fs "),
    "mkfs.xfs": (["-V"], "mkfs.xfs version"),
    "xfs_growfs": (["-V"], "xfs_growfs version"),
    "xfs_repair": (["-V"], "xfs_repair version"),
    "modprobe": (["-V"], "kmod"),
}


def fail(text):
    sys.exit(f"FAILED: {text}")


def image(archive, programs):
    done = subprocess.run([f"{TREE}/scripts/image", "--output", archive, "--programs", programs], capture_output=True, text=True)
    if done.returncode != 0:
        fail(done.stderr)
    return done.stdout.split()[-1]


def blob(archive, descriptor):
    """A blob by its descriptor; its length and digest are those that the descriptor says."""
    data = archive.extractfile("blobs/" + descriptor["digest"].replace(":", "/")).read()
    if len(data) != descriptor["size"] or f"sha256:{hashlib.sha256(data).hexdigest()}" != descriptor["digest"]:
        fail(f"blob {descriptor['digest']} is not what its descriptor says")
    return data


def unpack(path, directory):
    """Follows the layout from its index to the layers."""
    with tarfile.open(path) as archive:
        if json.load(archive.extractfile("oci-layout")) != {"imageLayoutVersion": "1.0.0"}:
            fail("oci-layout")
        (entry,) = json.load(archive.extractfile("index.json"))["manifests"]
        manifest = json.loads(blob(archive, entry))
        config = json.loads(blob(archive, manifest["config"]))
        plain = config["rootfs"]["diff_ids"]
        if len(plain) != len(manifest["layers"]) or (config["os"], config["architecture"]) != tuple(
            entry["platform"][key] for key in ("os", "architecture")
        ):
            fail("the configuration does not fit the manifest")
        for layer, digest in zip(manifest["layers"], plain):
            data = gzip.decompress(blob(archive, layer))
            if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
                fail(f"layer {digest} unpacks to other bytes")
            with tarfile.open(fileobj=io.BytesIO(data)) as files:
                files.extraction_filter = lambda member, path: member
                files.extractall(directory)
    return config, entry


def inside(directory, environment, *command):
    """A command in the image and nowhere else."""
    return subprocess.run(["chroot", directory, *command], capture_output=True, text=True, env=environment)


def starts(directory, config):
    """Every program of the image that is unpacked there starts and does what it is for."""
    environment = dict(pair.split("=", 1) for pair in config["Env"])
    for name, (arguments, word) in VERSIONS.items():
        done = inside(directory, environment, name, *arguments)
        if word not in done.stdout + done.stderr:
            fail(f"{name} {' '.join(arguments)} in the image: status {done.returncode}: {done.stderr or done.stdout}")
    for kind, size_of in (("ext4", 16), ("xfs", 300)):
        disk = f"/tmp/{kind}"
        open(directory + disk, "wb").truncate(size_of << 20)
        for command in ([f"mkfs.{kind}", disk], ["blkid", "-p", "-o", "value", "-s", "TYPE", disk]):
            done = inside(directory, environment, *command)
            if done.returncode != 0:
                fail(f"{' '.join(command)} in the image: {done.stderr or done.stdout}")
        if done.stdout.strip() != kind:
            fail(f"mkfs.{kind} made {done.stdout!r}")
        os.remove(directory + disk)
    done = inside(directory, environment, "longhornctl", "install", "manifests")
    if "kind: DaemonSet" not in done.stdout:
        fail(f"longhornctl in the image: {done.stderr}")


def main():
    programs = sys.argv[1] if len(sys.argv) > 1 else f"{TREE}/target/release"
    listed = [line.split()[1] for line in open(f"{TREE}/deploy/image.files") if line.startswith("program ")]
    if sorted(VERSIONS) != sorted(listed + ["longhorn", "longhornctl"]):
        fail(f"deploy/image.files lists {sorted(listed)}, this test starts {sorted(VERSIONS)}")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
        first, second = f"{scratch}/first.tar", f"{scratch}/second.tar"
        digest = image(first, programs)
        if image(second, programs) != digest or open(first, "rb").read() != open(second, "rb").read():
            fail("two archives of the same files differ")
        os.remove(second)
        size = os.path.getsize(first) >> 20
        directory = f"{scratch}/root"
        config, entry = unpack(first, directory)
        if entry["digest"] != digest:
            fail("the digest that was printed is not the image's")
        starts(directory, config["config"])
    print(f"SHOWN an OCI archive of {size} MiB, the same twice; {len(VERSIONS)} programs start in it")


if __name__ == "__main__":
    if os.geteuid() != 0:
        print("SKIP image: chroot needs root")
        sys.exit(0)
    main()
