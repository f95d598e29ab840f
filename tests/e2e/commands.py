"""Command lines at their edges: what is said again changes nothing, what other tools say is understood, and nothing is waited
for without an end."""
import json, os, signal, socket, subprocess, time
from harness import BIN, Host, expect, shown, wait_for


def refused(host, *args):
    done = host.ctl(*args, check=False)
    expect(done.returncode == 1, f"{' '.join(args)}: exit status {done.returncode}")
    return done.stderr


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def said_again(host):
    volume = host.name("again")
    host.up(volume, "--size", "16MiB", "--replicas", "1")
    frontend = host.status(volume)["frontend"]
    pid = host.status(volume)["engine_pid"]
    host.up(volume, "--frontend", frontend)
    expect(host.status(volume)["engine_pid"] == pid, "another engine")
    expect("--frontend auto" in refused(host, "up", volume, "--frontend", "none"), "another frontend on a running volume")
    host.ctl("down", volume)
    # Where a server listens belongs to the frontend that was told so.
    port = free_port()
    host.up(volume, "--frontend", "nbd-server", "--listen", f"127.0.0.1:{port}")
    expect(host.status(volume)["uri"].startswith(f"nbd://127.0.0.1:{port}/"), host.status(volume)["uri"])
    host.ctl("down", volume)
    host.up(volume)
    expect(host.status(volume)["uri"].startswith(f"nbd://127.0.0.1:{port}/"), "it listens elsewhere when it is started again")
    host.ctl("down", volume)
    host.up(volume, "--frontend", "nbd-server")
    expect(host.status(volume)["uri"].startswith("nbd+unix:"), host.status(volume)["uri"])
    host.ctl("down", volume)
    host.ctl("rm", volume, "--yes")
    shown("a frontend that is there already is no other one; --listen belongs to the frontend that it was said with")


def deaf_engine(host):
    volume = host.name("deaf")
    host.up(volume, "--size", "16MiB", "--replicas", "2", "--frontend", "nbd-server")
    os.kill(host.status(volume)["engine_pid"], signal.SIGSTOP)
    began = time.monotonic()
    done = subprocess.run([os.path.join(BIN, "longhornctl"), "--root", host.root, "down", volume], capture_output=True,
                          text=True, timeout=120)
    took = time.monotonic() - began
    expect(done.returncode == 0, done.stderr)
    expect(host.status(volume)["state"] == "detached", host.status(volume)["state"])
    host.up(volume)
    host.healthy(volume, replicas=2)
    host.ctl("down", volume)
    host.ctl("rm", volume, "--yes")
    shown(f"an engine that answers nothing is stopped all the same, in {took:.0f} s")


def other_words(host):
    """What Longhorn's longhornctl says."""
    volume, image = host.name("words"), os.path.join(host.root, "words.img")
    host.up(volume, "--size", "64MiB", "--replicas", "1")
    device = host.status(volume)["device"]
    expect("not mounted" in refused(host, "trim", "volume", volume), "trimmed without a file system")
    mount = os.path.join(host.root, "mount")
    os.mkdir(mount)
    subprocess.run(["mkfs.ext4", "-q", "-E", "nodiscard", device], check=True)
    subprocess.run(["mount", device, mount], check=True)
    try:
        trimmed = host.json("trim", "volume", "--name", volume)
        expect(trimmed["mount_point"] == mount and trimmed["bytes"] > 16 << 20, f"{trimmed}")
        expect("trimmed" in host.ctl("trim", "volume", volume).stdout, "no word of what was trimmed")
    finally:
        subprocess.run(["umount", mount], check=True)
    path = host.status(volume)["replicas"][0]["path"]
    host.ctl("down", volume)
    host.ctl("export", "replica", path, image)
    expect(os.path.getsize(image) == 64 << 20, "an image of another size")
    # Imported and let go again: nothing in the directory is ours.
    host.ctl("release", volume)
    before = sorted((entry.name, entry.stat().st_mtime_ns) for entry in os.scandir(path))
    host.ctl("import", volume, path)
    released = host.json("release", volume)
    expect(released["released"] == [path] and released["left"] == [], f"{released}")
    after = sorted((entry.name, entry.stat().st_mtime_ns) for entry in os.scandir(path))
    expect(before == after, f"{before} {after}")
    expect(volume not in [v["name"] for v in host.json("ls")], "it is known still")
    shown("trim volume, export replica; what was imported and never started is let go as it was")


def trusts_the_network(host):
    volume = host.name("trusts")
    other = os.path.join(host.root, "other")
    port = free_port()
    manager = subprocess.Popen([os.path.join(BIN, "longhorn"), "instance-manager", "--root", other, "--listen",
                                f"127.0.0.1:{port}", "--insecure"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ctl = [os.path.join(BIN, "longhornctl"), "--root", other]
    try:
        wait_for("a manager", lambda: os.path.exists(os.path.join(other, "run", "instance-manager.sock")), 20)
        subprocess.run([*ctl, "up", volume, "--size", "16MiB", "--replicas", "1", "--frontend", "none"], check=True,
                       capture_output=True)
        said = json.loads(subprocess.run([*ctl, "-o", "json", "status", volume], check=True, capture_output=True).stdout)
        expect(said["insecure"] == [f"instance manager on 127.0.0.1:{port}"], f"{said['insecure']}")
        for offset in range(5):
            socket.create_connection(("127.0.0.1", port + offset), 5).close()
        subprocess.run([*ctl, "down", volume], check=True, capture_output=True)
    finally:
        manager.terminate()
        manager.wait()
    shown("status names what obeys whoever reaches it")


def main():
    host = Host()
    said_again(host)
    deaf_engine(host)
    other_words(host)
    trusts_the_network(host)


main()
