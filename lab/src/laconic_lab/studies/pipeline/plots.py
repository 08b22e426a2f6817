"""Plots of the study: loss against bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from laconic.report.plots import Cell, Data, Mark, Plot
from laconic_lab.studies.figures import Panel
from laconic_lab.studies.pipeline.results import Results

__all__ = ["FIGURES", "make_plots"]

FIGURES = {"bits": (Panel("pipeline-bits"),)}


def make_plots(results: Results) -> list[Plot]:
    """Return loss by bytes."""
    rows: list[tuple[Cell, ...]] = [
        (_stages(run), str(run["forward"]).partition(":")[0], str(run["method"]),
         run["seed"], run["ratio"], run["validation_loss"][-1])
        for row in results.of("bits")
        for run in row.runs
    ]  # fmt: skip
    if not rows:
        return []
    marks = tuple(
        Mark("y", row.loss, f"uncompressed, {_stages(row.values)}", pick=_stages(row.values))
        for row in results.of("bits")
        if row.is_plain
    )
    columns = ("stages", "codec", "method", "seed", "times fewer bytes", "loss, nats a byte")
    return [Plot("pipeline-bits", "Loss against bytes", "Both directions, headers included; float32 is 1.", "points",
                 Data(columns, rows), "times fewer bytes", "loss, nats a byte", series="codec", pick="stages",
                 detail=("method", "seed"), log="x", marks=marks, better=(1, -1))]  # fmt: skip


def _stages(run: Mapping[str, Any]) -> str:
    return f"{run['size']}, {run['stages']} stages"
