"""The counter hash of ``kernels.random`` on the device: rounding noise and the signs of a rotation."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.random import row_factor
from laconic.kernels.triton.launch_args import split64

__all__ = ["hash32", "rotation_signs", "rounding_noise", "rounding_noise_tile", "row_factors"]


@lru_cache(maxsize=16)
def row_factors(device: torch.device) -> Tensor:
    """Return the factors of ``random.row_factor`` for the 32 rows of a group."""
    return torch.tensor([split64(row_factor(row))[0] for row in range(32)], dtype=torch.int32, device=device)


@triton.jit
def hash32(counter, key_low, key_high):
    """Compute ``random.hash32`` of counters below 2^32; the key is two int32 arguments."""
    h = counter.to(tl.uint32) ^ key_low.to(tl.uint32, bitcast=True)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15) ^ key_high.to(tl.uint32, bitcast=True)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def column_hash(offsets, first_group, key_low, key_high):
    """Hash that the 32 values of a column of a group share, for values at ``offsets`` after the first group."""
    return hash32((first_group + offsets // 256) * 8 + offsets % 8, key_low, key_high)


@triton.jit
def rounding_noise(offsets, first_group, row_factors, key_low, key_high, FRACTION_BITS: tl.constexpr):
    """Compute ``random.dither`` as int32."""
    factor = tl.load(row_factors + offsets // 8 % 32).to(tl.uint32, bitcast=True)
    return ((column_hash(offsets, first_group, key_low, key_high) * factor) >> (32 - FRACTION_BITS)).to(tl.int32)


@triton.jit
def rounding_noise_tile(first_group, row_factors, key_low, key_high, FRACTION_BITS: tl.constexpr, SPAN: tl.constexpr):
    """Compute ``random.dither`` for a tile of whole groups, as [groups, 32, 8]; each row's factor is loaded once."""
    group = first_group + tl.arange(0, SPAN // 256)[:, None, None]
    column = tl.arange(0, 8)[None, None, :]
    factor = tl.load(row_factors + tl.arange(0, 32)).to(tl.uint32, bitcast=True)[None, :, None]
    return ((hash32(group * 8 + column, key_low, key_high) * factor) >> (32 - FRACTION_BITS)).to(tl.int32)


@triton.jit
def rotation_signs(offsets, first_group, key_low, key_high):
    """Return ±1 for each value, as the rotation multiplies it."""
    negative = (column_hash(offsets, first_group, key_low, key_high) >> (offsets // 8 % 32).to(tl.uint32)) & 1
    return tl.where(negative == 1, -1.0, 1.0)
