"""Records of finished work, one line each: work whose Record is present is not done again.

Processes that do different work may share a file.
"""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

from laconic.errors import FileError
from laconic.records import Record

__all__ = ["RecordLog"]

log = logging.getLogger("laconic")


class RecordLog:
    """Records by key, in a file that is only appended to, or in memory without one."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        if path is not None and path.exists():
            self._read(path)

    @classmethod
    def of_experiment(cls, folder: Path | None, experiment: str) -> RecordLog:
        """Return the log of an experiment in a folder of Records."""
        return cls(None if folder is None else folder / f"{experiment}.jsonl")

    def _read(self, path: Path) -> None:
        try:
            with path.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # another process may be writing a line
                complete, newline, torn = file.read().rpartition(b"\n")
                if torn:
                    log.warning("%s ends in half a record, as after a power cut: it is dropped", path)
                    file.truncate(len(complete + newline))
            text = complete.decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FileError(f"cannot read records: {error}") from error
        for number, line in enumerate(text.splitlines(), 1):
            try:
                record = Record.from_json(line)
                self.records[record.values["key"]] = record
            except (ValueError, TypeError, KeyError) as error:
                raise FileError(f"line {number} of {path} is no record of a study: {error}") from error

    def __contains__(self, key: str) -> bool:
        return key in self.records

    def add(self, record: Record) -> None:
        """Add a Record; it is on disk when this returns."""
        self.records[record.values["key"]] = record
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
                file.write(record.to_json() + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise FileError(f"cannot write records to {self.path}: {error.strerror or error}") from error
