"""A volume as an iSCSI target, used by libiscsi and QEMU: its size and name, an image written and compared while a replica
and then the engine is killed, and the same bytes as its NBD export has; both tell its holes."""
import json, os, random, signal, socket, subprocess, time
from harness import Host, contents, expect, full, have, kill, run, say, shown, skip, wait_for

SIZE = full(64, 512) << 20


# An address of this machine that no other process of these tests has: what is free there stays free.
OWN = f"127.{os.getpid() >> 8 & 255}.{os.getpid() & 255}.1"


def free_address():
    with socket.create_server((OWN, 0)) as s:
        return f"{OWN}:{s.getsockname()[1]}"


def image(path):
    """Random bytes with holes, so that zeroes are written, too."""
    dice = random.Random(7)
    with open(path, "wb") as f:
        for at in range(0, SIZE, 1 << 20):
            if dice.random() < 0.7:
                f.seek(at)
                f.write(dice.randbytes(1 << 20))
        f.truncate(SIZE)


def holes_are_told(uri, picture):
    """A client is told of each MiB whether it holds data, so that a copy reads no holes."""
    told = json.loads(run("qemu-img", "map", "-f", "raw", "--output=json", uri, timeout=60).stdout)
    data = [(e["start"], e["length"]) for e in told if e["data"]]
    with open(picture, "rb") as f:
        written = [at for at in range(0, SIZE, 1 << 20) if f.read(1 << 20).strip(b"\0")]
    found = [at for start, length in data for at in range(start, start + length, 1 << 20)]
    expect(found == written and len(written) < SIZE >> 20, f"{uri} tells of data at {data}")


def qemu_has_iscsi(uri):
    done = run("qemu-img", "info", uri, check=False, timeout=60)
    return "Unknown protocol" not in done.stderr and "Unknown driver" not in done.stderr


def main():
    if not have("iscsi-inq", "iscsi-readcapacity16", "qemu-img"):
        return skip("iscsi", "no libiscsi tools or no qemu-img")
    host = Host()
    volume = host.name("iscsi")
    address = free_address()
    status = host.up(volume, "--size", f"{SIZE >> 20}MiB", "--frontend", "iscsi-target", "--listen", address)
    uri = status["uri"]
    expect(uri == f"iscsi://{address}/iqn.2019-10.io.longhorn:{volume}/1", f"the URI is {uri}")
    expect(str(SIZE) in run("iscsi-readcapacity16", "-s", uri).stdout, "another size over iSCSI")
    expect("LONGHORN" in run("iscsi-inq", uri).stdout, "the disk does not say whose it is")
    if not qemu_has_iscsi(uri):
        return skip("iscsi", "QEMU's iSCSI driver (qemu-block-extra) is not installed")

    picture = os.path.join(host.root, "picture.raw")
    image(picture)
    writer = subprocess.Popen(["qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", picture, uri],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    time.sleep(0.3)
    kill(host.status(volume)["replicas"][1]["pid"], signal.SIGKILL)
    expect(writer.wait(300) == 0, f"qemu-img convert: {writer.stdout.read()}")
    host.healthy(volume)
    same = run("qemu-img", "compare", "-f", "raw", "-F", "raw", picture, uri, check=False)
    expect(same.returncode == 0, f"the image reads otherwise: {same.stdout}{same.stderr}")
    say("written and compared beside a killed replica")

    pid = host.status(volume)["engine_pid"]
    kill(pid, signal.SIGKILL)
    wait_for("another engine", lambda: host.status(volume)["engine_pid"] not in (None, pid), 30)
    host.healthy(volume)
    same = run("qemu-img", "compare", "-f", "raw", "-F", "raw", picture, uri, check=False)
    expect(same.returncode == 0, f"after a new engine: {same.stdout}{same.stderr}")

    holes_are_told(uri, picture)

    host.ctl("snapshot", "create", volume, "written")
    with subprocess.Popen(["qemu-io", "-f", "raw", uri], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        client.stdin.write("length\n")
        client.stdin.flush()
        expect("MiB" in client.stdout.readline(), "QEMU does not open the disk")
        refused = host.ctl("snapshot", "revert", volume, "written", check=False)
        expect(refused.returncode == 1 and "iSCSI sessions: 1" in refused.stderr, f"a revert under an initiator: {refused.stderr}")
        client.communicate("quit\n")

    taken = host.name("taken")
    refused = host.ctl("up", taken, "--size", "16MiB", "--frontend", "iscsi-target", "--listen", address, check=False)
    expect(refused.returncode == 1 and address in refused.stderr, f"a port in use: {refused.stderr}")

    paths = [r["path"] for r in host.status(volume)["replicas"]]
    host.ctl("down", volume)
    expect(len({contents(p) for p in paths}) == 1, "replicas differ")
    status = host.up(volume, "--frontend", "nbd-server")
    holes_are_told(status["uri"], picture)
    if have("nbdcopy"):
        copy = os.path.join(host.root, "copy.raw")
        run("nbdcopy", status["uri"], copy)
        run("cmp", picture, copy)
    host.ctl("down", volume)
    shown(f"{SIZE >> 20} MiB written by QEMU over iSCSI, equal after a replica and the engine were killed, and over NBD; both tell which MiB are holes")


main()
