"""Sections of a report that other distributions draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol

from laconic.records import Record
from laconic.report.plots import Section

__all__ = ["ByKind", "Plugin", "installed"]

ByKind = Mapping[str, Sequence[Mapping[str, Any]]]
"""Values of Records, by kind."""


class Plugin(Protocol):
    """Sections that another distribution draws, registered in the entry-point group ``laconic.report``.

    If a section cannot be drawn, it is drawn again without the Records of which none can be drawn alone, and the page
    names what is left out. A plug-in should raise ``RecordError`` if Records do not fit together: its text is shown.
    """

    schemas: Mapping[str, Any]
    """For each kind of Record that the sections need a TypedDict; see ``laconic.records.checked_values``."""

    def derive(self, records: Sequence[Record]) -> tuple[list[Record], list[str]]:
        """Return Records computed from the given ones, and a line for each that could not be computed."""
        ...

    def sections(self, by_kind: ByKind) -> list[tuple[str, Callable[[], Section]]]:
        """Return the sections that these Records allow: a name and a function that draws it."""
        ...


def installed() -> list[Plugin]:
    """Return the installed report plug-ins."""
    return [entry.load() for entry in entry_points(group="laconic.report")]
