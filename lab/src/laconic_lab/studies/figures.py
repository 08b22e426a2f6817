"""How studies draw: SVG files that come out the same every time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from laconic.errors import ConfigError, FileError

__all__ = ["draw_all"]

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "laconic",  # names of clip paths: otherwise random
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


def draw_all(figures: Mapping[str, Callable[[Any], Any]], folder: Path) -> list[Path]:
    """Each figure into a file of its name. A function gets pyplot, and returns what it has drawn."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("figures need matplotlib: pip install 'laconic[plots]'") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawn = []
    with plt.rc_context({**matplotlib.rcParamsDefault, **STYLE}):
        for name, paint in figures.items():
            figure = paint(plt)
            path = folder / f"{name}.svg"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                figure.savefig(path, metadata={"Date": None, "Creator": None})
            except OSError as error:
                raise FileError(f"cannot write {path}: {error.strerror or error}") from error
            plt.close(figure)
            drawn.append(path)
    return drawn
