"""sign and onebit: one bit per value and the means of each bucket, in one pass over memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.sections import GROUP
from laconic.kernels.triton.buckets import (
    FLOAT32_MAX,
    encode_buckets,
    launch_decode,
    launch_encode,
    load_scales,
    magnitude_bits,
    store_scales,
    tile_shape,
)
from laconic.kernels.triton.tile import load_symbols, load_tile, pairwise_sum, store_or_add, store_symbols

__all__ = [
    "onebit_decode", "onebit_encode", "sign_decode", "sign_decode_part", "sign_encode", "sign_encode_part",
    "sign_tile_shape",
]  # fmt: skip


@triton.jit
def _sign_rows(
    x, offsets, begin, n,
    GROUPS: tl.constexpr, SCALE: tl.constexpr, SIDES: tl.constexpr, PARITY: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Read every other row of each group; return sign bits, sums in the reference's order, amax_bits, negatives.

    A thread keeps its columns from row to row, so that packing and adding need no other thread.
    """
    word = tl.zeros((GROUPS, 8), tl.uint32)
    largest = tl.zeros((GROUPS, 8), tl.int32)
    negatives = tl.zeros((GROUPS, 8), tl.int32)
    plus = tl.zeros((GROUPS, 8), tl.float32)
    minus = tl.zeros((GROUPS, 8), tl.float32)
    for r in tl.static_range(16):
        positions = begin + offsets + (16 * r + 8 * PARITY)
        if EDGE:
            v = tl.load(x + positions, mask=positions < n, other=0.0)
        else:
            v = tl.load(x + positions)
        bits = v.to(tl.int32, bitcast=True)
        largest = tl.maximum(largest, bits & 0x7FFFFFFF)
        word = word | ((bits.to(tl.uint32, bitcast=True) >> 31) << (2 * r + PARITY))
        a = tl.abs(v) * SCALE  # before summing, so that a sum of large values does not overflow
        b = a
        if SIDES == 2:
            negatives += (bits < 0).to(tl.int32)
            b = tl.where(bits < 0, a, 0.0)
            a = tl.where(bits < 0, 0.0, a)
        if r % 2 == 0:
            one = (a, b)
        else:
            a, b = one[0] + a, one[1] + b
            if r % 4 == 1:
                two = (a, b)
            else:
                a, b = two[0] + a, two[1] + b
                if r % 8 == 3:
                    four = (a, b)
                else:
                    a, b = four[0] + a, four[1] + b
                    if r == 7:
                        eight = (a, b)
                    else:
                        plus, minus = eight[0] + a, eight[1] + b
    return word, plus, minus, largest, negatives


@triton.jit
def _bucket_sum(even, odd, BUCKETS: tl.constexpr, GROUPS: tl.constexpr, STAGES: tl.constexpr):
    """Sum groups to buckets, then fold the columns in halves: the first half are the even rows."""
    for stage in tl.static_range(STAGES):
        even = tl.sum(tl.reshape(even, (GROUPS >> (stage + 1), 2, 8)), 1)
        odd = tl.sum(tl.reshape(odd, (GROUPS >> (stage + 1), 2, 8)), 1)
    total = even + odd
    for fold in tl.static_range(3):
        total = tl.sum(tl.reshape(total, (BUCKETS, 2, 4 >> fold)), 1)
    return tl.reshape(total, (BUCKETS,))


@triton.jit
def _encode_groups(
    program, x, means, packed, tail, n, full, count,
    BUCKET: tl.constexpr, BUCKETS: tl.constexpr, STAGES: tl.constexpr, SIDES: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    groups: tl.constexpr = BUCKETS * BUCKET // 256
    begin = program * (BUCKETS * BUCKET)
    group = tl.arange(0, groups)[:, None]
    column = tl.arange(0, 8)[None, :]
    offsets = group * 256 + column
    word0, plus0, minus0, largest0, negatives0 = _sign_rows(x, offsets, begin, n, groups, 1.0 / BUCKET, SIDES, 0, EDGE)
    word1, plus1, minus1, largest1, negatives1 = _sign_rows(x, offsets, begin, n, groups, 1.0 / BUCKET, SIDES, 1, EDGE)
    row = tl.arange(0, BUCKETS)
    first = program * BUCKETS
    valid = first + row < count
    bucket_size = tl.minimum(n - (begin + row * BUCKET), BUCKET).to(tl.float32)
    whole = tl.full((BUCKETS,), BUCKET, tl.float32)
    pointer = means.to(tl.pointer_type(tl.float32)) + (first + row) * SIDES
    total = _bucket_sum(plus0, plus1, BUCKETS, groups, STAGES)
    if SIDES == 2:
        negatives = tl.sum(tl.reshape(negatives0 + negatives1, (BUCKETS, groups // BUCKETS * 8)), 1).to(tl.float32)
        negative_total = _bucket_sum(minus0, minus1, BUCKETS, groups, STAGES)
        mean = negative_total * tl.div_rn(whole, tl.maximum(negatives, 1.0))
        tl.store(pointer + 1, tl.minimum(mean, FLOAT32_MAX), mask=valid)
        bucket_size = bucket_size - negatives
    mean = total * tl.div_rn(whole, tl.maximum(bucket_size, 1.0))
    tl.store(pointer, tl.minimum(mean, FLOAT32_MAX), mask=valid)
    word = word0 | word1
    words = packed.to(tl.pointer_type(tl.int32)) + begin // 32
    if EDGE:
        tl.store(
            words + group * 8 + column, word.to(tl.int32, bitcast=True), mask=begin + group * 256 + column * 0 < full
        )
        if full < n:
            for r in tl.static_range(32):
                positions = begin + offsets + 8 * r
                tl.store(
                    tail + (positions - full),
                    ((word >> r) & 1).to(tl.int32),
                    mask=(positions >= full) & (positions < n),
                )
    else:
        tl.store(words + group * 8 + column, word.to(tl.int32, bitcast=True))
    return tl.max(tl.max(tl.maximum(largest0, largest1), 1), 0)


@triton.jit
def sign_encode_part(
    program, x, means, packed, tail, n, full, count,
    SIDES: tl.constexpr, BUCKET: tl.constexpr, BUCKETS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Encode a program's part of a tensor; return its amax_bits.

    Stores the mean magnitude of each bucket or, with two SIDES, of its non-negative and its negative values.
    """
    if (program + 1) * (BUCKETS * BUCKET) <= full:
        amax_bits = _encode_groups(
            program, x, means, packed, tail, n, full, count, BUCKET, BUCKETS, STAGES, SIDES, False
        )
    else:
        amax_bits = _encode_groups(
            program, x, means, packed, tail, n, full, count, BUCKET, BUCKETS, STAGES, SIDES, True
        )
    return amax_bits


@triton.jit
def _sign_encode_small(
    x, means, packed, tail, amax_bits, n, full, count,
    SIDES: tl.constexpr, BUCKET: tl.constexpr, BUCKETS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Encode buckets of 128, two of which share a packing group."""
    span: tl.constexpr = BUCKETS * BUCKET
    program = tl.program_id(0).to(tl.int64)
    begin = program * (BUCKETS * BUCKET)
    first = program * BUCKETS
    offsets = tl.arange(0, BUCKETS)[:, None] * BUCKET + tl.arange(0, BUCKET)[None, :]
    v = load_tile(x, offsets, begin, n, span)
    tl.store(amax_bits + program, tl.max(tl.max(magnitude_bits(v), 1), 0))
    minus = v.to(tl.int32, bitcast=True) < 0
    scaled = tl.abs(v) * (1.0 / BUCKET)  # before summing, so that a sum of large values does not overflow
    row = tl.arange(0, BUCKETS)
    bucket_size = tl.minimum(n - (begin + row * BUCKET), BUCKET).to(tl.float32)
    if SIDES == 1:
        total = pairwise_sum(tl.reshape(scaled, (BUCKETS, BUCKET // 16, 16)), BUCKETS, BUCKET, STAGES)
        mean = total * tl.div_rn(tl.full((BUCKETS,), BUCKET, tl.float32), tl.maximum(bucket_size, 1.0))
        store_scales(means, first, count, tl.minimum(mean, FLOAT32_MAX), BUCKETS)
    else:
        negatives = tl.sum(minus.to(tl.int32), 1).to(tl.float32)
        positives = bucket_size - negatives
        pointer = means.to(tl.pointer_type(tl.float32)) + first * 2 + row * 2
        valid = first + row < count
        for side in tl.static_range(2):
            chosen = tl.where(minus, scaled, 0.0) if side == 1 else tl.where(minus, 0.0, scaled)
            total = pairwise_sum(tl.reshape(chosen, (BUCKETS, BUCKET // 16, 16)), BUCKETS, BUCKET, STAGES)
            side_size = negatives if side == 1 else positives
            mean = total * tl.div_rn(tl.full((BUCKETS,), BUCKET, tl.float32), tl.maximum(side_size, 1.0))
            tl.store(pointer + side, tl.minimum(mean, FLOAT32_MAX), mask=valid)
    store_symbols(minus.to(tl.int32), packed, tail, begin, n, full, 1, 32, span)


@triton.jit
def _sign_tile(packed, out, offsets, begin, n, full, plus, minus, weight, ADD: tl.constexpr, EDGE: tl.constexpr):
    negative = load_symbols(packed, offsets, begin, n, full, 1, EDGE) == 1
    # Times -1.0: Triton's unary minus subtracts from +0.0, which gives another zero.
    values = tl.where(negative, minus[:, None] * -1.0, plus[:, None])
    store_or_add(out, offsets, begin, n, values, weight, ADD, EDGE)


@triton.jit
def sign_decode_part(
    program, means, packed, out, flag, n, full, count, weight,
    SIDES: tl.constexpr, BUCKET: tl.constexpr, BUCKETS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Decode a program's part of a tensor; an invalid mean sets the flag and reads as 0."""
    begin = program * (BUCKETS * BUCKET)
    first = program * BUCKETS
    offsets = tl.arange(0, BUCKETS)[:, None] * BUCKET + tl.arange(0, BUCKET)[None, :]
    if SIDES == 1:
        plus = load_scales(means, first, count, flag, BUCKETS)
        minus = plus
    else:
        row = tl.arange(0, BUCKETS)
        pointer = means.to(tl.pointer_type(tl.float32)) + first * 2 + row * 2
        valid = first + row < count
        plus = tl.load(pointer, mask=valid, other=0.0)
        minus = tl.load(pointer + 1, mask=valid, other=0.0)
        accepted = (plus >= 0) & (plus <= FLOAT32_MAX) & (minus >= 0) & (minus <= FLOAT32_MAX)
        tl.store(flag, 1, mask=tl.max((accepted == 0).to(tl.int32), 0) > 0)
        plus = tl.where(accepted, plus, 0.0)
        minus = tl.where(accepted, minus, 0.0)
    if begin + BUCKETS * BUCKET <= full:
        _sign_tile(packed, out, offsets, begin, n, full, plus, minus, weight, ADD, False)
    else:
        _sign_tile(packed, out, offsets, begin, n, full, plus, minus, weight, ADD, True)


def sign_tile_shape(bucket: int) -> tuple[int, int, int]:
    """Return buckets, warps and stages of a program: a thread has four columns of a packing group."""
    buckets = max(1, 4096 // bucket)
    return buckets, buckets * bucket // 4096, (bucket // GROUP).bit_length() - 1


def _encode_signs(x: Tensor, bucket: int, sides: int, means: Tensor, packed: Tensor) -> Tensor:
    if bucket < GROUP:
        buckets, warps = tile_shape(bucket)
        kernel, constants = _sign_encode_small, {"STAGES": bucket.bit_length() - 5, "SIDES": sides}
    else:
        buckets, warps, stages = sign_tile_shape(bucket)
        kernel, constants = encode_buckets, {"STAGES": stages, "ENCODE": sign_encode_part, "CODING": sides}
    return launch_encode(
        kernel, x, means, packed, bits=1, bucket=bucket, floats=sides, buckets=buckets, warps=warps, **constants
    )


def _decode_signs(means: Tensor, packed: Tensor, bucket: int, sides: int, out: Tensor, weight: float | None) -> Tensor:
    return launch_decode(sign_decode_part, sides, means, packed, out, weight, bits=1, bucket=bucket, floats=sides)


def sign_encode(x: Tensor, *, bucket: int, scales: Tensor, packed: Tensor) -> Tensor:
    return _encode_signs(x, bucket, 1, scales, packed)


def sign_decode(scales: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None) -> Tensor:
    return _decode_signs(scales, packed, bucket, 1, out, weight)


def onebit_encode(x: Tensor, *, bucket: int, means: Tensor, packed: Tensor) -> Tensor:
    return _encode_signs(x, bucket, 2, means, packed)


def onebit_decode(means: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None) -> Tensor:
    return _decode_signs(means, packed, bucket, 2, out, weight)
