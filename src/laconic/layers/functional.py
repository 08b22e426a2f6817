"""Calls a Linear, a convolution or an embedding with a weight that is computed elsewhere."""

from __future__ import annotations

import copy

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["SUPPORTED", "call_with_weight", "with_parameters", "without_parameters"]

SUPPORTED: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)
"""Layers that can be called with another weight. Subclasses may do anything in forward, so they are not included."""


def without_parameters(layer: nn.Module) -> nn.Module:
    """Return a copy of a layer that has its settings but no parameters."""
    settings = copy.copy(layer)
    settings._parameters, settings._buffers = {"weight": None, "bias": None}, {}
    return settings


def with_parameters(settings: nn.Module, weight: Tensor, bias: Tensor | None) -> nn.Module:
    """Return a plain layer with copies of these parameters."""
    layer = copy.copy(settings)
    layer._parameters, layer._buffers = {"weight": nn.Parameter(weight.detach().clone())}, {}
    if not isinstance(layer, nn.Embedding):
        layer.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach().clone()))
    return layer


def call_with_weight(settings: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return what the layer computes with this weight."""
    if isinstance(settings, nn.Linear):
        return F.linear(x, weight, bias)
    if isinstance(settings, nn.Embedding):
        return F.embedding(x, weight, settings.padding_idx)
    assert isinstance(settings, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    y: Tensor = settings._conv_forward(x, weight, bias)
    return y
