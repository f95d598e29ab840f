"""A host that restarts: what was up is up again by `up --all`, each volume by its own options, what `down` stopped stays down,
and a volume that does not start neither holds the others up nor is passed over. `down --all --for-now` is what a host does
before it stops."""
import fcntl, json, os, shutil, subprocess, threading, time
from harness import BIN, Host, expect, shown, wait_for

PATTERN = os.urandom(1 << 20)


def write(device, at):
    with open(device, "r+b", buffering=0) as file:
        file.seek(at)
        file.write(PATTERN)
        os.fsync(file.fileno())


def read(device, at):
    with open(device, "rb", buffering=0) as file:
        file.seek(at)
        return file.read(len(PATTERN))


def lose_power(host, volumes):
    """Every process dies, and what the kernel and /run had of them is gone."""
    devices = {}
    for volume in volumes:
        node = f"/dev/longhorn/{volume}"
        if os.path.exists(node):
            devices[node] = os.stat(node).st_rdev
    host.kill_everything()
    for node, rdev in devices.items():
        name = os.path.basename(os.path.realpath(f"/sys/dev/block/{os.major(rdev)}:{os.minor(rdev)}"))
        if name.startswith("loop"):
            subprocess.run(["losetup", "-d", "/dev/" + name], capture_output=True)
        elif name.startswith("nbd"):
            subprocess.run(["nbd-client", "-d", "/dev/" + name], capture_output=True)
        if os.path.exists(node):
            os.unlink(node)
    for name in os.listdir("/run/longhorn"):
        if any(name.startswith(volume + ".") for volume in volumes):
            path = os.path.join("/run/longhorn", name)
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


def all_of(host, *args, status=0):
    """What `up --all` or `down --all` says of each volume."""
    done = host.ctl("-o", "json", *args, check=False)
    expect(done.returncode == status, f"{args}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return {o["volume"]: o for o in json.loads(done.stdout)}, done.stderr


def restart(host):
    """Volumes of several kinds before and after."""
    data, served, stopped, quiet = (host.name(word) for word in ("data", "served", "stopped", "quiet"))
    everything = [data, served, stopped, quiet]
    device = host.up(data, "--size", "64MiB", "--replicas", "2")["device"]
    host.up(served, "--size", "64MiB", "--replicas", "1", "--frontend", "nbd-server", "--io-timeout", "7")
    host.up(stopped, "--size", "64MiB", "--replicas", "1", "--frontend", "nbd-server")
    host.up(quiet, "--size", "64MiB", "--replicas", "1", "--frontend", "none")
    write(device, 1 << 20)
    host.ctl("down", stopped)
    lose_power(host, everything)
    # What is ending has no command line any more, and is there all the same.
    wait_for("the power is gone", lambda: host.status(data)["state"] == "detached")
    expect(not os.path.exists(device), "the power is not gone")

    told, said = all_of(host, "up", "--all")
    expect(sorted(told) == sorted([data, served, quiet]), f"started: {sorted(told)}")
    expect(all(o["done"] and o["error"] == "" and o["status"]["state"] == "attached" for o in told.values()), f"{told}")
    expect(told[data]["status"]["endpoint"] == device, f"{told[data]}")
    expect(told[served]["status"]["uri"].startswith("nbd+unix:"), f"{told[served]}")
    expect(all(line.split(": ")[0] in told for line in said.splitlines() if line), f"nobody knows whom this is about: {said}")
    expect(read(device, 1 << 20) == PATTERN, "what was written before the power was lost is not there")
    line = next(open(f"/proc/{told[served]['status']['engine_pid']}/cmdline", "rb")).split(b"\0")
    expect(line[line.index(b"--io-timeout") + 1] == b"7", f"its own options are lost: {line}")
    expect(host.status(stopped)["state"] == "detached", "a stopped volume was started")
    again, _ = all_of(host, "up", "--all")
    expect(all(o["done"] for o in again.values()) and again[data]["status"]["engine_pid"] == told[data]["status"]["engine_pid"],
           f"starting all again is no success without effect: {again}")
    shown("after a crash of everything `up --all` has 3 volumes up again, a stopped one down")
    return data, served, stopped, quiet, device


def before_it_stops(host, data, served, stopped, quiet, device):
    """`down --all --for-now`, which waits for whoever lets go of a device, and tells who does not."""
    holder = open(device, "rb")
    told, _ = all_of(host, "down", "--all", "--for-now", status=1)
    expect(not told[data]["done"] and "in use" in told[data]["error"], f"{told[data]}")
    expect(told[served]["done"] and told[quiet]["done"] and stopped not in told, f"{told}")
    expect(host.status(data)["state"] == "attached", "a device in use was stopped")
    began = time.monotonic()
    threading.Timer(2, holder.close).start()
    told, _ = all_of(host, "down", "--all", "--for-now", "--wait", "60")
    expect(list(told) == [data] and told[data]["done"], f"{told}")
    expect(1 < time.monotonic() - began < 50, "it did not wait for its user")
    told, _ = all_of(host, "up", "--all")
    expect(sorted(told) == sorted([data, served, quiet]), f"after a stop for now: {sorted(told)}")
    told, _ = all_of(host, "down", "--all")
    expect(len(told) == 3 and all(o["done"] for o in told.values()), f"{told}")
    told, said = all_of(host, "up", "--all")
    expect(told == {} and "no volume is to be up" in said, f"after a stop for good: {told} {said}")
    shown("`down --all --for-now --wait` stops what is unused, waits for the rest; `up --all` has it again")


def not_all(host, data, served, stopped, quiet, device):
    """One volume cannot be read, one cannot be opened, one waits for another command; the fourth is up at once."""
    for volume in (data, served, stopped, quiet):
        host.up(volume)
    # Cleanly, so that nothing but the command starts any of them.
    host.ctl("down", "--all", "--for-now")
    record = os.path.join(host.root, "volumes", served, "volume.json")
    text = open(record).read()
    open(record, "w").write("{")
    for name in os.listdir(os.path.join(host.root, "replicas")):
        if name.startswith(quiet + "-"):
            meta = os.path.join(host.root, "replicas", name, "volume.meta")
            sound = open(meta).read()
            open(meta, "w").write("nothing that was ever one")
    # Held as by a command on that volume, the first in order.
    lock = open(os.path.join(host.root, "run", "volumes", data + ".lock"), "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    command = [os.path.join(BIN, "longhornctl"), "--root", host.root, "up", "--all", "-o", "json"]
    starting = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for("a volume beside one that waits", lambda: host.json("status", stopped)["state"] == "attached", 25)
    expect(starting.poll() is None, "nothing was waited for")
    lock.close()
    out, said = starting.communicate(timeout=120)
    told = {o["volume"]: o for o in json.loads(out)}
    expect(starting.returncode == 1 and "2 of 4 volumes are not up" in said, f"{starting.returncode} {said}")
    expect(told[data]["done"] and told[stopped]["done"], f"{told}")
    expect("volume.json is damaged" in told[served]["error"] and told[served]["status"] is None, f"{told[served]}")
    expect(not told[quiet]["done"] and "volume.meta" in told[quiet]["error"], f"{told[quiet]}")
    table = host.ctl("up", "--all", check=False)
    lines = {line.split()[0]: line for line in table.stdout.splitlines() if line.split()}
    expect(table.returncode == 1 and " failed " in lines[served] and " up " in lines[data], f"{table.stdout}")
    expect(read(device, 1 << 20) == PATTERN, "its data has gone")
    open(record, "w").write(text)
    open(meta, "w").write(sound)
    told, _ = all_of(host, "up", "--all")
    expect(len(told) == 4 and all(o["done"] for o in told.values()), f"once they are mended: {told}")
    host.ctl("down", "--all")
    for volume in (data, served, stopped, quiet):
        host.ctl("rm", volume, "--yes")
    shown("volumes that do not start are named with their reasons, and hold no other up")


def of_before(host):
    """A volume that a program started that did not note it, and one that is gone again."""
    old = host.name("old")
    host.up(old, "--size", "64MiB", "--replicas", "1", "--frontend", "nbd-server")
    os.unlink(os.path.join(host.root, "volumes", old, "up"))
    lose_power(host, [old])
    told, _ = all_of(host, "up", "--all")
    expect(list(told) == [old] and told[old]["done"], f"{told}")
    host.ctl("down", old, "--for-now")
    host.ctl("rm", old, "--yes")
    host.ctl("up", old, "--size", "64MiB", "--frontend", "nbd-server", "--replicas", "1")
    host.ctl("down", old)
    told, _ = all_of(host, "up", "--all")
    expect(told == {}, f"{told}")
    refused = host.ctl("up", "--all", "--size", "1GiB", check=False)
    expect(refused.returncode == 2, f"{refused.returncode} {refused.stderr}")
    host.ctl("rm", old, "--yes")


def main():
    host = Host()
    volumes = restart(host)
    before_it_stops(host, *volumes)
    not_all(host, *volumes)
    of_before(host)


main()
