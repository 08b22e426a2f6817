"""Records of a study in, tables out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from laconic.errors import FileError
from laconic.records import Record, read

__all__ = ["Table", "read_all"]


def read_all(folder: Path, parts: Iterable[str]) -> list[Record]:
    """All Records of a study's parts that a folder keeps."""
    paths = [folder / f"{part}.jsonl" for part in parts]
    found = [record for path in paths if path.exists() for record in read(path)]
    if not found:
        raise FileError(f"no records of the study in {folder}: expected {', '.join(path.name for path in paths)}")
    return found


@dataclass(frozen=True)
class Table:
    """Text in columns."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)
