"""From Records to tables: claimed, measured, difference, verdict; the map; the collapse."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from laconic.records import Record
from laconic_lab.studies.claims import Claim, measured
from laconic_lab.studies.intervals import Interval, mean_interval
from laconic_lab.studies.oland2015.claims import CLAIMS
from laconic_lab.studies.oland2015.error_decomposition import WAYS
from laconic_lab.studies.oland2015.experiments import CEILING, FIX, PARTS, ZERO, c
from laconic_lab.studies.oland2015.settings import BASELINE
from laconic_lab.studies.tables import Table, read_all

__all__ = ["Finding", "Results", "closest", "findings", "load", "tables"]

FLOAT_BITS = 32
POINT = ("lr", "l1", "decay", "batch", "pixels", "sends")
"""What, beside the codec, makes a setting."""

PER_RUN = ("raw_bits", "whole_bits", "coded_bits", "peak", "final", "peak_epoch", "near_peak_epoch")

C5, C6 = c(5).spec, c(6).spec


def load(folder: Path) -> list[Record]:
    """All Records of a study that a folder keeps."""
    return read_all(folder, PARTS)


@dataclass
class Setting:
    """All runs of one setting: what each unit's Record says, in the order of the runs' numbers."""

    units: list[Mapping[str, Any]]

    @property
    def values(self) -> Mapping[str, Any]:
        return self.units[0]

    @property
    def num_runs(self) -> int:
        return sum(unit["runs"] for unit in self.units)

    def runs(self, name: str) -> list[float]:
        """A value per run."""
        return [one for unit in self.units for one in unit[name]]

    def mean(self, name: str) -> float:
        return fmean(self.runs(name))

    def curve(self, name: str) -> list[float]:
        """The mean over runs, epoch by epoch."""
        weights = [unit["runs"] for unit in self.units]
        values = zip(*(unit[name] for unit in self.units), strict=True)
        return [sum(w * v for w, v in zip(weights, some, strict=True)) / sum(weights) for some in values]

    def first(self, runs: int) -> Setting:
        """Some of the runs: only the same ones can be compared closely."""
        kept: list[Mapping[str, Any]] = []
        for unit in self.units:
            left = runs - sum(one["runs"] for one in kept)
            if left > 0:
                kept.append({**unit, "runs": min(left, unit["runs"]), **{k: unit[k][:left] for k in PER_RUN}})
        return Setting(kept)


class Results:
    """Records by part and setting; of a part that was run on several data or lengths, the study of most runs.

    Args:
        records: Of one or more parts.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self.parts: dict[str, dict[tuple[Any, ...], Setting]] = {}
        studies: dict[str, dict[tuple[Any, ...], list[Mapping[str, Any]]]] = {}
        for values in (record.values for record in records):
            study = tuple(values[name] for name in ("data", "workers", "epochs", "seed", "device"))
            studies.setdefault(values["part"], {}).setdefault(study, []).append(values)
        for part, some in studies.items():
            largest = max(some.values(), key=lambda units: sum(unit["runs"] for unit in units))
            settings = self.parts.setdefault(part, {})
            for unit in sorted(largest, key=lambda unit: int(unit["first_run"])):
                key = (unit["codec"], *(unit[name] for name in POINT))
                settings.setdefault(key, Setting([])).units.append(unit)

    def find(self, part: str, codec: str, **point: Any) -> Setting | None:
        """The setting of that codec, at a point where the part has several."""
        for key, setting in self.parts.get(part, {}).items():
            here = dict(zip(POINT, key[1:], strict=True))
            if key[0] == codec and all(here[name] == value for name, value in point.items()):
                return setting
        return None

    def in_grid(self, codec: str) -> Setting | None:
        """A setting of the grid; the headline's first runs are the same and need not be trained again."""
        found = self.find("grid", codec)
        if found is None and "grid" in self.parts and (found := self.find("headline", codec)) is not None:
            runs = min(setting.num_runs for setting in self.parts["grid"].values())
            found = found.first(runs)
        return found


# ------------------------------------------------------------------------------------------------------------- claims


@dataclass(frozen=True)
class Finding:
    """A claim and what was measured of it."""

    claim: Claim
    measured: Interval
    data: str

    @property
    def difference(self) -> float:
        return self.measured.mean - self.claim.value

    @property
    def verdict(self) -> str:
        claim, (mean, low, high, runs) = self.claim, self.measured
        if runs == 1:
            return "one run"
        if claim.relation == "best":
            return "no" if not low <= claim.value <= high else "yes" if low == high else "not seen"
        if claim.relation == "=":
            if low <= claim.value <= high:  # a wide interval contains anything
                return "yes" if high - low <= 2 * claim.close else "not seen"
            return "close" if abs(mean - claim.value) <= claim.close else "no"
        above, below = (low > claim.value, high < claim.value)
        if claim.relation == "<":
            above, below = below, above
        return "yes" if above else "no" if below else "not seen"

    def values(self) -> dict[str, Any]:
        claim, (mean, low, high, runs) = self.claim, self.measured
        return {
            "claim": claim.what, "section": claim.section, "relation": claim.relation, "claimed": claim.value,
            "unit": claim.unit, "measured": mean, "low": low, "high": high, "runs": runs,
            "difference": self.difference, "verdict": self.verdict, "data": self.data,
        }  # fmt: skip


def findings(results: Results) -> list[Finding]:
    """Of every claim that the Records speak of."""
    return [Finding(claim, *found) for claim, found in measured(CLAIMS, MEASURES, results)]


Measured = tuple[Interval, str] | None


def _values(
    name: str, codec: str, function: Callable[[float], float] = lambda bits: bits
) -> Callable[[Results], Measured]:
    def measure(results: Results) -> Measured:
        setting = results.find("headline", codec)
        return None if setting is None else (mean_interval(setting.runs(name)).map(function), setting.values["data"])

    return measure


def _times(bits: float) -> float:
    return FLOAT_BITS / bits


def _pairs(results: Results, part: str, codec: str) -> tuple[Setting, Setting] | None:
    """A setting and the baseline: runs of one number start from the same weights."""
    setting, baseline = results.find(part, codec), results.find(part, BASELINE.spec)
    return None if setting is None or baseline is None else (setting, baseline)


def _beside(part: str, codec: str, name: str) -> Callable[[Results], Measured]:
    """The mean of the differences."""

    def measure(results: Results) -> Measured:
        both = _pairs(results, part, codec)
        if both is None:
            return None
        differences = [x - y for x, y in zip(both[0].runs(name), both[1].runs(name), strict=False)]
        return mean_interval(differences), both[0].values["data"]

    return measure


def _epochs(results: Results) -> Measured:
    both = _pairs(results, "headline", C6)
    if both is None:
        return None
    fewer = [100 * (1 - x / y) for x, y in zip(*(one.runs("peak_epoch") for one in both), strict=False)]
    return mean_interval(fewer), both[0].values["data"]


def _overall(results: Results) -> Measured:
    both = _pairs(results, "headline", C6)
    if both is None:
        return None
    epochs = zip(*(one.runs("peak_epoch") for one in both), strict=False)
    times = [FLOAT_BITS / bits * y / x for bits, (x, y) in zip(both[0].runs("coded_bits"), epochs, strict=False)]
    return mean_interval(times), both[0].values["data"]


def _best_floor(results: Results) -> Measured:
    """The floor of the best mean; from the lowest to the highest of those whose interval reaches it."""
    codecs = {floor: c(floor, m=CEILING - floor).spec for floor in range(2, CEILING)} | {CEILING: f"uniform:{CEILING}"}
    settings = {floor: found for floor, codec in codecs.items() if (found := results.in_grid(codec)) is not None}
    if len(settings) < len(codecs):
        return None
    intervals = {floor: mean_interval(setting.runs("peak")) for floor, setting in settings.items()}
    best = max(intervals, key=lambda floor: intervals[floor].mean)
    tied = [floor for floor, one in intervals.items() if one.high >= intervals[best].mean]
    return Interval(best, min(tied), max(tied), intervals[best].runs), settings[best].values["data"]


def _correlation(results: Results) -> Measured:
    found = results.find("entropy", BASELINE.spec)
    if found is None:
        return None
    layers = [mean_interval([one for one in layer if one is not None]) for layer in found.values["correlation"]]
    return min(layers), found.values["data"]


def _uncentred(results: Results) -> Measured:
    """From the means over runs."""
    found = results.find("entropy", BASELINE.spec)
    if found is None:
        return None
    values = found.values
    m, f = values["entropy_bits"].index(4), values["entropy_rates"].index(0.03)
    cosines = []
    for derivative, entropy in zip(values["derivative_by_epoch"], values["entropy_by_epoch"], strict=True):
        x, y = [math.log2(g + 1) for g in derivative], entropy[m][f]
        cosines.append(_dot(x, y) / math.sqrt(_dot(x, x) * _dot(y, y)))
    return Interval(min(cosines), min(cosines), min(cosines), found.num_runs), values["data"]


def _dot(x: Sequence[float], y: Sequence[float]) -> float:
    return math.fsum(a * b for a, b in zip(x, y, strict=True))


def _sampling(results: Results) -> Measured:
    found = results.find("entropy", BASELINE.spec)
    if found is None:
        return None
    return max(mean_interval(layer) for layer in found.values["largest_sampling_error"]), found.values["data"]


MEASURES: dict[str, Callable[[Results], Measured]] = {
    "c5_raw_bits": _values("raw_bits", C5),
    "c5_raw_times": _values("raw_bits", C5, _times),
    "c5_coded_bits": _values("coded_bits", C5),
    "c5_coded_times": _values("coded_bits", C5, _times),
    "c5_peak": _beside("headline", C5, "peak"),
    "c6_coded_bits": _values("coded_bits", C6),
    "c6_coded_times": _values("coded_bits", C6, _times),
    "c6_peak": _beside("headline", C6, "peak"),
    "c6_final": _beside("headline", C6, "final"),
    "c6_epochs": _epochs,
    "c6_overall": _overall,
    "fixed_8": _beside("fixed", "uniform:8", "peak"),
    "best_floor": _best_floor,
    "correlation": _correlation,
    "uncentred": _uncentred,
    "sampling": _sampling,
}


# ------------------------------------------------------------------------------------------------------------- tables


def tables(results: Results) -> list[Table]:
    """All that the Records allow."""
    found = [_claims(results), _settings_of_headline(results), _closest(results), _lines(results), _beyond(results)]
    found += [_by_gradient(results), _collapse(results), _gradients(results)]
    return [table for table in found if table.rows]


def _claims(results: Results) -> Table:
    rows = [
        (
            one.claim.what,
            one.claim.section,
            _claimed(one.claim),
            _shown(one),
            f"{one.difference:+.3g}",
            one.verdict,
            f"{one.data}, {one.measured.runs:,} run{'s' if one.measured.runs > 1 else ''}",
        )
        for one in findings(results)
    ]
    columns = ("claim", "section", "paper", "measured (95 %)", "difference", "verdict", "on")
    return Table("What the paper claims", columns, rows)


def _claimed(claim: Claim) -> str:
    relation = f"{claim.relation} " if claim.relation in ("<", ">") else ""
    return f"{relation}{claim.value:g}{f' {claim.unit}' if claim.unit else ''}"


def _shown(finding: Finding) -> str:
    mean, low, high, _ = finding.measured
    if finding.claim.relation == "best":
        return f"{mean:.0f}, tied with {low:.0f} to {high:.0f}"
    digits = 4 if abs(mean) < 0.1 else 3 if abs(mean) < 10 else 2
    return f"{mean:.{digits}f}" + (f" ({low:.{digits}f} to {high:.{digits}f})" if low < high else "")


def _settings_of_headline(results: Results) -> Table:
    rows = []
    for setting in results.parts.get("headline", {}).values():
        row = [setting.values["codec"], f"{setting.num_runs:,}"]
        for name, digits in (("raw_bits", 3), ("coded_bits", 3), ("peak", 3), ("final", 3), ("peak_epoch", 1)):
            mean, low, high, _ = mean_interval(setting.runs(name))
            row.append(f"{mean:.{digits}f} ± {(high - low) / 2:.{digits}f}")
        rows.append(tuple(row))
    columns = ("codec", "runs", "raw bits", "coded bits", "best accuracy %", "last accuracy %", "epoch of the best")
    return Table("Headline", columns, rows)


def closest(results: Results) -> list[Setting]:
    """Points of the map's c = 5, by how far their raw and coded bits together are from the paper's."""
    claims = {claim.key: claim.value for claim in CLAIMS}

    def off(setting: Setting) -> float:
        raw, coded = setting.mean("raw_bits"), setting.mean("coded_bits")
        return abs(raw - claims["c5_raw_bits"]) + abs(coded - claims["c5_coded_bits"])

    return sorted((s for key, s in results.parts.get("map", {}).items() if key[0] == C5), key=off)


def _closest(results: Results) -> Table:
    rows = [_point(results, setting) for setting in closest(results)[:8]]
    return Table("Points of the map whose bits at c = 5 are closest to the paper's", POINT_COLUMNS, rows)


POINT_COLUMNS = (
    "learning rate", "l1", "decay", "batch", "baseline, best (last) %", "c = 5: raw, coded bits", "best (last) %",
    "c = 6: raw, coded bits", "best (last) %",
)  # fmt: skip


def _point(results: Results, setting: Setting) -> tuple[str, ...]:
    values = setting.values
    where = {name: values[name] for name in POINT}
    batch = f"{values['batch']}{'' if values['pixels'] == 'unit' else ', pixels centred'}"
    row = [f"{values['lr']:g}", f"{values['l1']:g}", f"{values['decay']:g}", batch]
    baseline = results.find("map", BASELINE.spec, **where)
    row.append("" if baseline is None else _accuracy(baseline))
    for codec in (C5, C6):
        one = results.find("map", codec, **where)
        row += ["", ""] if one is None else [_bits(one), _accuracy(one)]
    return tuple(row)


def _accuracy(setting: Setting) -> str:
    return f"{setting.mean('peak'):.2f} ({setting.mean('final'):.2f})"


def _bits(setting: Setting) -> str:
    return f"{setting.mean('raw_bits'):.2f}, {setting.mean('coded_bits'):.2f}"


def _lines(results: Results) -> Table:
    """What the map varies beside the plane."""
    default = next(iter(results.parts.get("headline", {}).values()), None)
    if default is None:
        return Table("", (), [])
    lines = [
        setting
        for key, setting in results.parts.get("map", {}).items()
        if key[0] == C5 and (setting.values["lr"], setting.values["l1"]) == (default.values["lr"], default.values["l1"])
    ]
    title = "Decay, mini-batch and pixels at the headline's learning rate and l1"
    return Table(title, POINT_COLUMNS, [_point(results, setting) for setting in lines])


def _beyond(results: Results) -> Table:
    rows = []
    for key, fixed in results.parts.get("beyond", {}).items():
        if key[0] != FIX.spec:
            continue
        where = dict(zip(POINT, key[1:], strict=True))
        others = [results.find("map", BASELINE.spec, **where), results.find("map", C5, **where)]
        others.append(results.find("beyond", ZERO.spec, **where))
        if None not in others:
            baseline, paper, zero = (one for one in others if one is not None)
            row = [f"{where['lr']:g}", f"{where['l1']:g}", _accuracy(baseline)]
            for one in (paper, zero, fixed):
                row += [_bits(one), _accuracy(one)]
            rows.append(tuple(row))
    columns = ["learning rate", "l1", "baseline, best (last) %"]
    for name in ("c = 5", "c = 5, zero", "c = 4, zero, tail 0.001"):
        columns += [f"{name}: raw, coded bits", "best (last) %"]
    return Table("Beyond the paper: zero is a level, and outliers travel apart", columns, rows)


def _by_gradient(results: Results) -> Table:
    rows = []
    for key, setting in results.parts.get("beyond", {}).items():
        if "by=grad" in key[0]:
            rows.append((key[0], _bits(setting), _accuracy(setting)))
    return Table("Levels by the derivative (section 3.2)", ("codec", "raw, coded bits", "best (last) %"), rows)


def _collapse(results: Results) -> Table:
    setting = results.find("collapse", BASELINE.spec)
    rows = []
    if setting is not None:
        values = setting.values
        for way, meaning in WAYS.items():
            rows.append((meaning, *(f"{one:.2f}" for one in values[f"anatomy_{way}"])))
        for name, meaning in FULLEST.items():
            rows.append((meaning, *(f"{one:.3g}" for one in values[f"anatomy_{name}"])))
    epochs = () if setting is None else tuple(f"epoch {epoch}" for epoch in setting.values["anatomy_epochs"])
    return Table("The same weights, quantized in several ways: accuracy %", ("weights", *epochs), rows)


FULLEST = {
    "share": "share of layer one in its fullest bin",
    "width": "width of that bin",
    "offset": "its centre to the mean of its weights",
    "spread": "standard deviation of its weights",
}


def _gradients(results: Results) -> Table:
    rows = [(key[0], _bits(one), _accuracy(one)) for key, one in results.parts.get("gradients", {}).items()]
    return Table("Gradients after every mini-batch", ("codec", "raw, coded bits", "best (last) %"), rows)
