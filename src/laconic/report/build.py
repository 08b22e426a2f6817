"""Build the page of a report: checks Records, draws their sections and names what is not drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from laconic.records import Record, RecordError, checked_values
from laconic.report import page, plugins, run_plots, runs, whatif
from laconic.report.plots import Section

__all__ = ["Report", "build"]


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
        more, failures = plugin.derive(valid)
        derived += more
        problems += failures
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for record in (*valid, *derived):
        by_kind.setdefault(record.kind, []).append(record.values)
    trained = runs.runs_of([record for record in valid if record.kind in runs.SCHEMAS])
    drawings: list[tuple[str, Callable[[], Section]]] = [
        ("runs", lambda: run_plots.section(trained, prices or runs.Prices()))
    ]
    drawings += [drawing for plugin in extensions for drawing in plugin.sections(by_kind)]
    sections = []
    for name, draw in drawings:
        try:
            sections.append(draw())
        except RecordError as error:
            problems.append(f"{name}: {error}")
    problems += [
        f"{_count(len(values))} of kind {kind}: no plot is made of these"
        for kind, values in by_kind.items()
        if kind not in schemas
    ]
    sections = [section for section in sections if section]
    text = page.render(
        sections, title=title, origin=_origin(records, command), skipped=problems,
        what_if=whatif.settings(runs.presets(trained)),
    )  # fmt: skip
    plots = tuple(plot.ident for section in sections for plot in section.plots)
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
