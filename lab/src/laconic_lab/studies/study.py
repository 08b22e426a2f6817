"""A study as one object: experiments, claims, tables and plots.

The command line, the HTML report and the documentation pages find studies by their folders (``study_names``); no other
file names them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from laconic.errors import ConfigError, FileError
from laconic.records import NOT_EMPTY, POSITIVE, Record, RecordError, checked_values, read
from laconic.report.plots import Plot
from laconic.report.verdicts import Verdict
from laconic_lab.studies import load_study, study_names
from laconic_lab.studies.claims import Claim, Finding, claims_table, findings_of
from laconic_lab.studies.figures import Panel, draw_all
from laconic_lab.studies.scoreboard import GOAL, scoreboard
from laconic_lab.studies.tables import Table

__all__ = [
    "CLAIM_KIND", "Count", "Positive", "Results", "Row", "Series", "Study", "check_experiment", "claim_records",
    "compared_frames", "rows_by_part", "seeds_option", "training_options", "with_records",
]  # fmt: skip

CLAIM_KIND = "study.claim"

Count = Annotated[int, POSITIVE]
Positive = Annotated[float, POSITIVE]
Series = Annotated[list[float], NOT_EMPTY]
"""Types of fields in the schemas of Records."""


class Results:
    """Records of a study, checked and grouped by kind.

    A study derives a class that arranges them for its tables, and names the fields that it needs of each kind.
    """

    schemas: ClassVar[Mapping[str, Any]] = {}
    """A TypedDict for each kind of Record that is read."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._values: dict[str, list[Any]] = {kind: [] for kind in self.schemas}
        self._records: dict[int, Record] = {}
        for record in records:
            if record.kind in self.schemas:
                self._values[record.kind].append(checked_values(record, self.schemas[record.kind]))
                self._records[id(record.values)] = record

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        """Return the values of all Records of a kind."""
        return self._values[kind]

    def record_of(self, values: Mapping[str, Any]) -> Record:
        """Return the Record that holds these values, themselves and not a copy."""
        return self._records[id(values)]


@dataclass
class Runs:
    """Runs of one setting: the values of their Records."""

    runs: list[Mapping[str, Any]]

    @property
    def values(self) -> Mapping[str, Any]:
        return self.runs[0]


class Row(Runs):
    """All runs of one setting, sorted by seed."""

    @property
    def seeds(self) -> list[int]:
        return [run["seed"] for run in self.runs]

    @property
    def final(self) -> list[float]:
        """Top-1 after the last epoch, by seed."""
        return [run["accuracy"][-1] for run in self.runs]


RunsType = TypeVar("RunsType", bound=Runs)


def rows_by_part(
    runs: Iterable[Mapping[str, Any]], row: type[RunsType], defaults: Mapping[str, Any]
) -> dict[str, list[RunsType]]:
    """Return runs by experiment, in the order of the Records: a row for those that agree in all these values.

    Args:
        defaults: The values' names, each with the value that holds for Records older than its field.
    """
    by_setting: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for run in runs:
        setting = json.dumps([run.get(name, default) for name, default in defaults.items()])
        by_setting.setdefault((run["part"], setting), []).append(run)
    rows: dict[str, list[RunsType]] = {}
    for (part, _), alike in by_setting.items():
        rows.setdefault(part, []).append(row(sorted(alike, key=lambda run: run["seed"])))
    return rows


R = TypeVar("R", bound=Results)


@dataclass(frozen=True)
class Study(Generic[R]):
    """A paper's experiments run again.

    Args:
        name: Name on the command line and of the folder of Records.
        title: Heading in a report.
        experiments: Names of the experiments, the default one first; Records of each are kept in a file of its name.
        claims: Claims of the paper, in its order.
        results: Class that arranges the study's Records.
        run: Runs one experiment and returns its Records.
        tables: Returns all tables but the one of claims; tables without rows are not shown.
        plots: Returns all plots that the results allow.
        figures: Panels of the SVG files on the study's page, by file name.
        flags: Options of ``laconic study`` that apply to this study alone.
        options: Translates the given options into arguments of ``run``.
        counts: Returns totals over the Records for ``--json``.
        related: Kinds of Records of other commands that the results also use, and their files below ``results``.
        verdicts: Returns what to use in the situations that were measured, for the top of a report.
    """

    name: str
    title: str
    experiments: tuple[str, ...]
    claims: tuple[Claim, ...]
    results: type[R]
    run: Callable[..., list[Record]]
    tables: Callable[[R], Sequence[Table]]
    plots: Callable[[R], list[Plot]]
    figures: Mapping[str, Sequence[Panel]]
    flags: tuple[str, ...]
    options: Callable[[Mapping[str, Any]], dict[str, Any]]
    counts: Callable[[Sequence[Record]], dict[str, Any]]
    related: Mapping[str, str] = field(default_factory=dict)
    verdicts: Callable[[R], list[Verdict]] = lambda results: []

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of Records that the study itself writes."""
        return frozenset(self.results.schemas) - frozenset(self.related)

    def records_in(self, folder: Path) -> list[Record]:
        """Return all Records of the study in a folder, and related ones in the folders beside it."""
        paths = [folder / f"{experiment}.jsonl" for experiment in self.experiments]
        records = [record for path in paths if path.exists() for record in read(path)]
        if not records:
            names = ", ".join(path.name for path in paths)
            raise FileError(f"no records of {self.name} in {folder}: expected {names}")
        related = [folder.parent / file for file in self.related.values()]
        return records + [record for path in related if path.exists() for record in read(path)]

    def load(self, folder: Path) -> R:
        """Return the results of the Records in a folder."""
        return self.results(self.records_in(folder))

    def findings(self, results: R) -> list[Finding]:
        return findings_of(self.claims, results)

    def judged(self, folder: Path) -> tuple[str, list[Finding], Callable[[Mapping[str, Any]], Record], list[Record]]:
        """Return what ``scoreboard.index_tables`` needs of the Records in a folder."""
        records = self.records_in(folder)
        results = self.results(records)
        own = [record for record in records if record.kind in self.kinds]
        return self.name, self.findings(results), results.record_of, own

    def all_tables(self, results: R) -> list[Table]:
        """Return every table that the results fill, the scoreboard and the table of a paper's claims first.

        The scoreboard has the paper's claims, or our goals where there is no paper.
        """
        findings = self.findings(results)
        claims = [finding for finding in findings if finding.claim.section != GOAL]
        tables = [scoreboard(claims or findings, results.record_of), claims_table(claims), *self.tables(results)]
        return [table for table in tables if table.rows]

    def draw(self, results: R, folder: Path) -> list[Path]:
        """Write every figure that the results allow as an SVG file."""
        return draw_all(self.figures, self.plots(results), folder)


def check_experiment(name: str, experiments: Sequence[str]) -> None:
    """Raise ``ConfigError`` for an unknown experiment."""
    if name not in experiments:
        raise ConfigError(f"unknown experiment {name!r}: expected one of {', '.join(experiments)}")


def seeds_option(given: Mapping[str, Any]) -> list[int] | None:
    """Return the seeds of ``--seeds``; None without it."""
    try:
        return None if given["seeds"] is None else [int(seed) for seed in given["seeds"].split(",")]
    except ValueError:
        raise ConfigError(f"--seeds must be whole numbers such as 0,1,2, got {given['seeds']!r}") from None


def training_options(given: Mapping[str, Any], models: Iterable[str]) -> dict[str, Any]:
    """Return the options that studies which train several models share."""
    chosen = given["models"].split(",") if given["models"] else tuple(models)
    return {
        "models": chosen,
        "seeds": seeds_option(given),
        **{name: given[name] for name in ("epochs", "data", "lanes")},
    }


def compared_frames(records: Sequence[Record]) -> dict[str, Any]:
    """Return how many sampled frames were compared with computed values, and how many differ."""
    compared, differing = (
        sum(record.values.get(name, 0) for record in records) for name in ("frames_compared", "frames_other")
    )
    return {"runs": len(records), "frames_compared": compared, "frames_that_differ": differing}


def with_records(records: Sequence[Record]) -> Iterator[tuple[Study[Any], list[Record]]]:
    """Yield each study that has Records among the given ones, and those that it uses."""
    kinds = {record.kind for record in records}
    for study in map(load_study, study_names()):
        if kinds & study.kinds:
            yield study, [record for record in records if record.kind in study.results.schemas]


def claim_records(records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """Return a Record for each claim that the Records cover, and a line for each study whose Records lack fields."""
    judged, skipped = [], []
    for study, used in with_records(records):
        try:
            findings = study.findings(study.results(used))
        except RecordError as error:
            skipped.append(f"claims of {study.name}: {error}")
            continue
        first = used[0]
        judged += [
            Record(CLAIM_KIND, {"study": study.name, **finding.values()}, first.seed, first.machine, first.versions,
                   first.commit, first.at)
            for finding in findings
        ]  # fmt: skip
    return judged, skipped
