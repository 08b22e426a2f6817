"""Goals of the study as numbers: loss beside AdamW-DDP at a share of its bytes."""

from __future__ import annotations

from collections.abc import Callable

from laconic_lab.studies.claims import Claim, Evidence
from laconic_lab.studies.gpt.results import ADAMW, MUON, Results, Row
from laconic_lab.studies.intervals import Interval, difference_interval

__all__ = ["CLAIMS"]


def _above(part: str, workers: int, least_ratio: float, base: str = ADAMW) -> Callable[[Results], Evidence | None]:
    """Return a function that finds our best run at or beyond a ratio, in per cent above a baseline."""

    def evidence(results: Results) -> Evidence | None:
        plain = results.best(part, base)
        ours = [
            row for row in results.of(part)
            if row.is_local and row.values["workers"] == workers and row.ratio >= least_ratio
            and row.values["method"].startswith("laconic")
        ]  # fmt: skip
        if plain is None or not ours:
            return None
        row = min(ours, key=lambda each: (-len(each.runs), each.loss))
        basis = f"{row.values['method']}, 1/{row.ratio:,.0f}, {row.values['size']}"
        return Evidence(_per_cent(row, plain), basis, sources=row.runs)

    return evidence


def _per_cent(row: Row, plain: Row) -> Interval:
    return difference_interval(row.losses, plain.losses).map(lambda difference: 100 * difference / plain.loss)


CLAIMS = (
    Claim("k8", "8 workers at 1/2,000 of the bytes end at or below AdamW-DDP's loss", "goal", 0.0, "<", "%",
          evidence=_above("large", 8, 1950)),
    Claim("k4", "4 workers at 1/3,000 of the bytes end at or below AdamW-DDP's loss", "goal", 0.0, "<", "%",
          evidence=_above("large", 4, 2900)),
    Claim("k8_muon", "8 workers at 1/500 of the bytes end within 1 % of Muon-DDP's loss", "goal", 1.0, "<", "%",
          evidence=_above("large", 8, 490, MUON)),
)  # fmt: skip
