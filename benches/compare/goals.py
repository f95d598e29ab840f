"""The goals: what is promised, what came out, and what limits it."""
import dataclasses

from .client import READ_32, WRITE_1, WRITE_1M, WRITE_32


@dataclasses.dataclass
class Goal:
    """A row of the table. `met` is None where nothing was measured."""
    what: str
    goal: str
    result: str
    met: bool | None
    peers: str
    command: str


def close(value, goal, digits):
    """A figure with so many digits, and one more where it is within 1 % of the goal: a verdict can be read from it."""
    return f"{value:.{digits + (abs(value - goal) <= goal / 100)}f}"


def times(ratio, goal):
    return f"{close(ratio[0], goal, 2)}x ({ratio[1]:.2f} to {ratio[2]:.2f})"


def rate(group, contestant, work):
    cell = group.cell(contestant, work) if group else None
    if not cell or not cell.samples:
        return None
    low, high = cell.spread("iops")
    return f"{cell.median('iops'):,.0f} ({low:,.0f} to {high:,.0f}) IOPS"


def versus(group, what, goal, least, one, other, work, field="iops"):
    """A goal that is a ratio of two contestants of one group."""
    command = group.commands.get((one, work.key), "") if group else ""
    ratio = group.ratio(one, other, work, field) if group else None
    if ratio is None:
        return Goal(what, goal, why_not(group, one, other), None, "", command)
    peers = f"{other}: {rate(group, other, work)}"
    result = f"{times(ratio, least)}: {rate(group, one, work)}"
    if group.page:
        where = "in a guest: " if "guest" in group.title else ""
        result, command = f"{result}, {where}[see there]({group.page})", f"scripts/bench --only {group.key}"
    return Goal(what, goal, result, ratio[0] >= least, peers, command)


# What nobody asked for.
LEFT_OUT = "not measured: left out"


def why_not(group, *contestants):
    if not group:
        return LEFT_OUT
    reasons = [group.absent[c] for c in contestants if c in group.absent]
    return "not measured" + (": " + "; ".join(reasons) if reasons else "")


def missing(what, goal, found):
    why = "not measured: " + found.get("failed", "in another way then") if found else LEFT_OUT
    return Goal(what, goal, why, None, "", "")


def good(found, *figures):
    """True if something was found, and these figures are in it."""
    return found is not None and "failed" not in found and all(figure in found for figure in figures)


def all_of(groups, special):
    """Every row: processor time, rates, then what is no rate of a client."""
    ram, disk, nbd, fuse, ublk = (groups.get(k) for k in ("ram", "disk", "nbd", "fuse", "ublk"))
    return [
        processor_time(ram, "longhorn", "in RAM over unix sockets", 25),
        processor_time(disk, "longhorn-tcp", "on disk over TCP", 40),
        versus(ram, "4 KiB write, depth 32, three replicas in RAM, unix sockets", ">= 5x the quorum", 5,
               "longhorn", "quorum", WRITE_32),
        versus(ram, "the same, all over TCP", ">= 5x the quorum", 5, "longhorn-tcp", "quorum-tcp", WRITE_32),
        bare(ram, special.get("bare_fan_out")),
        versus(disk, "4 KiB write, depth 32, three replicas on one disk", ">= 0.85x raw-x3", 0.85, "longhorn", "raw-x3",
               WRITE_32),
        depth_one(disk, special.get("round_trip")),
        versus(disk, "4 KiB read, depth 32, over NBD", ">= 1.5x qemu-nbd", 1.5, "longhorn", "qemu-nbd", READ_32),
        versus(disk, "1 MiB write, depth 8", ">= 0.8x raw-x3", 0.8, "longhorn", "raw-x3", WRITE_1M),
        versus(nbd, "NBD frontend alone, 4 KiB write, depth 32", ">= 1.2x qemu-storage-daemon", 1.2, "longhorn-nbd",
               "qsd", WRITE_32),
        versus(nbd, "NBD frontend alone, 4 KiB read, depth 32", ">= 1.2x qemu-storage-daemon", 1.2, "longhorn-nbd",
               "qsd", READ_32),
        versus(nbd, "NBD frontend alone, 4 KiB write, depth 1", ">= 1.2x qemu-storage-daemon", 1.2, "longhorn-nbd",
               "qsd", WRITE_1),
        versus(fuse, "FUSE + loop, 4 KiB write, depth 32, memory disk", ">= 5x nbdfuse + loop", 5, "longhorn-fuse",
               "nbdfuse", WRITE_32),
        versus(fuse, "FUSE + loop, 4 KiB read, depth 32, memory disk", ">= 5x nbdfuse + loop", 5, "longhorn-fuse",
               "nbdfuse", READ_32),
        versus(ublk, "4 KiB read, depth 32, over ublk, one replica", ">= 0.9x the raw file", 0.9, "longhorn-ublk", "raw", READ_32),
        *[versus(ublk, f"ublk {what}, 4 KiB {work.name.split()[2].rstrip(',')}, depth 32", ">= 0.95x rublk", 0.95,
                 f"longhorn-{what}", f"rublk-{what}", work) for what in ("null", "loop") for work in (WRITE_32, READ_32)],
        holes(special.get("holes")), memory(special.get("memory")), pause(special.get("snapshot_pause")),
        *rebuild(special.get("rebuild")), *iscsi(special.get("iscsi")),
    ]


def processor_time(group, key, where, limit):
    what, goal = f"CPU of engine, three replicas and client per 4 KiB write, depth 32, {where}", f"<= {limit} us"
    cell = group.cell(key, WRITE_32) if group else None
    if not cell or not cell.samples:
        return missing(what, goal, None)
    low, high = cell.spread("cpu")
    peers = [f"{peer} {group.cell(peer, WRITE_32).median('cpu'):.1f} us" for peer in ("quorum", "qemu-nbd", "raw-x3")
             if group.cell(peer, WRITE_32) and group.cell(peer, WRITE_32).samples]
    return Goal(what, goal, f"{close(cell.median('cpu'), limit, 1)} us ({low:.1f} to {high:.1f})", cell.median("cpu") <= limit,
                ", ".join(peers), group.commands[key, WRITE_32.key])


def bare(ram, found):
    what, goal = "the same beside a bare blocking fan-out over TCP", ">= 0.5x"
    cell = ram.cell("longhorn-tcp", WRITE_32) if ram else None
    if not good(found) or not cell or not cell.samples:
        return missing(what, goal, None if good(found) else found)
    ratio = cell.median("iops") / found["iops"]
    return Goal(what, goal, f"{close(ratio, 0.5, 2)}x", ratio >= 0.5,
                f"bare-fan-out: {found['iops']:,.0f} ({found['spread'][0]:,.0f} to {found['spread'][1]:,.0f}) writes/s",
                "target/release/bare-fan-out /dev/shm 3")


def depth_one(disk, trip):
    what, goal = "4 KiB write, depth 1, over NBD", "<= raw-x3 + 3 loopback round trips"
    ours, raw = (disk.cell(k, WRITE_1) if disk else None for k in ("longhorn", "raw-x3"))
    if not good(trip) or not ours or not ours.samples or not raw or not raw.samples:
        return missing(what, goal, None if good(trip) else trip)
    limit = raw.median("mean") + 3 * trip["seconds"] * 1e6
    low, high = ours.spread("mean")
    return Goal(what, goal, f"{ours.median('mean'):.0f} us ({low:.0f} to {high:.0f}), limit {limit:.0f} us",
                ours.median("mean") <= limit,
                f"raw-x3 {raw.median('mean'):.0f} us, round trip {trip['seconds'] * 1e6:.1f} us",
                disk.commands["longhorn", WRITE_1.key])


def holes(found):
    what, goal = "first write into a hole, one replica, on disk", ">= 0.9x a raw sparse file"
    if not good(found):
        return missing(what, goal, found)
    return Goal(what, goal, times((found["ratio"], *found["spread"]), 0.9), found["ratio"] >= 0.9,
                f"raw: {found['raw']:,.0f} IOPS", "fio --rw=randwrite --bs=4k --iodepth=32, once over a new volume")


def memory(found):
    what, goal = "memory (PSS) of engine and three replicas, 1 GiB volume", "<= 60 MB"
    if not good(found):
        return missing(what, goal, found)
    return Goal(what, goal, f"{close(found['bytes'] / 1e6, 60, 1)} MB", found["bytes"] <= 60e6, "",
                "the largest sum of /proc/PID/smaps_rollup under 4 KiB writes")


def pause(found):
    what, goal = "requests held by a snapshot, by the engine's clock, under 4 KiB writes, depth 32, and folds", "p99 <= 10 ms"
    if not good(found, "held_p99"):
        return missing(what, goal, found)
    p99 = found["held_p99"] * 1e3
    return Goal(what, goal, f"p99 {close(p99, 10, 1)} ms, median {found['held_p50'] * 1e3:.1f} ms, longest {found['held_longest'] * 1e3:.1f} ms of "
                f"{found['snapshots']:,} snapshots, {found['folded']:,} folded meanwhile", p99 <= 10,
                f"the clients' p99.9: {found['felt_p999'] * 1e3:.1f} ms",
                "longhornctl snapshot create, rm, purge beside fio; \"requests were held for\" in the engine's log")


def rebuild(found):
    rows = [("filling a replica, one full replica beside it, no client, on one disk", ">= 0.8x dd with O_DIRECT and fdatasync"),
            ("p99 of clients during a rebuild, fio --verify, depth 32", "<= 2x"),
            ("p99 of clients during a rebuild, 4 KiB writes, depth 1", "<= 2x")]
    if not good(found, "verifying", "one_by_one"):
        return [missing(what, goal, found) for what, goal in rows]
    command = "longhornctl replica add VOLUME; from \"is brought in sync\" to \"is in sync\" in the engine's log"
    alone = Goal(*rows[0], f"{times((found['ratio'], *found['spread']), 0.8)}: {found['rate'] / 2**20:,.0f} MiB/s", found["ratio"] >= 0.8,
                 f"dd: {found['copy_rate'] / 2**20:,.0f} MiB/s", command)
    return [alone, *[slower(row, found[key], command) for row, key in zip(rows[1:], ("verifying", "one_by_one"))]]


def slower(row, one, command):
    return Goal(*row, f"{times((one['ratio'], *one['spread']), 2)}: {one['p99_during'] * 1e3:.2f} ms", one["ratio"] <= 2,
                f"before: {one['p99_before'] * 1e3:.2f} ms; {one['rate'] / 2**20:,.0f} MiB/s beside them", command)


def iscsi(found):
    rows = []
    for work in ("write", "read"):
        what, goal = f"iSCSI frontend alone, 4 KiB {work}, depth 32", ">= 1.2x tgtd"
        if not good(found):
            rows.append(missing(what, goal, found))
            continue
        one = found[work]
        rows.append(Goal(what, goal, f"{times((one['ratio'], *one['spread']), 1.2)}: {one['longhorn']:,.0f} IOPS",
                         one["ratio"] >= 1.2, f"tgtd: {one['tgtd']:,.0f} IOPS", "qemu-img bench -d 32 -s 4096 iscsi://..."))
    return rows


# Goals that are judged elsewhere, and where.
NOT_MEASURED = [
    ("fold on XFS", "grows with extents, not bytes", "`LH_FULL=1 scripts/test fold` measures it"),
]
