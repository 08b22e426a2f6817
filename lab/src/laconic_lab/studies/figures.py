"""SVG files for documentation pages, drawn from the same plots as the HTML report; equal Records give equal bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from laconic.errors import ConfigError, FileError
from laconic.report.plots import Plot

__all__ = ["Panel", "draw_all"]

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "laconic",  # names of clip paths would be random otherwise
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.constrained_layout.use": True,
}
COLOURS = ("#1f6fb4", "#d95f02", "#1b9e77", "#7570b3", "#c2185b", "#b8860b", "#66a61e", "#222222", "#999999", "#4eb3d3")
MARKERS, DASHES = "os^Dv", ("-", "--", ":", "-.")
MOST_COLUMNS = 3


class Panel(NamedTuple):
    """A plot in a figure: one pair of axes for each value of its ``pick`` column.

    Args:
        plot: The plot's ``ident``.
        span: The y axis ends this much below the largest value; by default all values are shown.
        pick: Only values of the ``pick`` column that begin with this.
    """

    plot: str
    span: float | None = None
    pick: str = ""


class _Axes(NamedTuple):
    """The rows of a plot that one pair of axes shows."""

    plot: Plot
    title: str
    rows: Sequence[Mapping[str, Any]]
    span: float | None


def draw_all(figures: Mapping[str, Sequence[Panel]], plots: Sequence[Plot], folder: Path) -> list[Path]:
    """Write each figure that has at least one of the plots to ``NAME.svg`` and return the paths."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("figures need matplotlib: pip install 'laconic[plots]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    by_ident, written = {plot.ident: plot for plot in plots}, []
    with plt.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
        for name, panels in figures.items():
            groups = [list(_axes(by_ident[panel.plot], panel)) for panel in panels if panel.plot in by_ident]
            if not any(groups):
                continue
            figure, path = _draw(plt, [group for group in groups if group]), folder / f"{name}.svg"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                figure.savefig(path, metadata={"Date": None, "Creator": None})
            except OSError as error:
                raise FileError(f"cannot write {path}: {error.strerror or error}") from error
            finally:
                plt.close(figure)
            written.append(path)
    return written


def _axes(plot: Plot, panel: Panel) -> Iterator[_Axes]:
    rows = [dict(zip(plot.data.columns, row, strict=True)) for row in plot.data.rows]
    if plot.pick is None:
        yield _Axes(plot, plot.title, rows, panel.span)
        return
    for value in dict.fromkeys(row[plot.pick] for row in rows):
        if str(value).startswith(panel.pick):
            one = replace(plot, marks=tuple(mark for mark in plot.marks if mark.pick in (None, str(value))))
            yield _Axes(one, f"{plot.title}: {value}", [row for row in rows if row[plot.pick] == value], panel.span)


def _draw(plt: Any, groups: Sequence[Sequence[_Axes]]) -> Any:
    shown = [axes for group in groups for axes in group]
    columns = _columns([len(group) for group in groups])
    lines = math.ceil(len(shown) / columns)
    series = list(dict.fromkeys(name for axes in shown for name in _names(axes)))
    labels = 0.05 * max((len(word) for axes in shown for word in _words(axes)), default=0)
    width = max(6.4, (4.2 + labels) * columns) if len(shown) == 1 else (4.2 + labels) * columns
    height = max(3.0, *(0.9 + 0.24 * len(_words(axes)) * _bars_each(axes) for axes in shown))
    per_row = max(1, min(6, int(width / (0.5 + 0.075 * max(map(len, series))))))
    legend = 0.18 * math.ceil(len(series) / per_row)
    figure, grid = plt.subplots(lines, columns, figsize=(width, height * lines + legend), squeeze=False)
    handles: dict[str, Any] = {}
    for axes, place in zip(shown, grid.flat, strict=False):
        colours = {name: series.index(name) for name in _names(axes)}
        drawn = _draw_bars(place, axes, colours) if axes.plot.kind == "bars" else _draw_plane(place, axes, colours)
        handles |= {name: handle for name, handle in drawn.items() if name not in handles}
        place.set_title(axes.title)
    for place in grid.flat[len(shown) :]:
        place.set_visible(False)
    if len(handles) > 1:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=per_row)
    return figure


def _columns(sizes: Sequence[int]) -> int:
    """Return the columns of a grid: several plots with as many axes each are rows, others fill up to three columns."""
    total = sum(sizes)
    if len(sizes) > 1 and len(set(sizes)) == 1 and sizes[0] > 1:
        return sizes[0]
    return 2 if total == 4 else min(MOST_COLUMNS, total)


def _names(axes: _Axes) -> list[str]:
    """The series of these axes, in the order of the rows."""
    column = axes.plot.series
    return [""] if column is None else list(dict.fromkeys(str(row[column]) for row in axes.rows))


def _words(axes: _Axes) -> list[str]:
    return list(dict.fromkeys(str(row[axes.plot.y]) for row in axes.rows)) if axes.plot.kind == "bars" else []


def _bars_each(axes: _Axes) -> float:
    return 1.0 if axes.plot.stacked else max(1.0, 0.6 * len(_names(axes)))


def _draw_plane(place: Any, axes: _Axes, colours: Mapping[str, int]) -> dict[str, Any]:
    """Draw lines or points, and return a legend handle for each series."""
    plot, handles = axes.plot, {}
    complete = [row for row in axes.rows if row[plot.x] is not None and row[plot.y] is not None]
    for name in _names(axes):
        rows = [row for row in complete if plot.series is None or str(row[plot.series]) == name]
        number = colours[name]
        colour = COLOURS[number % len(COLOURS)]
        if plot.kind == "points":
            style: dict[str, Any] = {"linestyle": "", "marker": MARKERS[number // len(COLOURS) % 5], "markersize": 4.5}
        else:
            style = {"linestyle": DASHES[number // len(COLOURS) % 4], "linewidth": 1.2}
            style |= {"marker": "o", "markersize": 3} if len(rows) <= 12 else {}
        groups = dict.fromkeys(row[plot.group] if plot.group else None for row in rows)
        for group in groups:
            line = [row for row in rows if plot.group is None or row[plot.group] == group]
            xs, ys = [row[plot.x] for row in line], [row[plot.y] for row in line]
            (handles[name],) = place.plot(xs, ys, color=colour, **style)
        if plot.low is not None and plot.high is not None:
            whiskers = [[row[plot.y] - row[plot.low] for row in rows], [row[plot.high] - row[plot.y] for row in rows]]
            xs, ys = [row[plot.x] for row in rows], [row[plot.y] for row in rows]
            place.errorbar(xs, ys, yerr=whiskers, fmt="none", ecolor=colour, elinewidth=0.8, capsize=2)
    _marks(place, plot)
    if plot.diagonals:
        ends = [min(row[plot.x] for row in complete) / 1.3, max(row[plot.x] for row in complete) * 1.3]
        for slope in plot.diagonals:
            place.plot(ends, [slope * end for end in ends], color="0.6", linestyle="-" if slope == 1 else ":")
    place.set(xlabel=plot.x, ylabel=plot.y)
    for axis in plot.log:
        place.set(**{f"{axis}scale": "log"})
        _log_ticks(getattr(place, f"{axis}axis"), [row[getattr(plot, axis)] for row in complete])
    if all(isinstance(row[plot.x], int) for row in complete) and "x" not in plot.log:
        place.xaxis.get_major_locator().set_params(integer=True)
    if axes.span is not None and complete:
        top = max(row[plot.y] for row in complete)
        place.set_ylim(top - axes.span, top + 0.05 * axes.span)
    return handles


def _draw_bars(place: Any, axes: _Axes, colours: Mapping[str, int]) -> dict[str, Any]:
    plot, words, names = axes.plot, _words(axes), _names(axes)
    lengths = {
        name: [
            sum(row[plot.x] or 0.0 for row in axes.rows
                if str(row[plot.y]) == word and (plot.series is None or str(row[plot.series]) == name))
            for word in words
        ]
        for name in names
    }  # fmt: skip
    stacks = list(accumulate(lengths.values(), _add, initial=[0.0] * len(words)))
    thickness = 0.8 if plot.stacked else 0.8 / len(names)
    handles = {}
    for number, name in enumerate(names):
        shift = 0.0 if plot.stacked else (number - (len(names) - 1) / 2) * thickness
        left = stacks[number] if plot.stacked else 0.0
        places = [position + shift for position in range(len(words))]
        colour = COLOURS[colours[name] % len(COLOURS)]
        handles[name] = place.barh(places, lengths[name], thickness, left=left, color=colour)
    place.set_yticks(range(len(words)), words)
    place.invert_yaxis()
    _marks(place, plot)
    place.set(xlabel=plot.x)
    if "x" in plot.log:
        place.set_xscale("log")
    if axes.span is not None:
        top = max(max(bars) for bars in lengths.values())
        place.set_xlim(top - axes.span, top + 0.05 * axes.span)
    return handles


def _add(first: list[float], second: list[float]) -> list[float]:
    return [a + b for a, b in zip(first, second, strict=True)]


def _log_ticks(axis: Any, values: Sequence[float]) -> None:
    """Label a logarithmic axis with plain numbers, also between powers of ten where there are few of them."""
    from matplotlib import ticker

    few = max(values, default=1.0) < 300 * min(values, default=1.0)
    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if few else (1,)))
    axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    axis.set_minor_formatter(ticker.NullFormatter())


def _marks(place: Any, plot: Plot) -> None:
    """Draw claimed values as dotted lines with their labels."""
    for number, mark in enumerate(plot.marks):
        if mark.axis == "x":
            place.axvline(mark.value, color="0.5", linestyle=":", linewidth=1)
            place.annotate(mark.label, (mark.value, 0.98), xycoords=("data", "axes fraction"), fontsize=7, color="0.4",
                           rotation=90, ha="right", va="top", annotation_clip=True)  # fmt: skip
        else:
            place.axhline(mark.value, color="0.5", linestyle=":", linewidth=1)
            left = number % 2  # labels of neighbouring lines at opposite ends
            place.annotate(mark.label, (0.01 if left else 0.99, mark.value), xycoords=("axes fraction", "data"),
                           fontsize=7, color="0.4", ha="left" if left else "right", va="bottom",
                           annotation_clip=True)  # fmt: skip
