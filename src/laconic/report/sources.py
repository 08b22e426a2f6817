"""Read Records from folders of runs, files of Records, and folders of either."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from laconic.errors import ConfigError, FileError
from laconic.json_files import read_json
from laconic.records import Record, read_valid

__all__ = ["Sources", "gather"]

CONFIG, SUMMARY, RECORDS = "config.json", "summary.json", "records.jsonl"
"""Files of a run's folder."""
OTHER_FILES = ("events", "reports")
"""Names of JSON-lines files in a run's folder that hold no Records."""


@dataclass
class Sources:
    """Records and where they come from.

    Args:
        records: All Records, in order; those of a run have a ``run`` that no other run has.
        runs: Folders of the runs that were read.
        skipped: A line for each file or run that could not be read, with the reason.
    """

    records: list[Record] = field(default_factory=list)
    runs: list[Path] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def gather(paths: Sequence[Path]) -> Sources:
    """Return the Records of all paths.

    Raises:
        ConfigError: A path does not exist or cannot be read, or none has anything to show.
    """
    sources = Sources()
    folders: list[Path] = []
    seen: set[Path] = set()
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path} does not exist: name a run's folder, a file of Records or a folder of these")
        try:
            folders += _read(path, sources, seen)
        except OSError as error:
            raise ConfigError(f"cannot read {error.filename or path}: {error.strerror or error}") from None
    for folder, label in zip(folders, _labels(folders), strict=True):
        _read_run(folder, label, sources)
    if not sources.records:
        details = f" ({'; '.join(sources.skipped[:3])})" if sources.skipped else ""
        raise ConfigError(
            f"no run and no Records in {' '.join(map(str, paths))}{details}: make one by `laconic train --run-dir DIR`"
        )
    return sources


def _read(path: Path, sources: Sources, seen: set[Path]) -> list[Path]:
    """Read files of Records, and return the folders of runs, which get their labels when all are known.

    Args:
        seen: Folders that were read already: links may lead back to them.
    """
    if path.is_file():
        sources.records += _read_file(path, sources)
        return []
    if path.resolve() in seen:
        return []
    seen.add(path.resolve())
    if (path / CONFIG).exists() or (path / SUMMARY).exists():
        return [path]
    folders: list[Path] = []
    for entry in sorted(path.iterdir()):
        if entry.is_dir():
            folders += _read(entry, sources, seen)
        elif entry.suffix == ".jsonl" and re.split("[-.]", entry.stem)[0] not in OTHER_FILES:
            try:
                sources.records += _read_file(entry, sources)
            except ConfigError as error:
                sources.skipped.append(str(error))
    return folders


def _read_file(path: Path, sources: Sources) -> list[Record]:
    """Return the Records of a file; lines that are none are noted, unless there are no others."""
    try:
        records, problem = read_valid(path)
    except FileError as error:
        raise ConfigError(str(error)) from None
    if problem is not None:
        if not records:
            raise ConfigError(f"{path} does not hold records, one JSON object a line: {problem}")
        sources.skipped.append(f"{path}: {problem}")
    return records


def _labels(folders: Sequence[Path]) -> list[str]:
    """Return the names of folders, with as many parent folders as are needed to distinguish them."""
    parts = [folder.resolve().parts for folder in folders]
    depth = 1
    while depth < 6 and len({part[-depth:] for part in parts}) < len(set(parts)):
        depth += 1
    return ["/".join(part[-depth:]) for part in parts]


def _read_run(folder: Path, label: str, sources: Sources) -> None:
    try:
        has_records = (folder / RECORDS).exists()
        records = _read_file(folder / RECORDS, sources) if has_records else list(_summary(folder))
    except (ConfigError, OSError) as error:
        sources.skipped.append(f"{label}: {error}")
        return
    if not records:
        sources.skipped.append(f"{label}: the run has not ended, it has no {SUMMARY}")
        return
    sources.runs.append(folder)
    sources.records += [replace(record, values={**record.values, "run": label}) for record in records]


def _summary(folder: Path) -> Iterable[Record]:
    """Yield the summary of a run whose folder has no Records: an older run, or a server on a host of its own."""
    path = folder / SUMMARY
    if not path.exists():
        return
    try:
        values: Any = read_json(path)
    except FileError as error:
        raise ConfigError(str(error)) from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} does not hold a run's summary")
    yield Record("train.run", values, machine={}, versions={}, commit=None, at="")
