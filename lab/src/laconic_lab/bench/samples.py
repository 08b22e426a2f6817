"""Seeded test data with distributions like those of gradients and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

__all__ = ["SAMPLES", "gradient_like", "heavy_tailed", "weight_like"]

ROW = 512


def gradient_like(numel: int, seed: int) -> Tensor:
    """Return gaussian values with the magnitude of gradients, 1e-3."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-3


def weight_like(numel: int, seed: int) -> Tensor:
    """Return Laplace values with the magnitude of weights: a sharp peak, so that few symbols dominate."""
    generator = torch.Generator().manual_seed(seed)
    magnitude = torch.empty(numel).exponential_(generator=generator).mul_(0.02)
    return magnitude.copysign_(torch.rand(numel, generator=generator).sub_(0.5))


def heavy_tailed(numel: int, seed: int) -> Tensor:
    """Return gradients with log-normal row scales: most values lie in a small part of the range."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randn(-(-numel // ROW), 1, generator=generator).mul_(0.5).exp_().mul_(1e-3)
    return torch.randn(len(scales), ROW, generator=generator).mul_(scales).view(-1)[:numel]


SAMPLES: Mapping[str, Callable[[int, int], Tensor]] = {
    "gaussian": gradient_like,
    "weights": weight_like,
    "grads": heavy_tailed,
}
"""Functions (numel, seed) -> flat float32 by name. Coded sizes depend on the distribution, so coders use all."""
