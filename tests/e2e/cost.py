"""System calls per I/O of the engine at depth 32, and the memory of engine and three replicas."""
import os, re, subprocess, sys, threading, time
from harness import TOP, Host, expect, fio, full, have, say, shown, skip

sys.path.append(os.path.join(TOP, "benches"))
from compare.machine import pss  # noqa: E402


def count_syscalls(pid, seconds):
    """System calls of a process in this time: by perf where it can, else by strace."""
    done = subprocess.run(["perf", "stat", "-e", "raw_syscalls:sys_enter", "-p", str(pid), "--", "sleep", str(seconds)],
                          capture_output=True, text=True)
    found = re.search(r"([\d,.]+)\s+raw_syscalls:sys_enter", done.stderr)
    if done.returncode == 0 and found:
        return int(re.sub(r"\D", "", found.group(1))), "perf"
    if not have("strace"):
        return None, None
    done = subprocess.run(["timeout", "-s", "INT", str(seconds), "strace", "-c", "-f", "-p", str(pid)],
                          capture_output=True, text=True)
    total = re.search(r"^\s*100\.00\s+\S+\s+(?:\S+\s+)?(\d+)\s", done.stderr, re.M)
    return (int(total.group(1)), "strace") if total else (None, None)


def main():
    if not have("fio"):
        return skip("cost", "no fio")
    host = Host("/dev/shm")
    volume = host.name("cost")
    status = host.up(volume, "--size", "1GiB", "--frontend", "nbd-server")
    uri = f"nbd+unix:///{volume}?socket={host.socket(volume)}"
    seconds = full(15, 60)
    results = {}
    load = threading.Thread(target=lambda: results.update(fio(
        "load", seconds, "--rw=randwrite", "--bs=4k", "--iodepth=32", "--size=1g", "--ioengine=nbd", f"--uri={uri}")))
    began = time.monotonic()
    load.start()
    time.sleep(3)
    window = 5
    calls, tool = count_syscalls(status["engine_pid"], window)
    load.join()
    # The load is steady: what it did in the window follows from its rate.
    done = int(results["jobs"][0]["write"]["iops"] * window)
    pids = [status["engine_pid"], *[r["pid"] for r in host.status(volume)["replicas"]]]
    memory = sum(map(pss, pids))
    say(f"PSS by process: {[pss(p) >> 10 for p in pids]} KiB")
    expect(memory <= 60 << 20, f"PSS of engine and three replicas is {memory >> 20} MiB, promised 60")
    if calls is None:
        skip("cost", "neither perf nor strace can count here")
        counted = ""
    else:
        per_io = calls / max(done, 1)
        expect(per_io <= 0.3, f"{per_io:.3f} system calls per I/O ({calls} in {done} I/Os, by {tool}), promised 0.3")
        counted = f"{per_io:.3f} system calls per I/O ({tool}), "
    host.ctl("down", volume)
    shown(f"{counted}PSS {memory / (1 << 20):.1f} MiB, "
          f"{results['jobs'][0]['write']['iops']:.0f} IOPS")


main()
