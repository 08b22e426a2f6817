"""Goals of the study as numbers: loss beside AdamW-DDP at a share of its bytes."""

from __future__ import annotations

from collections.abc import Callable

from laconic_lab.studies.claims import Claim, Evidence
from laconic_lab.studies.gpt.results import ADAMW, MUON, Results, Row
from laconic_lab.studies.intervals import Interval, difference_interval, mean_interval

__all__ = ["CLAIMS"]


def _above(part: str, workers: int, least_ratio: float, base: str = ADAMW) -> Callable[[Results], Evidence | None]:
    """Return a function that finds our best run at about a ratio, or somewhat beyond, in per cent above a baseline."""

    def evidence(results: Results) -> Evidence | None:
        plain = results.best(part, base)
        ours = [
            row for row in results.of(part)
            if row.is_local and row.values["workers"] == workers and least_ratio <= row.ratio < 1.5 * least_ratio
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


def _every_step(results: Results) -> Evidence | None:
    """Our best run that exchanges in every step at 1/100 of the bytes, in per cent above AdamW-DDP."""
    plain = results.best("frontier", ADAMW)
    ours = [row for row in results.of("frontier") if row.is_local and row.values["every"] == 1 and row.ratio >= 100]
    if plain is None or not ours:
        return None
    row = min(ours, key=lambda each: each.loss)
    return Evidence(_per_cent(row, plain), f"{row.values['method']}, 1/{row.ratio:,.0f}", sources=row.runs)


def _beside_demo(results: Results) -> Evidence | None:
    """Our best run in every step that sends no more than DeMo, in per cent above DeMo."""
    demo = results.best("frontier", "DeMo")
    ours = [row for row in results.of("frontier") if row.is_local and row.values["every"] == 1]
    if demo is None or not ours:
        return None
    row = min((each for each in ours if each.ratio >= demo.ratio), key=lambda each: each.loss, default=None)
    if row is None:
        return None
    basis = f"{row.values['method']}, 1/{row.ratio:,.0f}, DeMo 1/{demo.ratio:,.0f}"
    return Evidence(_per_cent(row, demo), basis, sources=[*row.runs, *demo.runs])


def _one_mean(results: Results, value: Callable[[Row, Row], Interval]) -> Evidence | None:
    """Compare 16 workers that receive one coded mean with 16 that receive all frames, by the better codec."""
    rows = [row for row in results.of("workers") if row.is_local and row.values["workers"] == 16]
    pairs = [
        (row, gathered)
        for gathered in rows
        for row in rows
        if gathered.values["gather"] and not row.values["gather"]
        and all(row.values[name] == gathered.values[name] for name in ("every", "up", "lr", "outer_lr", "decay"))
    ]  # fmt: skip
    if not pairs:
        return None
    row, gathered = min(pairs, key=lambda pair: pair[0].loss / pair[1].loss)
    return Evidence(value(row, gathered), row.values["method"], sources=[*row.runs, *gathered.runs])


def _frames_received(row: Row, gathered: Row) -> Interval:
    return mean_interval([run["down_bytes"] / run["up_bytes"] for run in row.runs])


def _bits_per_sent(results: Results) -> Evidence | None:
    measured = [values for values in results.positions if values["optimizer"] == "muon"]
    if not measured:
        return None
    least = min(measured, key=lambda values: values["bits_per_sent"])
    return Evidence(Interval.exact(least["bits_per_sent"]), least["spec"], sources=[least])


CLAIMS = (
    Claim("k8", "8 workers at 1/2,000 of the bytes end at or below AdamW-DDP's loss", "goal", 0.0, "≤", "%",
          evidence=_above("large", 8, 1950)),
    Claim("confirmed", "126 M parameters, 8 workers at 1/2,000 of the bytes end at or below AdamW-DDP's loss", "goal",
          0.0, "≤", "%", evidence=_above("confirmation", 8, 1950)),
    Claim("k4", "4 workers at 1/3,000 of the bytes end at or below AdamW-DDP's loss", "goal", 0.0, "≤", "%",
          evidence=_above("large", 4, 2900)),
    Claim("k8_muon", "8 workers at 1/500 of the bytes end within 1 % of Muon-DDP's loss", "goal", 1.0, "≤", "%",
          evidence=_above("large", 8, 490, MUON)),
    Claim("every_step", "an exchange in every step at 1/100 of the bytes ends within 2 % of AdamW-DDP's loss", "goal",
          2.0, "≤", "%", evidence=_every_step),
    Claim("demo", "an exchange in every step ends below DeMo's loss with fewer bytes", "goal", 0.0, "<", "%",
          evidence=_beside_demo),
    Claim("received", "each of 16 workers receives at most 1.2 frames' worth", "goal", 1.2, "≤", "frames",
          evidence=lambda results: _one_mean(results, _frames_received)),
    Claim("one_mean", "16 workers that receive one coded mean end within 0.5 % of those that receive all frames",
          "goal", 0.5, "≤", "%", evidence=lambda results: _one_mean(results, _per_cent)),
    Claim("positions", "a sent value takes at most 7 bits at one of 64, positions and sign", "goal", 7.0, "≤", "bits",
          evidence=_bits_per_sent),
)  # fmt: skip
