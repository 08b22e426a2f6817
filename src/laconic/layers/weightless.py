"""A layer without its weight: what is left of a Linear, a convolution or an embedding when others make the weight."""

from __future__ import annotations

import copy

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["KINDS", "applied", "emptied", "filled"]

KINDS: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
"""Layers that can be called with another's weight. Subclasses may do anything in theirs, so they are not among them."""


def emptied(layer: nn.Module) -> nn.Module:
    """The layer's settings: a copy without parameters."""
    frame = copy.copy(layer)
    frame._parameters, frame._buffers = {"weight": None, "bias": None}, {}
    return frame


def filled(frame: nn.Module, weight: Tensor, bias: Tensor | None) -> nn.Module:
    """A plain layer again, with copies of these."""
    layer = copy.copy(frame)
    layer._parameters, layer._buffers = {"weight": nn.Parameter(weight.detach().clone())}, {}
    if not isinstance(layer, nn.Embedding):
        layer.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach().clone()))
    return layer


def applied(frame: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What the layer would do with this weight."""
    if isinstance(frame, nn.Linear):
        return F.linear(x, weight, bias)
    if isinstance(frame, nn.Embedding):
        return F.embedding(x, weight, frame.padding_idx)
    assert isinstance(frame, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    y: Tensor = frame._conv_forward(x, weight, bias)
    return y
