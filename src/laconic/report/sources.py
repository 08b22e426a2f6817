"""Where Records come from: folders of runs, files of Records, folders of either."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from laconic.errors import ConfigError, FileError
from laconic.records import Record, read

__all__ = ["Sources", "gather"]

CONFIG, SUMMARY, RECORDS = "config.json", "summary.json", "records.jsonl"
"""Of a run's folder."""
OTHERS = ("events", "reports")
"""Files of JSON lines that lie in a run's folder and hold no Records."""


@dataclass
class Sources:
    """What was found.

    Args:
        records: All, in order; those of a run with a ``run`` that no other has.
        runs: Folders of runs that were read.
        skipped: What was there and could not be read, and why.
    """

    records: list[Record] = field(default_factory=list)
    runs: list[Path] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def gather(paths: Sequence[Path]) -> Sources:
    """Records of all of these.

    Raises:
        ConfigError: A path does not exist or cannot be read, or there is nothing to show in any.
    """
    found = Sources()
    folders: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path} does not exist: name a run's folder, a file of Records or a folder of these")
        try:
            folders += _read(path, found)
        except OSError as error:
            raise ConfigError(f"cannot read {error.filename or path}: {error.strerror or error}") from None
    for folder, label in zip(folders, _labels(folders), strict=True):
        _read_run(folder, label, found)
    if not found.records:
        besides = f" ({'; '.join(found.skipped[:3])})" if found.skipped else ""
        raise ConfigError(
            f"no run and no Records in {' '.join(map(str, paths))}{besides}: make one by `laconic train --run-dir DIR`"
        )
    return found


def _read(path: Path, found: Sources) -> list[Path]:
    """Files of Records at once; the folders of runs, to be named when all are known."""
    if path.is_file():
        found.records += _file(path)
        return []
    if (path / CONFIG).exists() or (path / SUMMARY).exists():
        return [path]
    folders: list[Path] = []
    for one in sorted(path.iterdir()):
        if one.is_dir():
            folders += _read(one, found)
        elif one.suffix == ".jsonl" and one.stem.split("-")[0] not in OTHERS:
            try:
                found.records += _file(one)
            except ConfigError as error:
                found.skipped.append(str(error))
    return folders


def _file(path: Path) -> list[Record]:
    try:
        records = read(path)
    except FileError as error:
        raise ConfigError(str(error)) from None
    for record in records:
        if not isinstance(record.kind, str) or not isinstance(record.values, dict):
            raise ConfigError(f"{path} does not hold records: one has no kind or no values")
    return records


def _labels(folders: Sequence[Path]) -> list[str]:
    """Names of folders; as many folders above them as tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    depth = 1
    while depth < 6 and len({one[-depth:] for one in parts}) < len(set(parts)):
        depth += 1
    return ["/".join(one[-depth:]) for one in parts]


def _read_run(folder: Path, label: str, found: Sources) -> None:
    try:
        records = _file(folder / RECORDS) if (folder / RECORDS).exists() else list(_summary(folder))
    except (ConfigError, OSError) as error:
        found.skipped.append(f"{label}: {error}")
        return
    if not records:
        found.skipped.append(f"{label}: the run has not ended, it has no {SUMMARY}")
        return
    found.runs.append(folder)
    found.records += [replace(record, values={**record.values, "run": label}) for record in records]


def _summary(folder: Path) -> Iterable[Record]:
    """Of a run before there were Records in its folder, or of a server on a host of its own."""
    path = folder / SUMMARY
    if not path.exists():
        return
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} does not hold a run's summary")
    yield Record("train.run", values, machine={}, versions={}, commit=None, at="")
