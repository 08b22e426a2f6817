"""Records to a page: every kind goes to the room that can draw it, and what nobody can is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from laconic.records import Record
from laconic.report import benches, page, runs, studies, whatif
from laconic.report.plots import Plot, Section

__all__ = ["Report", "build"]

CLAIM = "study.claim"
ByKind = Mapping[str, Sequence[Mapping[str, Any]]]

PAPERS: tuple[tuple[str, str, str, Callable[[ByKind, Sequence[Mapping[str, Any]]], list[Plot]]], ...] = (
    ("kothari2021", "kothari2021.", "Kothari, Kaushik and Faisal 2021: six methods and ours", studies.kothari2021),
    ("oland2015", "study.oland2015", "Øland and Raj 2015: as many bits as the entropy asks for", studies.oland2015),
    ("jang2017", "jang2017.", "Jang, Na and Yoon 2017: a model of time, and real runs", studies.jang2017),
    ("homomorphic", "homomorphic.", "Homomorphic compression", studies.homomorphic),
)
BENCHES: tuple[tuple[str, str, Callable[[ByKind], list[Plot]]], ...] = (
    ("bench.ddp", "DistributedDataParallel", benches.ddp),
    ("cluster.", "Parameter server", benches.cluster),
    ("bench.codec", "Codecs", benches.codecs),
    ("faults.", "Faults", benches.faults),
)
DRAWN = frozenset(
    {*runs.KINDS, CLAIM, "kothari2021.run", "kothari2021.time", "study.oland2015", "jang2017.run", "jang2017.table1",
     "jang2017.kernels", "homomorphic.run", "homomorphic.step", "bench.layers", "bench.ddp", "bench.ddp.train",
     "cluster.round", "cluster.load", "bench.codec", "faults.scene"}
)  # fmt: skip
"""Kinds that plots are made of."""


@dataclass(frozen=True)
class Report:
    """A page, and what is on it."""

    html: str
    runs: int
    plots: tuple[str, ...]
    skipped: tuple[str, ...]


def build(
    records: Sequence[Record],
    *,
    title: str = "laconic report",
    command: str | None = None,
    prices: runs.Prices | None = None,
    skipped: Sequence[str] = (),
) -> Report:
    """The page of some Records.

    Args:
        records: Of any kinds, in any order.
        title: Of the page.
        command: What to type to get it again.
        prices: What an hour and a gigabyte cost.
        skipped: What was not even a Record, and why.
    """
    told = [*skipped]
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        by_kind.setdefault(record.kind, []).append(record.values)
    found = runs.runs_of([record for record in records if record.kind in runs.KINDS])
    sections = _try("runs", lambda: [runs.section(found, prices or runs.Prices())], told)
    for study, prefix, heading, draw in PAPERS:
        claimed = [one for one in by_kind.get(CLAIM, []) if one.get("study") == study]
        mine = {kind: some for kind, some in by_kind.items() if kind.startswith(prefix)}
        if study == "homomorphic":
            mine |= {kind: some for kind, some in by_kind.items() if kind == "bench.layers"}
        if mine:
            sections += _try(study, lambda: [_paper(study, heading, draw(mine, claimed), claimed)], told)  # noqa: B023
    for prefix, heading, draw_bench in BENCHES:
        mine = {kind: some for kind, some in by_kind.items() if kind.startswith(prefix)}
        if mine:
            ident = prefix.strip(".").replace(".", "-")
            sections += _try(heading, lambda: [Section(ident, heading, plots=draw_bench(mine))], told)  # noqa: B023
    told += [
        f"{len(some)} Record{'s' * (len(some) != 1)} of kind {kind}: no plot is made of these"
        for kind, some in by_kind.items()
        if kind not in DRAWN
    ]
    sections = [one for one in sections if one]
    text = page.render(
        sections, title=title, origin=_origin(records, command), skipped=told,
        what_if=whatif.settings(runs.presets(found)),
    )  # fmt: skip
    plots = tuple(plot.ident for one in sections for plot in one.plots)
    return Report(text, len(found), plots, tuple(told))


def _paper(study: str, heading: str, plots: list[Plot], claimed: Sequence[Mapping[str, Any]]) -> Section:
    tables, more = studies.claims(study, claimed)
    return Section(study, heading, tables=tables, plots=[*plots, *more])


def _try(what: str, draw: Callable[[], list[Section]], told: list[str]) -> list[Section]:
    """A Record may lack anything: then what it belongs to is named, and the rest is drawn."""
    try:
        return draw()
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError, AttributeError, AssertionError) as error:
        told.append(f"{what}: its Records cannot be drawn ({type(error).__name__}: {error})")
        return []


def _origin(records: Sequence[Record], command: str | None) -> list[str]:
    lines = []
    machines = dict.fromkeys(
        ", ".join(
            str(x) for x in (one.machine["cpu"], f"{one.machine.get('cores')} cores", one.machine.get("gpu")) if x
        )
        for one in records
        if one.machine.get("cpu")
    )
    if machines:
        lines.append(f"Measured on: {'; '.join(list(machines)[:4])}.")
    first = next((one for one in records if one.versions), None)
    if first is not None:
        commits = dict.fromkeys(str(one.commit) for one in records if one.commit)
        words = [f"{name} {version}" for name, version in first.versions.items()]
        words += [f"commit {', '.join(list(commits)[:4])}{', …' if len(commits) > 4 else ''}"] if commits else []
        lines.append("; ".join([*words, f"{min(r.at for r in records if r.at)} to {max(r.at for r in records)}"]) + ".")
    if command:
        lines.append(f"Again: {command}")
    return lines
