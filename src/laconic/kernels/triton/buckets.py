"""Bucketed codecs: device functions for magnitudes, scales and their sections, and the launches of whole tensors.

Encoders return the largest magnitude of each program on the device (``amax_bits``); reading their maximum is the only
synchronization of an encoding. Decoders return a flag on the device: whether a section holds values that no encoder
writes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.sections import GROUP, num_buckets, packed_nbytes
from laconic.kernels.triton.launch_args import TILE, exact_options, word_aligned
from laconic.kernels.triton.packing import PackedSection

__all__ = [
    "FLOAT32_MAX", "ROUND_DOWN", "TINY_NORM", "UPSCALE", "bucket_tile", "encode_buckets", "launch_decode",
    "launch_encode", "load_scales", "magnitude_bits", "quantization_scale", "step_size", "store_scales", "tile_shape",
]  # fmt: skip


TINY_NORM = tl.constexpr(2.0**-90)
UPSCALE = tl.constexpr(2.0**64)
ROUND_DOWN = tl.constexpr(1 - 2.0**-22)
FLOAT32_MAX = tl.constexpr((2.0 - 2.0**-23) * 2.0**127)


def tile_shape(bucket: int, values: int = TILE) -> tuple[int, int]:
    """Return the buckets of a program and its warps: two warps for ``values`` values, more for larger buckets."""
    return max(1, values // bucket), min(32, max(2, 2 * bucket // values))


@triton.jit
def encode_buckets(
    x, scales, packed, tail, amax_bits, n, full, count,
    ENCODE: tl.constexpr, CODING: tl.constexpr, BUCKET: tl.constexpr, BUCKETS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Encode a tensor by a codec's device function ENCODE and its constants CODING."""
    program = tl.program_id(0).to(tl.int64)
    program_amax_bits = ENCODE(program, x, scales, packed, tail, n, full, count, CODING, BUCKET, BUCKETS, STAGES)
    tl.store(amax_bits + program, program_amax_bits)


@triton.jit
def _decode_buckets(
    scales, packed, out, flag, n, full, count, weight,
    DECODE: tl.constexpr, CODING: tl.constexpr, BUCKET: tl.constexpr, BUCKETS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    DECODE(
        tl.program_id(0).to(tl.int64), scales, packed, out, flag, n, full, count, weight, CODING, BUCKET, BUCKETS, ADD
    )


def launch_encode(
    kernel: Any, x: Tensor, scales: Tensor, packed: Tensor, *, bits: int, bucket: int, floats: int, buckets: int,
    warps: int, **constants: Any,
) -> Tensor:  # fmt: skip
    """Encode x in buckets with so many floats in ``scales`` each; return amax_bits by program."""
    n, packed_section = x.numel(), PackedSection(packed, x.numel(), bits)
    count = num_buckets(n, bucket)
    assert scales.numel() == 4 * floats * count
    programs = num_buckets(count, buckets)
    amax_bits = torch.empty(programs, dtype=torch.int32, device=x.device)
    aligned_scales = word_aligned(scales)
    kernel[(programs,)](
        x, aligned_scales, packed_section.target, packed_section.tail, amax_bits, n, packed_section.full, count,
        BUCKET=bucket, BUCKETS=buckets, **constants, **exact_options(num_warps=warps),
    )  # fmt: skip
    if aligned_scales is not scales:
        scales.copy_(aligned_scales)
    packed_section.finish()
    return amax_bits


def launch_decode(
    decode: Any, coding: int, scales: Tensor, packed: Tensor, out: Tensor, weight: float | None, *, bits: int,
    bucket: int, floats: int, tile: int = TILE,
) -> Tensor:  # fmt: skip
    """Decode buckets with so many floats in ``scales`` each into ``out``, or add them; return the flag.

    Args:
        decode: The codec's device function for the buckets of a program.
        coding: Its constant.
    """
    n, (buckets, warps) = out.numel(), tile_shape(bucket, tile)
    count = num_buckets(n, bucket)
    assert scales.numel() == 4 * floats * count and packed.numel() == packed_nbytes(n, bits)
    flag = torch.zeros(1, dtype=torch.int32, device=out.device)
    _decode_buckets[(num_buckets(count, buckets),)](
        word_aligned(scales), word_aligned(packed), out, flag, n, n // GROUP * GROUP, count, weight or 0.0,
        DECODE=decode, CODING=coding, BUCKET=bucket, BUCKETS=buckets, ADD=weight is not None,
        **exact_options(num_warps=warps),
    )  # fmt: skip
    return flag


@triton.jit
def bucket_tile(program, BUCKET: tl.constexpr, BUCKETS: tl.constexpr):
    """Return where a program's values begin, and their offsets from there, a row per bucket."""
    begin = program * (BUCKETS * BUCKET)
    return begin, tl.arange(0, BUCKETS)[:, None] * BUCKET + tl.arange(0, BUCKET)[None, :]


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
