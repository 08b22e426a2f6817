"""Plots of the study, and which of them its page shows as the paper's figures and ours."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean, median, pstdev
from typing import Any

from laconic.report.plots import Cell, Data, Mark, Plot
from laconic_lab.studies.figures import Panel
from laconic_lab.studies.oland2015.claims import C5, C6, CLAIMS
from laconic_lab.studies.oland2015.error_decomposition import VARIANTS
from laconic_lab.studies.oland2015.experiments import CEILING, FIX, FLOORS_AT_FOUR, FLOORS_UNDER_CEILING, ZERO, c
from laconic_lab.studies.oland2015.results import Results, SettingRuns
from laconic_lab.studies.oland2015.settings import BASELINE

__all__ = ["FIGURES", "make_plots"]

FIGURES = {
    "figure1": (Panel("oland-fixed"),), "figure2": (Panel("oland-derivatives"),), "figure3": (Panel("oland-entropy"),),
    "figure4": (Panel("oland-grid-accuracy"), Panel("oland-grid-epochs")), "figure5": (Panel("oland-bits"),),
    "learning": (Panel("oland-accuracy", 4, "headline"),), "map": (Panel("oland-map"),),
    "beyond": (Panel("oland-beyond-accuracy", 30), Panel("oland-beyond-bits")), "collapse": (Panel("oland-collapse"),),
    "gradients": (Panel("oland-gradients"),),
}  # fmt: skip

Rows = list[tuple[Cell, ...]]
_CLAIMED = {claim.key: claim.value for claim in CLAIMS}
NAMES = {C5: "c = 5", C6: "c = 6", ZERO.spec: "c = 5, zero", FIX.spec: "c = 4, zero, tail 0.001", BASELINE.spec: "none"}


def make_plots(results: Results) -> list[Plot]:
    """Return the paper's figures 1 to 5, the curves, the map of settings, and what goes beyond the paper."""
    shown = [
        *_curves(results), _points(results), _fixed(results), *_entropy(results), *_grid(results), _map(results),
        *_beyond(results), _collapse(results), _gradients(results),
    ]  # fmt: skip
    return [plot for plot in shown if plot.data.rows]


def _claimed(axis: str) -> tuple[Mark, ...]:
    return tuple(Mark(axis, _CLAIMED[f"c{floor}_coded_bits"], f"paper, c = {floor}") for floor in (5, 6))


def _first(results: Results, experiment: str) -> SettingRuns | None:
    return next(iter(results.experiments.get(experiment, {}).values()), None)


def _caption(title: str, setting: SettingRuns | None) -> str:
    return title if setting is None else f"{title} ({setting.values['data']}, {setting.num_runs:,} runs)"


def _curves(results: Results) -> list[Plot]:
    """Return accuracy by epoch, bits by epoch and bits by layer."""
    accuracy: Rows = []
    bits: Rows = []
    layers: Rows = []
    for experiment, settings in results.experiments.items():
        for setting in settings.values():
            values = setting.values
            if "accuracy_by_epoch" not in values:
                continue
            group = f"{experiment}, {values['data']}"
            codec = (
                values["codec"] if experiment in ("headline", "fixed") else f"{values['codec']}, l1 {values['l1']:g}"
            )
            accuracy += [(group, codec, i, x) for i, x in enumerate(setting.curve("accuracy_by_epoch"), 1)]
            by_layer = enumerate(setting.curve("coded_bits_by_layer"), 1)
            layers += [(group, codec, f"layer {layer}", coded) for layer, coded in by_layer]
            if experiment == "headline" and values["codec"] != BASELINE.spec:
                for name, kind in (("raw_bits", "quantized"), ("coded_bits", "quantized and coded")):
                    curve = setting.curve(f"{name}_by_epoch")
                    bits += [(NAMES.get(codec, codec), kind, i, x) for i, x in enumerate(curve, 1)]
    headline = next((str(row[0]) for row in accuracy if str(row[0]).startswith("headline")), None)
    return [
        Plot("oland-accuracy", "Accuracy by epoch", "The mean over runs.", "line",
             Data(("experiment", "codec", "epoch", "accuracy %"), accuracy), "epoch", "accuracy %", series="codec",
             pick="experiment", begin=headline),
        Plot("oland-bits", "Bits by epoch", "Bits of a weight as sent after each epoch; the mean over runs.", "line",
             Data(("codec", "bits", "epoch", "bits a weight"), bits), "epoch", "bits a weight", series="bits",
             pick="codec", marks=_claimed("y")),
        Plot("oland-layers", "Bits by layer", "Bits of a weight, coded; the mean over runs and epochs.", "bars",
             Data(("experiment", "codec", "layer", "coded bits"), layers), "coded bits", "layer", series="codec",
             pick="experiment", begin=headline),
    ]  # fmt: skip


def _points(results: Results) -> Plot:
    rows: Rows = [
        (experiment, setting.values["codec"], setting.values["lr"], setting.values["l1"], setting.mean("raw_bits"),
         setting.mean("coded_bits"), setting.mean("peak"), setting.num_runs)
        for experiment, settings in results.experiments.items()
        for setting in settings.values()
    ]  # fmt: skip
    data = Data(("experiment", "codec", "lr", "l1", "raw bits", "coded bits", "best accuracy %", "runs"), rows)
    return Plot("oland-settings", "Accuracy by bits", "Every setting: its best accuracy and its bits a weight, coded.",
                "points", data, "coded bits", "best accuracy %", series="experiment",
                detail=("codec", "lr", "l1", "runs"), log="x", marks=_claimed("x"))  # fmt: skip


def _spread(values: list[float]) -> tuple[float, float, float, float]:
    """Return mean, mean minus and plus one standard deviation, and median."""
    mean, deviation = fmean(values), pstdev(values)
    return mean, mean - deviation, mean + deviation, median(values)


def _fixed(results: Results) -> Plot:
    settings = {
        int(key[0].removeprefix("uniform:")): setting
        for key, setting in results.experiments.get("fixed", {}).items()
        if key[0].startswith("uniform:")
    }
    rows: Rows = []
    for bits in sorted(settings):
        mean, low, high, middle = _spread(settings[bits].per_run("peak"))
        rows += [("mean ± standard deviation", bits, mean, low, high), ("median", bits, middle, middle, middle)]
    baseline = results.find("fixed", BASELINE.spec)
    marks = () if baseline is None else (Mark("y", baseline.mean("peak"), "not quantized"),)
    data = Data(("statistic", "bits a weight", "best accuracy %", "low", "high"), rows)
    return Plot("oland-fixed", _caption("Figure 1: fixed bits", _first(results, "fixed")), "Best accuracy by the bits "
                "of every weight.", "line", data, "bits a weight", "best accuracy %", series="statistic", low="low",
                high="high", marks=marks)  # fmt: skip


def _entropy(results: Results) -> list[Plot]:
    setting = _first(results, "entropy")
    values: Mapping[str, Any] = {} if setting is None else setting.values
    derivatives: Rows = [
        (f"layer {layer}", epoch, value)
        for layer, curve in enumerate(values.get("derivative_by_epoch", ()), 1)
        for epoch, value in enumerate(curve, 1)
    ]
    entropies: Rows = [
        (f"M = {bits} bits", f"layer {layer}", f"{rate:.0%}", epoch, value)
        for i, bits in enumerate(values.get("entropy_bits", ()))
        for layer, by_bits in enumerate(values["entropy_by_epoch"], 1)
        for rate, curve in zip(values["entropy_rates"], by_bits[i], strict=True)
        for epoch, value in enumerate(curve, 1)
    ]
    return [
        Plot("oland-derivatives", _caption("Figure 2: derivatives", setting), "RMS of the derivative of each layer.",
             "line", Data(("layer", "epoch", "RMS of the derivative"), derivatives), "epoch", "RMS of the derivative",
             series="layer", log="y"),
        Plot("oland-entropy", "Figure 3", "Entropy of each layer over 2^M bins, from samples of several sizes.",
             "line", Data(("bins", "layer", "sampled", "epoch", "entropy, bits"), entropies), "epoch", "entropy, bits",
             series="layer", group="sampled", pick="bins"),
    ]  # fmt: skip


def _grid(results: Results) -> list[Plot]:
    ceiling = {floor: c(floor, m=CEILING - floor).spec for floor in FLOORS_UNDER_CEILING if floor < CEILING}
    ceiling[CEILING] = f"uniform:{CEILING}"
    lines = {f"c + M = {CEILING}": ceiling, "M = 4": {floor: c(floor).spec for floor in FLOORS_AT_FOUR}}
    shown = []
    baseline, first = results.in_grid(BASELINE.spec), _first(results, "grid")
    for name, title, ident in (
        ("peak", "best accuracy %", "oland-grid-accuracy"),
        ("peak_epoch", "epoch of the best", "oland-grid-epochs"),
    ):
        rows: Rows = []
        for line, codecs in lines.items():
            for floor, codec in codecs.items():
                setting = results.in_grid(codec)
                if setting is not None:
                    rows.append((line, floor, *_spread(setting.per_run(name))))
        marks = () if baseline is None else (Mark("y", baseline.mean(name), "not quantized"),)
        data = Data(("line", "c", title, "low", "high", "median"), rows)
        shown.append(
            Plot(ident, _caption("Figure 4", first), "Mean ± standard deviation over runs, by the floor c.", "line",
                 data, "c", title, pick="line", low="low", high="high", detail=("median",), marks=marks)
        )  # fmt: skip
    return shown


def _plane(results: Results) -> list[tuple[float, float, dict[str, Any]]]:
    """Return learning rate, l1 and all fields of the points of the map that vary only these two."""
    settings = [setting.values for setting in results.experiments.get("map", {}).values()]
    if not settings:
        return []
    rest = {name: settings[0][name] for name in ("decay", "batch", "pixels", "sends")}
    points = {(one["lr"], one["l1"]) for one in settings if all(one[name] == rest[name] for name in rest)}
    return [(lr, l1, {"lr": lr, "l1": l1, **rest}) for lr, l1 in sorted(points)]


def _at(results: Results, codec: str, point: Mapping[str, Any]) -> SettingRuns | None:
    return results.find("map", codec, **point) or results.find("beyond", codec, **point)


def _map(results: Results) -> Plot:
    rows: Rows = []
    for lr, l1, point in _plane(results):
        baseline, coded = _at(results, BASELINE.spec, point), _at(results, C5, point)
        if baseline is not None:
            rows.append(("best accuracy %, none", f"rate {lr:g}", l1, baseline.mean("peak")))
        if coded is not None:
            lost = coded.mean("peak") - coded.mean("final")
            rows += [
                ("raw bits, c = 5", f"rate {lr:g}", l1, coded.mean("raw_bits")),
                ("coded bits, c = 5", f"rate {lr:g}", l1, coded.mean("coded_bits")),
                ("points lost after the best epoch, c = 5", f"rate {lr:g}", l1, lost),
            ]
    data = Data(("quantity", "learning rate", "l1", "value"), rows)
    return Plot("oland-map", "Map", "The headline's quantities by learning rate and l1.", "line", data, "l1", "value",
                series="learning rate", pick="quantity", log="x")  # fmt: skip


def _beyond(results: Results) -> list[Plot]:
    rows: Rows = []
    for lr, l1, point in _plane(results):
        baseline = _at(results, BASELINE.spec, point)
        for codec, name in NAMES.items():
            setting = _at(results, codec, point)
            if setting is not None and baseline is not None and codec != BASELINE.spec:
                over = setting.mean("final") - baseline.mean("final")
                rows.append((f"rate {lr:g}", name, l1, over, setting.mean("coded_bits")))
    if "beyond" not in results.experiments:
        rows = []
    data = Data(("learning rate", "codec", "l1", "points over none", "coded bits"), rows)
    return [
        Plot("oland-beyond-accuracy", "Last accuracy", "Last accuracy minus the baseline's.", "line", data, "l1",
             "points over none", series="codec", pick="learning rate", log="x"),
        Plot("oland-beyond-bits", "Bits", "Coded bits of a weight.", "line", data, "l1", "coded bits", series="codec",
             pick="learning rate", log="x"),
    ]  # fmt: skip


def _collapse(results: Results) -> Plot:
    setting = _first(results, "collapse")
    rows: Rows = []
    if setting is not None:
        for variant, meaning in VARIANTS.items():
            curve = zip(setting.values["anatomy_epochs"], setting.values[f"anatomy_{variant}"], strict=True)
            rows += [(meaning, epoch, accuracy) for epoch, accuracy in curve]
    data = Data(("weights", "epoch", "accuracy %"), rows)
    return Plot("oland-collapse", _caption("The collapse", setting), "Accuracy of the same weights, quantized in "
                "several ways.", "line", data, "epoch", "accuracy %", series="weights")  # fmt: skip


def _gradients(results: Results) -> Plot:
    rows: Rows = [
        (setting.values["codec"], setting.mean("coded_bits"), setting.mean("final"))
        for setting in results.experiments.get("gradients", {}).values()
    ]
    data = Data(("codec", "coded bits a value", "last accuracy %"), rows)
    title = _caption("Gradients after every mini-batch", _first(results, "gradients"))
    return Plot("oland-gradients", title, "Last accuracy by the bits of a gradient's value.", "points", data,
                "coded bits a value", "last accuracy %", series="codec", log="x")  # fmt: skip
