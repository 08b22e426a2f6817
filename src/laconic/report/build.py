"""Records to a page: every kind goes to the room that can draw it, and what nobody can is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

from laconic.records import Record
from laconic.report import page, runs, whatif
from laconic.report.plots import Section

__all__ = ["Report", "build"]

ByKind = Mapping[str, Sequence[Mapping[str, Any]]]


class Plugin(Protocol):
    """Sections of a report that another distribution draws, found by the entry-point group ``laconic.report``."""

    kinds: frozenset[str]
    """Kinds of Records that the sections are drawn from."""

    def derive(self, records: Sequence[Record]) -> tuple[list[Record], list[str]]:
        """Return Records computed from the given ones, and a line for each that could not be computed."""
        ...

    def sections(self, by_kind: ByKind) -> list[tuple[str, Callable[[], Section]]]:
        """Return the name of each section that these Records allow, and what draws it."""
        ...


def plugins() -> list[Plugin]:
    """Return the installed report plug-ins."""
    return [entry.load() for entry in entry_points(group="laconic.report")]


@dataclass(frozen=True)
class Report:
    """A page, and what is on it."""

    html: str
    runs: int
    plots: tuple[str, ...]
    claims: int
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
    extensions = plugins()
    derived = list(records)
    for plugin in extensions:
        more, failed = plugin.derive(records)
        derived += more
        told += failed
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for record in derived:
        by_kind.setdefault(record.kind, []).append(record.values)
    found = runs.runs_of([record for record in records if record.kind in runs.KINDS])
    sections = _try("runs", lambda: [runs.section(found, prices or runs.Prices())], told)
    for plugin in extensions:
        for name, draw in plugin.sections(by_kind):
            sections += _try(name, lambda: [draw()], told)  # noqa: B023
    drawn = runs.KINDS | {kind for plugin in extensions for kind in plugin.kinds}
    told += [
        f"{len(some)} Record{'s' * (len(some) != 1)} of kind {kind}: no plot is made of these"
        for kind, some in by_kind.items()
        if kind not in drawn
    ]
    sections = [one for one in sections if one]
    text = page.render(
        sections, title=title, origin=_origin(records, command), skipped=told,
        what_if=whatif.settings(runs.presets(found)),
    )  # fmt: skip
    plots = tuple(plot.ident for one in sections for plot in one.plots)
    return Report(text, len(found), plots, len(derived) - len(records), tuple(told))


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
