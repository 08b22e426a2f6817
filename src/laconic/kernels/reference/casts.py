"""The values as they are, or rounded to 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.errors import FrameError
from laconic.kernels.reference.reductions import amax_bits_of, put

FLOAT16_MAX = 65504.0
BFLOAT16_MAX = float(torch.finfo(torch.bfloat16).max)


def all_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def add_momentum(x: Tensor, momentum: float, velocity: Tensor, residual: Tensor) -> None:
    """velocity = momentum * velocity + x; residual += velocity: float32, in place, rounded after each operation."""
    velocity.mul_(momentum).add_(x)
    residual.add_(velocity)


def copy_finite(x: Tensor, out: Tensor) -> bool:
    """Copy the bytes of x; False when one of its floats is not finite (the copy is then not to be used)."""
    if x.is_floating_point() and not all_finite(x):
        return False
    out.copy_(x.view(torch.uint8))
    return True


def raw_decode(section: Tensor, dtype: torch.dtype, out: Tensor, weight: float | None) -> None:
    """Values as they were: stored into ``out`` of the same dtype, or weighted and added to a float32 one."""
    if dtype == torch.bool and bool((section > 1).any()):
        raise FrameError("a boolean in the frame is neither 0 nor 1")
    values = section.clone().view(dtype)
    if dtype.is_floating_point and not all_finite(values):
        raise FrameError(f"a {str(dtype).removeprefix('torch.')} value in the frame is not finite")
    put(out, values if weight is None else values.to(torch.float32), weight)


def cast_encode(x: Tensor, to: str, out: Tensor) -> tuple[int, int]:
    """Round float32 to 16 bits, saturating; returns the key and how many values saturated."""
    amax_bits = amax_bits_of(x)
    limit, dtype = (FLOAT16_MAX, torch.float16) if to == "fp16" else (BFLOAT16_MAX, torch.bfloat16)
    out.copy_(x.clamp(-limit, limit).to(dtype).view(torch.uint8))
    return amax_bits, int((x.abs() > limit).sum())


def cast_decode(section: Tensor, source: str, out: Tensor, weight: float | None) -> None:
    values = section.clone().view(torch.float16 if source == "fp16" else torch.bfloat16)
    if not all_finite(values):
        raise FrameError(f"a {source} value in the frame is not finite")
    put(out, values.to(torch.float32), weight)
