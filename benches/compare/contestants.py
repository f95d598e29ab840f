"""Who is measured: each starts its servers in a place, says what the client opens, and stops them."""
import os, shutil, signal, socket, subprocess, time

from .client import BenchError, Target, file_job, nbd_job


class Missing(Exception):
    """A contestant cannot run here; the text says what is missing."""


def need(*tools):
    for tool in tools:
        if not shutil.which(tool):
            raise Missing(f"no {tool} here")


def wait_for(what, condition, seconds=20):
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise BenchError(f"{what}: not within {seconds} s")
        time.sleep(0.02)


def accepts(path):
    """True if a server listens on the unix socket."""
    with socket.socket(socket.AF_UNIX) as s:
        try:
            s.connect(path)
        except OSError:
            return False
    return True


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Contestant:
    """Base: child processes in a folder of its own."""
    key, name = "", ""

    def __init__(self, folder, size):
        self.folder, self.size, self.children = os.path.join(folder, self.key), size, []

    def start(self):
        os.makedirs(self.folder)

    def spawn(self, *words, **options):
        child = subprocess.Popen([str(w) for w in words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                 stderr=open(os.path.join(self.folder, "stderr"), "ab"), **options)
        self.children.append(child)
        return child

    def raw_file(self, name):
        path = os.path.join(self.folder, name)
        with open(path, "wb") as f:
            f.truncate(self.size)
        return path

    def socket(self, name):
        return os.path.join(self.folder, name)

    def target(self):
        raise NotImplementedError

    def pids(self):
        return [c.pid for c in self.children]

    def stop(self):
        for child in reversed(self.children):
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class Raw(Contestant):
    key, name = "raw", "raw file"

    def target(self):
        path = os.path.join(self.folder, "raw")
        return Target([file_job(path if os.path.exists(path) else self.raw_file("raw"))])


class RawThree(Contestant):
    key, name = "raw-x3", "raw-x3 (three files at once)"

    def target(self):
        paths = [os.path.join(self.folder, f"raw{n}") for n in range(3)]
        return Target([file_job(p if os.path.exists(p) else self.raw_file(os.path.basename(p))) for p in paths])


class QemuNbd(Contestant):
    key, name = "qemu-nbd", "qemu-nbd, one raw file"

    def start(self):
        need("qemu-nbd")
        super().start()
        path = self.socket("nbd")
        self.spawn("qemu-nbd", "--persistent", "--shared=8", "--format=raw", "--cache=none", "--aio=native",
                   f"--socket={path}", "--export-name=x", self.raw_file("raw"))
        wait_for("qemu-nbd's socket", lambda: accepts(path))

    def target(self):
        return Target([nbd_job(f"nbd+unix:///x?socket={self.socket('nbd')}")])


class StorageDaemon(Contestant):
    key, name = "qsd", "qemu-storage-daemon, one raw file"
    # On the files of every contestant O_DIRECT is on.
    CACHE = "cache.direct=on"

    def serve(self, path, *listen, export="x"):
        return self.spawn("qemu-storage-daemon", "--blockdev", f"driver=file,node-name=f,filename={path},{self.CACHE}",
                          "--blockdev", f"driver=raw,node-name=d,file=f,{self.CACHE}", "--nbd-server", *listen,
                          "--export", f"type=nbd,id=e,node-name=d,name={export},writable=on")

    def start(self):
        need("qemu-storage-daemon")
        super().start()
        path = self.socket("nbd")
        self.serve(self.raw_file("raw"), f"addr.type=unix,addr.path={path}")
        wait_for("qemu-storage-daemon's socket", lambda: accepts(path))

    def target(self):
        return Target([nbd_job(f"nbd+unix:///x?socket={self.socket('nbd')}")])


class Quorum(StorageDaemon):
    """Three servers of one file each, and a fourth with the quorum over them, on unix sockets: over TCP QEMU 7.2's
    client waits for delayed acknowledgements, which would flatter everybody beside it."""
    key, name, over = "quorum", "qemu-storage-daemon quorum over three NBD servers", "unix"

    def child(self, number):
        """Where a child listens: what the server is told, and what the quorum."""
        path = self.socket(f"child{number}")
        return f"addr.type=unix,addr.path={path}", f"server.type=unix,server.path={path}"

    def start(self):
        need("qemu-storage-daemon")
        Contestant.start(self)
        nodes, front = [], self.socket("nbd")
        for n in range(3):
            listen, reach = self.child(n)
            self.serve(self.raw_file(f"raw{n}"), listen)
            nodes += ["--blockdev", f"driver=nbd,node-name=n{n},{reach},export=x,reconnect-delay=0"]
        time.sleep(0.5)
        children = ",".join(f"children.{n}=n{n}" for n in range(3))
        self.spawn("qemu-storage-daemon", *nodes, "--blockdev", f"driver=quorum,node-name=q,vote-threshold=2,{children}",
                   "--nbd-server", f"addr.type=unix,addr.path={front}",
                   "--export", "type=nbd,id=e,node-name=q,name=x,writable=on")
        wait_for("the quorum's socket", lambda: accepts(front))


class QuorumTcp(Quorum):
    key, name = "quorum-tcp", "the same over TCP"

    def child(self, number):
        port = free_port()
        return (f"addr.type=inet,addr.host=127.0.0.1,addr.port={port}",
                f"server.type=inet,server.host=127.0.0.1,server.port={port}")


class Tgtd(Contestant):
    """The Linux target framework's daemon over one raw file, its write cache on."""
    key, name, iqn = "tgtd", "tgtd, one raw file", "iqn.2001-04.test:tgtd"

    def start(self):
        need("tgtd", "tgtadm")
        super().start()
        raw, port = self.raw_file("raw"), free_port()
        self.number = str(1 + port % 1000)
        self.spawn("tgtd", "-f", "-C", self.number, "--iscsi", f"portal=127.0.0.1:{port}")
        wait_for("tgtd", lambda: self.admin("--op", "show", "--mode", "sys"))
        target = ("--lld", "iscsi", "--tid", "1")
        for words in (("--op", "new", "--mode", "target", *target, "-T", self.iqn),
                      ("--op", "new", "--mode", "logicalunit", *target, "--lun", "1", "-b", raw),
                      ("--op", "bind", "--mode", "target", *target, "-I", "ALL")):
            if not self.admin(*words):
                raise Missing(f"tgtadm {' '.join(words)} failed")
        self.url = f"iscsi://127.0.0.1:{port}/{self.iqn}/1"

    def admin(self, *words):
        return subprocess.run(["tgtadm", "-C", self.number, *words], capture_output=True).returncode == 0


class NbdkitMemory(Contestant):
    key, name = "nbdkit", "nbdkit memory"

    def start(self):
        need("nbdkit")
        super().start()
        path = self.socket("nbd")
        self.spawn("nbdkit", "--foreground", f"--unix={path}", "memory", f"size={self.size}")
        wait_for("nbdkit's socket", lambda: accepts(path))

    def target(self):
        return Target([nbd_job(f"nbd+unix:///?socket={self.socket('nbd')}")])


class Loop(Contestant):
    """A loop device with direct I/O on a file."""
    key, name = "loop", "loop on a file in RAM (no server: the floor)"
    device = None

    def start(self):
        need("losetup")
        super().start()
        self.attach(self.raw_file("raw"))

    def attach(self, path):
        words = ["losetup", "--find", "--show", "--direct-io=on", path]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode != 0:
            raise Missing(f"no loop device: {done.stderr.strip()}")
        self.device = done.stdout.strip()

    def target(self):
        return Target([file_job(self.device)])

    def detach(self):
        if self.device:
            subprocess.run(["losetup", "--detach", self.device], capture_output=True)
            self.device = None

    def stop(self):
        self.detach()
        super().stop()


class NbdFuse(Loop):
    key, name = "nbdfuse", "nbdkit memory, nbdfuse, loop"

    def start(self):
        need("nbdkit", "nbdfuse", "losetup")
        Contestant.start(self)
        path, self.mounted = self.socket("nbd"), os.path.join(self.folder, "fuse")
        os.mkdir(self.mounted)
        self.spawn("nbdkit", "--foreground", f"--unix={path}", "memory", f"size={self.size}")
        wait_for("nbdkit's socket", lambda: accepts(path))
        disk = os.path.join(self.mounted, "disk.img")
        self.spawn("nbdfuse", disk, f"nbd+unix:///?socket={path}")
        wait_for("nbdfuse's file", lambda: os.path.exists(disk))
        self.attach(disk)

    def stop(self):
        self.detach()
        if getattr(self, "mounted", None):
            # The loop device lets go of the file a moment after it was detached.
            for _ in range(50):
                if subprocess.run(["umount", self.mounted], capture_output=True).returncode == 0:
                    break
                time.sleep(0.1)
        Contestant.stop(self)
