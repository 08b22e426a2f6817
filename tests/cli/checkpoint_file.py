"""A safetensors file with one tensor of each kind that a frame can carry."""

from __future__ import annotations

import torch


def tensors() -> dict[str, torch.Tensor]:
    """Return every dtype, a scalar and an empty tensor."""
    g = torch.Generator().manual_seed(0)
    return {
        "body.w": torch.randn(200, 300, generator=g), "body.b": torch.randn(300, generator=g),
        "head.w": torch.randn(64, 100, generator=g).bfloat16(), "half": torch.randn(100, 100, generator=g).half(),
        "double": torch.randn(100, 100, generator=g).double(), "small": torch.randn(4, 4, generator=g),
        "zero": torch.zeros(80, 80), "empty": torch.empty(0, 3), "steps": torch.tensor(7),
        "ids": torch.arange(1000, dtype=torch.int32), "short": torch.arange(-5, 5, dtype=torch.int16),
        "bytes": torch.arange(256, dtype=torch.uint8), "signed": torch.arange(-100, 100, dtype=torch.int8).view(2, 100),
        "mask": torch.tensor([[True, False], [False, True]]), "ünï/cødé": torch.randn(70, 70, generator=g),
    }  # fmt: skip
