"""Which method a server should use over each link, by the study's times and accuracies."""

from __future__ import annotations

from statistics import fmean

from laconic.report.verdicts import Candidate, Verdict, decide
from laconic_lab.studies.kothari2021.results import LINK_NAMES, MODEL_NAMES, Results

__all__ = ["make_verdicts"]

POINTS, SEEDS = 0.5, 2
"""A method may lose so many points of top-1, as the mean of at least so many seeds."""


def make_verdicts(results: Results) -> list[Verdict]:
    """Return a verdict for each model and link on which method 1 and others were timed, the slowest first."""
    verdicts = []
    for model, link in dict.fromkeys((model, link) for model, link, _ in results.times):
        candidates = {
            method: candidate
            for (of_model, of_link, method), timed in results.times.items()
            if (of_model, of_link) == (model, link) and timed.valid
            if (candidate := _candidate(results, model, method, timed.seconds())) is not None
        }
        plain = candidates.pop("1", None)
        if plain is None or not candidates:
            continue
        where = "no slow link" if link == "unshaped" else LINK_NAMES[link]
        situation = f"Parameter server, {MODEL_NAMES[model]}, {where}"
        limit = f"{POINTS:g} points, {SEEDS} seeds"
        verdicts.append(decide(situation, plain, list(candidates.values()), limit))
    return sorted(verdicts, key=lambda verdict: -verdict.baseline.seconds)


def _candidate(results: Results, model: str, method: str, seconds: float) -> Candidate | None:
    row, plain = results.row(model, method), results.row(model, "1")
    if row is None or plain is None:
        return None
    points, seeds = fmean(row.final) - fmean(plain.final), len(row.seeds)
    lost = f"accuracy {points:+.2f} points ({seeds} seed{'s' * (seeds > 1)})"
    allowed = points >= -POINTS and seeds >= SEEDS
    return Candidate(f"method {method}", seconds, row.bytes_per_iteration, lost, allowed)
