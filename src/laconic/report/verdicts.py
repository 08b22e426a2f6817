"""Verdicts: whether to compress in a measured situation, by what, and what is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from laconic.plan.formulas import exceeds_error
from laconic.report.summary import fraction
from laconic.tables import Table

__all__ = ["Candidate", "Verdict", "decide", "verdict_table"]

NOTHING = "nothing: do not compress"
MOST_REFUSED = 2
"""So many faster ways are named that were refused for their loss."""


class Candidate(NamedTuple):
    """A way to exchange that was measured.

    Args:
        seconds: Time of a step, a run or the way to a goal.
        nbytes: Bytes sent in as much time; None if they were not counted.
        lost: What is lost by it, as words.
        allowed: Whether that is within the limit.
    """

    name: str
    seconds: float
    nbytes: float | None
    lost: str
    allowed: bool = True


class Verdict(NamedTuple):
    """The answer of some Records: what to use in a situation.

    Args:
        situation: What was measured: engine, model, workers and link.
        baseline: What others are compared with.
        choice: The fastest way within the limit; None if it does not pay.
        best: The fastest way within the limit, even if it does not pay.
        limit: The limit on what may be lost, as words.
        refused: Faster ways that are beyond the limit.
        fewest: Where the link is not known, the way within the limit that sends least, if that is another one.
    """

    situation: str
    baseline: Candidate
    choice: Candidate | None
    best: Candidate | None
    limit: str
    refused: tuple[Candidate, ...] = ()
    fewest: Candidate | None = None

    @property
    def sentence(self) -> str:
        """The verdict as a sentence: should I, which, what do I lose, on this link; and what else on a slower one."""
        if self.fewest is None:
            return self._on_this_link
        share = _share(self.fewest, self.baseline)
        return (
            f"{self._on_this_link} On a slower link {self.fewest.name} may be faster: it sends {share} of the bytes; "
            f"{self.fewest.lost}."
        )

    @property
    def _on_this_link(self) -> str:
        if self.choice is None:
            if self.best is None:
                return f"{self.situation}: do not compress; no way was within the limit ({self.limit})."
            fast = f"{_times(self.baseline, self.best)} times as fast as {self.baseline.name}"
            return f"{self.situation}: do not compress; the fastest, {self.best.name}, is {fast}."
        share = _share(self.choice, self.baseline)
        fast = f"{_times(self.baseline, self.choice)} times as fast as {self.baseline.name}"
        sends = f" and sends {share} of its bytes" if share else ""
        return f"{self.situation}: take {self.choice.name}, which is {fast}{sends}; {self.choice.lost}."


def decide(
    situation: str, baseline: Candidate, others: Sequence[Candidate], limit: str, *, any_link: bool = False
) -> Verdict:
    """Return the verdict: the fastest way within the limit, if it is at least 1.05 times as fast as the baseline.

    Args:
        any_link: Also name the way that sends least: the situation does not say how fast the link was.

    >>> plain, sign = Candidate("plain DDP", 4.0, 8e6, ""), Candidate("ef|sign", 1.0, 25e4, "error 0.8")
    >>> decide("DDP, 1 Gbit/s", plain, [sign], "any").sentence
    'DDP, 1 Gbit/s: take ef|sign, which is 4.00 times as fast as plain DDP and sends 1/32 of its bytes; error 0.8.'
    >>> decide("DDP, 1 Gbit/s", plain, [sign._replace(seconds=3.9)], "any").choice
    """
    best = min((one for one in others if one.allowed), key=lambda one: one.seconds, default=None)
    choice = best if best is not None and exceeds_error(baseline.seconds, best.seconds, 0.0) else None
    taken = choice or baseline
    faster = [one for one in others if not one.allowed and exceeds_error(taken.seconds, one.seconds, 0.0)]
    refused = tuple(sorted(faster, key=lambda one: one.seconds)[:MOST_REFUSED])
    fewest = None
    if any_link:
        counted = [one for one in others if one.allowed and one.nbytes and one.nbytes < (taken.nbytes or 0.0)]
        fewest = min(counted, key=lambda one: one.nbytes or 0.0, default=None)
    return Verdict(situation, baseline, choice, best, limit, refused, fewest)


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    """Return a table with one row for each verdict."""
    columns = ("measured", "take", "times as fast", "bytes", "what is lost", "faster, but beyond the limit")
    rows = [
        (
            one.situation,
            one.choice.name if one.choice else NOTHING,
            _times(one.baseline, one.choice) if one.choice else "",
            _share(one.choice, one.baseline) if one.choice else "",
            f"{one.choice.lost} (limit: {one.limit})" if one.choice else "",
            "; ".join(f"{other.name}: {_times(one.baseline, other)}, {other.lost}" for other in one.refused),
        )
        for one in verdicts
    ]
    caption = (
        "The fastest way whose loss is within the limit, if it is at least 1.05 times as fast as the baseline: plain "
        "DDP, or method 1 of a parameter server."
    )
    return Table(columns, rows, 2, title="Every measured situation", caption=caption)


def _times(baseline: Candidate, other: Candidate) -> str:
    times = baseline.seconds / other.seconds
    return f"{times:.2f}" if times < 10 else f"{times:.0f}"


def _share(one: Candidate, baseline: Candidate) -> str:
    return fraction(one.nbytes, baseline.nbytes) if one.nbytes and baseline.nbytes else ""
