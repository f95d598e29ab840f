"""A ublk device's life besides requests: who may stop it, who finds it again, how its queues are dealt, what a server that
dies at the wrong moment leaves, and that a steady load asks the system for no memory and no
thread.

    life.py ublk
"""
import os, subprocess, time
from devices import (Ublk, attribute, example, expect, fio, have, kernel_has, nodes, ring_work, run, shown, skip, wait_for)


def is_not_stopped_while_in_use():
    if not kernel_has("ublk-life-in-use", "not to be stopped while merely open", 7, 0):
        return
    disk = Ublk("used")
    held = os.open(disk.device, os.O_RDONLY)
    expect(disk.refuses_to_stop(), "a device that is open was stopped")
    # It serves on.
    run("dd", f"if={disk.device}", "of=/dev/null", "bs=4k", "count=4", "iflag=direct", "status=none")
    os.close(held)
    disk.stop()


def is_found_by_its_volume_alone():
    """Two volumes left behind: each goes to its own next server, although the other has the lower number."""
    first, second = Ublk("first", size=64 << 20), Ublk("second", size=64 << 20)
    for disk, word in ((first, b"first"), (second, b"second")):
        with open(disk.device, "wb") as file:
            file.write(word.ljust(4096, b"\0"))
    first.kill()
    second.kill()
    devices = first.device, second.device
    second.restart()
    first.restart()
    expect((first.device, second.device) == devices, "devices were exchanged")
    for disk, word in ((first, b"first"), (second, b"second")):
        run("blockdev", "--flushbufs", disk.device)
        with open(disk.device, "rb") as file:
            expect(file.read(6).rstrip(b"\0") == word, f"bytes of {disk.volume}")
        disk.stop()


def other_numbers_of_threads_serve_it():
    disk = Ublk("dealt", queues=2)
    for threads in (1, 2, 3, 1):
        disk.kill()
        disk.start(threads)
        fio(f"threads{threads}", disk.device, "--rw=randrw", "--bs=4k", "--size=4m", "--iodepth=16", "--numjobs=2",
            "--offset_increment=8m")
    disk.stop()


def requests_wait_for_the_next_server():
    """Writes and a flush begun without a server end well with the next one; the volume may have grown meanwhile."""
    disk = Ublk("waits", size=64 << 20)
    disk.kill()
    writer = subprocess.Popen(["dd", "if=/dev/urandom", f"of={disk.device}", "bs=64k", "count=16", "oflag=direct",
                               "conv=fsync", "status=none"])
    time.sleep(0.3)
    expect(writer.poll() is None, "a write ended without a server")
    if kernel_has("ublk-life-grown", "to grow in use", 6, 16):
        disk.size += 32 << 20
    disk.restart()
    expect(writer.wait(60) == 0, "the write failed")
    wait_for("the volume's size", lambda: int(attribute(disk.device, "size")) * 512 == disk.size)
    disk.stop()


def other_blocks_are_refused():
    disk = Ublk("blocks", size=64 << 20)
    disk.kill()
    done = subprocess.run([example("ublk-memory"), "serve", "blocks", "--size", str(64 << 20), "--null", "yes",
                           "--block-size", "4096"], capture_output=True, text=True, timeout=60)
    expect(done.returncode == 1 and "blocks of 512" in done.stderr, f"{done.returncode} {done.stderr}")
    expect(run(example("ublk-memory"), "remove", "blocks").stdout == f"removed {disk.numbers}\n", "not removed")
    expect(run(example("ublk-memory"), "remove", "blocks").stdout == "removed nothing\n", "removed twice")
    expect(nodes() == [], f"left behind: {nodes()}")


def a_living_server_is_not_robbed():
    disk = Ublk("live", size=64 << 20)
    done = subprocess.run([example("ublk-memory"), "serve", "live", "--size", str(64 << 20), "--null", "yes"],
                          capture_output=True, text=True, timeout=60)
    expect(done.returncode == 1 and f"process {disk.server.pid}" in done.stderr, f"{done.returncode} {done.stderr}")
    disk.stop()


def blocks_of_4096():
    disk = Ublk("4kn", size=64 << 20, block=4096)
    expect(run("blockdev", "--getss", disk.device).stdout.strip() == "4096", "logical block")
    fio("4kn", disk.device, "--rw=randwrite", "--bs=4k", "--size=8m", "--iodepth=8")
    disk.stop()


def a_steady_load_allocates_nothing():
    disk = Ublk("steady", size=64 << 20)
    options = ["--rw=randrw", "--bssplit=4k/80:64k/20", "--size=16m", "--iodepth=32"]
    fio("warm", disk.device, *options, verify=False)
    disk.server.ask("allocations", "allocations")
    before = ring_work(disk.server.pid)
    fio("steady", disk.device, *options, "--loops=3", verify=False)
    said = disk.server.ask("allocations", "allocations")
    expect(said == "allocations 0", said)
    # The bytes were copied by the thread that asked for them. A tick is what a thread that only looks may cost.
    work = ring_work(disk.server.pid) - before
    expect(work <= 1, f"threads of io_uring's have worked for {work} ticks")
    disk.stop()


def end_in_the_middle_of_its_birth():
    """Killed between making the device and showing it: the next server gets a device all the same."""
    for delay in range(0, 60, 6):
        server = subprocess.Popen([example("ublk-memory"), "serve", "birth", "--size", str(64 << 20), "--null", "yes"],
                                  stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(delay / 1000)
        server.kill()
        server.wait()
    disk = Ublk("birth", size=64 << 20)
    disk.stop()
    expect(nodes() == [], f"left behind: {nodes()}")


def main():
    if not have("fio"):
        skip("ublk-life", "no fio")
        return
    stories = [is_not_stopped_while_in_use, is_found_by_its_volume_alone, other_numbers_of_threads_serve_it,
               requests_wait_for_the_next_server, other_blocks_are_refused, a_living_server_is_not_robbed,
               blocks_of_4096, a_steady_load_allocates_nothing, end_in_the_middle_of_its_birth]
    for story in stories:
        began = time.monotonic()
        story()
        print(f"{story.__name__}: {time.monotonic() - began:.1f} s", flush=True)
        expect(nodes() == [], f"left behind: {nodes()}")
    shown(f"ublk: {len(stories)} stories of a device's life")


main()
