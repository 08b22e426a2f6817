"""Build the page of a report: checks Records, draws their sections and names what is not drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from laconic.records import Record, RecordError, checked_values
from laconic.report import page, plugins, run_plots, runs, whatif
from laconic.report.plots import Section

__all__ = ["Report", "build"]

T = TypeVar("T")
KindAndValues = tuple[str, Mapping[str, Any]]

MAX_TRIED = 5000
"""Up to this number the parts of a section that fails are drawn one by one, to find those that cannot be drawn."""
MAX_LEFT_OUT = 300
"""Up to this number one part after the other is left out, to find one that does not fit the others."""


@dataclass(frozen=True)
class Report:
    """A page and a summary of its contents.

    Args:
        runs: Number of runs in its first table.
        plots: Identifiers of its plots.
        claims: Number of Records that plug-ins derived, such as verdicts on a paper's claims.
        skipped: A line for everything that is not shown, with the reason.
    """

    html: str
    runs: int
    plots: tuple[str, ...]
    claims: int
    skipped: tuple[str, ...]


def build(
    records: Sequence[Record], *, title: str = "laconic report", command: str | None = None,
    prices: runs.Prices | None = None, skipped: Sequence[str] = (),
) -> Report:  # fmt: skip
    """Return the page about these Records.

    Args:
        records: Records of any kinds, in any order.
        prices: Prices of an hour and of a gigabyte.
        skipped: Lines about files that could not be read; the page lists them with what it cannot draw.
    """
    problems = [*skipped]
    extensions = plugins.installed()
    schemas = {**runs.SCHEMAS, **{kind: schema for plugin in extensions for kind, schema in plugin.schemas.items()}}
    valid = _valid_records(records, schemas, problems)
    derived: list[Record] = []
    for plugin in extensions:
        try:
            more, failures = plugin.derive(valid)
        except Exception as error:  # Records may hold anything: the rest of the page is still drawn
            more, failures = [], [f"nothing was derived from the Records: {_described(error)}"]
        derived += more
        problems += failures
    by_kind = _by_kind((record.kind, record.values) for record in (*valid, *derived))
    trained = runs.runs_of([record for record in valid if record.kind in runs.SCHEMAS])
    used_prices = prices or runs.Prices()
    sections = [_drawn("runs", trained, lambda some: run_plots.section(some, used_prices), problems)]
    for plugin in extensions:
        sections += _plugin_sections(plugin, by_kind, problems)
    problems += [
        f"{_count(len(values))} of kind {kind}: no plot is made of these"
        for kind, values in by_kind.items()
        if kind not in schemas
    ]
    shown = [section for section in sections if section]
    text = page.render(
        shown, title=title, origin=_origin(records, command), skipped=problems,
        what_if=whatif.settings(runs.presets(trained)),
    )  # fmt: skip
    plots = tuple(plot.ident for section in shown for plot in section.plots)
    return Report(text, len(trained), plots, len(derived), tuple(problems))


def _valid_records(records: Sequence[Record], schemas: Mapping[str, Any], problems: list[str]) -> list[Record]:
    """Return the Records that have all fields which are drawn; the others become lines of ``problems``."""
    valid, invalid = [], Counter[str]()
    for record in records:
        try:
            if record.kind in schemas:
                checked_values(record, schemas[record.kind])
            valid.append(record)
        except RecordError as error:
            invalid[str(error)] += 1
    problems += [f"{error} ({_count(count)} left out)" for error, count in invalid.items()]
    return valid


def _by_kind(records: Iterable[KindAndValues]) -> dict[str, list[Mapping[str, Any]]]:
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for kind, values in records:
        by_kind.setdefault(kind, []).append(values)
    return by_kind


def _plugin_sections(
    plugin: plugins.Plugin, by_kind: Mapping[str, Sequence[Mapping[str, Any]]], problems: list[str]
) -> list[Section | None]:
    """Return the sections of a plug-in, each of all Records that can be drawn."""
    records: list[KindAndValues] = [(kind, values) for kind in by_kind for values in by_kind[kind]]

    def draw(name: str, some: Sequence[KindAndValues]) -> Section | None:
        return next((draw() for other, draw in plugin.sections(_by_kind(some)) if other == name), None)

    try:
        names = [name for name, _ in plugin.sections(by_kind)]
    except Exception as error:
        problems.append(f"sections: {_described(error)}")
        return []
    return [_drawn(name, records, partial(draw, name), problems) for name in names]


def _drawn(
    name: str, parts: Sequence[T], draw: Callable[[Sequence[T]], Section | None], problems: list[str]
) -> Section | None:
    """Return a section of all parts; if it cannot be drawn, of those parts that can be drawn alone.

    Records may hold anything that their schema allows, and one of them must not hide the others.
    """
    try:
        return draw(parts)
    except Exception as error:
        problem = f"{name}: {_described(error)}"
    alone = [part for part in parts if _tried(draw, [part])] if len(parts) <= MAX_TRIED else []
    # One that does not fit the others can be drawn alone, but all the others together can be drawn without it.
    without = ([*alone[:i], *alone[i + 1 :]] for i in range(len(alone) if len(alone) <= MAX_LEFT_OUT else 0))
    for some in (alone, *without):
        drawn = _tried(draw, some) if some else None
        if drawn and drawn[0]:
            problems.append(f"{problem} ({len(parts) - len(some)} left out)")
            return drawn[0]
    problems.append(problem)
    return None


def _tried(draw: Callable[[Sequence[T]], Section | None], parts: Sequence[T]) -> tuple[Section | None] | None:
    """Return a section, or None if it cannot be drawn; a plug-in may have no section for these parts."""
    try:
        return (draw(parts),)
    except Exception:
        return None


def _described(error: Exception) -> str:
    if isinstance(error, RecordError):
        return str(error)
    first = next(iter(str(error).splitlines()), "")
    return f"a Record cannot be drawn ({type(error).__name__}: {first[:100]})"


def _count(records: int) -> str:
    return f"{records} Record{'s' * (records != 1)}"


def _origin(records: Sequence[Record], command: str | None) -> list[str]:
    """Return the lines at the end of the page: machines, versions, commits, dates and the command."""
    lines = []
    machines = dict.fromkeys(
        ", ".join(
            str(x)
            for x in (record.machine["cpu"], f"{record.machine.get('cores')} cores", record.machine.get("gpu"))
            if x
        )
        for record in records
        if record.machine.get("cpu")
    )
    if machines:
        lines.append(f"Measured on: {'; '.join(list(machines)[:4])}.")
    first = next((record for record in records if record.versions), None)
    if first is not None:
        commits = dict.fromkeys(str(record.commit) for record in records if record.commit)
        words = [f"{name} {version}" for name, version in first.versions.items()]
        words += [f"commit {', '.join(list(commits)[:4])}{', …' if len(commits) > 4 else ''}"] if commits else []
        dates = [record.at for record in records if record.at]
        lines.append("; ".join([*words, f"{min(dates)} to {max(dates)}"]) + ".")
    if command:
        lines.append(f"Again: {command}")
    return lines
