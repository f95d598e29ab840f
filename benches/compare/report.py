"""A run as Markdown, JSON and plots; and from its JSON the Markdown again."""
import dataclasses, json, os, re

from . import goals, plot
from .client import Sample
from .rounds import Cell, Plan


@dataclasses.dataclass
class Run:
    """Everything that a report tells."""
    when: str
    load: float
    marks: list
    facts: list
    plan: object
    groups: dict
    special: dict
    command: str
    # What other runs have added, as sentences.
    added: list = dataclasses.field(default_factory=list)


def write(run, folder):
    """Writes speed.md, speed.json and a plot for each group; returns the Markdown's path."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "speed.json"), "w") as f:
        json.dump(as_json(run, goals.all_of(run.groups, run.special)), f, indent=1)
        f.write("\n")
    return render(run, folder)


def render(run, folder):
    """Writes speed.md and the plots alone; returns the Markdown's path."""
    os.makedirs(folder, exist_ok=True)
    for group in run.groups.values():
        for field, unit in (("iops", "I/O per second"), ("cpu", "us of processor time per I/O")) if not group.page else ():
            with open(os.path.join(folder, f"{group.key}-{field}.svg"), "w") as f:
                f.write(plot.bars(group.title, unit, blocks(group, field)))
    path = os.path.join(folder, "speed.md")
    with open(path, "w") as f:
        f.write(markdown(run, goals.all_of(run.groups, run.special)))
    return path


def read(folder, known):
    """The run whose speed.json is there. `known` are groups without results: they have the names and the order of contestants
    and workloads, and are filled in."""
    with open(os.path.join(folder, "speed.json")) as f:
        told = json.load(f)
    groups = {}
    for group in known:
        if group.key not in told["groups"]:
            continue
        one = told["groups"][group.key]
        group.title, group.absent = one["title"], one["absent"]
        for cell in one["cells"]:
            key = cell["contestant"], cell["workload"]
            group.results[key] = Cell([Sample(**s) for s in cell["samples"]], cell["failed"] or "")
            group.commands[key] = cell["command"] or ""
        groups[group.key] = group
    return Run(told["when"], told["load"], told["marks"], list(told["machine"].items()),
               Plan(told["rounds"], told["seconds"], told["size"], False), groups, told["special"], told["command"])


def fill_in(run, other):
    """Takes from another run what this one has not, or has measured in another way or in vain."""
    groups = {key: group for key, group in other.groups.items() if key not in run.groups}
    special = {key: found for key, found in other.special.items()
               if "failed" not in found and found.keys() != run.special.get(key, {}).keys()}
    run.groups.update(groups)
    run.special.update(special)
    if groups or special:
        run.added.append(f"{', '.join([*groups, *special])}: {other.when}, load average {other.load:.2f} before the start, "
                         f"`{without_names(other.command)}`, {other.plan.rounds} rounds of {other.plan.seconds:g} s.")
        run.marks += [f"{', '.join([*groups, *special])}: {mark}" for mark in other.marks]


def without_names(command):
    """A command without what was one run's: names of volumes, sockets and files, numbers of devices, where results went."""
    for gone, stands_for in ((r"nbd\+unix:///[^?\s]*\?socket=\S+", "nbd+unix:///VOLUME?socket=SOCKET"),
                             (r"/dev/longhorn/\S+", "/dev/longhorn/VOLUME"), (r"=\S*/lh-bench-\S+", "=FILE"),
                             (r"/dev/(nbd|ublkb|loop)\d+", r"/dev/\1N"), (r" (-o \S+|--no-build)(?= |$)", "")):
        command = re.sub(gone, stands_for, command)
    return command


def blocks(group, field):
    found = []
    for work in group.workloads:
        rows = []
        for kind in group.contestants:
            cell = group.cell(kind.key, work)
            if cell and cell.samples:
                rows.append((kind.key, cell.median(field), *cell.spread(field)))
        found.append((work.name, rows))
    return found


def as_json(run, rows):
    groups = {}
    for group in run.groups.values():
        cells = [{"contestant": c, "workload": w, "command": group.commands.get((c, w)), "failed": cell.failed or None,
                  "samples": [dataclasses.asdict(s) for s in cell.samples]} for (c, w), cell in group.results.items()]
        groups[group.key] = {"title": group.title, "place": group.place, "absent": group.absent, "cells": cells}
    return {"when": run.when, "load": run.load, "marks": run.marks, "machine": dict(run.facts), "command": run.command,
            "rounds": run.plan.rounds, "seconds": run.plan.seconds, "size": run.plan.size, "groups": groups,
            "special": run.special, "goals": [dataclasses.asdict(g) for g in rows]}


def markdown(run, rows):
    lines = ["# Speed", ""]
    lines += [f"**{mark}**" + "\n" for mark in run.marks]
    lines += [f"{run.when}, load average {run.load:.2f} before the start. `{without_names(run.command)}`: {run.plan.rounds} rounds of "
              f"{run.plan.seconds:g} s, contestants in turns, medians, in brackets the lowest and highest round. O_DIRECT "
              "on every file. \"In RAM\" is tmpfs, for every contestant.", ""]
    lines += ["Taken by themselves: " + " ".join(run.added), ""] if run.added else []
    lines += ["| | |", "|---|---|", *[f"| {k} | {v} |" for k, v in run.facts], ""]
    lines += ["## Goals", "", "| | goal | result | | peers | command |", "|---|---|---|---|---|---|"]
    verdict = {True: "reached", False: "**not reached**", None: ""}
    if "--only" in run.command:
        rows = [g for g in rows if g.result != goals.LEFT_OUT]
    lines += [f"| {g.what} | {g.goal} | {g.result} | {verdict[g.met]} | {g.peers} | "
              f"{'`' + without_names(g.command).replace('|', '/') + '`' if g.command else ''} |" for g in rows]
    lines += [f"| {what} | {goal} | {why} | | | |" for what, goal, why in goals.NOT_MEASURED]
    for group in run.groups.values():
        lines += ["", *table(group)] if not group.page else []
    return "\n".join(lines) + "\n"


def table(group):
    lines = [f"## {group.title}", "", f"![I/O per second]({group.key}-iops.svg)",
             f"![processor time per I/O]({group.key}-cpu.svg)", ""]
    names = {kind.key: kind.name for kind in group.contestants}
    for work in group.workloads:
        lines += [f"### {work.name}", "",
                  "| | IOPS | MiB/s | mean us | p50 us | p99 us | p99.9 us | CPU us per I/O: client and servers | "
                  "whole machine |", "|---|---|---|---|---|---|---|---|---|"]
        for key, name in names.items():
            cell = group.cell(key, work)
            if cell and cell.samples:
                low, high = cell.spread("iops")
                rest = [cell.median(f) for f in ("mib_s", "mean", "p50", "p99", "p999", "cpu", "machine")]
                lines.append(f"| {name} | {cell.median('iops'):,.0f} ({low:,.0f} to {high:,.0f}) | "
                             + " | ".join(plot.number(r) for r in rest) + " |")
            else:
                lines.append(f"| {name} | {group.absent.get(key) or (cell.failed if cell else '') or 'no figure'} "
                             "| | | | | | | |")
        lines.append("")
    return lines
