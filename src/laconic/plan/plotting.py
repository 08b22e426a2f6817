"""Curves as text for a terminal, or as a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from laconic.errors import ConfigError, FileError

__all__ = ["save_plot", "text_plot"]

MARKS = "ox+*#@%&=~"


def text_plot(
    xs: Sequence[float], curves: Mapping[str, Sequence[float]], *, x_label: str, y_label: str, width: int = 64,
    height: int = 18, log_x: bool = True, log_y: bool = True,
) -> str:  # fmt: skip
    """Return curves drawn with characters.

    >>> print(text_plot([1, 10, 100], {"a": [1, 10, 100]}, x_label="x", y_label="y", width=5, height=3))
         y
      100 |    o
          |  o
        1 |o
          +-----
           1 to 100: x
           o a
    """
    points = [(x, y) for ys in curves.values() for x, y in zip(xs, ys, strict=True) if _drawable(y, log_y)]
    if not points:
        raise ConfigError("no curve has a point that can be drawn")
    low, high = min(y for _, y in points), max(y for _, y in points)
    rows = [[" "] * width for _ in range(height)]
    for mark, ys in zip(_marks(len(curves)), curves.values(), strict=True):
        for x, y in zip(xs, ys, strict=True):
            if _drawable(y, log_y):
                column = round(_position(x, min(xs), max(xs), log_x) * (width - 1))
                above = round(_position(y, low, high, log_y) * (height - 1))
                rows[height - 1 - above][min(width - 1, column)] = mark
    edge = max(len(f"{limit:.4g}") for limit in (low, high)) + 2
    lines = [" " * edge + y_label]
    for i, row in enumerate(rows):
        label = f"{high:.4g}" if i == 0 else f"{low:.4g}" if i == height - 1 else ""
        lines.append((label.rjust(edge) + " |" + "".join(row)).rstrip())
    lines.append(" " * edge + " +" + "-" * width)
    lines.append(" " * edge + f"  {min(xs):.4g} to {max(xs):.4g}: {x_label}")
    lines += [" " * edge + f"  {mark} {name}" for mark, name in zip(_marks(len(curves)), curves, strict=True)]
    return "\n".join(lines)


def _marks(count: int) -> str:
    return (MARKS * (count // len(MARKS) + 1))[:count]


def _drawable(y: float, log: bool) -> bool:
    return math.isfinite(y) and (y > 0 or not log)


def _position(value: float, low: float, high: float, log: bool) -> float:
    if high == low:
        return 0.0
    if log and low > 0:
        return (math.log(value) - math.log(low)) / (math.log(high) - math.log(low))
    return (value - low) / (high - low)


def save_plot(
    path: Path, xs: Sequence[float], curves: Mapping[str, Sequence[float]], *, title: str, x_label: str, y_label: str,
    log_x: bool = True, log_y: bool = True,
) -> None:  # fmt: skip
    """Write curves as a figure, in the format of the file's suffix."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'laconic[plots]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), constrained_layout=True)
    for name, ys in curves.items():
        axes.plot(xs, ys, marker=".", label=name)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    if log_x:
        axes.set_xscale("log")
    if log_y:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise FileError(f"cannot write the plot {path}: {error}") from None
    finally:
        plt.close(figure)
