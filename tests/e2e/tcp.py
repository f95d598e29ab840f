"""Replicas on three hosts, each a network namespace, reached over TCP: fio verify over NBD while a host's network goes
away and comes back; without --insecure neither side starts."""
import glob, json, os, subprocess, time
from harness import BIN, Host, contents, expect, fio, full, have, run, say, shown, skip, wait_for

PORT = 10000
SIZE = 256 << 20


class Hosts:
    """Three network namespaces behind one bridge of this host."""

    def __init__(self, prefix):
        # Names of network devices have at most 15 characters.
        self.tag = prefix[-5:]
        self.bridge = f"lhb{self.tag}"
        self.net = 100 + os.getpid() % 100
        run("ip", "link", "add", self.bridge, "type", "bridge")
        run("ip", "addr", "add", f"10.{self.net}.0.254/24", "dev", self.bridge)
        run("ip", "link", "set", self.bridge, "up")
        for n in (1, 2, 3):
            name, outer, inner = self.name(n), f"lho{self.tag}{n}", f"lhi{self.tag}{n}"
            run("ip", "netns", "add", name)
            run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", name)
            run("ip", "link", "set", outer, "master", self.bridge, "up")
            run("ip", "-n", name, "addr", "add", f"{self.address(n)}/24", "dev", inner)
            run("ip", "-n", name, "link", "set", inner, "up")

    def name(self, n):
        return f"lh{self.tag}{n}"

    def address(self, n):
        return f"10.{self.net}.0.{n}"

    def cut(self, n, away):
        run("ip", "link", "set", f"lho{self.tag}{n}", "down" if away else "up")

    def remove(self):
        for n in (1, 2, 3):
            subprocess.run(["ip", "netns", "del", self.name(n)], capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)


class Volume:
    """A volume whose processes are started by hand: its record and directories are those of a root on this host."""

    def __init__(self, host, hosts):
        self.host, self.hosts, self.children = host, hosts, []
        self.name = host.name("tcp")
        host.ctl("up", self.name, "--size", str(SIZE), "--frontend", "none")
        self.replicas = host.status(self.name)["replicas"]
        host.ctl("down", self.name)
        self.record = os.path.join(host.root, "volumes", self.name)
        self.engine_root = os.path.join(host.root, "engine")
        os.mkdir(self.engine_root)
        self.control = os.path.join(self.engine_root, "e.sock")

    def spawn(self, *words):
        log = open(os.path.join(self.host.root, "tcp.log"), "ab")
        self.children.append(subprocess.Popen(words, stdout=log, stderr=log))
        return self.children[-1]

    def replica(self, n, *more):
        replica = self.replicas[n - 1]
        return ["ip", "netns", "exec", self.hosts.name(n), os.path.join(BIN, "longhorn"), "replica",
                "--volume-name", self.name, "--replica-instance-name", replica["name"],
                "--listen", f"unix:{self.host.root}/r{n}.sock",
                "--data-listen", f"tcp:{self.hosts.address(n)}:{PORT}", "--key-file", f"{self.record}/key",
                *more, replica["path"]]

    def engine(self, *more):
        members = [f"--replica={r['name']}=tcp:{self.hosts.address(n)}:{PORT}" for n, r in enumerate(self.replicas, 1)]
        return [os.path.join(BIN, "longhorn"), "controller", "--root", self.engine_root, "--authority", self.record,
                "--key-file", f"{self.record}/key", "--size", str(SIZE), "--frontend", "nbd-server",
                "--listen", f"unix:{self.control}", *members, *more, self.name]

    def modes(self):
        done = run(os.path.join(BIN, "longhorn"), "--url", f"unix:{self.control}", "ls", check=False)
        return [line.split()[1] for line in done.stdout.splitlines() if line.startswith("tcp:")]

    def stop(self):
        for child in reversed(self.children):
            child.terminate()
        for child in reversed(self.children):
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()


def refused(words):
    done = run(*words, check=False, timeout=60)
    expect(done.returncode != 0 and "--insecure" in done.stderr, f"not refused: {words}: {done.stderr}")


def main():
    if not have("fio", "ip"):
        return skip("tcp", "no fio or no ip")
    host = Host()
    hosts = Hosts(host.prefix)
    volume = Volume(host, hosts)
    try:
        refused(volume.replica(1))
        refused(volume.engine())
        for n in (1, 2, 3):
            volume.spawn(*volume.replica(n, "--insecure"))
        volume.spawn(*volume.engine("--insecure"))
        healthy = lambda: volume.modes() == ["RW"] * 3
        wait_for("three replicas over TCP", healthy, 60)
        socket = host.socket(volume.name)
        load = subprocess.Popen(
            ["fio", "--name=tcp", "--rw=randrw", "--bsrange=4k-64k", "--iodepth=16", "--size=200m", "--randrepeat=0",
             "--time_based", f"--runtime={full(15, 60)}", "--verify=crc32c", "--verify_backlog=512", "--verify_fatal=1",
             "--ioengine=nbd", f"--uri=nbd+unix:///{volume.name}?socket={socket}", "--output-format=json"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/tmp")
        rounds = 0
        while load.poll() is None and rounds < full(2, 8):
            n = 1 + rounds % 3
            time.sleep(1)
            hosts.cut(n, True)
            wait_for(f"host {n} put out", lambda: volume.modes().count("RW") == 2, 15)
            time.sleep(1)
            hosts.cut(n, False)
            wait_for(f"host {n} in sync again", healthy, 90)
            rounds += 1
        said = load.communicate()[0]
        expect(load.returncode == 0, f"fio: status {load.returncode}\n{said[-3000:]}")
        job = json.loads(said[said.index("{"):])["jobs"][0]
        expect(rounds > 0, "the load ended before a host was away")
    finally:
        volume.stop()
        hosts.remove()
    expect(len({contents(r["path"]) for r in volume.replicas}) == 1, "replicas differ")
    shown(f"{job['read']['total_ios']} reads, {job['write']['total_ios']} writes over TCP, a host away {rounds} times: "
          "no error, no mismatch, replicas equal")


main()
