"""Plots of the study: accuracy by the bytes sent, and the time of a compressed step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from laconic.report.plots import Cell, Data, Mark, Plot
from laconic_lab.studies.figures import Panel
from laconic_lab.studies.homomorphic.results import DEVICES, MODEL_NAMES, Results
from laconic_lab.studies.homomorphic.speed import STEP_KIND

__all__ = ["FIGURES", "make_plots", "step_times"]

FIGURES = {
    "frontier": (
        Panel("homomorphic-rho", 4, "MLP"), Panel("homomorphic-rho", 4, "LeNet"), Panel("homomorphic-rho", 4, "VGG"),
        Panel("homomorphic-h", pick="MLP, CPU"), Panel("homomorphic-h", pick="LeNet-5, CPU"),
        Panel("homomorphic-h", pick="VGG-11, CPU"),
    ),
}  # fmt: skip

EXPERIMENTS = {
    "sums": "sums of integers", "layers": "layers in fewer numbers", "products": "both", "search": "tried on the way",
}  # fmt: skip


def make_plots(results: Results) -> list[Plot]:
    """Return accuracy by rho, and h by rho."""
    shown = [_accuracy(results), step_times("homomorphic-h", results.of_kind(STEP_KIND))]
    return [plot for plot in shown if plot.data.rows]


def _accuracy(results: Results) -> Plot:
    rows: list[tuple[Cell, ...]] = [
        (MODEL_NAMES[model], name, row.layers, row.codec, run["workers"], run["seed"], row.rho,
         results.h(model, row.layers, "cpu"), run["accuracy"][-1])
        for experiment, name in EXPERIMENTS.items()
        for model in results.models(experiment)
        for row in results.rows.get((experiment, model), [])
        for run in row.runs
    ]  # fmt: skip
    rows.sort(key=lambda row: list(MODEL_NAMES.values()).index(str(row[0])))
    columns = ("model", "experiment", "layers", "codec", "workers", "seed", "rho", "h on a CPU", "last top-1 %")
    return Plot("homomorphic-rho", "Accuracy by rho", "Rho: bytes pushed over float32's of the dense model.", "points",
                Data(columns, rows), "rho", "last top-1 %", series="experiment", pick="model",
                detail=("layers", "codec", "workers", "seed", "h on a CPU"), log="x", better=(-1, 1))  # fmt: skip


def step_times(ident: str, steps: Iterable[Mapping[str, Any]]) -> Plot:
    """Return h by rho of compressed layers."""
    rows: list[tuple[Cell, ...]] = [
        (f"{MODEL_NAMES.get(step['case'], step['case'])}, {DEVICES.get(step['device'], step['device'])}",
         str(step["scheme"]).partition(":")[0], step["scheme"], step["rho"], step["h"])
        for step in steps
        if step["h"] is not None
    ]  # fmt: skip
    data = Data(("case", "layers", "scheme", "rho", "h"), rows)
    return Plot(ident, "Time of a compressed step", "h: its time over the dense model's, by rho.", "points",
                data, "rho", "h", series="layers", pick="case", detail=("scheme",), log="xy",
                marks=(Mark("y", 1.0, "as dense"),))  # fmt: skip
