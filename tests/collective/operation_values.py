"""Codecs, dtypes and tensors for tests of collectives and messages, and the error of their results."""

from __future__ import annotations

import torch

import laconic

COMPRESS_ALL = laconic.Policy(min_numel=0, exempt_1d=False)
SPECS = {
    "qsgd:8": 0.02,
    "thc:8": 0.03,
    "bf16": 0.01,
    "topk:0.5": 0.6,
    "topk:0.5|qsgd:8": 0.6,
    "shared:8": 0.03,
    "sign": 1.1,
}
"""Codecs, and the largest relative error of a mean in each."""
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * seed + rank)).to(dtype)


def relative_error(x: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.to(torch.float64)
    return float((x.to(torch.float64) - expected).norm() / expected.norm().clamp(min=1e-12))
