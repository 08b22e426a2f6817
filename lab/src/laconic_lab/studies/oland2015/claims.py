"""The paper's claims, and the evidence for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from laconic_lab.studies.claims import Claim, Evidence, How
from laconic_lab.studies.intervals import Interval, mean_interval
from laconic_lab.studies.oland2015.experiments import CEILING, c
from laconic_lab.studies.oland2015.results import Results, SettingRuns
from laconic_lab.studies.oland2015.settings import BASELINE, EPOCHS

__all__ = ["C5", "C6", "CLAIMS"]

FLOAT_BITS = 32
C5, C6 = c(5).spec, c(6).spec


def _evidence(interval: Interval, setting: SettingRuns, how: How = "measured") -> Evidence:
    basis = f"{setting.values['data']}, {interval.runs:,} run{'s' if interval.runs > 1 else ''}"
    return Evidence(interval, basis, how, setting.sources, _differs(setting.values))


def _differs(values: Mapping[str, Any]) -> str:
    """Describe how runs differ from the paper's."""
    parts = [] if values["data"] == "mnist" else [f"{values['data']}, not mnist"]
    parts += [] if values["epochs"] == EPOCHS else [f"{values['epochs']} epochs, not {EPOCHS}"]
    return "; ".join(parts)


def _mean(
    name: str, codec: str, function: Callable[[float], float] = lambda bits: bits, how: How = "measured"
) -> Callable[[Results], Evidence | None]:
    def evidence(results: Results) -> Evidence | None:
        setting = results.find("headline", codec)
        return None if setting is None else _evidence(mean_interval(setting.per_run(name)).map(function), setting, how)

    return evidence


def _fitted(name: str, function: Callable[[float], float] = lambda bits: bits) -> Callable[[Results], Evidence | None]:
    """Learning rate, decay, l1 and mini-batch were chosen so that the bits at c = 5 come close to the paper's."""
    return _mean(name, C5, function, "fitted")


def _times_smaller(bits: float) -> float:
    return FLOAT_BITS / bits


Pair = tuple[SettingRuns, SettingRuns]


def _with_baseline(results: Results, experiment: str, codec: str) -> Pair | None:
    """Return a setting and the baseline; runs of the same number start from the same weights."""
    setting, baseline = results.find(experiment, codec), results.find(experiment, BASELINE.spec)
    return None if setting is None or baseline is None else (setting, baseline)


def _over_baseline(experiment: str, codec: str, name: str) -> Callable[[Results], Evidence | None]:
    """The mean of the differences between runs of the same number."""

    def evidence(results: Results) -> Evidence | None:
        pair = _with_baseline(results, experiment, codec)
        if pair is None:
            return None
        differences = [x - y for x, y in zip(pair[0].per_run(name), pair[1].per_run(name), strict=False)]
        return _evidence(mean_interval(differences), pair[0])

    return evidence


def _epochs_saved(results: Results) -> Evidence | None:
    pair = _with_baseline(results, "headline", C6)
    if pair is None:
        return None
    fewer = [100 * (1 - x / y) for x, y in zip(*(one.per_run("peak_epoch") for one in pair), strict=False)]
    return _evidence(mean_interval(fewer), pair[0])


def _traffic_saved(results: Results) -> Evidence | None:
    pair = _with_baseline(results, "headline", C6)
    if pair is None:
        return None
    epochs = zip(*(one.per_run("peak_epoch") for one in pair), strict=False)
    times = [FLOAT_BITS / bits * y / x for bits, (x, y) in zip(pair[0].per_run("coded_bits"), epochs, strict=False)]
    return _evidence(mean_interval(times), pair[0])


def _best_floor(results: Results) -> Evidence | None:
    """The floor of the best mean; the interval spans the floors whose own interval reaches that mean."""
    codecs = {floor: c(floor, m=CEILING - floor).spec for floor in range(2, CEILING)} | {CEILING: f"uniform:{CEILING}"}
    settings = {floor: one for floor, codec in codecs.items() if (one := results.in_grid(codec)) is not None}
    if len(settings) < len(codecs):
        return None
    intervals = {floor: mean_interval(setting.per_run("peak")) for floor, setting in settings.items()}
    best = max(intervals, key=lambda floor: intervals[floor].mean)
    tied = [floor for floor, one in intervals.items() if one.high >= intervals[best].mean]
    return _evidence(Interval(best, min(tied), max(tied), intervals[best].runs), settings[best])


def _smaller_m(results: Results) -> Evidence | None:
    """Best accuracy at M = 4 minus that at M = 5, both with c = 5: the paper's 9:5 and 10:5, run by run."""
    nine, ten = results.in_grid(C5), results.in_grid(c(5, m=5).spec)
    if nine is None or ten is None:
        return None
    differences = [x - y for x, y in zip(nine.per_run("peak"), ten.per_run("peak"), strict=False)]
    return _evidence(mean_interval(differences), ten)


def _correlation(results: Results) -> Evidence | None:
    setting = results.find("entropy", BASELINE.spec)
    if setting is None:
        return None
    layers = [mean_interval([one for one in layer if one is not None]) for layer in setting.values["correlation"]]
    return _evidence(min(layers), setting)


def _uncentred_correlation(results: Results) -> Evidence | None:
    """Correlation of means over runs, without subtracting the mean."""
    setting = results.find("entropy", BASELINE.spec)
    if setting is None:
        return None
    values = setting.values
    m, f = values["entropy_bits"].index(4), values["entropy_rates"].index(0.03)
    cosines = []
    for derivative, entropy in zip(values["derivative_by_epoch"], values["entropy_by_epoch"], strict=True):
        x, y = [math.log2(g + 1) for g in derivative], entropy[m][f]
        cosines.append(_dot(x, y) / math.sqrt(_dot(x, x) * _dot(y, y)))
    return _evidence(Interval.exact(min(cosines), setting.num_runs), setting)


def _dot(x: Sequence[float], y: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(x, y, strict=True))


def _sampling_error(results: Results) -> Evidence | None:
    setting = results.find("entropy", BASELINE.spec)
    if setting is None:
        return None
    return _evidence(max(mean_interval(layer) for layer in setting.values["largest_sampling_error"]), setting)


GIGABIT = 1e9 / 8
"""Bytes per second of a link."""


def _coding(value: Callable[[Mapping[str, Any]], float]) -> Callable[[Results], Evidence | None]:
    """A value of every run whose weights were coded."""

    def evidence(results: Results) -> Evidence | None:
        if not results.coding:
            return None
        first = results.coding[0]
        basis = f"{first['data']}, {first['epochs']} epochs, {len(results.coding)} runs"
        values = mean_interval([value(one) for one in results.coding])
        return Evidence(values, basis, sources=results.coding, differs=_differs(first))

    return evidence


CLAIMS = (
    Claim("c5_raw_bits", "bits a weight at c = 5, before coding", "5.1", 6.8, "=", "bits", 0.34, _fitted("raw_bits")),
    Claim("c5_raw_times", "times smaller than float32, before coding", "5.1", 4.70, "=", "×", 0.25,
          _fitted("raw_bits", _times_smaller)),
    Claim("c5_coded_bits", "bits a weight at c = 5, Huffman-coded", "5.1", 3.55, "=", "bits", 0.36,
          _fitted("coded_bits")),
    Claim("c5_coded_times", "times smaller than float32 at c = 5", "5.1", 9.01, "=", "×", 0.9,
          _fitted("coded_bits", _times_smaller)),
    Claim("c5_peak", "best accuracy of c = 5 minus the baseline's", "5.1", 0.0, "<", "points",
          evidence=_over_baseline("headline", C5, "peak")),
    Claim("c6_coded_bits", "bits a weight at c = 6, Huffman-coded", "5.2", 3.78, "=", "bits", 0.38,
          _mean("coded_bits", C6)),
    Claim("c6_coded_times", "times smaller than float32 at c = 6", "5.2", 8.47, "=", "×", 0.85,
          _mean("coded_bits", C6, _times_smaller)),
    Claim("c6_peak", "best accuracy of c = 6 minus the baseline's", "5.2", 0.0, ">", "points",
          evidence=_over_baseline("headline", C6, "peak")),
    Claim("c6_final", "last accuracy of c = 6 minus the baseline's", "5.2", 0.0, ">", "points",
          evidence=_over_baseline("headline", C6, "final")),
    Claim("c6_epochs", "fewer epochs to the best accuracy at c = 6", "5.2", 20.0, "=", "%", 4.0, _epochs_saved),
    Claim("c6_overall", "less traffic in all at c = 6, epochs counted", "5.2", 10.32, "=", "×", 1.0, _traffic_saved),
    Claim("fixed_8", "accuracy of 8 fixed bits minus the baseline's", "3.1, 5.1", 0.0, "=", "points", 0.1,
          _over_baseline("fixed", "uniform:8", "peak")),
    Claim("best_floor", "best c while c + M = 10", "5.1", 6.0, "best", evidence=_best_floor),
    Claim("smaller_m", "best accuracy of 9:5 (M = 4) minus that of 10:5 (M = 5)", "5.1", 0.0, ">", "points",
          evidence=_smaller_m),
    Claim("correlation", "correlation of log(G + 1) and entropy, in the worst layer", "3.4", 0.75, ">",
          evidence=_correlation),
    Claim("uncentred", "the same, means not subtracted", "3.4", 0.75, ">", evidence=_uncentred_correlation),
    Claim("sampling", "largest error of an entropy from 3 % of the weights", "3.4, 5.1", 0.25, "<", "bits",
          evidence=_sampling_error),
    Claim("lzw", "LZW makes float32 weights smaller by", "3", 1.1, "<", "×",
          evidence=_coding(lambda one: one["nbytes"] / one["lzw_nbytes"])),
    Claim("side", "share of a frame at c = 5 that is not codes of weights", "1", 5.0, "<", "%",
          evidence=_coding(lambda one: 100 * one["side_nbytes"] / one["frame_nbytes"])),
    Claim("cost", "seconds to encode and decode at c = 5 over those of sending float32, 1 Gbit/s", "6", 0.5, "<", "×",
          evidence=_coding(lambda one: (one["encode_s"] + one["decode_s"]) / (one["nbytes"] / GIGABIT))),
)  # fmt: skip
"""The bounds of the last four are ours: the paper says very little, little if any, insignificant and minuscule."""
