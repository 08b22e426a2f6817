"""The frontier: accuracy against what is sent, coloured by what it costs to compute."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from laconic_lab.studies.figures import draw_all
from laconic_lab.studies.homomorphic.report import MODEL_NAMES, Results

__all__ = ["draw"]

PARTS = {"sums": "o", "layers": "s", "products": "^", "search": "v"}
NAMES = {
    "sums": "sums of integers",
    "layers": "layers in fewer numbers",
    "products": "both",
    "search": "tried on the way",
}
UNKNOWN = "#bbbbbb"
DEVICE = "cpu"


def draw(results: Results, folder: Path) -> list[Path]:
    """All figures that the Records allow."""
    models = results.models(*PARTS)
    return draw_all({"frontier": partial(_frontier, results, models)} if models else {}, folder)


def _frontier(results: Results, models: list[str], plt: Any) -> Any:
    from matplotlib.colors import TwoSlopeNorm
    from matplotlib.lines import Line2D

    figure, grid = plt.subplots(1, len(models), figsize=(4.6 * len(models), 4.0), squeeze=False)
    norm, colours = TwoSlopeNorm(1.0, 0.3, 2.0), plt.get_cmap("coolwarm")
    for model, axes in zip(models, grid[0], strict=True):
        best = 0.0
        for part, marker in PARTS.items():
            for row in results.rows.get((part, model), []):
                h = results.h(model, row.layers, DEVICE)
                colour = UNKNOWN if h is None else colours(norm(h))
                axes.plot(row.rho, row.top1, marker, color=colour, markeredgecolor="#444444", markeredgewidth=0.5)
                best = max(best, row.top1)
        dense = results.find("sums", model, workers=2)
        if dense is not None:
            axes.axhline(dense.top1, color="#888888", linewidth=0.8, linestyle=":")
        axes.set(xscale="log", xlabel="rho: bytes of a message over float32's", title=MODEL_NAMES[model])
        axes.set_ylim(best - 4, best + 0.3)
    grid[0][0].set_ylabel("top-1 %")
    figure.colorbar(
        plt.cm.ScalarMappable(norm, colours), ax=list(grid[0]), label="h of the layers, CPU (grey: not timed)"
    )
    shown = [
        Line2D([], [], marker=marker, color="#444444", linestyle="", label=NAMES[part])
        for part, marker in PARTS.items()
    ]
    figure.legend(handles=shown, loc="outside lower center", ncols=4)
    return figure
