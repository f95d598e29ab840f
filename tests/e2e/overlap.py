"""Overlapping 4 KiB to 32 KiB writes at depth 32 over 256 blocks, through NBD with several connections: all replicas are
equal afterwards, block by block; also one that hung meanwhile, was killed and came back."""
import json, os, signal, subprocess, time
from harness import BIN, Host, contents, expect, full, kill, rng, run, shown, wait_for


def load(host, volume, dice, *more):
    """Every block of this load ends with its own crc32c."""
    return [os.path.join(BIN, "register-load"), "--socket", host.socket(volume), "--export", volume, "--blocks", "256",
            "--connections", "4", "--depth", "8", "--read-percent", "10", "--seed", str(dice.randrange(1 << 30)), *more]


def equal(host, volume, what):
    paths = [r["path"] for r in host.status(volume)["replicas"]]
    host.ctl("down", volume)
    expect(len({contents(p) for p in paths}) == 1, f"replicas differ after {what}")
    return len(paths)


def at_once(host, dice):
    volume = host.name("overlap")
    host.up(volume, "--size", "64MiB", "--frontend", "nbd-server")
    done = run(*load(host, volume, dice, "--writes", str(full(20000, 100000)), "--seconds", "600"), timeout=900, check=False)
    expect(done.returncode == 0, f"register-load: {done.stdout}{done.stderr}")
    end = json.loads(done.stdout.splitlines()[-1])
    count = equal(host, volume, "overlapping writes")
    return f"{end['writes']} overlapping writes, {count} replicas equal"


def with_one_away(host, dice):
    """What it missed is the same blocks with other contents, and is found by comparing."""
    volume = host.name("away")
    host.up(volume, "--size", "64MiB", "--frontend", "nbd-server")
    client = subprocess.Popen(load(host, volume, dice, "--seconds", "600"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    time.sleep(1)
    replica = host.status(volume)["replicas"][1]
    kill(replica["pid"], signal.SIGSTOP)
    out = lambda: [r for r in host.status(volume)["replicas"] if r["name"] == replica["name"] and r["mode"] != "RW"]
    wait_for("the replica that hangs is out", out, 30)
    time.sleep(1)
    expect(client.poll() is None, "the load has ended")
    client.kill()
    client.wait()
    kill(replica["pid"], signal.SIGKILL)
    host.healthy(volume, 3)
    return f"{equal(host, volume, 'one of them was away')} equal after one was away"


def main():
    host, dice = Host(), rng()
    shown("; ".join(part(host, dice) for part in (at_once, with_one_away)))


main()
