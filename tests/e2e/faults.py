"""fio with crc32c verification at depth 32 on the device and over NBD, while a replica and then a second is killed and
stopped: no error, no mismatch, and short pauses."""
import os, signal, threading, time
from harness import (FULL, Host, Watch, expect, fail, fio, full, have, kill, rng, run, say, shown, skip, stand_still, wait_for)

SECONDS = full(20, 60)


def disturb(host, volume, seconds, pauses, device):
    """First one replica, then a second: SIGKILL, and SIGSTOP; each healed before the next."""
    watch = Watch(device, (1 << 30) - 4096) if device else None
    until = time.monotonic() + seconds
    time.sleep(2)
    for sig in (signal.SIGKILL, signal.SIGSTOP):
        for index in (0, 1):
            if time.monotonic() > until:
                break
            replica = host.status(volume)["replicas"][index]
            if watch:
                watch.take()
            kill(replica["pid"], sig)
            time.sleep(2.5)
            if watch:
                pauses.setdefault(sig.name, []).append(watch.take())
            if sig == signal.SIGSTOP:
                wait_for(f"{replica['name']} cut off", lambda: any(
                    r["name"] == replica["name"] and r["mode"] != "RW"
                    for r in host.status(volume)["replicas"]), 30)
                kill(replica["pid"], signal.SIGCONT)
            host.healthy(volume)
    if watch:
        watch.stop()


def verified(host, volume, what, device, *target):
    pauses = {}
    worker = threading.Thread(target=disturb, args=(host, volume, SECONDS, pauses, device))
    worker.start()
    result = fio("verify", SECONDS, "--rw=randrw", "--bsrange=4k-256k", "--iodepth=32", "--verify=crc32c",
                 "--size=512m", *target)
    worker.join()
    job = result["jobs"][0]
    expect(job["error"] == 0, f"fio error {job['error']}")
    say(f"{what}: {job['read']['total_ios']} reads, {job['write']['total_ios']} writes, pauses {pauses}")
    return pauses


def slow_replica(host, volume):
    """A replica whose process gets a fiftieth of its time is cut off within 5 s."""
    replica = host.status(volume)["replicas"][1]
    stop = threading.Event()

    def throttle():
        while not stop.is_set():
            began = time.monotonic()
            kill(replica["pid"], signal.SIGCONT)
            time.sleep(0.001)
            # On a busy machine it runs longer than that before it hears the signal, and goes on if the next one comes first.
            stand_still(replica["pid"])
            stop.wait(min(49 * (time.monotonic() - began), 2))
        kill(replica["pid"], signal.SIGCONT)
    # Should it not be cut off, this is no reason to go on for ever.
    thread = threading.Thread(target=throttle, daemon=True)
    load = threading.Thread(target=fio, args=("load", full(25, 12), "--rw=randwrite", "--bs=4k", "--iodepth=32", "--size=512m",
                                              "--ioengine=io_uring", "--direct=1", f"--filename=/dev/longhorn/{volume}"))
    load.start()
    time.sleep(3)
    began = time.monotonic()
    thread.start()
    wait_for("the slow replica cut off", lambda: any(
        r["name"] == replica["name"] and r["mode"] != "RW" for r in host.status(volume)["replicas"]), 20)
    took = time.monotonic() - began
    stop.set()
    thread.join()
    load.join()
    # As with the pauses below: the promise is for an otherwise idle machine.
    expect(took <= full(20, 5.5), f"a slow replica was cut off after {took:.1f} s")
    host.healthy(volume)
    return took


def no_false_cut_off(host, volume):
    """Both cores busy: nobody is put out."""
    burners = [os.spawnlp(os.P_NOWAIT, "sh", "sh", "-c", "while :; do :; done") for _ in range(os.cpu_count())]
    try:
        fio("busy", full(20, 600), "--rw=randrw", "--bs=4k", "--iodepth=32", "--size=512m", "--ioengine=io_uring",
            "--direct=1", f"--filename=/dev/longhorn/{volume}")
    finally:
        for pid in burners:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    status = host.status(volume)
    expect(status["robustness"] == "healthy" and all(r["mode"] == "RW" for r in status["replicas"]),
           f"a false cut-off under load: {status['replicas']}")


def all_killed(host, volume, device):
    """All replicas gone for a while: a pause, no error."""
    away = full(8, 30)
    stop = time.monotonic() + away
    killer = threading.Thread(target=lambda: [
        ([kill(pid, signal.SIGKILL) for pid in host.replica_pids(volume).values()], time.sleep(0.2))
        for _ in iter(lambda: time.monotonic() < stop, False)])
    killer.start()
    result = fio("pause", away + 10, "--rw=randrw", "--bs=4k", "--iodepth=32", "--size=256m", "--verify=crc32c",
                 "--ioengine=io_uring", "--direct=1", f"--filename={device}")
    killer.join()
    expect(result["jobs"][0]["error"] == 0, "an error while all replicas were away")
    host.healthy(volume)


def late_writes_are_of_their_time(host):
    """A replica is stopped with writes unread in its socket and cut off, and the engine's memory used for others meanwhile. What it
    then writes is what it was to write: the engine, stopped in its turn, does not see it in time to bring it in sync."""
    volume = host.name("late")
    host.up(volume, "--size", "256MiB", "--frontend", "nbd-server")
    client = ["--ioengine=nbd", f"--uri=nbd+unix:///{volume}?socket={host.socket(volume)}", "--rw=write", "--bs=64k", "--iodepth=32"]
    status = host.status(volume)
    replica = status["replicas"][1]
    # Where something was written before, a write does not wait for a mark of the intent bitmap.
    fio("marks", 1, "--size=8m", "--buffer_pattern=0x22", *client)
    stand_still(replica["pid"])
    load = threading.Thread(target=fio, args=("before", 5, "--size=8m", "--buffer_pattern=0x11", *client))
    load.start()
    wait_for("the stopped replica cut off", lambda: any(
        r["name"] == replica["name"] and r["mode"] != "RW" for r in host.status(volume)["replicas"]), 20)
    load.join()
    fio("after", 3, "--offset=128m", "--size=128m", "--buffer_pattern=0xee", *client)
    stand_still(status["engine_pid"])
    kill(replica["pid"], signal.SIGCONT)
    head = [name for name in os.listdir(replica["path"]) if name.startswith("volume-head-") and name.endswith(".img")]

    def written():
        with open(os.path.join(replica["path"], head[0]), "rb") as file:
            return file.read(8 << 20), file.read()
    wait_for("a write that was on its way to the stopped replica", lambda: 0x11 in written()[0], 30)
    time.sleep(2)
    early, late = written()
    kill(status["engine_pid"], signal.SIGCONT)
    expect(set(early) <= {0x22, 0x11}, f"late writes with bytes of other times: {sorted(set(early))}")
    expect(not late.strip(b"\0"), "late writes at places that nothing of that time was to go")
    host.healthy(volume)
    host.ctl("down", volume)


def nobody_answers(host):
    """The only replica hangs: status says that requests wait, they fail when their time is over, and once it answers again all is well.
    How long a write took to fail."""
    volume = host.name("silent")
    host.up(volume, "--size", "16MiB", "--replicas", "1", "--frontend", "nbd-server", "--io-timeout", "4")
    replica = host.status(volume)["replicas"][0]

    def write():
        return run("qemu-io", "-f", "raw", "-c", "write 0 4k", f"nbd+unix:///{volume}?socket={host.socket(volume)}", check=False)
    expect(write().returncode == 0, "a write of a new volume")
    stand_still(replica["pid"])
    try:
        began = time.monotonic()
        failed = []
        writer = threading.Thread(target=lambda: failed.append((write(), time.monotonic() - began)), daemon=True)
        writer.start()
        wait_for("status to say that the replica does not answer", lambda: host.status(volume)["robustness"] == "faulted", 15)
        writer.join(30)
        expect(failed, "a write that nobody answers waits for ever")
        (result, took), = failed
        expect(result.returncode != 0 and "failed" in result.stdout + result.stderr, f"a write that nobody answers: {result.stdout}")
        expect(took > 10, f"a write failed after {took:.1f} s, and was to wait for 8 and 4")
    finally:
        kill(replica["pid"], signal.SIGCONT)
    host.healthy(volume, 1)
    expect(write().returncode == 0, "a write when the replica answers again")
    host.ctl("down", volume)
    return took


def main():
    if not have("fio"):
        return skip("faults", "no fio")
    host = Host()
    rng()
    volume = host.name("faults")
    host.up(volume, "--size", "1GiB")
    device = f"/dev/longhorn/{volume}"
    pauses = verified(host, volume, "device", device, "--ioengine=io_uring", "--direct=1", f"--filename={device}")
    limits = {"SIGKILL": 0.25, "SIGSTOP": 2.0}
    for sig, seen in pauses.items():
        worst = max(seen)
        # Short runs share their cores with other work: the promise is for an otherwise idle machine.
        if worst > limits[sig] and FULL:
            fail(f"{sig}: a pause of {worst:.3f} s, promised {limits[sig]} s")
    slow = slow_replica(host, volume)
    no_false_cut_off(host, volume)
    all_killed(host, volume, device)
    host.ctl("down", volume)

    nbd = host.name("faultsnbd")
    host.up(nbd, "--size", "1GiB", "--frontend", "nbd-server")
    verified(host, nbd, "nbd", None, "--ioengine=nbd", f"--uri=nbd+unix:///{nbd}?socket={host.socket(nbd)}")
    host.ctl("down", nbd)
    late_writes_are_of_their_time(host)
    silent = nobody_answers(host) if have("qemu-io") else skip("faults_nobody_answers", "no qemu-io")
    text = ", ".join(f"{s} {max(v) * 1000:.0f} ms" for s, v in pauses.items())
    shown(f"no error, no mismatch; longest pauses {text}; slow replica out after {slow:.1f} s"
          + (f"; a write that nobody answers fails after {silent:.1f} s" if silent else ""))


main()
