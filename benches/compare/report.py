"""A run as Markdown, JSON and plots."""
import dataclasses, json, os

from . import goals, plot


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


def write(run, folder):
    """Writes speed.md, speed.json and a plot for each group; returns the Markdown's path."""
    os.makedirs(folder, exist_ok=True)
    rows = goals.all_of(run.groups, run.special)
    for group in run.groups.values():
        for field, unit in (("iops", "I/O per second"), ("cpu", "us of processor time per I/O")):
            with open(os.path.join(folder, f"{group.key}-{field}.svg"), "w") as f:
                f.write(plot.bars(group.title, unit, blocks(group, field)))
    with open(os.path.join(folder, "speed.json"), "w") as f:
        json.dump(as_json(run, rows), f, indent=1)
        f.write("\n")
    path = os.path.join(folder, "speed.md")
    with open(path, "w") as f:
        f.write(markdown(run, rows))
    return path


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
    lines += [f"{run.when}, load average {run.load:.2f} before the start. `{run.command}`: {run.plan.rounds} rounds of "
              f"{run.plan.seconds:g} s, contestants in turns, medians, in brackets the lowest and highest round. O_DIRECT "
              "on every file. \"In RAM\" is tmpfs, for every contestant.", ""]
    lines += ["| | |", "|---|---|", *[f"| {k} | {v} |" for k, v in run.facts], ""]
    lines += ["## Goals", "", "| | goal | result | | peers | command |", "|---|---|---|---|---|---|"]
    verdict = {True: "reached", False: "**not reached**", None: ""}
    lines += [f"| {g.what} | {g.goal} | {g.result} | {verdict[g.met]} | {g.peers} | "
              f"{'`' + g.command.replace('|', '/') + '`' if g.command else ''} |" for g in rows]
    lines += [f"| {what} | {goal} | {why} | | | |" for what, goal, why in goals.NOT_MEASURED]
    for group in run.groups.values():
        lines += ["", *table(group)]
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
