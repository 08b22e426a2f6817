"""What papers claim and what Records say of it, as Records themselves: for whoever draws both and knows no paper."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from laconic.records import Record

__all__ = ["KIND", "verdicts"]

KIND = "study.claim"
PREFIXES = {"kothari2021": "kothari2021.", "oland2015": "study.oland2015", "jang2017": "jang2017."}
"""Of kinds; without a dot at the end, the kind itself."""
LAYERS = "bench.layers"


def verdicts(records: Sequence[Record]) -> tuple[list[Record], list[str]]:
    """Every claim that the Records speak of; and the studies whose Records do not suffice, and why."""
    found, failed = [], []
    for study, prefix in PREFIXES.items():
        mine = [record for record in records if _of(record, prefix)]
        if not mine:
            continue
        mine += [record for record in records if study == "jang2017" and record.kind == LAYERS]
        try:
            found += _judged(study, mine)
        except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError, AttributeError) as error:
            failed.append(f"claims of {study}: its Records do not suffice ({type(error).__name__}: {error})")
    return found, failed


def _of(record: Record, prefix: str) -> bool:
    return record.kind.startswith(prefix) if prefix.endswith(".") else record.kind == prefix


def _judged(study: str, records: Sequence[Record]) -> list[Record]:
    from importlib import import_module

    of = import_module(f"laconic_lab.studies.{study}")
    first = records[0]
    judged = []
    for one in of.findings(of.Results(records)):
        claim, measured = one.claim, one.measured
        mean, low, high = (measured, None, None) if isinstance(measured, int | float) else measured[:3]
        values: dict[str, Any] = {
            "study": study, "key": claim.key, "claim": claim.what, "section": claim.section, "relation": claim.relation,
            "claimed": claim.value, "unit": claim.unit, "measured": mean, "low": low, "high": high,
            "verdict": one.verdict,
        }  # fmt: skip
        judged.append(Record(KIND, values, first.seed, first.machine, first.versions, first.commit, first.at))
    return judged
