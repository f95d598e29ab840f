"""Devices are made and removed again and again, and nothing stays: no node, no thread of the kernel, no descriptor.

    cycles.py ublk|nbd|ublk-volume|nbd-volume|iscsi-volume|fuse-volume

Of a volume, its engine shows and hides the device; then the whole of it is brought up and down.
"""
import glob, os, sys, time
from devices import (Process, Ublk, example, expect, fds, full, kernel_threads, kernel_threads_are_again, nodes, run, shown,
                     wait_for)
from volumes import KINDS

CYCLES = full(100, 1000)
# Of the device without a volume, each takes two processes a tenth of a second; of a whole volume, every process that it has.
NBD_CYCLES, WHOLE_CYCLES = CYCLES // 4, CYCLES // 10


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
    kernel_threads_are_again(threads)
    wait_for("open files as before", lambda: open_files() <= files + 64)
    server.say("end")
    server.end()
    # With a process each, too.
    for _ in range(5):
        disk = Ublk()
        disk.stop()
    expect(nodes() == [], f"left behind: {nodes()}")
    return f"{CYCLES} devices"


def nbd():
    socket, file = "/dev/shm/cycles.sock", "/dev/shm/cycles.disk"
    server = Process(example("nbd-kernel"), "serve", socket, file, str(64 << 20))
    server.hear("serving")
    for n in range(NBD_CYCLES):
        device = run(example("nbd-kernel"), "connect", "cyc", socket, "--connections", "2").stdout.split()[1]
        if n % 16 == 0:
            read_a_little(device)
        run(example("nbd-kernel"), "disconnect", "cyc")
        if n == 2:
            threads, files = kernel_threads(), open_files()
            descriptors = fds(server.pid)
    wait_for("the server has let go of every connection", lambda: fds(server.pid) <= descriptors)
    kernel_threads_are_again(threads)
    wait_for("open files as before", lambda: open_files() <= files + 64)
    connected = [l for l in run(example("nbd-kernel"), "status").stdout.splitlines() if l.endswith("true")]
    expect(connected == [], f"still connected: {connected}")
    server.kill()
    os.remove(file)
    return f"{NBD_CYCLES} devices"


def read_a_little(device):
    run("dd", f"if={device}", "of=/dev/null", "bs=4k", "count=4", "iflag=direct", "status=none")


def resident(pid):
    """MiB of memory of a process."""
    return int(open(f"/proc/{pid}/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20


def left_behind(disk, serving):
    """What may stay after a device has gone, each to be as before; `serving`: the process whose descriptors are counted."""
    disks = sorted(n for n in os.listdir("/sys/block") if not n.startswith("nbd"))
    return {"descriptors": fds(serving), "processes": len(disk.host.processes()), "kernel threads": kernel_threads(),
            "nodes": nodes(), "disks": disks, "sessions": glob.glob("/sys/class/iscsi_session/*"),
            "loop devices": run("losetup", "--list", "--noheadings").stdout}


def again_and_again(disk, count, serving, make, take):
    """Makes and takes away the device, which is there at the beginning and at the end."""
    take()
    for n in range(3 + count):
        if n == 3:
            # The first ones load what stays.
            before, files, memory = left_behind(disk, serving), open_files(), resident(serving)
        make()
        # Whoever is told of a device opens it at once.
        read_a_little(disk.device)
        take()
    wait_for(f"as before: {before}", lambda: left_behind(disk, serving) == before)
    wait_for("open files as before", lambda: open_files() <= files + 64)
    expect(resident(serving) <= memory + 4, f"it had {memory} MiB, and has {resident(serving)}")
    make()


def volume(kind):
    disk = KINDS[kind](size=64 << 20, replicas=1)
    began = time.monotonic()
    again_and_again(disk, CYCLES, disk.engine, disk.show, disk.hide)
    print(f"{CYCLES} times shown and hidden: {time.monotonic() - began:.0f} s", flush=True)
    again_and_again(disk, WHOLE_CYCLES, disk.manager(), disk.up, disk.down)
    print(f"{WHOLE_CYCLES} times up and down: {time.monotonic() - began:.0f} s", flush=True)
    disk.stop()
    return f"{CYCLES} devices of a volume, and {WHOLE_CYCLES} times the whole of it,"


def main():
    kind = sys.argv[1]
    what = volume(kind) if kind.endswith("-volume") else {"ublk": ublk, "nbd": nbd}[kind]()
    shown(f"{kind}: {what} made and removed; nodes, kernel threads and descriptors as before")


main()
