"""Time, waiting and bytes of a whole training, from the steps that were timed over a link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any

from laconic_lab.bench.gpt.methods import METHODS, powersgd_phase

__all__ = ["by_step", "composed", "curve", "reached"]

WARMUP = 2
"""Steps that are not representative: DDP settles its buckets in the first and sends new ones in the second. With local
steps it is the first exchange of every fragment, whose lengths the ranks do not know yet."""


def by_step(method: str, row: Sequence[float], steps: int, powersgd_start: int | None = None) -> list[float]:
    """Return the figure of each step of a training from those of its first steps.

    The work of a step repeats with the method's period, so the mean of each position in the period is repeated.
    PowerSGD has two phases: plain means, and PowerSGD's.
    """
    one = METHODS[method]
    if one.hook == "powersgd":
        start = len(row) // 2 if powersgd_start is None else powersgd_start
        plain, compressed = (_periodic(part, 1, WARMUP) for part in (row[:start], row[start:]))
        phase = min(steps, powersgd_phase(steps))
        return plain * phase + compressed * (steps - phase)
    repeated = _periodic(row, one.period, one.fragments * one.period if one.every else WARMUP)
    return [repeated[step % one.period] for step in range(steps)]


def _periodic(row: Sequence[float], period: int, warmup: int) -> list[float]:
    """Return the mean of each position in the period, without the first steps if there is a period besides them."""
    first = warmup if len(row) >= warmup + period else 0
    return [fmean(row[first + position :: period] or row[position::period] or row) for position in range(period)]


def composed(method: str, timing: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return the seconds after each step and the totals of a training of ``steps`` steps over a link.

    ``composed_s`` is computed from the first steps alone, also where all were timed.
    """
    start, counted = timing["powersgd_start"], len(timing["seconds"])
    whole = counted >= steps
    first = min(counted, int(timing["composed_from"]))
    estimate = by_step(method, timing["seconds"][:first], steps, start)
    seconds = list(timing["seconds"][:steps]) if whole else estimate
    figures = {
        name: sum(timing[name][:steps]) if whole else sum(by_step(method, timing[name], steps, start))
        for name in ("waited", "sent", "received")
    }
    total = sum(seconds) + timing["finish_s"]
    return {
        "clock": list(accumulate(seconds)), "train_s": total, "composed_s": sum(estimate) + timing["finish_s"],
        "real_s": total if whole else None, "step_s": sum(seconds) / steps, "steps_timed": counted,
        "composed_from": first,
        "waiting_share": (figures["waited"] + timing["finish_s"] * (METHODS[method].every > 0)) / total,
        "sent_nbytes": figures["sent"] + timing["finish_nbytes"][0],
        "received_nbytes": figures["received"] + timing["finish_nbytes"][1],
    }  # fmt: skip


def curve(losses: Sequence[Sequence[float]], clock: Sequence[float], train_s: float) -> list[list[float]]:
    """Return [step, seconds, loss]; the last loss is that after ``finish``."""
    at = {0: 0.0} | dict(enumerate(clock, 1))
    *before, (last, loss) = losses
    return [*([step, at[int(step)], each] for step, each in before), [last, train_s, loss]]


def reached(points: Sequence[Sequence[float]], goal: float) -> tuple[float, int] | None:
    """Return the seconds and the step at which a loss was at most ``goal`` for the first time, or None."""
    return next(((seconds, int(step)) for step, seconds, loss in points if loss <= goal), None)
