"""qsgd, terngrad, sign, onebit: a bucket's numbers, its symbols and their packing in one pass over memory.

Encoders return the largest magnitude of each program (keys, on the device): reading their maximum is the one wait
of an encoding. Decoders return a flag of the device: whether a section held what no encoder writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels import random
from laconic.kernels.interface import GROUP, TRIT_LANES, num_buckets, packed_nbytes, trits_nbytes
from laconic.kernels.triton.packing import Packed, trit_of, trit_place
from laconic.kernels.triton.parts import (
    TILE,
    exact,
    factors,
    halves,
    hash32,
    keep,
    load_tile,
    noise_of,
    noise_tile,
    pairwise,
    period,
    read_symbols,
    store_symbols,
    words_of,
)

__all__ = [
    "onebit_decode",
    "onebit_encode",
    "qsgd_decode",
    "qsgd_encode",
    "sign_decode",
    "sign_encode",
    "ternary_decode",
    "ternary_encode",
]

TINY = tl.constexpr(2.0**-90)
LIFT = tl.constexpr(2.0**64)
HAIR = tl.constexpr(1 - 2.0**-22)
FLOAT32_MAX = tl.constexpr((2.0 - 2.0**-23) * 2.0**127)
QSGD_TILE = 1024
"""Sixteen values a thread, where a residual comes with each."""

ROW_FACTORS = tl.constexpr(tuple(halves(random.row_factor(row))[0] for row in range(32)))


def _tile(bucket: int, values: int = TILE) -> tuple[int, int]:
    """Buckets of a program, which holds them whole, and its warps: two for so many values, more in large buckets."""
    return max(1, values // bucket), min(32, max(2, 2 * bucket // values))


@triton.jit
def _magnitudes(v):
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale_to(norm, UNIT: tl.constexpr, LENGTH: tl.constexpr):
    """What values of a bucket are multiplied by, in two steps: the power of two that lifts it, and the scale."""
    up = tl.where(norm < TINY, LIFT, 1.0)
    scale = tl.div_rn(tl.full((LENGTH,), UNIT, tl.float32), norm * up) * HAIR
    return up, tl.where(norm > 0, scale, 0.0)


@triton.jit
def _store_floats(section, first, count, values, ROWS: tl.constexpr):
    row = tl.arange(0, ROWS)
    place = section.to(tl.pointer_type(tl.float32)) + first
    tl.store(place + row, values, mask=first + row < count)


@triton.jit
def _load_floats(section, first, count, flag, ROWS: tl.constexpr):
    """A number of each bucket; 0 in place of what no encoder writes, which is told."""
    row = tl.arange(0, ROWS)
    place = section.to(tl.pointer_type(tl.float32)) + first
    value = tl.load(place + row, mask=first + row < count, other=0.0)
    good = (value >= 0) & (value <= FLOAT32_MAX)
    tl.store(flag, 1, mask=tl.max((good == 0).to(tl.int32), 0) > 0)
    return tl.where(good, value, 0.0)


@triton.jit
def _step_of(norm, LEVELS: tl.constexpr, ROWS: tl.constexpr):
    step = tl.div_rn(norm, tl.full((ROWS,), LEVELS, tl.float32))
    return tl.where(step * LEVELS > FLOAT32_MAX, step * HAIR, step)


# ------------------------------------------------------------------------------------------------------------ qsgd


@triton.jit(do_not_specialize=["low_key", "high_key"])
def _qsgd_encode(
    x,
    residual,
    norms,
    packed,
    tail,
    keys,
    factors,
    n,
    full,
    count,
    low_key,
    high_key,
    BITS: tl.constexpr,
    PERIOD: tl.constexpr,
    BUCKET: tl.constexpr,
    BUCKETS: tl.constexpr,
    STAGES: tl.constexpr,
    L2: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FEEDBACK: tl.constexpr,
):
    span: tl.constexpr = BUCKETS * BUCKET
    levels: tl.constexpr = (1 << (BITS - 1)) - 1
    fraction_bits: tl.constexpr = 31 - BITS
    program = tl.program_id(0).to(tl.int64)
    begin = program * span
    at = tl.arange(0, BUCKETS)[:, None] * BUCKET + tl.arange(0, BUCKET)[None, :]
    v = load_tile(x, at, begin, n, span)
    if FEEDBACK:
        v = load_tile(residual, at, begin, n, span) + v
    largest = tl.max(_magnitudes(v), 1)
    tl.store(keys + program, tl.max(largest, 0))
    norm = largest.to(tl.float32, bitcast=True)
    if L2:
        wide = tl.reshape(v.to(tl.float64), (BUCKETS, BUCKET // 16, 16))
        root = tl.sqrt(pairwise(wide * wide, BUCKETS, BUCKET, STAGES)).to(tl.float32)
        norm = tl.minimum(tl.maximum(root, norm), FLOAT32_MAX)
    _store_floats(norms, program * BUCKETS, count, norm, BUCKETS)
    up, scale = _scale_to(norm, levels << fraction_bits, BUCKETS)
    symbols = ((v * up[:, None]) * scale[:, None]).to(tl.int32)
    if STOCHASTIC:
        first_group = (program * (span // 256)).to(tl.int32)
        noise = noise_tile(first_group, factors, low_key, high_key, fraction_bits, span)
        symbols = tl.reshape(tl.reshape(symbols, (span // 256, 32, 8)) + noise, (BUCKETS, BUCKET))
    else:
        symbols += 1 << (fraction_bits - 1)
    symbols = (symbols + (levels << fraction_bits)) >> fraction_bits
    if FEEDBACK:
        sent = (symbols - levels).to(tl.float32) * _step_of(norm, levels, BUCKETS)[:, None]
        if begin + span <= n:
            keep(residual, at, begin, n, v - sent, 0.0, False, False)
        else:
            keep(residual, at, begin, n, v - sent, 0.0, False, True)
    store_symbols(symbols, packed, tail, begin, n, full, BITS, PERIOD, span)


@triton.jit
def _qsgd_part(
    x,
    residual,
    norms,
    packed,
    tail,
    keys,
    n,
    full,
    count,
    low_key,
    high_key,
    BITS: tl.constexpr,
    PERIOD: tl.constexpr,
    BUCKET: tl.constexpr,
    BUCKETS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FEEDBACK: tl.constexpr,
    EDGE: tl.constexpr,
):
    span: tl.constexpr = BUCKETS * BUCKET
    parts: tl.constexpr = span // (8 * PERIOD)
    a_group: tl.constexpr = 32 // PERIOD
    levels: tl.constexpr = (1 << (BITS - 1)) - 1
    fraction_bits: tl.constexpr = 31 - BITS
    program = tl.program_id(0).to(tl.int64)
    begin = program * span
    part = tl.arange(0, parts)[:, None]
    lane = tl.arange(0, 8)[None, :]
    at = part * (8 * PERIOD) + lane
    rows = ()  # all loaded before anything is stored: a residual read once more would come from memory again
    largest = tl.zeros((parts, 8), tl.int32)
    for r in tl.static_range(PERIOD):
        row = _row(x, residual, begin + at + 8 * r, n, FEEDBACK, EDGE)
        largest = tl.maximum(largest, _magnitudes(row))
        rows = rows + (row,)  # type: ignore[assignment]
    bucket_key = tl.max(tl.reshape(largest, (BUCKETS, parts // BUCKETS * 8)), 1)
    norm = bucket_key.to(tl.float32, bitcast=True)
    up, scale = _scale_to(norm, levels << fraction_bits, BUCKETS)
    lift = _each_part(up, parts, BUCKETS)
    factor = _each_part(scale, parts, BUCKETS)
    step = _each_part(_step_of(norm, levels, BUCKETS), parts, BUCKETS)
    number = (program * parts).to(tl.int32) + part
    hashed = hash32(number // a_group * 8 + lane, low_key, high_key)
    word = tl.zeros((parts, 8), tl.uint32)
    for r in tl.static_range(PERIOD):
        spot = begin + at + 8 * r
        v = rows[r]  # type: ignore[var-annotated]
        symbol = ((v * lift) * factor).to(tl.int32)
        if STOCHASTIC:
            symbol += ((hashed * _row_factor(number % a_group, r, PERIOD, a_group)) >> (32 - fraction_bits)).to(
                tl.int32
            )
        else:
            symbol += 1 << (fraction_bits - 1)
        symbol = (symbol + (levels << fraction_bits)) >> fraction_bits
        word = word | (symbol.to(tl.uint32, bitcast=True) << (BITS * r))
        if FEEDBACK:
            left = v - (symbol - levels).to(tl.float32) * step
            if EDGE:
                tl.store(residual + spot, left, mask=spot < n)
            else:
                tl.store(residual + spot, left)
        if EDGE:
            tl.store(tail + (spot - full), symbol, mask=(spot >= full) & (spot < n))
    tl.store(keys + program, tl.max(bucket_key, 0))
    _store_floats(norms, program * BUCKETS, count, norm, BUCKETS)
    words = packed.to(tl.pointer_type(tl.int32)) + begin // 32 * BITS + part * 8 + lane
    if EDGE:
        tl.store(words, word.to(tl.int32, bitcast=True), mask=begin + at < full)
    else:
        tl.store(words, word.to(tl.int32, bitcast=True))


@triton.jit
def _row(x, residual, place, n, FEEDBACK: tl.constexpr, EDGE: tl.constexpr):
    if EDGE:
        v = tl.load(x + place, mask=place < n, other=0.0)
        if FEEDBACK:
            v = tl.load(residual + place, mask=place < n, other=0.0) + v
    else:
        v = tl.load(x + place)
        if FEEDBACK:
            v = tl.load(residual + place) + v
    return v


@triton.jit
def _row_factor(place, R: tl.constexpr, PERIOD: tl.constexpr, PLACES: tl.constexpr):
    """What the hash is multiplied by in a part's row; selected, since a load would bring a layout of its own."""
    value = tl.zeros_like(place) + ROW_FACTORS[R]
    for other in tl.static_range(1, PLACES):
        value = tl.where(place == other, ROW_FACTORS[other * PERIOD + R], value)
    return value.to(tl.uint32, bitcast=True)


@triton.jit
def _each_part(values, PARTS: tl.constexpr, BUCKETS: tl.constexpr):
    """A bucket's number for each of its parts, as a column."""
    return tl.reshape(tl.broadcast_to(values[:, None], (BUCKETS, PARTS // BUCKETS)), (PARTS,))[:, None]


@triton.jit(do_not_specialize=["low_key", "high_key"])
def _qsgd_encode_rows(
    x,
    residual,
    norms,
    packed,
    tail,
    keys,
    n,
    full,
    count,
    low_key,
    high_key,
    BITS: tl.constexpr,
    PERIOD: tl.constexpr,
    BUCKET: tl.constexpr,
    BUCKETS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FEEDBACK: tl.constexpr,
):
    """The same for 2, 4 and 8 bits and the largest magnitude: row by row, so that a thread packs its own words."""
    if (tl.program_id(0).to(tl.int64) + 1) * (BUCKETS * BUCKET) <= full:
        _qsgd_part(
            x, residual, norms, packed, tail, keys, n, full, count, low_key, high_key,
            BITS, PERIOD, BUCKET, BUCKETS, STOCHASTIC, FEEDBACK, False,
        )  # fmt: skip
    else:
        _qsgd_part(
            x, residual, norms, packed, tail, keys, n, full, count, low_key, high_key,
            BITS, PERIOD, BUCKET, BUCKETS, STOCHASTIC, FEEDBACK, True,
        )  # fmt: skip


def qsgd_encode(
    x: Tensor,
    *,
    bits: int,
    bucket: int,
    l2: bool,
    stochastic: bool,
    seed: int,
    norms: Tensor,
    packed: Tensor,
    residual: Tensor | None = None,
) -> Tensor:
    """With a residual its sum with x is encoded, and what the receiver will not have stays there."""
    n, into = x.numel(), Packed(packed, x.numel(), bits)
    buckets, warps = _tile(bucket, QSGD_TILE)
    count = num_buckets(n, bucket)
    assert norms.numel() == 4 * count
    programs = num_buckets(count, buckets)
    keys = torch.empty(programs, dtype=torch.int32, device=x.device)
    numbers = words_of(norms)
    tensors = (x, x if residual is None else residual, numbers, into.target, into.tail, keys)
    sizes = (n, into.full, count, *halves(random.key(seed, random.ROUNDING)))
    how = {"BITS": bits, "PERIOD": period(bits), "BUCKET": bucket, "BUCKETS": buckets, "STOCHASTIC": stochastic,
           "FEEDBACK": residual is not None, **exact(num_warps=warps)}  # fmt: skip
    if bits in (2, 4, 8) and not l2:
        _qsgd_encode_rows[(programs,)](*tensors, *sizes, **how)
    else:
        _qsgd_encode[(programs,)](*tensors, factors(x.device), *sizes, L2=l2, STAGES=bucket.bit_length() - 5, **how)
    if numbers is not norms:
        norms.copy_(numbers)
    into.finish()
    return keys


@triton.jit
def _qsgd_tile(
    packed, out, at, begin, n, full, step, weight, BITS: tl.constexpr, ADD: tl.constexpr, EDGE: tl.constexpr
):
    levels: tl.constexpr = (1 << (BITS - 1)) - 1
    symbols = read_symbols(packed, at, begin, n, full, BITS, EDGE)
    centred = tl.minimum(symbols - levels, levels).to(tl.float32)
    keep(out, at, begin, n, centred * step[:, None], weight, ADD, EDGE)


@triton.jit
def _qsgd_decode(
    norms,
    packed,
    out,
    flag,
    n,
    full,
    count,
    weight,
    BITS: tl.constexpr,
    BUCKET: tl.constexpr,
    BUCKETS: tl.constexpr,
    ADD: tl.constexpr,
):
    span: tl.constexpr = BUCKETS * BUCKET
    levels: tl.constexpr = (1 << (BITS - 1)) - 1
    program = tl.program_id(0).to(tl.int64)
    begin = program * span
    at = tl.arange(0, BUCKETS)[:, None] * BUCKET + tl.arange(0, BUCKET)[None, :]
    step = _step_of(_load_floats(norms, program * BUCKETS, count, flag, BUCKETS), levels, BUCKETS)
    if begin + span <= full:
        _qsgd_tile(packed, out, at, begin, n, full, step, weight, BITS, ADD, False)
    else:
        _qsgd_tile(packed, out, at, begin, n, full, step, weight, BITS, ADD, True)


def qsgd_decode(norms: Tensor, packed: Tensor, *, bits: int, bucket: int, out: Tensor, weight: float | None) -> Tensor:
    n = out.numel()
    buckets, warps = _tile(bucket, QSGD_TILE)
    count = num_buckets(n, bucket)
    assert norms.numel() == 4 * count and packed.numel() == packed_nbytes(n, bits)
    flag = torch.zeros(1, dtype=torch.int32, device=out.device)
    _qsgd_decode[(num_buckets(count, buckets),)](
        words_of(norms), words_of(packed), out, flag, n, n // GROUP * GROUP, count, weight or 0.0,
        BITS=bits, BUCKET=bucket, BUCKETS=buckets, ADD=weight is not None, **exact(num_warps=warps),
    )  # fmt: skip
    return flag


# --------------------------------------------------------------------------------------------------------- ternary


@triton.jit
def _norms(x, norms, keys, n, count, BUCKET: tl.constexpr, BUCKETS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BUCKETS)[:, None] * BUCKET + tl.arange(0, BUCKET)[None, :]
    largest = tl.max(_magnitudes(load_tile(x, at, program * BUCKETS * BUCKET, n, BUCKETS * BUCKET)), 1)
    tl.store(keys + program, tl.max(largest, 0))
    _store_floats(norms, program * BUCKETS, count, largest.to(tl.float32, bitcast=True), BUCKETS)


@triton.jit(do_not_specialize=["low_key", "high_key"])
def _ternary_encode(
    x, norms, packed, factors, n, full, nbytes, low_key, high_key, BUCKET: tl.constexpr, BYTES: tl.constexpr
):
    """Five values for each byte; groups of 320 lie across buckets, so the norms come from memory."""
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    value = tl.zeros((BYTES,), tl.int32)
    for k in tl.static_range(5):
        at = tl.where(byte < full // 5, byte // 64 * 320 + k * 64 + byte % 64, full + (byte - full // 5) * 5 + k)
        there = (byte < nbytes) & (at < n)
        v = tl.load(x + at, mask=there, other=0.0)
        norm = tl.load(norms.to(tl.pointer_type(tl.float32)) + at // BUCKET, mask=there, other=0.0)
        up, scale = _scale_to(norm, 1 << 29, BYTES)
        symbol = ((v * up) * scale).to(tl.int32) + noise_of(at, 0, factors, low_key, high_key, 29)
        value += tl.where(there, (symbol + (1 << 29)) >> 29, 0) * (3**k)
    tl.store(packed + byte, value.to(tl.uint8), mask=byte < nbytes)


def ternary_encode(x: Tensor, *, bucket: int, seed: int, norms: Tensor, packed: Tensor) -> Tensor:
    n, span = x.numel(), 5 * TRIT_LANES
    buckets, warps = _tile(bucket)
    count = num_buckets(n, bucket)
    assert norms.numel() == 4 * count and packed.numel() == trits_nbytes(n)
    programs = num_buckets(count, buckets)
    keys = torch.empty(programs, dtype=torch.int32, device=x.device)
    numbers = words_of(norms)
    _norms[(programs,)](x, numbers, keys, n, count, BUCKET=bucket, BUCKETS=buckets, **exact(num_warps=warps))
    _ternary_encode[(num_buckets(packed.numel(), 512),)](
        x, numbers, packed, factors(x.device), n, n // span * span, packed.numel(),
        *halves(random.key(seed, random.ROUNDING)), BUCKET=bucket, BYTES=512, **exact(num_warps=4),
    )  # fmt: skip
    if numbers is not norms:
        norms.copy_(numbers)
    return keys


@triton.jit
def _ternary_decode(
    norms, packed, out, flag, n, full, count, weight, BUCKET: tl.constexpr, BUCKETS: tl.constexpr, ADD: tl.constexpr
):
    span: tl.constexpr = BUCKETS * BUCKET
    program = tl.program_id(0).to(tl.int64)
    begin = program * span
    at = tl.arange(0, BUCKETS)[:, None] * BUCKET + tl.arange(0, BUCKET)[None, :]
    step = _load_floats(norms, program * BUCKETS, count, flag, BUCKETS)
    place, power = trit_place(begin + at, full)
    byte = tl.load(packed + place, mask=begin + at < n, other=0).to(tl.int32)
    tl.store(flag, 1, mask=tl.max(tl.max(byte, 1), 0) > 242)
    centred = (trit_of(byte, power) - 1).to(tl.float32)
    keep(out, at, begin, n, centred * step[:, None], weight, ADD, True)


def ternary_decode(norms: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None) -> Tensor:
    n, span = out.numel(), 5 * TRIT_LANES
    buckets, warps = _tile(bucket)
    count = num_buckets(n, bucket)
    assert norms.numel() == 4 * count and packed.numel() == trits_nbytes(n)
    flag = torch.zeros(1, dtype=torch.int32, device=out.device)
    _ternary_decode[(num_buckets(count, buckets),)](
        words_of(norms), packed, out, flag, n, n // span * span, count, weight or 0.0,
        BUCKET=bucket, BUCKETS=buckets, ADD=weight is not None, **exact(num_warps=warps),
    )  # fmt: skip
    return flag


# -------------------------------------------------------------------------------------------------- sign and onebit


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
def _sign_part(
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
    EDGE: tl.constexpr,
):
    groups: tl.constexpr = BUCKETS * BUCKET // 256
    program = tl.program_id(0).to(tl.int64)
    begin = program * (BUCKETS * BUCKET)
    group = tl.arange(0, groups)[:, None]
    lane = tl.arange(0, 8)[None, :]
    at = group * 256 + lane
    word0, plus0, minus0, largest0, below0 = _sign_rows(x, at, begin, n, groups, 1.0 / BUCKET, SIDES, 0, EDGE)
    word1, plus1, minus1, largest1, below1 = _sign_rows(x, at, begin, n, groups, 1.0 / BUCKET, SIDES, 1, EDGE)
    tl.store(keys + program, tl.max(tl.max(tl.maximum(largest0, largest1), 1), 0))
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
    if (tl.program_id(0).to(tl.int64) + 1) * (BUCKETS * BUCKET) <= full:
        _sign_part(x, means, packed, tail, keys, n, full, count, BUCKET, BUCKETS, STAGES, SIDES, False)
    else:
        _sign_part(x, means, packed, tail, keys, n, full, count, BUCKET, BUCKETS, STAGES, SIDES, True)


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
    tl.store(keys + program, tl.max(tl.max(_magnitudes(v), 1), 0))
    minus = v.to(tl.int32, bitcast=True) < 0
    scaled = tl.abs(v) * (1.0 / BUCKET)  # first: a sum of large values must not overflow
    row = tl.arange(0, BUCKETS)
    here = tl.minimum(n - (begin + row * BUCKET), BUCKET).to(tl.float32)
    if SIDES == 1:
        total = pairwise(tl.reshape(scaled, (BUCKETS, BUCKET // 16, 16)), BUCKETS, BUCKET, STAGES)
        mean = total * tl.div_rn(tl.full((BUCKETS,), BUCKET, tl.float32), tl.maximum(here, 1.0))
        _store_floats(means, first, count, tl.minimum(mean, FLOAT32_MAX), BUCKETS)
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
    span: tl.constexpr = BUCKETS * BUCKET
    program = tl.program_id(0).to(tl.int64)
    begin = program * span
    first = program * BUCKETS
    at = tl.arange(0, BUCKETS)[:, None] * BUCKET + tl.arange(0, BUCKET)[None, :]
    if SIDES == 1:
        plus = _load_floats(means, first, count, flag, BUCKETS)
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


def _encode_signs(x: Tensor, bucket: int, sides: int, means: Tensor, packed: Tensor) -> Tensor:
    n, into = x.numel(), Packed(packed, x.numel(), 1)
    count = num_buckets(n, bucket)
    assert means.numel() == 4 * sides * count
    if bucket < GROUP:
        (buckets, warps), stages, kernel = _tile(bucket), bucket.bit_length() - 5, _sign_encode_small
    else:  # a thread for four lanes of a group
        buckets = max(1, 4096 // bucket)
        warps, stages, kernel = buckets * bucket // 4096, (bucket // GROUP).bit_length() - 1, _sign_encode
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
    buckets, warps = _tile(bucket)
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
