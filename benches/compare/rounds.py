"""Contestants in turns: A B C, B C A, C A B, ..., so that whatever the machine does happens to all of them."""
import dataclasses, shutil, statistics, sys, tempfile

from . import client, ours
from .client import BenchError, FILL
from .contestants import Missing


@dataclasses.dataclass
class Plan:
    """How much is measured."""
    rounds: int
    seconds: float
    size: int
    quick: bool


@dataclasses.dataclass
class Cell:
    """What a contestant did in one workload, a sample for each round."""
    samples: list = dataclasses.field(default_factory=list)
    failed: str = ""

    def values(self, field):
        return [getattr(s, field) for s in self.samples]

    def median(self, field):
        return statistics.median(self.values(field)) if self.samples else None

    def spread(self, field):
        """Lowest and highest."""
        values = self.values(field)
        return (min(values), max(values)) if values else None


@dataclasses.dataclass
class Group:
    """Contestants in one place, and the workloads that all of them do."""
    key: str
    title: str
    place: str
    contestants: list
    workloads: list
    results: dict = dataclasses.field(default_factory=dict)
    absent: dict = dataclasses.field(default_factory=dict)
    commands: dict = dataclasses.field(default_factory=dict)
    # Where its tables are, if not beside the goals.
    page: str = ""

    def cell(self, contestant, work):
        return self.results.get((contestant, work.key))

    def ratio(self, one, other, work, field="iops"):
        """Median of the ratios of the rounds, and the lowest and highest; None if one of the two is not there."""
        a, b = self.cell(one, work), self.cell(other, work)
        if not a or not b or not a.samples or not b.samples:
            return None
        ratios = [x / y for x, y in zip(a.values(field), b.values(field)) if y]
        return (statistics.median(ratios), min(ratios), max(ratios)) if ratios else None


def say(text):
    print(text, file=sys.stderr, flush=True)


def measure(group, plan):
    """Starts all contestants of the group, goes round, stops them."""
    folder = tempfile.mkdtemp(prefix="lh-bench-", dir=group.place)
    running = []
    try:
        for kind in group.contestants:
            contestant = kind(folder, plan.size)
            try:
                ours.start(contestant)
            except (Missing, BenchError) as e:
                say(f"{group.key}: {contestant.name}: left out: {e}")
                group.absent[contestant.key] = str(e)
                continue
            running.append(contestant)
        for contestant in running:
            # Every later write is to blocks that are there, for everybody.
            client.run(contestant.target(), FILL, plan.size)
        for work in group.workloads:
            for number in range(plan.rounds):
                for contestant in turned(running, number):
                    one(group, contestant, work, plan)
                say(f"{group.key}: {work.name}: round {number + 1} of {plan.rounds}: "
                    + ", ".join(f"{c.key} {latest(group, c, work)}" for c in running))
    finally:
        for contestant in running:
            contestant.stop()
        shutil.rmtree(folder, ignore_errors=True)


def turned(contestants, number):
    """Each round begins with another one: a disk whose host limits its rate lets whoever comes after a fast one pay for what that
    one took, which in a fixed order would always be the same."""
    first = number % len(contestants) if contestants else 0
    return contestants[first:] + contestants[:first]


def one(group, contestant, work, plan):
    cell = group.results.setdefault((contestant.key, work.key), Cell())
    target = contestant.target()
    group.commands[contestant.key, work.key] = " ".join(client.command(target, work, plan.size, plan.seconds))
    try:
        cell.samples.append(client.run(target, work, plan.size, contestant.pids(), plan.seconds))
    except BenchError as e:
        cell.failed = str(e)
        say(f"{group.key}: {contestant.name}: {work.name}: {e}")
    client.settle()


def latest(group, contestant, work):
    cell = group.cell(contestant.key, work)
    return f"{cell.samples[-1].iops:.0f}" if cell.samples else "-"
