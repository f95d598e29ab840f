"""A ublk device under load is taken away, loses its server, or loses it again while it is being taken over: nothing hangs,
nothing stays, and where a server comes back no request fails.

    stress.py ublk
"""
import contextlib, os, random, re, subprocess, time
from devices import (WORK, Mounted, Ublk, attribute, example, expect, fail, full, have, kernel_has, nodes, run, shown, skip,
                     wait_for)

ROUNDS = full(3, 20)
SEED = int(os.environ.get("LH_SEED", random.randrange(1 << 32)))
dice = random.Random(SEED)


def load(device, *options):
    """Random reads and writes of two processes, until the device fails or the load is ended."""
    command = ["fio", "--name=load", f"--filename={device}", "--ioengine=libaio", "--direct=1", "--rw=randrw", "--bs=4k",
               "--norandommap", "--iodepth=64", "--numjobs=2", "--size=64m", "--time_based", "--runtime=600",
               "--output-format=terse", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=WORK)
    wait_for("the load has begun", lambda: process.poll() is not None or int(attribute(device, "stat").split()[0]) > 500)
    return process


def removed(volume):
    done = run(example("ublk-memory"), "remove", volume)
    expect(re.fullmatch(r"removed \d+:\d+\n", done.stdout), f"remove: {done.stdout}")


def somebody_has_it_open(null):
    """Whoever has it open keeps a device that fails: they are not waited for, and the volume gets another one."""
    disk = Ublk("open", null=null)
    first, numbers = disk.device, disk.numbers
    held = os.open(first, os.O_RDONLY)
    disk.kill()
    began = time.monotonic()
    said = run(example("ublk-memory"), "remove", "open").stdout
    expect(said == f"removed {numbers}\n", f"of {numbers} it said {said}")
    expect(time.monotonic() - began < 20, "whoever has it open was waited for")
    with contextlib.suppress(OSError):
        expect(os.pread(held, 512, 0) == b"", "what was taken away was read")
    disk.restart()
    expect(disk.device != first, f"it is {first} again, which somebody has open")
    run("dd", f"if={disk.device}", "of=/dev/null", "bs=4k", "count=4", "iflag=direct", "status=none")
    os.close(held)
    disk.stop()


def ends(process, seconds=60):
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        fail("the load hangs")


def the_server_dies_and_the_device_is_removed(null, at_once):
    """As blktests ublk/002, 004 and the selftests stress_02, 07, generic_06: what waited fails, and nothing hangs."""
    disk = Ublk("dies", null=null)
    process = load(disk.device)
    time.sleep(dice.uniform(0, 0.5))
    disk.kill()
    if not at_once:
        time.sleep(0.5)
        expect(process.poll() is None, "requests failed although a server may come back")
    removed("dies")
    ends(process)


def the_device_is_removed_under_load(null):
    """As stress_01, 06 and blktests ublk/001: somebody else stops it while its server serves."""
    if not kernel_has("ublk-stress-in-use", "not to be stopped while merely open", 7, 0):
        return
    disk = Ublk("gone", null=null)
    process = load(disk.device)
    time.sleep(dice.uniform(0, 0.5))
    # A server that lives is not robbed of its device by `remove`; its end is asked for, and refused while it is used.
    expect(disk.refuses_to_stop(), "stopped under load")
    process.terminate()
    ends(process)
    disk.stop()


def recovery_is_interrupted(null):
    """As generic_17, blktests ublk/005 and 006: the next server dies, too, at any moment of taking over."""
    if not kernel_has("ublk-stress-interrupted", "to notice that who takes over has died", 6, 16):
        return
    disk = Ublk("again", null=null)
    process = load(disk.device)
    for _ in range(6):
        disk.kill()
        server = subprocess.Popen([example("ublk-memory"), "serve", "again", "--size", str(disk.size), *disk.options],
                                  stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(dice.uniform(0, 0.3))
        server.kill()
        server.wait()
        disk.restart()
        expect(process.poll() is None, "a request failed")
    process.terminate()
    ends(process)
    disk.stop()


def the_partition_table_is_being_read(null):
    """As part_02: killed as soon as it is shown, while the kernel reads its first blocks."""
    disk = Ublk("parts", null=null)
    disk.kill()
    removed("parts")


def the_server_dies_under_a_file_system():
    """As blktests ublk/003, without a next server: what the file system still has to write fails, and it can be unmounted."""
    disk = Ublk("mounted")
    mounted = Mounted(disk.device, "ext4")
    where = mounted.__enter__()
    with open(os.path.join(where, "file"), "wb") as file:
        file.write(os.urandom(4 << 20))
    disk.kill()
    remover = subprocess.Popen([example("ublk-memory"), "remove", "mounted"], stdout=subprocess.PIPE, text=True)
    # It may say that not everything was written.
    run("umount", where, check=False, timeout=60)
    expect(not os.path.ismount(where), "still mounted")
    expect(remover.communicate(timeout=60)[0].startswith("removed "), "not removed")
    expect(remover.returncode == 0, f"it ended with {remover.returncode}")


# Over nothing and over a file.
STORIES = [(story, null, *more) for null in (True, False) for story, *more in (
    (the_server_dies_and_the_device_is_removed, True), (the_server_dies_and_the_device_is_removed, False),
    (somebody_has_it_open,), (the_device_is_removed_under_load,), (recovery_is_interrupted,),
    (the_partition_table_is_being_read,))]
STORIES.append((the_server_dies_under_a_file_system,))


def main():
    if not have("fio"):
        skip("ublk-stress", "no fio")
        return
    print(f"seed {SEED} (LH_SEED={SEED} repeats it)", flush=True)
    stories = 0
    for number in range(ROUNDS):
        for story, *options in STORIES:
            began = time.monotonic()
            story(*options)
            stories += 1
            wait_for("no node is left", lambda: nodes() == [])
            print(f"{story.__name__} {options}: {time.monotonic() - began:.1f} s", flush=True)
    shown(f"ublk: {stories} times taken away, killed, or killed while being taken over under load; nothing hung or stayed")


main()
