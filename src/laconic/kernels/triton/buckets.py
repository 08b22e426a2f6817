"""Device functions of bucketed codecs: magnitudes, scales and their sections.

Encoders return the largest magnitude of each program on the device (``amax_bits``); reading their maximum is the only
synchronization of an encoding. Decoders return a flag on the device: whether a section holds values that no encoder
writes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.triton.tile import TILE

__all__ = [
    "FLOAT32_MAX", "ROUND_DOWN", "TINY_NORM", "UPSCALE", "load_scales", "magnitude_bits", "quantization_scale",
    "step_size", "store_scales", "tile_shape",
]  # fmt: skip


TINY_NORM = tl.constexpr(2.0**-90)
UPSCALE = tl.constexpr(2.0**64)
ROUND_DOWN = tl.constexpr(1 - 2.0**-22)
FLOAT32_MAX = tl.constexpr((2.0 - 2.0**-23) * 2.0**127)


def tile_shape(bucket: int, values: int = TILE) -> tuple[int, int]:
    """Return the buckets of a program and its warps: two warps for ``values`` values, more for larger buckets."""
    return max(1, values // bucket), min(32, max(2, 2 * bucket // values))


@triton.jit
def magnitude_bits(v):
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def quantization_scale(norm, UNIT: tl.constexpr, LENGTH: tl.constexpr):
    """Return the two factors of a bucket's values: a power of two that avoids subnormals, and the scale."""
    upscale = tl.where(norm < TINY_NORM, UPSCALE, 1.0)
    scale = tl.div_rn(tl.full((LENGTH,), UNIT, tl.float32), norm * upscale) * ROUND_DOWN
    return upscale, tl.where(norm > 0, scale, 0.0)


@triton.jit
def store_scales(section, first, count, values, ROWS: tl.constexpr):
    row = tl.arange(0, ROWS)
    pointer = section.to(tl.pointer_type(tl.float32)) + first
    tl.store(pointer + row, values, mask=first + row < count)


@triton.jit
def load_scales(section, first, count, flag, ROWS: tl.constexpr):
    """Load the scale of each bucket; an invalid one sets the flag and reads as 0."""
    row = tl.arange(0, ROWS)
    pointer = section.to(tl.pointer_type(tl.float32)) + first
    value = tl.load(pointer + row, mask=first + row < count, other=0.0)
    valid = (value >= 0) & (value <= FLOAT32_MAX)
    tl.store(flag, 1, mask=tl.max((valid == 0).to(tl.int32), 0) > 0)
    return tl.where(valid, value, 0.0)


@triton.jit
def step_size(norm, LEVELS: tl.constexpr, ROWS: tl.constexpr):
    step = tl.div_rn(norm, tl.full((ROWS,), LEVELS, tl.float32))
    return tl.where(step * LEVELS > FLOAT32_MAX, step * ROUND_DOWN, step)
