"""Figures from Records, as SVG files that are the same for the same Records."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from laconic_lab.studies.figures import draw_all
from laconic_lab.studies.kothari2021.report import Results, Row
from laconic_lab.studies.kothari2021.times import LINKS
from laconic_lab.studies.kothari2021.timetables import LINK_NAMES, MODEL_NAMES

__all__ = ["FIGURES", "draw"]

COLOURS = {
    "1": "#222222", "2": "#7570b3", "2w": "#b8860b", "3": "#999999", "4": "#1b9e77", "5": "#d95f02", "6": "#c2185b",
    "laconic": "#1f6fb4", "laconic-min": "#0b3d66", "adaptive": "#66a61e",
}  # fmt: skip
OTHERS = ("#8c6bb1", "#41ae76", "#ef6548", "#4eb3d3", "#fd8d3c", "#969696", "#df65b0", "#74c476")


def draw(results: Results, folder: Path) -> list[Path]:
    """All figures that the Records allow."""
    allowed = {
        name: paint
        for name, (part, paint) in FIGURES.items()
        if results.models(part) and (name != "time" or results.times)
    }
    return draw_all({name: partial(paint, results) for name, paint in allowed.items()}, folder)


def _panels(results: Results, plt: Any, part: str) -> tuple[Any, list[tuple[str, Any]]]:
    models = results.models(part)
    figure, axes = plt.subplots(1, len(models), figsize=(5.2 * len(models), 3.8), squeeze=False)
    return figure, list(zip(models, axes[0], strict=True))


def _colour(row: Row, number: int) -> str:
    return COLOURS.get(row.name, OTHERS[number % len(OTHERS)])


def _caption(model: str, rows: list[Row]) -> str:
    values = rows[0].values
    return f"{MODEL_NAMES[model]}, {values['data']}, {values['epochs']} epochs"


def _curves(results: Results, plt: Any, against: Callable[[Row], list[float]], label: str, log: bool) -> Any:
    figure, panels = _panels(results, plt, "accuracy")
    for model, axes in panels:
        rows = results.rows("accuracy", model)
        for number, row in enumerate(rows):
            axes.plot(against(row), row.curve("accuracy"), color=_colour(row, number), linewidth=1.2, label=row.name)
        top = max(fmean(row.final) for row in rows)
        axes.set(xlabel=label, ylabel="top-1 %", title=_caption(model, rows))
        axes.set_ylim(top - (30 if model == "vgg11" else 3), top + 0.5)
        if log:
            axes.set_xscale("log")
    figure.legend(*panels[-1][1].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def _by_epoch(results: Results, plt: Any) -> Any:
    return _curves(results, plt, lambda row: [float(i + 1) for i in range(len(row.curve("accuracy")))], "epoch", False)


def _by_bytes(results: Results, plt: Any) -> Any:
    def megabytes(row: Row) -> list[float]:
        return [one / 1e6 for one in row.bytes_by_epoch()]

    return _curves(results, plt, megabytes, "MB sent and received so far, both workers", True)


def _by_time(results: Results, plt: Any) -> Any:
    """Accuracy after each epoch against what the server took for as many iterations: a row a model, a column a link."""
    from matplotlib import ticker

    models = [model for model in MODEL_NAMES if any(place[0] == model for place in results.times)]
    links = [link for link in LINKS if any(place[1] == link for place in results.times)]
    size = (4.2 * len(links), 3.0 * len(models) + 0.8)
    figure, grid = plt.subplots(len(models), len(links), figsize=size, squeeze=False, sharey="row")
    shown: dict[str, Any] = {}
    for model, line in zip(models, grid, strict=True):
        rows = results.rows("accuracy", model)
        for link, axes in zip(links, line, strict=True):
            for number, row in enumerate(rows):
                cell = results.times.get((model, link, row.name))
                if cell is None:
                    continue
                epoch = cell.seconds() * row.iterations / row.values["epochs"] / 60
                curve = row.curve("accuracy")
                (shown[row.name],) = axes.plot(
                    [epoch * (i + 1) for i in range(len(curve))], curve, color=_colour(row, number), linewidth=1.2
                )
            found = [cell for (m, one, _), cell in results.times.items() if (m, one) == (model, link)]
            busy = "" if all(cell.calm for cell in found) else " (busy)"
            axes.set(xlabel="minutes", xscale="log", title=f"{MODEL_NAMES[model]}, {LINK_NAMES[link]}{busy}")
            axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
            axes.xaxis.set_minor_formatter(ticker.NullFormatter())
            axes.set_visible(bool(axes.lines))
        top = max((fmean(row.final) for row in rows), default=100.0)
        line[0].set_ylim(top - (30 if model == "vgg11" else 3), top + 0.5)
        line[0].set_ylabel("top-1 %")
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=5)
    return figure


def _frontier(results: Results, plt: Any) -> Any:
    """Last accuracy against bytes, all settings."""
    figure, panels = _panels(results, plt, "accuracy")
    for model, axes in panels:
        rows = results.rows("accuracy", model)
        for number, row in enumerate(rows):
            kilobytes = row.bytes_per_iteration / 1e3
            axes.plot([kilobytes] * len(row.final), row.final, "o", color=_colour(row, number), label=row.name)
        others = results.rows("frontier", model)
        kilobytes_of = [row.bytes_per_iteration / 1e3 for row in others]
        axes.plot(kilobytes_of, [fmean(row.final) for row in others], "x", color="#1f6fb4", label="other settings")
        top = max(fmean(row.final) for row in rows)
        axes.set(xlabel="kB an iteration", ylabel="last top-1 %", xscale="log", title=_caption(model, rows))
        axes.set_ylim(top - (12 if model == "vgg11" else 1.0), top + (1 if model == "vgg11" else 0.2))
    figure.legend(*panels[-1][1].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def _ingredients(results: Results, plt: Any) -> Any:
    """What is lost, and what it costs, without each."""
    models = results.models("ingredients")
    figure, grid = plt.subplots(len(models), 2, figsize=(8.4, 2.6 * len(models)), squeeze=False, sharey="row")
    for model, (left, right) in zip(models, grid, strict=True):
        base = results.row(model, "laconic-min")
        rows = ([base] if base is not None else []) + results.rows("ingredients", model)
        names = [row.name for row in rows]
        left.barh(names, [fmean(row.final) for row in rows], color="#1f6fb4")
        right.barh(names, [row.bytes_per_iteration / 1e3 for row in rows], color="#d95f02")
        finals = [fmean(row.final) for row in rows]
        left.set(xlabel="last top-1 %", title=_caption(model, rows), xlim=(min(finals) - 2, max(finals) + 1))
        right.set(xlabel="kB an iteration")
        left.invert_yaxis()
    return figure


FIGURES: dict[str, tuple[str, Callable[[Results, Any], Any]]] = {
    "epochs": ("accuracy", _by_epoch),
    "bytes": ("accuracy", _by_bytes),
    "time": ("accuracy", _by_time),
    "frontier": ("accuracy", _frontier),
    "ingredients": ("ingredients", _ingredients),
}
"""Files, and the part whose Records they need."""
