"""A model's parameters with pre-generated gradients: backward is a copy, so a step is its exchange."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from laconic.train.models import build_model
from laconic_lab.bench.samples import heavy_tailed

__all__ = ["PregeneratedGradients", "Synthetic"]

SLIDE = 997
"""Offset between the gradients of two steps, so that they differ without being generated."""
MOST_STEPS = 512


class PregeneratedGradients:
    """Pre-generated gradients of a rank: slices of one long tensor."""

    def __init__(self, numel: int, seed: int) -> None:
        self.numel = numel
        self.values = heavy_tailed(numel + SLIDE * MOST_STEPS, seed)

    def at(self, step: int) -> Tensor:
        begin = SLIDE * (step % MOST_STEPS)
        return self.values[begin : begin + self.numel]


class _Give(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carried: Tensor, parameter: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return carried.clone()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        return outputs[0], ctx.gradient, None


class Synthetic(nn.Module):
    """The parameters of a model in the order of its layers; called with the gradients of all of them."""

    def __init__(self, model: str) -> None:
        super().__init__()
        shapes = [(name, p.shape) for name, p in build_model(model, seed=0).named_parameters() if p.requires_grad]
        self.slots = nn.ParameterDict({name.replace(".", "-"): nn.Parameter(torch.zeros(s)) for name, s in shapes})
        self.numel = sum(shape.numel() for _, shape in shapes)

    def forward(self, gradients: Tensor) -> Tensor:
        carried, at = torch.zeros((), requires_grad=True), 0
        for parameter in self.slots.values():
            given = gradients[at : at + parameter.numel()].view(parameter.shape)
            carried = _Give.apply(carried, parameter, given)  # type: ignore[no-untyped-call]
            at += parameter.numel()
        return carried
