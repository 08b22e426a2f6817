"""Outer optimizers: what is done with the mean of the ranks' changes, and their state by parameter name."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from laconic.codecs import parse
from laconic.errors import ConfigError
from laconic.suitability import moments

__all__ = ["OUTER", "Outer", "OuterStep", "advise_longer_mean", "choose_outer", "is_lossy"]

log = logging.getLogger("laconic")

Outer = Callable[[list[Tensor]], torch.optim.Optimizer]

OUTER: Mapping[str, Outer] = {
    "mean": lambda anchors: torch.optim.SGD(anchors, lr=1.0),
    "nesterov": lambda anchors: torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True),
    "muloco": lambda anchors: torch.optim.SGD(anchors, lr=0.7, momentum=0.6, nesterov=True),
}
"""Outer optimizers by name: plain averaging, DiLoCo's Nesterov momentum, and MuLoCo's.

With u = 0.6 u + 0.7 D, MuLoCo's step is theta - 0.6 u - 0.7 D: Nesterov momentum of 0.6, whose buffer torch keeps
without the learning rate. ``mean:F`` multiplies the mean by F.
"""


def is_lossy(spec: str) -> bool:
    """Whether a codec drops or quantizes values; casts to 16 bits are not counted as lossy."""
    chain = parse(spec)[1]
    return chain.selector is not None or any(stage.kind != "cast" for stage in chain.stages)


def choose_outer(outer: str | Outer | None, codecs: Sequence[str]) -> str | Outer:
    """Return the outer optimizer to use: by default Nesterov momentum, and a plain mean if a codec is lossy.

    Momentum replays what error feedback delivers late, so under a lossy codec a plain mean trains better.

    Args:
        outer: The user's choice.
        codecs: The codec of the exchange, then those of the policy's rules.
    """
    if outer is None:
        outer = "mean" if any(is_lossy(codec) for codec in codecs) else "nesterov"
        log.info("LocalSGD uses outer=%r, the default with codec %r", outer, codecs[0])
    outer_of(outer)
    return outer


FEW_STEPS = 4
"""Local steps up to which a plain mean of what Adam did was measured to be too short."""


def advise_longer_mean(
    outer: str | Outer, optimizers: Sequence[torch.optim.Optimizer], every: int, replicas: int
) -> None:
    """Log once that the mean of what several replicas' Adam did after few local steps is too short.

    Adam divides a gradient by its own noise. A replica's gradient comes from a share of the batch and is noisier than
    that of the whole batch, so its steps are shorter, by up to the root of the number of replicas where noise prevails;
    their mean is not longer. Measured by ``laconic bench fsdp`` (docs/fsdp.md).
    """
    adam = bool(optimizers) and all(moments(each) == "adam" for each in optimizers)
    if outer == "mean" and adam and every <= FEW_STEPS and replicas > 1:
        log.warning(
            "LocalSGD: with Adam and so few local steps a plain mean is too short a step. Two replicas ended 2 %% "
            "above data parallelism's loss, and less than 1 %% with outer='mean:1.4'. With %d replicas try factors up "
            "to outer='mean:%.1f' (docs/local-sgd.md)",
            replicas, math.sqrt(replicas),
        )  # fmt: skip


def outer_of(outer: str | Outer) -> Outer:
    """Return the function behind an outer optimizer's name: one of ``OUTER``, or ``mean:F``."""
    if callable(outer):
        return outer
    if isinstance(outer, str):
        if outer in OUTER:
            return OUTER[outer]
        name, _, text = outer.partition(":")
        factor = _number(text)
        if name == "mean" and 0 < factor < math.inf:
            return lambda anchors: torch.optim.SGD(anchors, lr=factor)
    raise ConfigError(
        f"outer must be one of {', '.join(OUTER)}, mean:F with a factor F above 0, or a function; got {outer!r}"
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


_OWN = ("params", "foreach", "fused", "capturable", "differentiable")
"""Keys of a parameter group that a saved state does not change: the tensors, and how the step is computed."""


class OuterStep:
    """Applies an outer optimizer to anchors: the global model, from which the ranks' changes are measured."""

    def __init__(self, outer: str | Outer, names: Sequence[str], anchors: Sequence[Tensor]) -> None:
        self._anchors, self._names = list(anchors), {id(x): name for name, x in zip(names, anchors, strict=True)}
        self.optimizer = outer_of(outer)(list(anchors))
        held = {id(x) for group in self.optimizer.param_groups for x in group["params"]}
        if held != set(self._names):
            raise ConfigError("the outer optimizer must hold exactly the tensors that the function was given")

    def apply(self, changes: Sequence[Tensor]) -> None:
        """Move the anchors by the mean of the ranks' changes."""
        for anchor, change in zip(self._anchors, changes, strict=True):
            anchor.grad = change
        self.optimizer.step()
        for anchor in self._anchors:
            anchor.grad = None

    def add(self, name: str, anchor: Tensor) -> None:
        """Let the optimizer hold one more anchor."""
        self._anchors.append(anchor)
        self._names[id(anchor)] = name
        self.optimizer.param_groups[0]["params"].append(anchor)

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the optimizer's memory of each anchor, by parameter name."""
        return {self._names[id(x)]: copy.deepcopy(dict(memory)) for x, memory in self.optimizer.state.items()}

    def settings(self) -> list[dict[str, Any]]:
        """Return the options of the optimizer's parameter groups, such as the learning rate."""
        return [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]

    def load(self, state: Mapping[str, Mapping[str, Any]], settings: Sequence[Mapping[str, Any]]) -> None:
        """Continue with a saved memory; settings are used if there are as many groups as here."""
        self.optimizer.state.clear()
        for anchor in self._anchors:
            memory = state.get(self._names[id(anchor)])
            if memory:
                self.optimizer.state[anchor] = {
                    key: value.to(anchor.device).clone() if isinstance(value, Tensor) else copy.deepcopy(value)
                    for key, value in memory.items()
                }
        if len(settings) == len(self.optimizer.param_groups):
            for group, saved in zip(self.optimizer.param_groups, settings, strict=True):
                group.update({key: value for key, value in saved.items() if key not in _OWN})
