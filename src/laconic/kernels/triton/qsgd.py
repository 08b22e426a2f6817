"""qsgd: a bucket's norm, its symbols and their packing in one pass over memory, with error feedback if asked for."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels import random
from laconic.kernels.interface import QsgdCoding
from laconic.kernels.sections import GROUP, num_buckets, packed_nbytes
from laconic.kernels.triton.buckets import FLOAT32_MAX, load_floats, magnitudes, scale_to, step_of, store_floats, tile
from laconic.kernels.triton.packing import Packed
from laconic.kernels.triton.tile import (
    exact,
    factors,
    halves,
    hash32,
    keep,
    load_tile,
    noise_tile,
    pairwise,
    period,
    read_symbols,
    store_symbols,
    words_of,
)

__all__ = ["FEEDBACK_TILE", "QSGD_TILE", "decode_part", "encode_part", "qsgd_decode", "qsgd_encode"]

QSGD_TILE = 1024
"""Sixteen values a thread."""

FEEDBACK_TILE = 512
"""Eight, where a residual comes with each."""

ROW_FACTORS = tl.constexpr(tuple(halves(random.row_factor(row))[0] for row in range(32)))


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
    largest = tl.max(magnitudes(v), 1)
    tl.store(keys + program, tl.max(largest, 0))
    norm = largest.to(tl.float32, bitcast=True)
    if L2:
        wide = tl.reshape(v.to(tl.float64), (BUCKETS, BUCKET // 16, 16))
        root = tl.sqrt(pairwise(wide * wide, BUCKETS, BUCKET, STAGES)).to(tl.float32)
        norm = tl.minimum(tl.maximum(root, norm), FLOAT32_MAX)
    store_floats(norms, program * BUCKETS, count, norm, BUCKETS)
    up, scale = scale_to(norm, levels << fraction_bits, BUCKETS)
    symbols = ((v * up[:, None]) * scale[:, None]).to(tl.int32)
    if STOCHASTIC:
        first_group = (program * (span // 256)).to(tl.int32)
        noise = noise_tile(first_group, factors, low_key, high_key, fraction_bits, span)
        symbols = tl.reshape(tl.reshape(symbols, (span // 256, 32, 8)) + noise, (BUCKETS, BUCKET))
    else:
        symbols += 1 << (fraction_bits - 1)
    symbols = (symbols + (levels << fraction_bits)) >> fraction_bits
    if FEEDBACK:
        sent = (symbols - levels).to(tl.float32) * step_of(norm, levels, BUCKETS)[:, None]
        if begin + span <= n:
            keep(residual, at, begin, n, v - sent, 0.0, False, False)
        else:
            keep(residual, at, begin, n, v - sent, 0.0, False, True)
    store_symbols(symbols, packed, tail, begin, n, full, BITS, PERIOD, span)


@triton.jit
def _encode_rows(
    program,
    x,
    residual,
    norms,
    packed,
    tail,
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
    begin = program * span
    part = tl.arange(0, parts)[:, None]
    lane = tl.arange(0, 8)[None, :]
    at = part * (8 * PERIOD) + lane
    rows = ()  # all loaded before anything is stored: a residual read once more would come from memory again
    largest = tl.zeros((parts, 8), tl.int32)
    for r in tl.static_range(PERIOD):
        row = _row(x, residual, begin + at + 8 * r, n, FEEDBACK, EDGE)
        largest = tl.maximum(largest, magnitudes(row))
        rows = rows + (row,)  # type: ignore[assignment]
    bucket_key = tl.max(tl.reshape(largest, (BUCKETS, parts // BUCKETS * 8)), 1)
    norm = bucket_key.to(tl.float32, bitcast=True)
    up, scale = scale_to(norm, levels << fraction_bits, BUCKETS)
    lift = _each_part(up, parts, BUCKETS)
    factor = _each_part(scale, parts, BUCKETS)
    step = _each_part(step_of(norm, levels, BUCKETS), parts, BUCKETS)
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
    store_floats(norms, program * BUCKETS, count, norm, BUCKETS)
    words = packed.to(tl.pointer_type(tl.int32)) + begin // 32 * BITS + part * 8 + lane
    if EDGE:
        tl.store(words, word.to(tl.int32, bitcast=True), mask=begin + at < full)
    else:
        tl.store(words, word.to(tl.int32, bitcast=True))
    return tl.max(bucket_key, 0)


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


@triton.jit
def encode_part(
    program,
    x,
    residual,
    norms,
    packed,
    tail,
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
    """A program's part of a tensor, the largest magnitude of which it returns, as a key."""
    if (program + 1) * (BUCKETS * BUCKET) <= full:
        key = _encode_rows(
            program, x, residual, norms, packed, tail, n, full, count, low_key, high_key,
            BITS, PERIOD, BUCKET, BUCKETS, STOCHASTIC, FEEDBACK, False,
        )  # fmt: skip
    else:
        key = _encode_rows(
            program, x, residual, norms, packed, tail, n, full, count, low_key, high_key,
            BITS, PERIOD, BUCKET, BUCKETS, STOCHASTIC, FEEDBACK, True,
        )  # fmt: skip
    return key


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
    program = tl.program_id(0).to(tl.int64)
    key = encode_part(
        program, x, residual, norms, packed, tail, n, full, count, low_key, high_key,
        BITS, PERIOD, BUCKET, BUCKETS, STOCHASTIC, FEEDBACK,
    )  # fmt: skip
    tl.store(keys + program, key)


def qsgd_encode(
    x: Tensor, coding: QsgdCoding, *, seed: int, norms: Tensor, packed: Tensor, residual: Tensor | None = None
) -> Tensor:
    """With a residual its sum with x is encoded, and what the receiver will not have stays there."""
    bits, bucket, l2, stochastic = coding
    n, into = x.numel(), Packed(packed, x.numel(), bits)
    buckets, warps = tile(bucket, QSGD_TILE if residual is None else FEEDBACK_TILE)
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
def decode_part(
    program,
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
    begin = program * span
    at = tl.arange(0, BUCKETS)[:, None] * BUCKET + tl.arange(0, BUCKET)[None, :]
    step = step_of(load_floats(norms, program * BUCKETS, count, flag, BUCKETS), levels, BUCKETS)
    if begin + span <= full:
        _qsgd_tile(packed, out, at, begin, n, full, step, weight, BITS, ADD, False)
    else:
        _qsgd_tile(packed, out, at, begin, n, full, step, weight, BITS, ADD, True)


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
    program = tl.program_id(0).to(tl.int64)
    decode_part(program, norms, packed, out, flag, n, full, count, weight, BITS, BUCKET, BUCKETS, ADD)


def qsgd_decode(norms: Tensor, packed: Tensor, *, bits: int, bucket: int, out: Tensor, weight: float | None) -> Tensor:
    n = out.numel()
    buckets, warps = tile(bucket, QSGD_TILE)
    count = num_buckets(n, bucket)
    assert norms.numel() == 4 * count and packed.numel() == packed_nbytes(n, bits)
    flag = torch.zeros(1, dtype=torch.int32, device=out.device)
    _qsgd_decode[(num_buckets(count, buckets),)](
        words_of(norms), words_of(packed), out, flag, n, n // GROUP * GROUP, count, weight or 0.0,
        BITS=bits, BUCKET=bucket, BUCKETS=buckets, ADD=weight is not None, **exact(num_warps=warps),
    )  # fmt: skip
    return flag
