"""Speed-up of codecs over the number of workers, the rate of the links, or the rho and h of compressed layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from laconic.errors import ConfigError
from laconic.plan import plotting
from laconic.plan.recommend import CompressedLayers, PlanRequest, recommend

__all__ = ["SWEEPS", "Sweep", "sweep"]

SWEEPS: Mapping[str, tuple[str, Sequence[float]]] = {
    "workers": ("workers", (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)),
    "bandwidth": ("bit/s of a link", tuple(10 ** (7 + i / 4) for i in range(17))),
    "rho": ("rho of the layers", (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)),
    "h": ("h of the layers", tuple(0.1 * i for i in range(1, 21))),
}
"""By name, the label of the x axis and its values."""

SHOWN = 6
"""The number of curves: those of the codecs with the largest speed-ups."""


@dataclass(frozen=True)
class Sweep:
    """The speed-up of each codec over float32, at each value of one parameter."""

    parameter: str
    x: Sequence[float]
    speedup_fp32: Mapping[str, Sequence[float]]

    def values(self) -> dict[str, Any]:
        return {"what": self.parameter, "x": list(self.x), "speedup_fp32": dict(self.speedup_fp32)}

    @property
    def _axes(self) -> dict[str, Any]:
        labels = {"x_label": SWEEPS[self.parameter][0], "y_label": "times as fast as float32"}
        return {**labels, "log_x": self.parameter != "h"}

    def text(self) -> str:
        """Return the curves as text."""
        return plotting.text_plot(self.x, self.speedup_fp32, **self._axes)

    def save(self, path: Path) -> None:
        """Write the curves as a figure, in the format of the file's suffix."""
        plotting.save_plot(path, self.x, self.speedup_fp32, title="laconic plan", **self._axes)


def sweep(request: PlanRequest, parameter: str) -> Sweep:
    """Return the speed-ups of a training's codecs over one parameter.

    A codec that cannot be used at some of the values, such as a sum with too few bits for so many workers, is left out.
    """
    if parameter not in SWEEPS:
        raise ConfigError(f"--sweep must be one of {', '.join(SWEEPS)}, got {parameter!r}")
    x = SWEEPS[parameter][1]
    curves: dict[str, list[float]] = {}
    for value in x:
        for row in recommend(_at(request, parameter, value), break_even=False).rows:
            if row.codec != "none":
                curves.setdefault(row.codec, []).append(row.speedup_fp32)
    complete = {codec: ys for codec, ys in curves.items() if len(ys) == len(x)}
    best = sorted(complete, key=lambda codec: -max(complete[codec]))[:SHOWN]
    return Sweep(parameter, x, {codec: complete[codec] for codec in best})


def _at(request: PlanRequest, parameter: str, value: float) -> PlanRequest:
    """Return the request with another value of one parameter."""
    if parameter == "workers":
        return replace(request, workers=int(value))
    if parameter == "bandwidth":
        return replace(request, rate=value)
    layers = request.layers or CompressedLayers(1.0, 1.0)
    return replace(request, layers=replace(layers, **{parameter: value}))
