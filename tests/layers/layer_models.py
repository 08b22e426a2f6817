"""A small convolutional network, shared by the tests of compressed layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SCHEMES = ("monarch:0.2", "lowrank:0.2", "subspace:0.1", "hashed:0.2")


def mixed_network() -> nn.Module:
    """Return a network with convolutions of several kinds, norms and linear layers."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1, dilation=1), nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding="same", groups=2, bias=False), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Linear(1024, 96), nn.Tanh(), nn.Linear(96, 10),
    )  # fmt: skip


def images(count: int = 4) -> Tensor:
    return torch.randn(count, 3, 16, 16)
