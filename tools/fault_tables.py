"""The tables of docs/faults.md: a tier of the fault campaign, and the server's throughput before and now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

from laconic.records import Record
from laconic.tables import Table
from laconic_lab.faults.tiers import TIERS, PartSummary, latest, summarise

TIER = 3


def tier_block(records: Sequence[Record]) -> str:
    """Return the table of all parts, with the goals and the dates of the Records."""
    rows, again = [], []
    for part, summary in summarise(records).items():
        again += [f"- {part}, {reason}" for reason in summary.repeated]
        goal, mine = getattr(TIERS[TIER], part), latest(records)[part]
        rows.append((
            _what(part, mine), f"{goal:,}", f"{summary.done:,}", str(len(summary.broken)), str(len(summary.repeated)),
            _dates(summary),
        ))  # fmt: skip
    table = Table(("what", "goal", "done", "broken", "broken before, run again", "dates"), rows).to_markdown()
    reasons = "\n".join(["Broken before, run again:", "", *again, "", ""]) if again else ""
    return (
        f"{table}\n\n{reasons}{_machines(records)}. `laconic lab faults --tier {TIER} --record "
        f"results/faults/tier{TIER}.jsonl` continues where these Records end."
    )


def throughput_block(records: Sequence[Record]) -> str:
    """Return how the server's throughput compares with that of an earlier commit, from Records taken in turns."""
    rows, shown = [], {
        "aggregation": {"ratio": "throughput relative to bare gRPC", "server_cpu_s": "processor seconds of a round"},
        "load": {"pushes_per_s": "pushes per second of 64 clients"},
    }  # fmt: skip
    for part, values in shown.items():
        mine = [record for record in records if record.kind == f"cluster.{part}"]
        for name, what in values.items():
            before, after = ([record.values[name] for record in mine[i::2]] for i in (0, 1))
            ratios = sorted(y / x for x, y in zip(before, after, strict=True))
            rows.append((
                what, f"{median(before):.3g}", f"{median(after):.3g}",
                f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})", str(len(ratios)),
            ))  # fmt: skip
    errors = sum(len(record.values["errors"]) for record in records if record.kind == "cluster.load")
    table = Table(("what", "before", "now", "ratio of a turn: median (range)", "turns"), rows).to_markdown()
    commits = " and ".join(f"`{commit}`" for commit in dict.fromkeys(str(record.commit) for record in records))
    return f"{table}\n\n{commits}, {errors} errors, {_machines(records)} at the same time."


def heap_block(records: Sequence[Record]) -> str:
    """Return what a soak with many faults holds on the heap, in the two halves of its time."""
    samples = records[-1].values["samples"]
    shown = {
        "used_nbytes": "MB of glibc's blocks in use", "free_nbytes": "MB of its free blocks",
        "rss_nbytes": "MB of memory", "threads": "threads", "descriptors": "open files", "cores": "servers' states",
        "clients": "clients", "channels": "connections", "tensors": "tensors",
    }  # fmt: skip
    rows = []
    for name, what in shown.items():
        values = [sample[name] / (1e6 if name.endswith("nbytes") else 1) for sample in samples]
        half = len(values) // 2
        medians = (
            f"{median(part):.0f} ({min(part):.0f} to {max(part):.0f})" for part in (values[:half], values[half:])
        )
        rows.append((what, *medians))
    table = Table(("median (range)", "first half", "second half"), rows).to_markdown()
    return (
        f"{table}\n\nA fault every second, {len(samples)} samples in {samples[-1]['seconds']} s; {_machines(records)}."
    )


def _machines(records: Sequence[Record]) -> str:
    machines = {f"{record.machine['cpu']}, {record.machine['cores']} cores" for record in records}
    return f"{'; '.join(sorted(machines))}, shared with other work"


def _dates(summary: PartSummary) -> str:
    return " to ".join(dict.fromkeys(at[:10] for at in (summary.first, summary.last) if at)) or "not run"


def _what(part: str, records: Sequence[Record]) -> str:
    values = [record.values for record in records]
    if part == "scenarios":
        names = {name: sum((Counter(each[name]) for each in values), Counter[str]()) for name in ("faults", "methods")}
        return f"scenarios: {len(names['faults'])} kinds of faults, {len(names['methods'])} methods, all modes"
    if part == "kills":
        cut = sum(sum(each["cut"].values()) for each in values if "cut" in each)
        return f"runs killed while they write a checkpoint, {cut:,} of them with a power cut, then resumed"
    if part == "soak":
        return f"seconds of a soak{_soak(values)}"
    if part == "idle":
        steps = ", ".join(f"{each['kind']} {100 * (each['slower'] - 1):+.0f} %" for each in values)
        return f"kinds of calls that a member leaves open; time of a step beside calm phases: {steps or 'not run'}"
    sets = ", ".join(sorted({each["isa"] for each in values}))
    return f"mutated packets through {len({each['target'] for each in values})} readers under sanitizers ({sets})"


def _soak(values: Sequence[Any]) -> str:
    if not values:
        return ""
    longest = max(values, key=lambda each: (each["broken"] is None, each["seconds"]))
    memory, files, threads = (longest[name] for name in ("rss", "descriptors", "threads"))
    made = f"{longest['done']:,}" if "done" in longest else f"some of {longest['exchanges']:,}"
    ended = f", which ended with: {longest['broken']}" if longest["broken"] else ""
    return (
        f" with {longest['faults']} faults in {made} exchanges; from its second to its last quarter memory "
        f"{memory[0] / 1e6:.0f} to {memory[1] / 1e6:.0f} MB, open files {files[0]} to {files[1]}, threads {threads[0]} "
        f"to {threads[1]}{ended}"
    )
