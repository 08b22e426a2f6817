"""The headline, the map of hyper-parameters, what goes beyond the paper, and the collapse."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from laconic_lab.studies.intervals import mean_interval
from laconic_lab.studies.oland2015.claims import C5, C6, CLAIMS
from laconic_lab.studies.oland2015.error_decomposition import VARIANTS
from laconic_lab.studies.oland2015.experiments import FIX, ZERO
from laconic_lab.studies.oland2015.results import POINT, Results, SettingRuns
from laconic_lab.studies.oland2015.settings import BASELINE
from laconic_lab.studies.tables import Table, make_table

__all__ = ["closest", "make_tables"]


def make_tables(results: Results) -> list[Table]:
    """Return all tables but the one of claims."""
    return [
        _headline(results), _closest(results), _lines(results), _beyond(results), _by_gradient(results),
        _collapse(results), _helps(results), _gradients(results), _buckets(results), _coding(results),
        _compared(results),
    ]  # fmt: skip


def _headline(results: Results) -> Table:
    rows = []
    for setting in results.experiments.get("headline", {}).values():
        row = [setting.values["codec"], f"{setting.num_runs:,}"]
        for name, digits in (("raw_bits", 3), ("coded_bits", 3), ("peak", 3), ("final", 3), ("peak_epoch", 1)):
            mean, low, high, _ = mean_interval(setting.per_run(name))
            row.append(f"{mean:.{digits}f} ± {(high - low) / 2:.{digits}f}")
        rows.append(tuple(row))
    columns = ("codec", "runs", "raw bits", "coded bits", "best accuracy %", "last accuracy %", "epoch of the best")
    return make_table("Headline", columns, rows)


def closest(results: Results) -> list[SettingRuns]:
    """Return the settings of the map with c = 5, sorted by the distance of their bits from the paper's."""
    claims = {claim.key: claim.value for claim in CLAIMS}

    def distance(setting: SettingRuns) -> float:
        raw, coded = setting.mean("raw_bits"), setting.mean("coded_bits")
        return abs(raw - claims["c5_raw_bits"]) + abs(coded - claims["c5_coded_bits"])

    return sorted((s for key, s in results.experiments.get("map", {}).items() if key[0] == C5), key=distance)


def _closest(results: Results) -> Table:
    rows = [_point(results, setting) for setting in closest(results)[:8]]
    return make_table("Points of the map whose bits at c = 5 are closest to the paper's", POINT_COLUMNS, rows)


POINT_COLUMNS = (
    "learning rate", "l1", "decay", "batch", "baseline, best (last) %", "c = 5: raw, coded bits", "best (last) %",
    "c = 6: raw, coded bits", "best (last) %",
)  # fmt: skip


def _point(results: Results, setting: SettingRuns) -> tuple[str, ...]:
    values = setting.values
    point = {name: values[name] for name in POINT}
    batch = f"{values['batch']}{'' if values['pixels'] == 'unit' else ', pixels centred'}"
    row = [f"{values['lr']:g}", f"{values['l1']:g}", f"{values['decay']:g}", batch]
    baseline = results.find("map", BASELINE.spec, **point)
    row.append("" if baseline is None else _accuracy(baseline))
    for codec in (C5, C6):
        other = results.find("map", codec, **point)
        row += ["", ""] if other is None else [_bits(other), _accuracy(other)]
    return tuple(row)


def _accuracy(setting: SettingRuns) -> str:
    return f"{setting.mean('peak'):.2f} ({setting.mean('final'):.2f})"


def _bits(setting: SettingRuns) -> str:
    return f"{setting.mean('raw_bits'):.2f}, {setting.mean('coded_bits'):.2f}"


def _lines(results: Results) -> Table:
    """Return the settings of the map that vary another field than learning rate and l1."""
    default = next(iter(results.experiments.get("headline", {}).values()), None)
    if default is None:
        return make_table("", (), [])
    lines = [
        setting
        for key, setting in results.experiments.get("map", {}).items()
        if key[0] == C5 and (setting.values["lr"], setting.values["l1"]) == (default.values["lr"], default.values["l1"])
    ]
    title = "Decay, mini-batch and pixels at the headline's learning rate and l1"
    return make_table(title, POINT_COLUMNS, [_point(results, setting) for setting in lines])


def _beyond(results: Results) -> Table:
    rows = []
    for key, fixed in results.experiments.get("beyond", {}).items():
        if key[0] != FIX.spec:
            continue
        point = dict(zip(POINT, key[1:], strict=True))
        others = [results.find("map", BASELINE.spec, **point), results.find("map", C5, **point)]
        others.append(results.find("beyond", ZERO.spec, **point))
        if None not in others:
            baseline, paper, zero = (one for one in others if one is not None)
            row = [f"{point['lr']:g}", f"{point['l1']:g}", _accuracy(baseline)]
            for one in (paper, zero, fixed):
                row += [_bits(one), _accuracy(one)]
            rows.append(tuple(row))
    columns = ["learning rate", "l1", "baseline, best (last) %"]
    for name in ("c = 5", "c = 5, zero", "c = 4, zero, tail 0.001"):
        columns += [f"{name}: raw, coded bits", "best (last) %"]
    return make_table("Beyond the paper: zero is a level, and outliers are sent apart", columns, rows)


def _by_gradient(results: Results) -> Table:
    rows = []
    for key, setting in results.experiments.get("beyond", {}).items():
        if "by=grad" in key[0]:
            rows.append((key[0], _bits(setting), _accuracy(setting)))
    return make_table("Levels by the derivative (section 3.2)", ("codec", "raw, coded bits", "best (last) %"), rows)


def _collapse(results: Results) -> Table:
    setting = results.find("collapse", BASELINE.spec)
    rows = []
    if setting is not None:
        values = setting.values
        for variant, meaning in VARIANTS.items():
            rows.append((meaning, *(f"{one:.2f}" for one in values[f"anatomy_{variant}"])))
        for name, meaning in FULLEST_BIN.items():
            rows.append((meaning, *(f"{one:.3g}" for one in values[f"anatomy_{name}"])))
    epochs = () if setting is None else tuple(f"epoch {epoch}" for epoch in setting.values["anatomy_epochs"])
    return make_table("The same weights, quantized in several ways: accuracy %", ("weights", *epochs), rows)


FULLEST_BIN = {
    "share": "share of layer one in its fullest bin",
    "width": "width of that bin",
    "offset": "its centre to the mean of its weights",
    "spread": "standard deviation of its weights",
}


def _gradients(results: Results) -> Table:
    rows = [(key[0], _bits(one), _accuracy(one)) for key, one in results.experiments.get("gradients", {}).items()]
    return make_table("Gradients after every mini-batch", ("codec", "raw, coded bits", "best (last) %"), rows)


def _compared(results: Results) -> Table:
    units = [unit for settings in results.experiments.values() for one in settings.values() for unit in one.runs]
    compared, values, sizes = (sum(unit.get(name, 0) for unit in units) for name in COMPARED)
    rows = [(f"{sum(unit['runs'] for unit in units):,}", f"{compared:,}", str(values), str(sizes))] if compared else []
    columns = ("runs", "frames compared", "that differ in value", "in size")
    return make_table("Frames made and compared", columns, rows)


SATURATED = 90.0
"""Points of the map on which the baseline of some run stays below are left out of the summary."""


def _helps(results: Results) -> Table:
    """Return last accuracy compared with the baseline, and coded bits compared with c = 5, over the map."""
    codecs = {C5: "map", C6: "map", ZERO.spec: "beyond", FIX.spec: "beyond"}
    points = [
        dict(zip(POINT, key[1:], strict=True))
        for key, setting in results.experiments.get("beyond", {}).items()
        if key[0] == FIX.spec
    ]
    rows = []
    for codec, experiment in codecs.items():
        lost, bits, raw = [], [], []
        for point in points:
            baseline, paper = (results.find("map", one, **point) for one in (BASELINE.spec, C5))
            setting = results.find(experiment, codec, **point)
            if baseline is None or paper is None or setting is None or min(baseline.per_run("final")) < SATURATED:
                continue
            lost.append(setting.mean("final") - baseline.mean("final"))
            bits.append(setting.mean("coded_bits") / paper.mean("coded_bits"))
            raw.append(setting.mean("raw_bits") / paper.mean("raw_bits"))
        if lost:
            rows.append((
                f"`{codec.removesuffix('|huffman')}`", str(len(lost)), f"{min(lost):.1f}",
                str(sum(one < -1 for one in lost)), f"{min(bits):.2f} to {max(bits):.2f}",
                f"{min(raw):.2f} to {max(raw):.2f}",
            ))  # fmt: skip
    columns = (
        "codec", "points of the map", "worst, points", "of them lose more than one", "coded bits", "raw bits",
    )  # fmt: skip
    return Table(columns, rows, 1, "What each variant loses on the map")


def _buckets(results: Results) -> Table:
    by_codec: dict[str, list[Mapping[str, Any]]] = {}
    for one in results.buckets:
        by_codec.setdefault(one["codec"], []).append(one)
    rows = []
    for codec, runs in by_codec.items():
        names = ("bits", "relative_error", "fullest_bin", "peak", "final")
        bits, error, fullest, best, last = (fmean(run[name] or 0.0 for run in runs) for name in names)
        rows.append((f"`{codec}`", f"{bits:.2f}", f"{error:.3f}", f"{fullest:.3f}", f"{best:.2f} ({last:.2f})"))
    columns = ("codec", "coded bits", "relative squared error", "share of the fullest bin", "best (last) %")
    return Table(columns, rows, 1, "Gradients of the whole network in one packet")


def _coding(results: Results) -> Table:
    rows = [
        (
            f"{one['data']}, {one['epochs']}", f"{one['nbytes'] / one['lzw_nbytes']:.3f}", f"{1e3 * one['lzw_s']:.0f}",
            f"{one['nbytes'] / one['deflate_nbytes']:.3f}", f"{one['nbytes'] / one['frame_nbytes']:.2f}",
            f"{one['side_nbytes']:,}", f"{100 * one['side_nbytes'] / one['frame_nbytes']:.2f}",
            f"{1e3 * one['encode_s']:.2f}", f"{1e3 * one['decode_s']:.2f}",
        )
        for one in results.coding
    ]  # fmt: skip
    columns = (
        "data, epochs", "LZW: times smaller", "LZW, ms", "deflate: times smaller", "c = 5: times smaller",
        "bytes beside the codes", "% of the frames", "encode, ms", "decode, ms",
    )  # fmt: skip
    return Table(columns, rows, 1, "What coding saves and costs")


COMPARED = ("packets_compared", "packets_other_values", "packets_other_sizes")
