"""How long requests are held while a snapshot is taken, under fio at depth 32, with snapshots removed and folded away
behind: by the engine's own clock, and as a client feels it."""
from harness import Host, contents, expect, full, have, percentile, say, shown, skip
from held import under_load


def main():
    if not have("fio"):
        return skip("pause", "no fio")
    host = Host()
    volume = host.name("pause")
    host.up(volume, "--size", "256MiB", "--replicas", "3", "--frontend", "nbd-server")
    count = full(40, 1000)
    held = under_load(host, volume, 256 << 20, count, full(5, 20))
    expect(held.folded > 0, "nothing was folded meanwhile")
    paths = [r["path"] for r in host.healthy(volume)["replicas"]]
    host.ctl("snapshot", "purge", volume, timeout=1800)
    host.ctl("down", volume)
    expect(len({contents(p) for p in paths}) == 1, "replicas differ after snapshots and folds under load")
    worst, half, goal = percentile(held.pauses, 0.99), percentile(held.pauses, 0.5), full(2000.0, 10.0)
    say(f"held: {half:.1f} ms at the median, {worst:.1f} ms at p99, {max(held.pauses):.1f} ms at most; fio's p99.9 {held.felt:.1f} ms")
    expect(worst <= goal, f"requests are held for {worst:.1f} ms at p99 of {count} snapshots, promised {goal}")
    shown(f"{count} snapshots, {held.folded} folded meanwhile: held {half:.1f} ms at the median, {worst:.1f} ms at p99")


main()
