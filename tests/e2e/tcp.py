"""Replicas on three hosts, each a network namespace, reached over TCP: fio verify over NBD while a host's network goes
away and comes back; without --insecure neither side starts."""
import json, subprocess, time
from by_hand import ByHand
from harness import Host, contents, expect, full, have, run, shown, skip, wait_for
from namespaces import Hosts

PORT = 10000
SIZE = 256 << 20


def refused(words):
    done = run(*words, check=False, timeout=60)
    expect(done.returncode != 0 and "--insecure" in done.stderr, f"not refused: {words}: {done.stderr}")


def main():
    if not have("fio", "ip"):
        return skip("tcp", "no fio or no ip")
    host = Host()
    hosts = Hosts(host.prefix)
    try:
        volume = ByHand(host, "tcp", SIZE, [f"{hosts.address(n)}:{PORT}" for n in (1, 2, 3)],
                        lambda n: ["ip", "netns", "exec", hosts.name(n)])
        refused(volume.replica(1))
        refused(volume.engine())
        volume.start()
        load = subprocess.Popen(
            ["fio", "--name=tcp", "--rw=randrw", "--bsrange=4k-64k", "--iodepth=16", "--size=200m", "--randrepeat=0",
             "--time_based", f"--runtime={full(15, 60)}", "--verify=crc32c", "--verify_backlog=512", "--verify_fatal=1",
             "--ioengine=nbd", f"--uri={volume.uri()}", "--output-format=json"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/tmp")
        rounds = 0
        while load.poll() is None and rounds < full(2, 8):
            n = 1 + rounds % 3
            time.sleep(1)
            hosts.cut(n, True)
            # Without requests nobody misses a host.
            out = wait_for(f"host {n} put out, or the load over",
                           lambda: "out" if volume.modes().count("RW") == 2 else load.poll() is not None, 15)
            time.sleep(1)
            hosts.cut(n, False)
            wait_for(f"host {n} in sync again", volume.healthy, 240)
            rounds += out == "out"
        said = load.communicate()[0]
        expect(load.returncode == 0, f"fio: status {load.returncode}\n{said[-3000:]}")
        job = json.loads(said[said.index("{"):])["jobs"][0]
        expect(rounds > 0, "the load ended before a host was away")
        volume.stop()
    finally:
        hosts.remove()
    expect(len({contents(r["path"]) for r in volume.replicas}) == 1, "replicas differ")
    shown(f"{job['read']['total_ios']} reads, {job['write']['total_ios']} writes over TCP, a host away {rounds} times: "
          "no error, no mismatch, replicas equal")


main()
