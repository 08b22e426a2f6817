"""What codecs are measured on: tensors made from a seed, of shapes that training data has."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

__all__ = ["SAMPLES", "gradient_like", "heavy_tailed", "weight_like"]

ROW = 512


def gradient_like(numel: int, seed: int) -> Tensor:
    """Gaussian values of the size of gradients, 1e-3."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-3


def weight_like(numel: int, seed: int) -> Tensor:
    """Laplace values of the size of weights: a sharp peak, so that few symbols of many are common."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.empty(numel).exponential_(generator=generator).mul_(0.02)
    return magnitude.copysign_(torch.rand(numel, generator=generator).sub_(0.5))


def heavy_tailed(numel: int, seed: int) -> Tensor:
    """Gradients of rows that differ in scale, log-normally: most values lie in a small part of the range."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randn(-(-numel // ROW), 1, generator=generator).mul_(0.5).exp_().mul_(1e-3)
    return torch.randn(len(scales), ROW, generator=generator).mul_(scales).view(-1)[:numel]


SAMPLES: Mapping[str, Callable[[int, int], Tensor]] = {
    "gaussian": gradient_like,
    "weights": weight_like,
    "grads": heavy_tailed,
}
"""By name: (values, seed) -> flat float32. A coder's size depends on the shape, so coders are measured on all."""
