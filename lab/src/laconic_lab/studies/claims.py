"""Claims of papers, what was found here, and the one rule that compares the two."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from laconic.tables import Table
from laconic_lab.studies.intervals import Interval

__all__ = ["Claim", "Evidence", "Finding", "How", "claims_table", "findings_of", "verdict"]

How = Literal["measured", "formula", "simulated", "fitted"]
"""How a value was obtained. ``formula``: computed by the paper's own formula, which shows no more than consistency."""


class Evidence(NamedTuple):
    """What the Records of a study say about a claim.

    Args:
        interval: The value and its 95 % confidence interval.
        basis: Data, runs and other conditions, in words.
        how: How the value was obtained.
        sources: Values of the Records behind it.
        differs: How the set-up differs from the paper's, in words; empty where it does not.
    """

    interval: Interval
    basis: str
    how: How = "measured"
    sources: Sequence[Mapping[str, Any]] = ()
    differs: str = ""


@dataclass(frozen=True)
class Claim:
    """A statement of a paper as a number.

    Args:
        key: Unique within the study.
        section: Where the paper makes it.
        value: The claimed value or bound.
        relation: ``=`` (equal within the tolerance), ``>``, ``<``, ``≤`` or ``best`` (this value is the best of a
            series).
        tolerance: Largest difference that still counts as equal; set by us.
        evidence: Function from the study's results to evidence; None when the Records do not cover the claim.
    """

    key: str
    statement: str
    section: str
    value: float
    relation: Literal["=", "<", "≤", ">", "best"] = "="
    unit: str = ""
    tolerance: float = 0.0
    evidence: Callable[[Any], Evidence | None] = lambda results: None

    @property
    def claimed(self) -> str:
        """The claimed value as text, with relation, tolerance and unit."""
        sign = f"{self.relation} " if self.relation in "<≤>" else ""
        tolerance = f" ± {self.tolerance:g}" if self.tolerance else ""
        return f"{sign}{self.value:g}{tolerance}{f' {self.unit}' if self.unit else ''}"


def verdict(claim: Claim, interval: Interval, how: How = "measured") -> str:
    """Return ``yes``, ``no`` or ``undecided``: whether all, none or a part of the interval agrees with the claim.

    For ``best`` the interval spans all values of the series that are as good as the best one. A verdict from a single
    measurement ends with ``, one run``, one whose settings were chosen to obtain the claimed value with ``, fitted``.
    """
    low, high, value = interval.low, interval.high, claim.value
    if claim.relation == "=":
        least, most = value - claim.tolerance, value + claim.tolerance
        holds, fails = least <= low and high <= most, high < least or low > most
    elif claim.relation == "best":
        holds, fails = low == high == value, not low <= value <= high
    elif claim.relation == "<":
        holds, fails = high < value, low >= value
    elif claim.relation == "≤":
        holds, fails = high <= value, low > value
    else:
        holds, fails = low > value, high <= value
    answer = "yes" if holds else "no" if fails else "undecided"
    if how == "fitted":
        return f"{answer}, fitted"
    return f"{answer}, one run" if interval.runs == 1 and how == "measured" else answer


class Finding(NamedTuple):
    """A claim and the evidence for or against it."""

    claim: Claim
    evidence: Evidence

    @property
    def verdict(self) -> str:
        return verdict(self.claim, self.evidence.interval, self.evidence.how)

    @property
    def difference(self) -> float:
        return self.evidence.interval.mean - self.claim.value

    @property
    def found(self) -> str:
        """The value found here as text, with its interval."""
        mean, low, high, _ = self.evidence.interval
        if self.claim.relation == "best":
            return f"{mean:.0f}, tied with {low:.0f} to {high:.0f}"
        if low == high:
            return f"{mean:.4g}"
        digits = 4 if abs(mean) < 0.1 else 3 if abs(mean) < 10 else 2
        return f"{mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"

    def values(self) -> dict[str, Any]:
        """The fields of a Record of kind ``study.claim``."""
        claim, ((mean, low, high, runs), basis, how, _, differs) = self
        return {
            "key": claim.key, "claim": claim.statement, "section": claim.section, "relation": claim.relation,
            "claimed": claim.value, "tolerance": claim.tolerance, "unit": claim.unit, "measured": mean, "low": low,
            "high": high, "runs": runs, "difference": self.difference, "how": how, "verdict": self.verdict,
            "on": basis, "differs": differs,
        }  # fmt: skip


def findings_of(claims: Iterable[Claim], results: Any) -> list[Finding]:
    """Return a finding for every claim that the results cover."""
    covered = ((claim, claim.evidence(results)) for claim in claims)
    return [Finding(claim, evidence) for claim, evidence in covered if evidence is not None]


def claims_table(findings: Iterable[Finding]) -> Table:
    """Return the table of claims that every study shows."""
    rows = [
        (claim.statement, claim.section, claim.claimed, finding.found, f"{finding.difference:+.3g}", how,
         finding.verdict, basis)
        for finding in findings
        for claim, (_, basis, how, *_) in [finding]
    ]  # fmt: skip
    columns = ("claim", "section", "claimed", "here (95 %)", "difference", "how", "verdict", "basis")
    return Table(columns, rows, text_columns=len(columns), title="Claims")
