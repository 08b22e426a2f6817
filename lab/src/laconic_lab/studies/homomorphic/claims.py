"""Our own goals for the study, written as claims: the most points of top-1 that a setting may lose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laconic_lab.studies.claims import Claim, Evidence
from laconic_lab.studies.homomorphic.results import MODEL_NAMES, Results
from laconic_lab.studies.intervals import difference_interval
from laconic_lab.studies.tables import mean_and_values

__all__ = ["CLAIMS"]


def _points_lost(experiment: str, model: str, setting: dict[str, Any]) -> Callable[[Results], Evidence | None]:
    def evidence(results: Results) -> Evidence | None:
        row = results.find(experiment, model, **setting)
        dense = None if row is None else results.dense(row)
        if row is None or dense is None:
            return None
        basis = f"{row.layers} × {row.codec}, rho {row.rho:.3g}, top-1 {mean_and_values(row.final)} %"
        return Evidence(difference_interval(dense.final, row.final), basis, sources=row.runs)

    return evidence


def _goal(key: str, what: str, experiment: str, model: str, most: float, **setting: Any) -> Claim:
    statement = f"{MODEL_NAMES[model]}, {what}: points lost"
    return Claim(key, statement, "goal", most, "<", "points", evidence=_points_lost(experiment, model, setting))


CLAIMS = (
    _goal("mlp_4", "two bits, 4 workers", "sums", "mlp", 0.2, codec="ef|thc:2", workers=4),
    _goal("mlp_8", "two bits, 8 workers", "sums", "mlp", 0.2, codec="ef|thc:2", workers=8),
    _goal("mlp_tenth", "a tenth of the numbers", "layers", "mlp", 0.5, layers="subspace:0.1"),
    _goal("mlp_tenth_2", "a tenth, by two bits", "products", "mlp", 0.7, layers="subspace:0.1", codec="ef|thc:2"),
    _goal("vgg_2", "two bits", "sums", "vgg11", 0.2, codec="ef|thc:2", workers=2),
    _goal("vgg_1", "one bit", "sums", "vgg11", 0.3, codec="ef|thc:1", workers=2),
    _goal("vgg_sixth", "a sixth, by one bit", "products", "vgg11", 0.5, layers="subspace:0.125", codec="ef|thc:1"),
    _goal("vgg_13th", "a thirteenth, by one bit", "products", "vgg11", 0.5, layers="subspace:0.025", codec="ef|thc:1"),
)
