"""A paper's statement as a number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Claim", "measured"]

R = TypeVar("R")
M = TypeVar("M")


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


def measured(
    claims: Iterable[Claim], measures: Mapping[str, Callable[[R], M | None]], results: R
) -> Iterator[tuple[Claim, M]]:
    """Every claim that the Records speak of, and what they say."""
    for claim in claims:
        found = measures[claim.key](results)
        if found is not None:
            yield claim, found
