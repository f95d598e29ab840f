"""Overlapping 4 KiB to 32 KiB writes at depth 32 over 256 blocks, through NBD with several connections: all replicas are
equal afterwards, block by block."""
import json, os
from harness import BIN, Host, contents, expect, full, rng, run, shown


def main():
    host = Host()
    seed = rng().randrange(1 << 30)
    volume = host.name("overlap")
    host.up(volume, "--size", "64MiB", "--frontend", "nbd-server")
    done = run(os.path.join(BIN, "register-load"), "--socket", host.socket(volume), "--export", volume,
               "--blocks", 256, "--connections", 4, "--depth", 8, "--writes", full(20000, 100000), "--seconds", 600,
               "--read-percent", 10, "--seed", seed, timeout=900, check=False)
    expect(done.returncode == 0, f"register-load: {done.stdout}{done.stderr}")
    end = json.loads(done.stdout.splitlines()[-1])
    paths = [r["path"] for r in host.status(volume)["replicas"]]
    host.ctl("down", volume)
    found = {contents(p) for p in paths}
    expect(len(found) == 1, "replicas differ after overlapping writes")
    shown(f"{end['writes']} overlapping writes, {len(paths)} replicas equal")


main()
