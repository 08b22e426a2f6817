"""Plots of the study: loss against bytes with published methods in it, and loss by step."""

from __future__ import annotations

from laconic.report.plots import Cell, Data, Mark, Plot
from laconic_lab.studies.figures import Panel
from laconic_lab.studies.gpt.results import ADAMW, MUON, Results, Row
from laconic_lab.studies.gpt.tables import describe

__all__ = ["FIGURES", "make_plots"]

FIGURES = {"frontier": (Panel("gpt-bytes"),)}
PARTS = {"frontier": "7 M parameters", "large": "30 M parameters", "confirmation": "126 M parameters"}


def make_plots(results: Results) -> list[Plot]:
    """Return loss by bytes, and loss by step."""
    shown = [_bytes(results), _curves(results)]
    return [plot for plot in shown if plot.data.rows]


def _family(row: Row) -> str:
    method = str(row.values["method"])
    if method.startswith("laconic"):
        return f"laconic, {row.values['workers']} workers"
    return method if method in (ADAMW, MUON) else "published methods"


def _bytes(results: Results) -> Plot:
    rows: list[tuple[Cell, ...]] = [
        (name, _family(row), str(row.values["method"]), describe(row), run["workers"], run["seed"], run["ratio"],
         run["validation_loss"][-1])
        for part, name in PARTS.items()
        for row in results.of(part)
        for run in row.runs
    ]  # fmt: skip
    marks = []
    for part, name in PARTS.items():
        row = results.best(part, ADAMW)
        if row is not None:
            marks.append(Mark("y", row.loss, f"{ADAMW}, {name}", pick=name))
    columns = ("size", "family", "method", "setting", "workers", "seed", "times fewer bytes", "loss, nats a byte")
    return Plot("gpt-bytes", "Loss against bytes", "Both directions, headers included; float32 DDP is 1.", "points",
                Data(columns, rows), "times fewer bytes", "loss, nats a byte", series="family", pick="size",
                detail=("method", "setting", "workers", "seed"), log="x", marks=tuple(marks),
                better=(1, -1))  # fmt: skip


def _curves(results: Results) -> Plot:
    rows: list[tuple[Cell, ...]] = [
        (
            name,
            f"{row.values['method']}, {row.values['workers']} workers",
            f"{describe(row)}; seed {run['seed']}",
            step,
            loss,
        )
        for part, name in PARTS.items()
        for row in results.of(part)
        for run in row.runs
        for step, loss in zip(run["steps_evaluated"], run["validation_loss"], strict=True)
    ]
    columns = ("size", "method", "run", "step", "loss, nats a byte")
    return Plot("gpt-steps", "Loss by step", "Validation loss during training; a line for each run.", "line",
                Data(columns, rows), "step", "loss, nats a byte", series="method", group="run", pick="size",
                log="y")  # fmt: skip
