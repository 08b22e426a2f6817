"""What kernels of bucketed codecs share: a program's buckets, their numbers, and what values are multiplied by.

Encoders return the largest magnitude of each program (keys, on the device): reading their maximum is the one wait
of an encoding. Decoders return a flag of the device: whether a section held what no encoder writes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.triton.tile import TILE

__all__ = [
    "FLOAT32_MAX",
    "HAIR",
    "LIFT",
    "TINY",
    "load_floats",
    "magnitudes",
    "scale_to",
    "step_of",
    "store_floats",
    "tile",
]


TINY = tl.constexpr(2.0**-90)
LIFT = tl.constexpr(2.0**64)
HAIR = tl.constexpr(1 - 2.0**-22)
FLOAT32_MAX = tl.constexpr((2.0 - 2.0**-23) * 2.0**127)


def tile(bucket: int, values: int = TILE) -> tuple[int, int]:
    """Buckets of a program, which holds them whole, and its warps: two for so many values, more in large buckets."""
    return max(1, values // bucket), min(32, max(2, 2 * bucket // values))


@triton.jit
def magnitudes(v):
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_to(norm, UNIT: tl.constexpr, LENGTH: tl.constexpr):
    """What values of a bucket are multiplied by, in two steps: the power of two that lifts it, and the scale."""
    up = tl.where(norm < TINY, LIFT, 1.0)
    scale = tl.div_rn(tl.full((LENGTH,), UNIT, tl.float32), norm * up) * HAIR
    return up, tl.where(norm > 0, scale, 0.0)


@triton.jit
def store_floats(section, first, count, values, ROWS: tl.constexpr):
    row = tl.arange(0, ROWS)
    place = section.to(tl.pointer_type(tl.float32)) + first
    tl.store(place + row, values, mask=first + row < count)


@triton.jit
def load_floats(section, first, count, flag, ROWS: tl.constexpr):
    """A number of each bucket; 0 in place of what no encoder writes, which is told."""
    row = tl.arange(0, ROWS)
    place = section.to(tl.pointer_type(tl.float32)) + first
    value = tl.load(place + row, mask=first + row < count, other=0.0)
    good = (value >= 0) & (value <= FLOAT32_MAX)
    tl.store(flag, 1, mask=tl.max((good == 0).to(tl.int32), 0) > 0)
    return tl.where(good, value, 0.0)


@triton.jit
def step_of(norm, LEVELS: tl.constexpr, ROWS: tl.constexpr):
    step = tl.div_rn(norm, tl.full((ROWS,), LEVELS, tl.float32))
    return tl.where(step * LEVELS > FLOAT32_MAX, step * HAIR, step)
