"""Records of finished work, a line each: what is there is not done again."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from laconic.errors import FileError
from laconic.records import Record

__all__ = ["Ledger"]

log = logging.getLogger("laconic")


class Ledger:
    """Records by key, in a file that only ever grows; in memory alone without one."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FileError(f"cannot read records: {error}") from error
        whole, _, torn = text.rpartition("\n")
        if torn:
            log.warning("%s ends in half a record, as after a power cut: it is dropped", path)
            path.write_text(whole + "\n" if whole else "", encoding="utf-8")
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                record = Record.from_json(line)
                self.records[record.values["key"]] = record
            except (ValueError, TypeError, KeyError) as error:
                raise FileError(f"line {number} of {path} is no record of a study: {error}") from error

    def __contains__(self, key: str) -> bool:
        return key in self.records

    def add(self, record: Record) -> None:
        """Kept, and on disk before this returns."""
        self.records[record.values["key"]] = record
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(record.to_json() + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise FileError(f"cannot write records to {self.path}: {error.strerror or error}") from error
