"""bins: each value's bin and the mean of each bin of a bucket, in one pass over memory."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.interface import BinCoding
from laconic.kernels.triton.buckets import (
    FLOAT32_MAX,
    bucket_tile,
    encode_buckets,
    launch_decode,
    launch_encode,
    magnitude_bits,
    tile_shape,
)
from laconic.kernels.triton.tile import load_symbols, pairwise_sum, store_or_add

__all__ = ["BINS_TILE", "bins_constants", "bins_decode", "bins_decode_part", "bins_encode", "bins_encode_part"]

BINS_TILE = 1024
"""Values per program, unless a bucket needs more: sixteen per thread."""

LARGE, SMALL = tl.constexpr(2.0**40), tl.constexpr(2.0**-40)
UP, DOWN = tl.constexpr(2.0**96), tl.constexpr(2.0**-96)


@triton.jit
def _scales(largest):
    """Return the power of two that keeps sums and squares of a bucket's values in float32, and its inverse."""
    large, small = largest >= LARGE, largest < SMALL
    return tl.where(large, DOWN, tl.where(small, UP, 1.0)), tl.where(large, UP, tl.where(small, DOWN, 1.0))


@triton.jit
def _mean_and_factor(distances, squares, size, SLOPE: tl.constexpr, LENGTH: tl.constexpr):
    """Return a bucket's mean distance, and the bins per unit of distance, from its sums."""
    mean = tl.div_rn(distances, size)
    variance = tl.div_rn(squares, size) - mean * mean
    deviation = tl.sqrt_rn(tl.maximum(variance, 0.0))
    factor = tl.div_rn(tl.full((LENGTH,), SLOPE, tl.float32), tl.where(deviation > 0, deviation, 1.0))
    return mean, tl.where(deviation > 0, factor, 0.0)


@triton.jit
def _symbol(centred, mean, factor, OFFSET: tl.constexpr, HALF: tl.constexpr):
    """Return the bin of values whose bucket has this mean distance."""
    if HALF == 1:
        return (centred >= 0).to(tl.int32)
    level = (tl.abs(centred) - mean) * factor + OFFSET
    level = tl.minimum(tl.maximum(level, 0.0), HALF - 1.0).to(tl.int32)
    return tl.where(centred < 0, HALF - 1 - level, HALF + level)


# ------------------------------------------------------------------------------------------------------------ encode
#
# A program holds its values as eight rows of 16 of each block of 128, so that the first additions of a sum, and the
# packing, need no other thread.


@triton.jit
def _bucket_sum(rows, BUCKETS: tl.constexpr, BUCKET: tl.constexpr, STAGES: tl.constexpr):
    """Compute ``reference.pairwise_sum`` of each bucket; BUCKET = 128 << STAGES."""
    total = ((rows[0] + rows[1]) + (rows[2] + rows[3])) + ((rows[4] + rows[5]) + (rows[6] + rows[7]))
    return pairwise_sum(tl.reshape(total, (BUCKETS, BUCKET // 128, 16)), BUCKETS, BUCKET // 8, STAGES)


@triton.jit
def _per_block(values, BUCKETS: tl.constexpr, BLOCKS: tl.constexpr):
    """Repeat a bucket's number for each of its blocks, as a column."""
    return tl.reshape(tl.broadcast_to(values[:, None], (BUCKETS, BLOCKS // BUCKETS)), (BLOCKS,))[:, None]


@triton.jit
def _store_blocks(symbols, packed, begin, full, BITS: tl.constexpr, BLOCKS: tl.constexpr):
    """Pack the symbols of full groups: 16 of each column of a block, which are BITS half words."""
    block = tl.arange(0, BLOCKS)[:, None]
    stream = tl.zeros((BLOCKS, 16), tl.int64)
    for r in tl.static_range(8):
        stream = stream | (symbols[r].to(tl.int64) << (2 * BITS * r))
    stream = stream << (tl.arange(0, 16)[None, :] // 8 * BITS).to(tl.int64)
    stream = tl.sum(tl.reshape(stream, (BLOCKS, 2, 8)), 1)
    half_words = packed.to(tl.pointer_type(tl.int16)) + begin // 16 * BITS + block // 2 * (16 * BITS)
    for u in tl.static_range(BITS):
        at = block % 2 * BITS + u
        pointer = half_words + at // 2 * 16 + at % 2 + 2 * tl.arange(0, 8)[None, :]
        tl.store(pointer, (stream >> (16 * u)).to(tl.int16), mask=begin + block * 128 < full)


@triton.jit
def _encode_blocks(
    program, x, means, packed, tail, n, full, count,
    CODING: tl.constexpr, BUCKET: tl.constexpr, BUCKETS: tl.constexpr, STAGES: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    slope: tl.constexpr = CODING[0]
    offset: tl.constexpr = CODING[1]
    bits: tl.constexpr = CODING[2]
    blocks: tl.constexpr = BUCKETS * BUCKET // 128
    half: tl.constexpr = 1 << (bits - 1)
    begin = program * (BUCKETS * BUCKET)
    first = program * BUCKETS
    offsets = tl.arange(0, blocks)[:, None] * 128 + tl.arange(0, 16)[None, :]
    rows = ()
    magnitudes = tl.zeros((blocks, 16), tl.int32)
    for r in tl.static_range(8):
        positions = begin + offsets + 16 * r
        if EDGE:
            v = tl.load(x + positions, mask=positions < n, other=0.0)
        else:
            v = tl.load(x + positions)
        magnitudes = tl.maximum(magnitudes, magnitude_bits(v))
        rows = rows + (v,)  # type: ignore[assignment]
    largest = tl.max(tl.reshape(magnitudes, (BUCKETS, BUCKET // 8)), 1)
    scale, inverse = _scales(largest.to(tl.float32, bitcast=True))
    block_scale = _per_block(scale, BUCKETS, blocks)
    values = ()
    for r in tl.static_range(8):
        values = values + (rows[r] * block_scale,)  # type: ignore[assignment]

    row = tl.arange(0, BUCKETS)
    size = tl.maximum(tl.minimum(n - (begin + row * BUCKET), BUCKET), 1).to(tl.float32)
    mean = _per_block(tl.div_rn(_bucket_sum(values, BUCKETS, BUCKET, STAGES), size), BUCKETS, blocks)
    mean_distance = tl.zeros((blocks, 1), tl.float32)
    factor = tl.zeros((blocks, 1), tl.float32)
    if bits > 1:
        distances = ()
        squares = ()
        for r in tl.static_range(8):
            d = tl.abs(values[r] - mean)
            if EDGE:
                d = tl.where(begin + offsets + 16 * r < n, d, 0.0)
            distances = distances + (d,)  # type: ignore[assignment]
            squares = squares + (d * d,)  # type: ignore[assignment]
        bucket_mean, bucket_factor = _mean_and_factor(
            _bucket_sum(distances, BUCKETS, BUCKET, STAGES), _bucket_sum(squares, BUCKETS, BUCKET, STAGES), size,
            slope, BUCKETS,
        )  # fmt: skip
        mean_distance = _per_block(bucket_mean, BUCKETS, blocks)
        factor = _per_block(bucket_factor, BUCKETS, blocks)

    symbols = ()
    for r in tl.static_range(8):
        positions = begin + offsets + 16 * r
        symbol = _symbol(values[r] - mean, mean_distance, factor, offset, half)
        if EDGE:
            tl.store(tail + (positions - full), symbol, mask=(positions >= full) & (positions < n))
            symbol = tl.where(positions < n, symbol, 2 * half)  # no bin's
        symbols = symbols + (symbol,)  # type: ignore[assignment]
    _store_blocks(symbols, packed, begin, full, bits, blocks)
    pointer = means.to(tl.pointer_type(tl.float32)) + (first + row) * (2 * half)
    for bin_number in range(2 * half):  # unrolled, the kernel would compile for a minute
        inside = ()
        counts = tl.zeros((blocks, 16), tl.int32)
        for r in tl.static_range(8):
            here = symbols[r] == bin_number  # type: ignore[var-annotated]
            counts += here.to(tl.int32)
            inside = inside + (tl.where(here, values[r], 0.0),)
        members = tl.maximum(tl.sum(tl.reshape(counts, (BUCKETS, BUCKET // 8)), 1), 1).to(tl.float32)
        bin_mean = tl.div_rn(_bucket_sum(inside, BUCKETS, BUCKET, STAGES), members) * inverse
        bin_mean = tl.minimum(tl.maximum(bin_mean, -FLOAT32_MAX), FLOAT32_MAX) + 0.0  # -0 becomes 0
        tl.store(pointer + bin_number, bin_mean, mask=first + row < count)
    return tl.max(largest, 0)


@triton.jit
def bins_encode_part(
    program, x, means, packed, tail, n, full, count,
    CODING: tl.constexpr, BUCKET: tl.constexpr, BUCKETS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Encode a program's part of a tensor by CODING, a slope, an offset and bits; return its amax_bits."""
    if (program + 1) * (BUCKETS * BUCKET) <= full:
        amax_bits = _encode_blocks(
            program, x, means, packed, tail, n, full, count, CODING, BUCKET, BUCKETS, STAGES, False
        )
    else:
        amax_bits = _encode_blocks(
            program, x, means, packed, tail, n, full, count, CODING, BUCKET, BUCKETS, STAGES, True
        )
    return amax_bits


def bins_constants(coding: BinCoding) -> dict[str, Any]:
    """Return the constants of an encoder's kernel."""
    bits, bucket, slope, offset = coding
    return {"ENCODE": bins_encode_part, "CODING": (slope, offset, bits), "STAGES": bucket.bit_length() - 8}


def bins_encode(x: Tensor, coding: BinCoding, *, means: Tensor, packed: Tensor) -> Tensor:
    """Encode x; return amax_bits by program."""
    buckets, warps = tile_shape(coding.bucket, BINS_TILE)
    return launch_encode(
        encode_buckets, x, means, packed, bits=coding.bits, bucket=coding.bucket, floats=1 << coding.bits,
        buckets=buckets, warps=warps, **bins_constants(coding),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ decode


@triton.jit
def _bins_tile(
    table, packed, out, offsets, begin, n, full, present, weight,
    BITS: tl.constexpr, ADD: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    symbols = load_symbols(packed, offsets, begin, n, full, BITS, EDGE)
    values = tl.load(table + symbols, mask=present, other=0.0)
    values = tl.where(tl.abs(values) <= FLOAT32_MAX, values, 0.0)
    store_or_add(out, offsets, begin, n, values, weight, ADD, EDGE)


@triton.jit
def bins_decode_part(
    program, means, packed, out, flag, n, full, count, weight,
    BITS: tl.constexpr, BUCKET: tl.constexpr, BUCKETS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Decode a program's part of a tensor; a mean that is not finite sets the flag and reads as 0."""
    begin, offsets = bucket_tile(program, BUCKET, BUCKETS)
    bucket = program * BUCKETS + tl.arange(0, BUCKETS)[:, None]
    table = means.to(tl.pointer_type(tl.float32)) + (bucket << BITS)
    present = bucket < count
    all_means = tl.load(table + tl.arange(0, 1 << BITS)[None, :], mask=present, other=0.0)
    invalid = (tl.abs(all_means) <= FLOAT32_MAX) == 0
    tl.store(flag, 1, mask=tl.max(tl.max(invalid.to(tl.int32), 1), 0) > 0)
    if begin + BUCKETS * BUCKET <= full:
        _bins_tile(table, packed, out, offsets, begin, n, full, present, weight, BITS, ADD, False)
    else:
        _bins_tile(table, packed, out, offsets, begin, n, full, present, weight, BITS, ADD, True)


def bins_decode(means: Tensor, packed: Tensor, *, bits: int, bucket: int, out: Tensor, weight: float | None) -> Tensor:
    return launch_decode(bins_decode_part, bits, means, packed, out, weight, bits=bits, bucket=bucket, floats=1 << bits)
