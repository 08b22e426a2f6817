"""Plain values, and casts to 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.errors import FrameError
from laconic.kernels import random
from laconic.kernels.reference.reductions import amax_bits_of, put

FLOAT16_MAX = 65504.0
_EXPONENT = 0x7F800000
BFLOAT16_MAX = float(torch.finfo(torch.bfloat16).max)


def all_finite(x: Tensor) -> bool:
    return bool(torch.isfinite(x).all())


def add_momentum(x: Tensor, momentum: float, velocity: Tensor, residual: Tensor) -> None:
    velocity.mul_(momentum).add_(x)
    residual.add_(velocity)


def stochastic_bf16(x: Tensor, seed: int, out: Tensor) -> None:
    """Add random bits below the last one that bfloat16 keeps, and cut; see ``Kernels``."""
    index = torch.arange(x.numel(), dtype=torch.int64, device=x.device)
    bits = x.view(torch.int32).to(torch.int64) & random.M32
    summed = bits + (random.hash32(index, random.key(seed, random.RESIDUALS)) >> 16)
    infinite = ((bits & _EXPONENT) == _EXPONENT) | ((summed & _EXPONENT) == _EXPONENT)
    short = torch.where(infinite, bits, summed) >> 16
    out.view(torch.int16).copy_(short - ((short & 0x8000) << 1))


def copy_finite(x: Tensor, out: Tensor) -> bool:
    if x.is_floating_point() and not all_finite(x):
        return False
    out.copy_(x.view(torch.uint8))
    return True


def raw_decode(section: Tensor, dtype: torch.dtype, out: Tensor, weight: float | None) -> None:
    if dtype == torch.bool and bool((section > 1).any()):
        raise FrameError("the frame holds a boolean that is neither 0 nor 1")
    values = section.clone().view(dtype)
    if dtype.is_floating_point and not all_finite(values):
        raise FrameError(f"the frame holds a {str(dtype).removeprefix('torch.')} value that is not finite")
    put(out, values if weight is None else values.to(torch.float32), weight)


def cast_encode(x: Tensor, to: str, out: Tensor) -> tuple[int, int]:
    amax_bits = amax_bits_of(x)
    limit, dtype = (FLOAT16_MAX, torch.float16) if to == "fp16" else (BFLOAT16_MAX, torch.bfloat16)
    out.copy_(x.clamp(-limit, limit).to(dtype).view(torch.uint8))
    return amax_bits, int((x.abs() > limit).sum())


def cast_decode(section: Tensor, source: str, out: Tensor, weight: float | None) -> None:
    values = section.clone().view(torch.float16 if source == "fp16" else torch.bfloat16)
    if not all_finite(values):
        raise FrameError(f"the frame holds a {source} value that is not finite")
    put(out, values.to(torch.float32), weight)
