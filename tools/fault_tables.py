"""The table of a tier of the fault campaign, for docs/faults.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from laconic.records import Record
from laconic.tables import Table
from laconic_lab.faults.tiers import TIERS, PartSummary, latest, summarise

TIER = 3


def tier_block(records: Sequence[Record]) -> str:
    """Return the table of all parts, with the goals and the dates of the Records."""
    rows = []
    for part, summary in summarise(records).items():
        goal, mine = getattr(TIERS[TIER], part), latest(records)[part]
        rows.append((
            _what(part, mine), f"{goal:,}", f"{summary.done:,}", str(len(summary.broken)), str(len(summary.repeated)),
            _dates(summary),
        ))  # fmt: skip
    machines = {f"{record.machine['cpu']}, {record.machine['cores']} cores" for record in records}
    table = Table(("what", "goal", "done", "broken", "broken before, run again", "dates"), rows).to_markdown()
    return (
        f"{table}\n\n{'; '.join(sorted(machines))}, shared with other work. `laconic lab faults --tier {TIER} --record "
        f"results/faults/tier{TIER}.jsonl` continues where these Records end."
    )


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
