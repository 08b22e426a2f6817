"""The paper's figures and ours, from Records, as SVG files that are the same for the same Records."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from laconic_lab.studies.figures import draw_all
from laconic_lab.studies.oland2015.error_decomposition import WAYS
from laconic_lab.studies.oland2015.experiments import (
    CEILING,
    FIX,
    FLOORS_AT_FOUR,
    FLOORS_UNDER_CEILING,
    HEADLINE,
    ZERO,
    c,
)
from laconic_lab.studies.oland2015.report import C5, C6, Results, Setting
from laconic_lab.studies.oland2015.settings import BASELINE

__all__ = ["FIGURES", "draw"]

LAYERS = ("layer 1", "layer 2", "layer 3")
COLOURS = ("#1f6fb4", "#d95f02", "#1b9e77", "#7570b3", "#666666", "#b8860b", "#c2185b")


def draw(results: Results, folder: Path) -> list[Path]:
    """All figures that the Records allow."""
    allowed = {name: paint for name, (part, paint) in FIGURES.items() if part in results.parts}
    return draw_all({name: partial(paint, results) for name, paint in allowed.items()}, folder)


def _caption(setting: Setting) -> str:
    return f"{setting.values['data']}, {setting.num_runs:,} runs, {setting.values['epochs']} epochs"


def _some(results: Results, part: str) -> Setting:
    return next(iter(results.parts[part].values()))


# ---------------------------------------------------------------------------------------------------- paper's figures


def _fixed(results: Results, plt: Any) -> Any:
    """1: accuracy against fixed bits."""
    figure, axes = plt.subplots(figsize=(6.4, 3.2))
    settings = {
        int(key[0].removeprefix("uniform:")): setting
        for key, setting in results.parts["fixed"].items()
        if key[0].startswith("uniform:")
    }
    bits = sorted(settings)
    peaks = [settings[b].runs("peak") for b in bits]
    _spread(axes, bits, peaks)
    baseline = results.find("fixed", BASELINE.spec)
    if baseline is not None:
        axes.axhline(baseline.mean("peak"), color=COLOURS[4], linestyle="--", linewidth=1, label="not quantized")
    axes.set(xlabel="bits a weight", ylabel="best accuracy %", title=_caption(settings[bits[0]]))
    axes.legend()
    return figure


def _spread(axes: Any, x: Sequence[float], values: Sequence[Sequence[float]]) -> None:
    """Mean with standard deviation, and median."""
    means, spreads = [fmean(some) for some in values], [pstdev(some) for some in values]
    axes.errorbar(x, means, yerr=spreads, color=COLOURS[0], linewidth=1, capsize=2, label="mean ± standard deviation")
    axes.plot(x, [median(some) for some in values], "o", color=COLOURS[1], markersize=3, label="median")


def _derivatives(results: Results, plt: Any) -> Any:
    """2: RMS of the derivatives."""
    figure, axes = plt.subplots(figsize=(6.4, 3.2))
    found = _some(results, "entropy")
    for name, colour, curve in zip(LAYERS, COLOURS, found.values["derivative_by_epoch"], strict=False):
        axes.plot(range(1, len(curve) + 1), curve, color=colour, linewidth=1, label=name)
    axes.set(xlabel="epoch", ylabel="RMS of the derivative", yscale="log", title=_caption(found))
    axes.legend()
    return figure


def _entropies(results: Results, plt: Any) -> Any:
    """3: entropy by bins and sampling rates."""
    found = _some(results, "entropy")
    bins, rates = found.values["entropy_bits"], found.values["entropy_rates"]
    figure, grid = plt.subplots(2, 2, figsize=(7.6, 5.2), sharex=True)
    lines = ("-", "--", "-.", ":", (0, (1, 3)))
    for m, (bits, axes) in enumerate(zip(bins, grid.flat, strict=False)):
        for name, colour, layer in zip(LAYERS, COLOURS, found.values["entropy_by_epoch"], strict=False):
            for rate, line, curve in zip(rates, lines, layer[m], strict=False):
                label = f"{name}, {rate:.0%} of the weights" if rate in (1.0, 0.03) else None
                axes.plot(range(1, len(curve) + 1), curve, color=colour, linestyle=line, linewidth=1, label=label)
        axes.set(title=f"M = {bits} bits", ylabel="entropy, bits", xlabel="epoch")
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(_caption(found))
    return figure


def _grids(results: Results, plt: Any) -> Any:
    """4: accuracy and epochs to the best, under a ceiling of ten bits and at M = 4."""
    ceiling = {f"{CEILING}:{f}": c(f, m=CEILING - f).spec for f in FLOORS_UNDER_CEILING if f < CEILING}
    ceiling[f"{CEILING}:{CEILING}"] = f"uniform:{CEILING}"
    four = {f"{f + 4}:{f}": c(f).spec for f in FLOORS_AT_FOUR}
    figure, grid = plt.subplots(2, 2, figsize=(8.4, 5.6))
    for column, codecs in enumerate((ceiling, four)):
        wanted = {"none": results.in_grid(BASELINE.spec)}
        wanted |= {name: results.in_grid(codec) for name, codec in codecs.items()}
        found = {name: setting for name, setting in wanted.items() if setting is not None}
        for row, (what, label) in enumerate((("peak", "best accuracy %"), ("peak_epoch", "epoch of the best"))):
            axes = grid[row][column]
            _spread(axes, range(len(found)), [setting.runs(what) for setting in found.values()])
            axes.set_xticks(range(len(found)), list(found))
            axes.set(ylabel=label, xlabel="ceiling:floor, bits", title="abcd"[2 * row + column])
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(_caption(_some(results, "grid")))
    return figure


def _bits(results: Results, plt: Any) -> Any:
    """5: bits by epoch."""
    figure, grid = plt.subplots(1, 2, figsize=(7.6, 3.2), sharey=True)
    for axes, quantizer in zip(grid, HEADLINE[1:], strict=True):
        found = results.find("headline", quantizer.spec)
        if found is None:
            continue
        for name, colour, label in zip(("raw_bits", "coded_bits"), COLOURS, ("quantized", "and coded"), strict=False):
            curve = found.curve(f"{name}_by_epoch")
            label = f"{label}: {fmean(curve):.2f} on average"
            axes.plot(range(1, len(curve) + 1), curve, color=colour, label=label)
        axes.set(xlabel="epoch", title=f"c = {quantizer.c:g}", ylim=(0, None))
        axes.legend()
    grid[0].set_ylabel("bits a weight")
    figure.suptitle(_caption(_some(results, "headline")))
    return figure


# --------------------------------------------------------------------------------------------------------------- ours


def _learning(results: Results, plt: Any) -> Any:
    """Accuracy by epoch."""
    figure, axes = plt.subplots(figsize=(6.4, 3.2))
    for setting, colour in zip(results.parts["headline"].values(), COLOURS, strict=False):
        curve = setting.curve("accuracy_by_epoch")
        axes.plot(range(1, len(curve) + 1), curve, color=colour, linewidth=1, label=setting.values["codec"])
    last = _some(results, "headline").curve("accuracy_by_epoch")[-1]
    axes.set(xlabel="epoch", ylabel="accuracy %", ylim=(last - 4, last + 0.5))
    axes.set_title(_caption(_some(results, "headline")))
    axes.legend(loc="lower right")
    return figure


Value = Callable[[float, float], float | None]


def _plane(results: Results) -> tuple[list[float], list[float], dict[str, Any]]:
    """Learning rates and l1 weights of the plane, and everything else of its points."""
    settings = [setting.values for setting in results.parts["map"].values()]
    default = settings[0]
    rest = {name: default[name] for name in ("decay", "batch", "pixels", "sends")}
    plane = [values for values in settings if all(values[name] == rest[name] for name in rest)]
    return sorted({values["lr"] for values in plane}), sorted({values["l1"] for values in plane}), rest


def _heat(
    axes: Any, rates: Sequence[float], weights: Sequence[float], value: Value, colours: str, **scale: Any
) -> None:
    cells = [[value(lr, l1) for l1 in weights] for lr in rates]
    filled = [[math.nan if cell is None else cell for cell in row] for row in cells]
    axes.pcolormesh(filled, cmap=colours, edgecolors="white", linewidth=0.5, alpha=0.6, **scale)
    for y, row in enumerate(cells):
        for x, cell in enumerate(row):
            if cell is not None:
                text = f"{cell:.1f}" if abs(cell) >= 9.95 else f"{cell:.2f}"
                axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=7)
    axes.set_xticks([x + 0.5 for x in range(len(weights))], [f"{one:g}" for one in weights])
    axes.set_yticks([y + 0.5 for y in range(len(rates))], [f"{one:g}" for one in rates])
    axes.set(xlabel="l1", ylabel="learning rate")


def _at(results: Results, codec: str, what: str, rest: dict[str, Any]) -> Value:
    def value(lr: float, l1: float) -> float | None:
        for part in ("map", "beyond"):
            found = results.find(part, codec, lr=lr, l1=l1, **rest)
            if found is not None:
                return found.mean(what)
        return None

    return value


def _less(first: Value, second: Value) -> Value:
    def value(lr: float, l1: float) -> float | None:
        a, b = first(lr, l1), second(lr, l1)
        return None if a is None or b is None else a - b

    return value


def _map(results: Results, plt: Any) -> Any:
    """Sensitivity of the headline."""
    rates, weights, rest = _plane(results)
    panels = (
        ("raw bits at c = 5", _at(results, C5, "raw_bits", rest), "YlGnBu", {"vmin": 5, "vmax": 9}),
        ("coded bits at c = 5", _at(results, C5, "coded_bits", rest), "YlGnBu", {"vmin": 1, "vmax": 9}),
        ("best accuracy % without quantization", _at(results, BASELINE.spec, "peak", rest), "YlGn", {"vmin": 88}),
        (
            "c = 5: points lost from the best to the last epoch",
            _less(_at(results, C5, "peak", rest), _at(results, C5, "final", rest)),
            "OrRd",
            {"vmin": 0, "vmax": 30},
        ),
    )
    figure, grid = plt.subplots(2, 2, figsize=(9, 6))
    for axes, (title, value, colours, scale) in zip(grid.flat, panels, strict=True):
        _heat(axes, rates, weights, value, colours, **scale)
        axes.set_title(title)
    figure.suptitle(_caption(_some(results, "map")))
    return figure


def _beyond(results: Results, plt: Any) -> Any:
    """Last accuracy beside the baseline's, and bits, by codec."""
    rates, weights, rest = _plane(results)
    baseline = _at(results, BASELINE.spec, "final", rest)
    names = {"c = 5": C5, "c = 6": C6, "c = 5, zero": ZERO.spec, "c = 4, zero, tail 0.001": FIX.spec}
    figure, grid = plt.subplots(2, 4, figsize=(15, 6))
    for column, (name, codec) in enumerate(names.items()):
        final = _less(_at(results, codec, "final", rest), baseline)
        _heat(grid[0][column], rates, weights, final, "RdYlGn", vmin=-10, vmax=10)
        _heat(grid[1][column], rates, weights, _at(results, codec, "coded_bits", rest), "YlGnBu", vmin=1, vmax=9)
        grid[0][column].set_title(f"{name}: last accuracy - baseline's")
        grid[1][column].set_title(f"{name}: coded bits")
    figure.suptitle(_caption(_some(results, "beyond")))
    return figure


def _collapse(results: Results, plt: Any) -> Any:
    """The same weights, quantized in several ways."""
    figure, axes = plt.subplots(figsize=(8.4, 4.6))
    found = _some(results, "collapse")
    for (way, meaning), colour in zip(WAYS.items(), COLOURS, strict=True):
        line = "--" if way in ("shifted", "centred", "others") else "-"
        epochs, curve = found.values["anatomy_epochs"], found.values[f"anatomy_{way}"]
        axes.plot(epochs, curve, marker="o", markersize=3, linewidth=1, linestyle=line, color=colour, label=meaning)
    axes.set(xlabel="epoch", ylabel="accuracy %", title=f"{_caption(found)}, l1 {found.values['l1']:g}")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _gradients(results: Results, plt: Any) -> Any:
    """Bits against accuracy where gradients travel."""
    figure, axes = plt.subplots(figsize=(6.4, 3.2))
    for setting, colour in zip(results.parts["gradients"].values(), COLOURS, strict=False):
        bits, accuracy = setting.mean("coded_bits"), setting.mean("final")
        axes.plot([bits], [accuracy], "o", color=colour, label=setting.values["codec"])
    axes.set(xlabel="coded bits a value", ylabel="last accuracy %", xscale="log")
    axes.set_title(_caption(_some(results, "gradients")))
    axes.legend()
    return figure


FIGURES: dict[str, tuple[str, Callable[[Results, Any], Any]]] = {
    "figure1": ("fixed", _fixed),
    "figure2": ("entropy", _derivatives),
    "figure3": ("entropy", _entropies),
    "figure4": ("grid", _grids),
    "figure5": ("headline", _bits),
    "learning": ("headline", _learning),
    "map": ("map", _map),
    "beyond": ("beyond", _beyond),
    "collapse": ("collapse", _collapse),
    "gradients": ("gradients", _gradients),
}
"""Files, and the part whose Records they need."""
