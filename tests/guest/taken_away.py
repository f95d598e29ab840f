"""A device that somebody else takes away while its engine lives, as an administrator can: a FUSE connection is aborted, a ublk device
stopped or deleted. Whoever uses it then gets errors; the volume is shown again, with all that was flushed, and its engine's log says why.
An NBD device that is disconnected stays away until the volume is stopped and started, and the log says that once.

    taken_away.py ublk-volume|fuse-volume|nbd-volume
"""
import ctypes, fcntl, mmap, os, struct, subprocess, sys, time
from devices import expect, run, shown, wait_for
from volumes import Volume

MIB = 1 << 20
# Seconds from a device's end to the next one, in a guest beside other work.
SOON = 60

# include/uapi/linux/ublk_cmd.h: _IOWR and _IOR('u', NUMBER, struct ublksrv_ctrl_cmd), which has 32 bytes. The second does not wait for who
# has the device open.
STOP_DEV, DEL_DEV_ASYNC = 3 << 30 | 32 << 16 | ord("u") << 8 | 0x07, 2 << 30 | 32 << 16 | ord("u") << 8 | 0x14
# include/uapi/linux/io_uring.h, and the numbers of its system calls, which are the same everywhere.
SETUP_SQE128, URING_CMD, GETEVENTS, SQES, SETUP, ENTER = 1 << 10, 46, 1, 0x10000000, 425, 426
libc = ctypes.CDLL(None, use_errno=True)


def call(number, *arguments):
    done = libc.syscall(ctypes.c_long(number), *arguments)
    if done < 0:
        raise OSError(ctypes.get_errno(), f"system call {number}")
    return done


def order(command, device):
    """A command to the ublk driver, which is taken through io_uring alone."""
    parameters = bytearray(struct.pack("<3I", 0, 0, SETUP_SQE128) + bytes(108))
    ring = call(SETUP, 1, (ctypes.c_char * 120).from_buffer(parameters))
    with open("/dev/ublk-control", "r+b", buffering=0) as control:
        offsets = struct.unpack_from("<18I", parameters, 40)
        sq_tail, sq_array, cq_tail, cqes = offsets[1], offsets[6], offsets[11], offsets[15]
        sq, cq = (mmap.mmap(ring, 4096, offset=at) for at in (0, 0x8000000))
        entries = mmap.mmap(ring, 4096, offset=SQES)
        entries[0:16] = struct.pack("<BBHiII", URING_CMD, 0, 0, control.fileno(), command, 0)
        entries[48:80] = struct.pack("<IHHQQQ", device, 0xffff, 0, 0, 0, 0)
        sq[sq_array:sq_array + 4] = struct.pack("<I", 0)
        sq[sq_tail:sq_tail + 4] = struct.pack("<I", 1)
        call(ENTER, ring, 1, 1, GETEVENTS, None, 0)
        expect(struct.unpack_from("<I", cq, cq_tail)[0] == 1, "the driver has not answered")
        result = struct.unpack_from("<QiI", cq, cqes)[1]
    os.close(ring)
    expect(result == 0, f"the driver answers {result}")


def ublk_number(disk):
    return int(os.path.basename(os.path.realpath(f"/sys/dev/block/{disk.device_numbers()}")).removeprefix("ublkb"))


def abort(disk):
    """By the number of the file system that the loop device's file is in."""
    loop = os.path.basename(os.path.realpath(f"/sys/dev/block/{disk.device_numbers()}"))
    numbers = run("losetup", "--noheadings", "--output", "BACK-MAJ:MIN", f"/dev/{loop}").stdout.strip()
    where = "/sys/fs/fuse/connections"
    if not os.listdir(where):
        run("mount", "-t", "fusectl", "none", where)
    with open(f"{where}/{numbers.split(':')[1]}/abort", "w") as file:
        file.write("1")


WAYS = {"ublk": [("stopped", lambda disk: order(STOP_DEV, ublk_number(disk))),
                 ("deleted", lambda disk: order(DEL_DEV_ASYNC, ublk_number(disk)))],
        "fuse": [("aborted", abort)]}


def is_back(disk, before):
    """The next device, which answers."""
    def again():
        status = disk.host.status(disk.volume)
        if not status["device"] or (status["generation"], disk.device_numbers()) == before:
            return False
        return subprocess.run(["dd", f"if={disk.device}", "of=/dev/null", "bs=4k", "count=1", "iflag=direct"],
                              capture_output=True).returncode == 0
    began = time.monotonic()
    wait_for("the volume is shown again", again, SOON)
    return time.monotonic() - began


def is_shown_again(disk, how, take_away):
    pattern = os.urandom(MIB)
    with open(disk.device, "r+b") as file:
        file.write(pattern)
        os.fsync(file.fileno())
    load = subprocess.Popen(["dd", "if=/dev/zero", f"of={disk.device}", "bs=64k", "seek=16", "count=800", "oflag=direct"],
                            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    held = os.open(disk.device, os.O_RDONLY)
    before = disk.host.status(disk.volume)["generation"], disk.device_numbers()
    take_away(disk)
    seconds = is_back(disk, before)
    expect(load.wait(60) in (0, 1), "what used the device does not end")
    with open(disk.device, "rb") as file:
        expect(file.read(MIB) == pattern, "the volume has lost what was flushed")
    try:
        # Of a disk that is no more the kernel says that it has no bytes.
        expect(os.pread(held, 4096, 32 * MIB) == b"", "who has the device of before open reads from it")
    except OSError:
        pass
    os.close(held)
    with open(os.path.join(disk.host.root, "log", f"{disk.volume}-e-0.log")) as file:
        said = [line for line in file if "was taken away by somebody else" in line]
    expect(said and disk.device in said[-1] and how in said[-1], f"the log says of it {said[-1:]}")
    print(f"{how}: {seconds:.1f} s", flush=True)


# include/uapi/linux/nbd.h
NBD_DISCONNECT, NBD_CLEAR_SOCK = 0xab08, 0xab04
# Seconds between two looks of an engine at its device, and more.
LOOK = 6


def stays_away_and_says_so_once():
    disk = Volume("nbd", size=64 * MIB)
    device = os.path.basename(os.path.realpath(f"/sys/dev/block/{disk.device_numbers()}"))
    with open(f"/dev/{device}", "rb") as file:
        fcntl.ioctl(file, NBD_DISCONNECT)
        fcntl.ioctl(file, NBD_CLEAR_SOCK)
    wait_for("its node is gone", lambda: not os.path.lexists(disk.device), SOON)
    time.sleep(3 * LOOK)
    with open(os.path.join(disk.host.root, "log", f"{disk.volume}-e-0.log")) as file:
        said = [line for line in file if "disconnected by somebody else" in line]
    expect(len(said) == 1, f"said {len(said)} times: {said[:3]}")
    disk.host.ctl("down", disk.volume)
    disk.up()
    disk.stop()


def main():
    frontend = sys.argv[1].removesuffix("-volume")
    if frontend == "nbd":
        stays_away_and_says_so_once()
        return shown("nbd-volume: away once somebody else has disconnected the device, which is said once")
    disk = Volume(frontend, size=64 * MIB)
    for how, take_away in WAYS[frontend]:
        for _ in range(2):
            is_shown_again(disk, how, take_away)
    disk.up()
    disk.stop()
    shown(f"{sys.argv[1]}: shown again after somebody else has taken the device away")


main()
