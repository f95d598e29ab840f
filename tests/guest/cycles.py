"""Devices are made and removed again and again, and nothing stays: no node, no thread of the kernel, no descriptor.

    cycles.py ublk|nbd
"""
import os, sys
from devices import KINDS, Process, example, expect, full, kernel_threads, nodes, run, shown, wait_for

CYCLES = full(100, 1000)


def open_files():
    return int(open("/proc/sys/fs/file-nr").read().split()[0])


def ublk():
    server = Process(example("ublk-memory"), "cycle", "cyc", "--size", str(64 << 20), "--null", "yes", "--queues", "2")
    # The first ones load what stays: threads of io_uring's, pages.
    server.ask("cycle 3", "fds")
    fds = server.ask("cycle 1", "fds")
    threads, files = kernel_threads(), open_files()
    expect(nodes() == [], f"left behind: {nodes()}")
    done = server.ask(f"cycle {CYCLES}", "fds", 600)
    expect(done == fds, f"descriptors before and after: {fds} {done}")
    expect(nodes() == [], f"left behind: {nodes()}")
    expect(os.listdir("/sys/class/ublk-char") == [], "devices in /sys")
    wait_for(f"threads as before: {threads}", lambda: kernel_threads() == threads)
    wait_for("open files as before", lambda: open_files() <= files + 64)
    server.say("end")
    server.end()
    # With a process each, too.
    for _ in range(5):
        disk = KINDS["ublk"]()
        disk.stop()
    expect(nodes() == [], f"left behind: {nodes()}")


def nbd():
    socket, file = "/dev/shm/cycles.sock", "/dev/shm/cycles.disk"
    server = Process(example("nbd-kernel"), "serve", socket, file, str(64 << 20))
    server.hear("serving")
    threads = files = None
    # Each makes two processes of a second's tenth.
    for n in range(CYCLES // 4):
        device = run(example("nbd-kernel"), "connect", "cyc", socket, "--connections", "2").stdout.split()[1]
        if n % 16 == 0:
            run("dd", f"if={device}", "of=/dev/null", "bs=4k", "count=4", "iflag=direct", "status=none")
        run(example("nbd-kernel"), "disconnect", "cyc")
        if n == 2:
            threads, files = kernel_threads(), open_files()
            fds = len(os.listdir(f"/proc/{server.pid}/fd"))
    wait_for("the server has let go of every connection",
             lambda: len(os.listdir(f"/proc/{server.pid}/fd")) <= fds)
    wait_for(f"threads as before: {threads}", lambda: kernel_threads() == threads)
    wait_for("open files as before", lambda: open_files() <= files + 64)
    connected = [l for l in run(example("nbd-kernel"), "status").stdout.splitlines() if l.endswith("true")]
    expect(connected == [], f"still connected: {connected}")
    server.kill()
    os.remove(file)


def main():
    kind = sys.argv[1]
    {"ublk": ublk, "nbd": nbd}[kind]()
    count = CYCLES if kind == "ublk" else CYCLES // 4
    shown(f"{kind}: {count} devices made and removed; nodes, kernel threads and descriptors as before")


main()
