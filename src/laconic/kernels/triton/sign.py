"""sign and onebit: a bit for each value and a bucket's means, in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.sections import GROUP, num_buckets, packed_nbytes
from laconic.kernels.triton.buckets import FLOAT32_MAX, load_floats, magnitudes, store_floats, tile
from laconic.kernels.triton.packing import Packed
from laconic.kernels.triton.tile import exact, keep, load_tile, pairwise, read_symbols, store_symbols, words_of

__all__ = [
    "onebit_decode",
    "onebit_encode",
    "sign_decode",
    "sign_decode_part",
    "sign_encode",
    "sign_encode_part",
    "sign_shape",
]


@triton.jit
def _sign_rows(
    x,
    at,
    begin,
    n,
    GROUPS: tl.constexpr,
    SCALE: tl.constexpr,
    SIDES: tl.constexpr,
    PARITY: tl.constexpr,
    EDGE: tl.constexpr,
):
    """Every other row of 8 of each group: sign bits, sums over rows in the reference's order, largest, how many minus.

    A thread keeps its lanes from row to row, so that neither packing nor adding asks another thread.
    """
    word = tl.zeros((GROUPS, 8), tl.uint32)
    largest = tl.zeros((GROUPS, 8), tl.int32)
    below = tl.zeros((GROUPS, 8), tl.int32)
    plus = tl.zeros((GROUPS, 8), tl.float32)
    minus = tl.zeros((GROUPS, 8), tl.float32)
    for r in tl.static_range(16):
        place = begin + at + (16 * r + 8 * PARITY)
        if EDGE:
            v = tl.load(x + place, mask=place < n, other=0.0)
        else:
            v = tl.load(x + place)
        bits = v.to(tl.int32, bitcast=True)
        largest = tl.maximum(largest, bits & 0x7FFFFFFF)
        word = word | ((bits.to(tl.uint32, bitcast=True) >> 31) << (2 * r + PARITY))
        a = tl.abs(v) * SCALE  # first: a sum of large values must not overflow
        b = a
        if SIDES == 2:
            below += (bits < 0).to(tl.int32)
            b = tl.where(bits < 0, a, 0.0)
            a = tl.where(bits < 0, 0.0, a)
        if r % 2 == 0:
            a0 = a
            b0 = b
        else:
            a = a0 + a
            b = b0 + b
            if r % 4 == 1:
                a1 = a
                b1 = b
            else:
                a = a1 + a
                b = b1 + b
                if r % 8 == 3:
                    a2 = a
                    b2 = b
                else:
                    a = a2 + a
                    b = b2 + b
                    if r == 7:
                        a3 = a
                        b3 = b
                    else:
                        plus = a3 + a
                        minus = b3 + b
    return word, plus, minus, largest, below


@triton.jit
def _bucket_sum(even, odd, BUCKETS: tl.constexpr, GROUPS: tl.constexpr, STAGES: tl.constexpr):
    """Sums of groups to those of buckets, then the lanes folded in half: the first half are the even rows."""
    for stage in tl.static_range(STAGES):
        even = tl.sum(tl.reshape(even, (GROUPS >> (stage + 1), 2, 8)), 1)
        odd = tl.sum(tl.reshape(odd, (GROUPS >> (stage + 1), 2, 8)), 1)
    total = even + odd
    for fold in tl.static_range(3):
        total = tl.sum(tl.reshape(total, (BUCKETS, 2, 4 >> fold)), 1)
    return tl.reshape(total, (BUCKETS,))


@triton.jit
def _encode_groups(
    program,
    x,
    means,
    packed,
    tail,
    n,
    full,
    count,
    BUCKET: tl.constexpr,
    BUCKETS: tl.constexpr,
    STAGES: tl.constexpr,
    SIDES: tl.constexpr,
    EDGE: tl.constexpr,
):
    groups: tl.constexpr = BUCKETS * BUCKET // 256
    begin = program * (BUCKETS * BUCKET)
    group = tl.arange(0, groups)[:, None]
    lane = tl.arange(0, 8)[None, :]
    at = group * 256 + lane
    word0, plus0, minus0, largest0, below0 = _sign_rows(x, at, begin, n, groups, 1.0 / BUCKET, SIDES, 0, EDGE)
    word1, plus1, minus1, largest1, below1 = _sign_rows(x, at, begin, n, groups, 1.0 / BUCKET, SIDES, 1, EDGE)
    row = tl.arange(0, BUCKETS)
    first = program * BUCKETS
    there = first + row < count
    here = tl.minimum(n - (begin + row * BUCKET), BUCKET).to(tl.float32)
    whole = tl.full((BUCKETS,), BUCKET, tl.float32)
    place = means.to(tl.pointer_type(tl.float32)) + (first + row) * SIDES
    total = _bucket_sum(plus0, plus1, BUCKETS, groups, STAGES)
    if SIDES == 2:
        under = tl.sum(tl.reshape(below0 + below1, (BUCKETS, groups // BUCKETS * 8)), 1).to(tl.float32)
        other = _bucket_sum(minus0, minus1, BUCKETS, groups, STAGES)
        mean = other * tl.div_rn(whole, tl.maximum(under, 1.0))
        tl.store(place + 1, tl.minimum(mean, FLOAT32_MAX), mask=there)
        here = here - under
    mean = total * tl.div_rn(whole, tl.maximum(here, 1.0))
    tl.store(place, tl.minimum(mean, FLOAT32_MAX), mask=there)
    word = word0 | word1
    words = packed.to(tl.pointer_type(tl.int32)) + begin // 32
    if EDGE:
        tl.store(words + group * 8 + lane, word.to(tl.int32, bitcast=True), mask=begin + group * 256 + lane * 0 < full)
        if full < n:
            for r in tl.static_range(32):
                spot = begin + at + 8 * r
                tl.store(tail + (spot - full), ((word >> r) & 1).to(tl.int32), mask=(spot >= full) & (spot < n))
    else:
        tl.store(words + group * 8 + lane, word.to(tl.int32, bitcast=True))
    return tl.max(tl.max(tl.maximum(largest0, largest1), 1), 0)


@triton.jit
def sign_encode_part(
    program,
    x,
    means,
    packed,
    tail,
    n,
    full,
    count,
    BUCKET: tl.constexpr,
    BUCKETS: tl.constexpr,
    STAGES: tl.constexpr,
    SIDES: tl.constexpr,
):
    """A program's part of a tensor, the largest magnitude of which it returns, as a key."""
    if (program + 1) * (BUCKETS * BUCKET) <= full:
        key = _encode_groups(program, x, means, packed, tail, n, full, count, BUCKET, BUCKETS, STAGES, SIDES, False)
    else:
        key = _encode_groups(program, x, means, packed, tail, n, full, count, BUCKET, BUCKETS, STAGES, SIDES, True)
    return key


@triton.jit
def _sign_encode(
    x,
    means,
    packed,
    tail,
    keys,
    n,
    full,
    count,
    BUCKET: tl.constexpr,
    BUCKETS: tl.constexpr,
    STAGES: tl.constexpr,
    SIDES: tl.constexpr,
):
    """The mean magnitude of each bucket, or (two sides) that of its values without and with a minus."""
    program = tl.program_id(0).to(tl.int64)
    key = sign_encode_part(program, x, means, packed, tail, n, full, count, BUCKET, BUCKETS, STAGES, SIDES)
    tl.store(keys + program, key)


@triton.jit
def _sign_encode_small(
    x,
    means,
    packed,
    tail,
    keys,
    n,
    full,
    count,
    BUCKET: tl.constexpr,
    BUCKETS: tl.constexpr,
    STAGES: tl.constexpr,
    SIDES: tl.constexpr,
):
    """The same for buckets of 128, of which a group holds two."""
    span: tl.constexpr = BUCKETS * BUCKET
    program = tl.program_id(0).to(tl.int64)
    begin = program * span
    first = program * BUCKETS
    at = tl.arange(0, BUCKETS)[:, None] * BUCKET + tl.arange(0, BUCKET)[None, :]
    v = load_tile(x, at, begin, n, span)
    tl.store(keys + program, tl.max(tl.max(magnitudes(v), 1), 0))
    minus = v.to(tl.int32, bitcast=True) < 0
    scaled = tl.abs(v) * (1.0 / BUCKET)  # first: a sum of large values must not overflow
    row = tl.arange(0, BUCKETS)
    here = tl.minimum(n - (begin + row * BUCKET), BUCKET).to(tl.float32)
    if SIDES == 1:
        total = pairwise(tl.reshape(scaled, (BUCKETS, BUCKET // 16, 16)), BUCKETS, BUCKET, STAGES)
        mean = total * tl.div_rn(tl.full((BUCKETS,), BUCKET, tl.float32), tl.maximum(here, 1.0))
        store_floats(means, first, count, tl.minimum(mean, FLOAT32_MAX), BUCKETS)
    else:
        below = tl.sum(minus.to(tl.int32), 1).to(tl.float32)
        above = here - below
        place = means.to(tl.pointer_type(tl.float32)) + first * 2 + row * 2
        there = first + row < count
        for side in tl.static_range(2):
            chosen = tl.where(minus, scaled, 0.0) if side == 1 else tl.where(minus, 0.0, scaled)
            total = pairwise(tl.reshape(chosen, (BUCKETS, BUCKET // 16, 16)), BUCKETS, BUCKET, STAGES)
            many = below if side == 1 else above
            mean = total * tl.div_rn(tl.full((BUCKETS,), BUCKET, tl.float32), tl.maximum(many, 1.0))
            tl.store(place + side, tl.minimum(mean, FLOAT32_MAX), mask=there)
    store_symbols(minus.to(tl.int32), packed, tail, begin, n, full, 1, 32, span)


@triton.jit
def _sign_tile(packed, out, at, begin, n, full, plus, minus, weight, ADD: tl.constexpr, EDGE: tl.constexpr):
    negative = read_symbols(packed, at, begin, n, full, 1, EDGE) == 1
    # Times -1: Triton's minus is a difference from +0, which has another zero.
    values = tl.where(negative, minus[:, None] * -1.0, plus[:, None])
    keep(out, at, begin, n, values, weight, ADD, EDGE)


@triton.jit
def sign_decode_part(
    program,
    means,
    packed,
    out,
    flag,
    n,
    full,
    count,
    weight,
    BUCKET: tl.constexpr,
    BUCKETS: tl.constexpr,
    SIDES: tl.constexpr,
    ADD: tl.constexpr,
):
    span: tl.constexpr = BUCKETS * BUCKET
    begin = program * span
    first = program * BUCKETS
    at = tl.arange(0, BUCKETS)[:, None] * BUCKET + tl.arange(0, BUCKET)[None, :]
    if SIDES == 1:
        plus = load_floats(means, first, count, flag, BUCKETS)
        minus = plus
    else:
        row = tl.arange(0, BUCKETS)
        place = means.to(tl.pointer_type(tl.float32)) + first * 2 + row * 2
        there = first + row < count
        plus = tl.load(place, mask=there, other=0.0)
        minus = tl.load(place + 1, mask=there, other=0.0)
        good = (plus >= 0) & (plus <= FLOAT32_MAX) & (minus >= 0) & (minus <= FLOAT32_MAX)
        tl.store(flag, 1, mask=tl.max((good == 0).to(tl.int32), 0) > 0)
        plus = tl.where(good, plus, 0.0)
        minus = tl.where(good, minus, 0.0)
    if begin + span <= full:
        _sign_tile(packed, out, at, begin, n, full, plus, minus, weight, ADD, False)
    else:
        _sign_tile(packed, out, at, begin, n, full, plus, minus, weight, ADD, True)


@triton.jit
def _sign_decode(
    means,
    packed,
    out,
    flag,
    n,
    full,
    count,
    weight,
    BUCKET: tl.constexpr,
    BUCKETS: tl.constexpr,
    SIDES: tl.constexpr,
    ADD: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    sign_decode_part(program, means, packed, out, flag, n, full, count, weight, BUCKET, BUCKETS, SIDES, ADD)


def sign_shape(bucket: int) -> tuple[int, int, int]:
    """Buckets, warps and stages of a program whose buckets are groups or more: a thread for four lanes of a group."""
    buckets = max(1, 4096 // bucket)
    return buckets, buckets * bucket // 4096, (bucket // GROUP).bit_length() - 1


def _encode_signs(x: Tensor, bucket: int, sides: int, means: Tensor, packed: Tensor) -> Tensor:
    n, into = x.numel(), Packed(packed, x.numel(), 1)
    count = num_buckets(n, bucket)
    assert means.numel() == 4 * sides * count
    if bucket < GROUP:
        (buckets, warps), stages, kernel = tile(bucket), bucket.bit_length() - 5, _sign_encode_small
    else:
        (buckets, warps, stages), kernel = sign_shape(bucket), _sign_encode
    programs = num_buckets(count, buckets)
    keys = torch.empty(programs, dtype=torch.int32, device=x.device)
    numbers = words_of(means)
    kernel[(programs,)](
        x, numbers, into.target, into.tail, keys, n, into.full, count,
        BUCKET=bucket, BUCKETS=buckets, STAGES=stages, SIDES=sides, **exact(num_warps=warps),
    )  # fmt: skip
    if numbers is not means:
        means.copy_(numbers)
    into.finish()
    return keys


def _decode_signs(means: Tensor, packed: Tensor, bucket: int, sides: int, out: Tensor, weight: float | None) -> Tensor:
    n = out.numel()
    buckets, warps = tile(bucket)
    count = num_buckets(n, bucket)
    assert means.numel() == 4 * sides * count and packed.numel() == packed_nbytes(n, 1)
    flag = torch.zeros(1, dtype=torch.int32, device=out.device)
    _sign_decode[(num_buckets(count, buckets),)](
        words_of(means), words_of(packed), out, flag, n, n // GROUP * GROUP, count, weight or 0.0,
        BUCKET=bucket, BUCKETS=buckets, SIDES=sides, ADD=weight is not None, **exact(num_warps=warps),
    )  # fmt: skip
    return flag


def sign_encode(x: Tensor, *, bucket: int, scales: Tensor, packed: Tensor) -> Tensor:
    return _encode_signs(x, bucket, 1, scales, packed)


def sign_decode(scales: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None) -> Tensor:
    return _decode_signs(scales, packed, bucket, 1, out, weight)


def onebit_encode(x: Tensor, *, bucket: int, means: Tensor, packed: Tensor) -> Tensor:
    return _encode_signs(x, bucket, 2, means, packed)


def onebit_decode(means: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None) -> Tensor:
    return _decode_signs(means, packed, bucket, 2, out, weight)
