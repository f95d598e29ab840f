"""4 KiB random writes at depth 32, three replicas in RAM, over NBD: beside qemu-storage-daemon's quorum over three NBD
servers, the same client, in turns."""
import json, os, signal, statistics, subprocess, tempfile, time
from harness import Host, expect, fio, full, have, kill, say, shown, skip, wait_for

GOAL = 3.0
ROUNDS, SECONDS = full(3, 5), full(3, 5)


class Quorum:
    """Three qemu-storage-daemon NBD servers on raw files in RAM, and a fourth with the quorum over them. Unix sockets
    throughout: over TCP, QEMU 7.2's NBD waits for delayed acknowledgements (36 ms a write), which would flatter us."""

    def __init__(self, folder):
        self.folder, self.children = folder, []
        nodes = []
        for i in range(3):
            path, socket = f"{folder}/q{i}.raw", f"{folder}/child{i}.sock"
            with open(path, "wb") as f:
                f.truncate(1 << 30)
            self.start("--blockdev", f"driver=file,node-name=f,filename={path}",
                       "--blockdev", "driver=raw,node-name=d,file=f",
                       "--nbd-server", f"addr.type=unix,addr.path={socket}",
                       "--export", "type=nbd,id=e,node-name=d,name=x,writable=on")
            nodes += ["--blockdev", f"driver=nbd,node-name=n{i},server.type=unix,server.path={socket},export=x"]
        time.sleep(0.5)
        self.socket = f"{folder}/quorum.sock"
        self.start(*nodes, "--blockdev",
                   "driver=quorum,node-name=q,vote-threshold=2,children.0=n0,children.1=n1,children.2=n2",
                   "--nbd-server", f"addr.type=unix,addr.path={self.socket}",
                   "--export", "type=nbd,id=e,node-name=q,name=q,writable=on")
        wait_for("the quorum's socket", lambda: os.path.exists(self.socket), 10)
        self.uri = f"nbd+unix:///q?socket={self.socket}"

    def start(self, *args):
        self.children.append(subprocess.Popen(["qemu-storage-daemon", *args]))

    def stop(self):
        for child in self.children:
            child.kill()
            child.wait()


def write_iops(uri):
    result = fio("speed", SECONDS, "--rw=randwrite", "--bs=4k", "--iodepth=32", "--size=1g", "--ramp_time=1",
                 "--ioengine=nbd", f"--uri={uri}")
    return result["jobs"][0]["write"]["iops"]


def main():
    if not have("fio", "qemu-storage-daemon"):
        return skip("speed", "no fio or no qemu-storage-daemon")
    host = Host("/dev/shm")
    volume = host.name("speed")
    host.up(volume, "--size", "1GiB", "--frontend", "nbd-server")
    ours = f"nbd+unix:///{volume}?socket={host.socket(volume)}"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        quorum = Quorum(folder)
        try:
            pairs = []
            for _ in range(ROUNDS):
                pairs.append((write_iops(ours), write_iops(quorum.uri)))
                say(f"ours {pairs[-1][0]:.0f}, quorum {pairs[-1][1]:.0f} IOPS")
        finally:
            quorum.stop()
    ratio = statistics.median(a / b for a, b in pairs)
    host.ctl("down", volume)
    expect(ratio >= GOAL, f"{ratio:.1f} times the quorum, promised {GOAL}")
    shown(f"{statistics.median(a for a, _ in pairs):.0f} IOPS, {ratio:.1f} times the quorum's "
          f"{statistics.median(b for _, b in pairs):.0f}")


main()
