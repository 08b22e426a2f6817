"""Records for tests of the report."""

from __future__ import annotations

from typing import Any

from laconic.records import Record


def record(kind: str, **values: Any) -> Record:
    """One that says nothing of the machine, which takes time to look at."""
    about: dict[str, Any] = {"machine": {"cpu": "a chip", "cores": 2}, "versions": {"laconic": "0"}}
    return Record(kind, values, commit="abc", at="2026-01-01T00:00:00+00:00", **about)
