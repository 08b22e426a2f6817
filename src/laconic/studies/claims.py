"""A paper's statement as a number."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Claim"]


@dataclass(frozen=True)
class Claim:
    """One of a paper's numbers, and how to tell whether ours agrees.

    Args:
        key: What a study's ``report`` measures it by.
        what: In words.
        section: Where the paper says so.
        value: What it says.
        relation: ``=`` (the value), ``>`` (more than it), ``<`` (less than it) or ``best`` (it and no other).
        unit: Of the value.
        close: For ``=``: how far off still counts as close.
    """

    key: str
    what: str
    section: str
    value: float
    relation: str = "="
    unit: str = ""
    close: float = 0.0
