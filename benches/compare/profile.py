"""What processors do while 4 KiB requests run: samples of engine and replica by perf, sorted into what they are for, as
microseconds per request."""
import os, re, subprocess, tempfile, threading, time

from . import client, machine, ours

WORKLOADS = [client.WRITE_1, client.WRITE_32, client.READ_1, client.READ_32]

# Samples per second; not a divisor of the tick, so that the two do not beat.
FREQUENCY = 1999

# The first that fits a symbol says what it is for: (in the kernel, pattern, name).
PARTS = [
    (True, r"copy_from_iter|copy_to_iter|_copy_(from|to)|copy_user|rep_movs|clear_page", "kernel: copying bytes"),
    (True, r"unix_|skb|sock_|memcg|kmem|slab|kfree|kmalloc|__check_heap|alloc_pages|page_frag",
     "kernel: unix sockets and their buffers"),
    (True, r"tcp_|ip_|net_rx|dev_queue", "kernel: TCP"),
    (True, r"io_|fget|fput|task_work", "kernel: io_uring"),
    (True, r"shmem|folio|filemap|iov_iter|xas_|vfs|inode|file_|ext4|blk_|bio_|iomap", "kernel: files"),
    (True, r"sched|switch|wake|enqueue|dequeue|try_to|update_|pick_|spin|rwsem|pv_|softirq|hrtimer|tick|irq|idle",
     "kernel: scheduling, wake-ups, locks"),
    (True, r"syscall|entry|swapgs", "kernel: entry and exit"),
    (True, r"", "kernel: the rest"),
    (False, r"datapath::order", "order table"),
    (False, r"datapath::queue", "queue machine"),
    (False, r"datapath::link", "connections and slots"),
    (False, r"lh_ring", "ring, receiving, sending"),
    (False, r"nbd_frontend", "NBD frontend"),
    (False, r"fuse_frontend", "FUSE frontend"),
    (False, r"replica::store", "replica's store and index"),
    (False, r"replica::serve", "replica's sessions and server"),
    (False, r"lh_wire|crc32c", "wire headers and checksums"),
    (False, r"mem(move|cpy|set)", "copying and clearing in user space"),
    (False, r"alloc|free", "allocation"),
    (False, r"clock_gettime|vdso", "the time of day"),
    (False, r"", "the rest"),
]


def part_of(in_kernel, symbol):
    return next(name for kernel, pattern, name in PARTS if kernel == in_kernel and re.search(pattern, symbol))


def shares(data):
    """Part of all samples for each purpose, in per cent."""
    done = subprocess.run(["perf", "report", "-i", data, "--no-children", "--stdio", "--sort", "dso,sym",
                           "--percent-limit", "0"], capture_output=True, text=True)
    found = {}
    for line in done.stdout.splitlines():
        row = re.match(r"\s+([\d.]+)%\s+\S+\s+\[(.)\]\s+(.*)", line)
        if row:
            name = part_of(row.group(2) == "k", row.group(3))
            found[name] = found.get(name, 0) + float(row.group(1))
    return found


def one(volume, work, size, seconds, folder):
    """Runs the workload; microseconds per request and shares of engine and of the first replica."""
    pids = {"engine": volume.status["engine_pid"], "replica": volume.status["replicas"][0]["pid"]}
    found = {}
    load = threading.Thread(target=lambda: found.update(
        sample=client.run(volume.target(), work, size, volume.pids(), seconds)))
    before = {name: machine.cpu_of([pid]) for name, pid in pids.items()}
    load.start()
    # fio opens its connection in this time.
    time.sleep(0.3)
    recorders = [subprocess.Popen(["perf", "record", "-q", "-F", str(FREQUENCY), "-e", "cpu-clock", "-o",
                                   os.path.join(folder, name), "-p", str(pid), "--", "sleep", str(max(seconds - 0.6, 0.3))],
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for name, pid in pids.items()]
    load.join()
    for recorder in recorders:
        recorder.wait()
    sample = found["sample"]
    count = sample.iops * seconds
    cost = {name: (machine.cpu_of([pid]) - before[name]) / count * 1e6 for name, pid in pids.items()}
    return sample, {name: (cost[name], shares(os.path.join(folder, name))) for name in pids}


def run(out, seconds, marks):
    """Writes profile.md into `out`; returns its path."""
    size = 256 << 20
    lines = ["# Where the time goes", "", *[f"**{m}**\n" for m in marks],
             "Processor time per request in microseconds, three replicas in RAM, NBD over a unix socket: perf samples of "
             f"the engine and of one replica, {seconds:g} s each.", ""]
    with tempfile.TemporaryDirectory(prefix="lh-bench-", dir="/dev/shm") as folder:
        volume = ours.Volume(folder, size)
        ours.start(volume)
        try:
            client.run(volume.target(), client.FILL, size)
            for work in WORKLOADS:
                sample, processes = one(volume, work, size, seconds, folder)
                lines += table(work, sample, processes)
        finally:
            volume.stop()
    os.makedirs(out, exist_ok=True)
    path = os.path.join(out, "profile.md")
    with open(path, "w") as f:
        f.write("\n".join(lines) + "\n")
    return path


def table(work, sample, processes):
    names = {name for _, found in processes.values() for name in found}
    cost = lambda process, name: processes[process][0] * processes[process][1].get(name, 0) / 100
    order = sorted(names, key=lambda n: -sum(cost(p, n) for p in processes))
    lines = [f"## {work.name}", "", f"{sample.iops:,.0f} IOPS, mean {sample.mean:.0f} us, client and servers together "
             f"{sample.cpu:.1f} us of processor time per request.", "", "| | engine | replica |", "|---|---|---|",
             f"| in all | {processes['engine'][0]:.2f} | {processes['replica'][0]:.2f} |"]
    lines += [f"| {name} | {cost('engine', name):.2f} | {cost('replica', name):.2f} |" for name in order]
    return [*lines, ""]
