"""qsgd: norms, symbols and packing in one pass over memory, optionally with error feedback."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels import random
from laconic.kernels.interface import QsgdCoding
from laconic.kernels.reference.quantizers import whole_norm
from laconic.kernels.sections import num_buckets
from laconic.kernels.triton.buckets import (
    FLOAT32_MAX,
    bucket_tile,
    launch_decode,
    load_scales,
    magnitude_bits,
    quantization_scale,
    step_size,
    store_scales,
    tile_shape,
)
from laconic.kernels.triton.counter_hash import hash32, rounding_noise_tile, row_factors
from laconic.kernels.triton.launch_args import exact_options, packing_period, split64, word_aligned
from laconic.kernels.triton.packing import PackedSection
from laconic.kernels.triton.tile import load_symbols, load_tile, pairwise_sum, store_or_add, store_symbols

__all__ = ["FEEDBACK_TILE", "QSGD_TILE", "decode_part", "encode_part", "qsgd_decode", "qsgd_encode", "qsgd_feedback"]

QSGD_TILE = 1024
"""Values per program: sixteen per thread."""

WHOLE_TILE = 16384
"""Values per program that decodes a tensor with one norm."""

FEEDBACK_TILE = 512
"""Values per program with error feedback: eight per thread, and as many residuals."""

ROW_FACTORS = tl.constexpr(tuple(split64(random.row_factor(row))[0] for row in range(32)))


@triton.jit(do_not_specialize=["key_low", "key_high"])
def _qsgd_encode(
    x, residual, norms, packed, tail, amax_bits, row_factors, n, full, count, key_low, key_high,
    BITS: tl.constexpr, PERIOD: tl.constexpr, BUCKET: tl.constexpr, BUCKETS: tl.constexpr, STAGES: tl.constexpr,
    L2: tl.constexpr, STOCHASTIC: tl.constexpr, FEEDBACK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Encode buckets; with WHOLE all values share the norm that ``norms`` holds already."""
    span: tl.constexpr = BUCKETS * BUCKET
    levels: tl.constexpr = (1 << (BITS - 1)) - 1
    fraction_bits: tl.constexpr = 31 - BITS
    program = tl.program_id(0).to(tl.int64)
    begin, offsets = bucket_tile(program, BUCKET, BUCKETS)
    v = load_tile(x, offsets, begin, n, span)
    if FEEDBACK:
        v = load_tile(residual, offsets, begin, n, span) + v
    largest = tl.max(magnitude_bits(v), 1)
    tl.store(amax_bits + program, tl.max(largest, 0))
    norm = largest.to(tl.float32, bitcast=True)
    if WHOLE:
        norm = tl.zeros((BUCKETS,), tl.float32) + tl.load(norms.to(tl.pointer_type(tl.float32)))
    else:
        if L2:
            wide = tl.reshape(v.to(tl.float64), (BUCKETS, BUCKET // 16, 16))
            root = tl.sqrt(pairwise_sum(wide * wide, BUCKETS, BUCKET, STAGES)).to(tl.float32)
            norm = tl.minimum(tl.maximum(root, norm), FLOAT32_MAX)
        store_scales(norms, program * BUCKETS, count, norm, BUCKETS)
    upscale, scale = quantization_scale(norm, levels << fraction_bits, BUCKETS)
    symbols = ((v * upscale[:, None]) * scale[:, None]).to(tl.int32)
    if STOCHASTIC:
        first_group = (program * (span // 256)).to(tl.int32)
        noise = rounding_noise_tile(first_group, row_factors, key_low, key_high, fraction_bits, span)
        symbols = tl.reshape(tl.reshape(symbols, (span // 256, 32, 8)) + noise, (BUCKETS, BUCKET))
    else:
        symbols += 1 << (fraction_bits - 1)
    symbols = (symbols + (levels << fraction_bits)) >> fraction_bits
    if FEEDBACK:
        sent = (symbols - levels).to(tl.float32) * step_size(norm, levels, BUCKETS)[:, None]
        if begin + BUCKETS * BUCKET <= n:
            store_or_add(residual, offsets, begin, n, v - sent, 0.0, False, False)
        else:
            store_or_add(residual, offsets, begin, n, v - sent, 0.0, False, True)
    store_symbols(symbols, packed, tail, begin, n, full, BITS, PERIOD, span)


@triton.jit
def _encode_rows(
    program, x, residual, norms, packed, tail, n, full, count, key_low, key_high,
    BITS: tl.constexpr, PERIOD: tl.constexpr, BUCKET: tl.constexpr, BUCKETS: tl.constexpr, STOCHASTIC: tl.constexpr,
    FEEDBACK: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    span: tl.constexpr = BUCKETS * BUCKET
    parts: tl.constexpr = span // (8 * PERIOD)
    a_group: tl.constexpr = 32 // PERIOD
    levels: tl.constexpr = (1 << (BITS - 1)) - 1
    fraction_bits: tl.constexpr = 31 - BITS
    begin = program * span
    part = tl.arange(0, parts)[:, None]
    column = tl.arange(0, 8)[None, :]
    offsets = part * (8 * PERIOD) + column
    rows = ()  # all rows are loaded before anything is stored: a residual read again would come from memory
    largest = tl.zeros((parts, 8), tl.int32)
    for r in tl.static_range(PERIOD):
        row = _load_row(x, residual, begin + offsets + 8 * r, n, FEEDBACK, EDGE)
        largest = tl.maximum(largest, magnitude_bits(row))
        rows = rows + (row,)  # type: ignore[assignment]
    bucket_amax_bits = tl.max(tl.reshape(largest, (BUCKETS, parts // BUCKETS * 8)), 1)
    norm = bucket_amax_bits.to(tl.float32, bitcast=True)
    norm_upscale, scale = quantization_scale(norm, levels << fraction_bits, BUCKETS)
    upscale = _repeat_per_part(norm_upscale, parts, BUCKETS)
    factor = _repeat_per_part(scale, parts, BUCKETS)
    step = _repeat_per_part(step_size(norm, levels, BUCKETS), parts, BUCKETS)
    part_number = (program * parts).to(tl.int32) + part
    hashed = hash32(part_number // a_group * 8 + column, key_low, key_high)
    word = tl.zeros((parts, 8), tl.uint32)
    for r in tl.static_range(PERIOD):
        positions = begin + offsets + 8 * r
        v = rows[r]  # type: ignore[var-annotated]
        symbol = ((v * upscale) * factor).to(tl.int32)
        if STOCHASTIC:
            symbol += (
                (hashed * _select_row_factor(part_number % a_group, r, PERIOD, a_group)) >> (32 - fraction_bits)
            ).to(tl.int32)
        else:
            symbol += 1 << (fraction_bits - 1)
        symbol = (symbol + (levels << fraction_bits)) >> fraction_bits
        word = word | (symbol.to(tl.uint32, bitcast=True) << (BITS * r))
        if FEEDBACK:
            rest = v - (symbol - levels).to(tl.float32) * step
            if EDGE:
                tl.store(residual + positions, rest, mask=positions < n)
            else:
                tl.store(residual + positions, rest)
        if EDGE:
            tl.store(tail + (positions - full), symbol, mask=(positions >= full) & (positions < n))
    store_scales(norms, program * BUCKETS, count, norm, BUCKETS)
    words = packed.to(tl.pointer_type(tl.int32)) + begin // 32 * BITS + part * 8 + column
    if EDGE:
        tl.store(words, word.to(tl.int32, bitcast=True), mask=begin + offsets < full)
    else:
        tl.store(words, word.to(tl.int32, bitcast=True))
    return tl.max(bucket_amax_bits, 0)


@triton.jit
def _load_row(x, residual, positions, n, FEEDBACK: tl.constexpr, EDGE: tl.constexpr):
    if EDGE:
        v = tl.load(x + positions, mask=positions < n, other=0.0)
        if FEEDBACK:
            v = tl.load(residual + positions, mask=positions < n, other=0.0) + v
    else:
        v = tl.load(x + positions)
        if FEEDBACK:
            v = tl.load(residual + positions) + v
    return v


@triton.jit
def _select_row_factor(group_part, R: tl.constexpr, PERIOD: tl.constexpr, PLACES: tl.constexpr):
    """Return the hash factor of a part's row; selected, because a load would have another layout."""
    value = tl.zeros_like(group_part) + ROW_FACTORS[R]
    for other in tl.static_range(1, PLACES):
        value = tl.where(group_part == other, ROW_FACTORS[other * PERIOD + R], value)
    return value.to(tl.uint32, bitcast=True)


@triton.jit
def _repeat_per_part(values, PARTS: tl.constexpr, BUCKETS: tl.constexpr):
    """Repeat a bucket's number for each of its parts, as a column."""
    return tl.reshape(tl.broadcast_to(values[:, None], (BUCKETS, PARTS // BUCKETS)), (PARTS,))[:, None]


@triton.jit
def encode_part(
    program, x, residual, norms, packed, tail, n, full, count, key_low, key_high,
    BITS: tl.constexpr, PERIOD: tl.constexpr, BUCKET: tl.constexpr, BUCKETS: tl.constexpr, STOCHASTIC: tl.constexpr,
    FEEDBACK: tl.constexpr,
):  # fmt: skip
    """Encode a program's part of a tensor; return its amax_bits."""
    if (program + 1) * (BUCKETS * BUCKET) <= full:
        amax_bits = _encode_rows(
            program, x, residual, norms, packed, tail, n, full, count, key_low, key_high,
            BITS, PERIOD, BUCKET, BUCKETS, STOCHASTIC, FEEDBACK, False,
        )  # fmt: skip
    else:
        amax_bits = _encode_rows(
            program, x, residual, norms, packed, tail, n, full, count, key_low, key_high,
            BITS, PERIOD, BUCKET, BUCKETS, STOCHASTIC, FEEDBACK, True,
        )  # fmt: skip
    return amax_bits


@triton.jit(do_not_specialize=["key_low", "key_high"])
def _qsgd_encode_rows(
    x, residual, norms, packed, tail, amax_bits, n, full, count, key_low, key_high,
    BITS: tl.constexpr, PERIOD: tl.constexpr, BUCKET: tl.constexpr, BUCKETS: tl.constexpr, STOCHASTIC: tl.constexpr,
    FEEDBACK: tl.constexpr,
):  # fmt: skip
    """Encode 2, 4 or 8 bits by the largest magnitude, row by row, so that a thread packs its own words."""
    program = tl.program_id(0).to(tl.int64)
    program_amax_bits = encode_part(
        program, x, residual, norms, packed, tail, n, full, count, key_low, key_high,
        BITS, PERIOD, BUCKET, BUCKETS, STOCHASTIC, FEEDBACK,
    )  # fmt: skip
    tl.store(amax_bits + program, program_amax_bits)


def qsgd_encode(x: Tensor, coding: QsgdCoding, *, seed: int, norms: Tensor, packed: Tensor) -> Tensor:
    """Encode x; return amax_bits by program."""
    return qsgd_feedback(x, None, coding, seed=seed, norms=norms, packed=packed)


def qsgd_feedback(
    x: Tensor, residual: Tensor | None, coding: QsgdCoding, *, seed: int, norms: Tensor, packed: Tensor
) -> Tensor:
    """Encode the sum of x and its residual, and keep what is not sent in the residual; return amax_bits by program."""
    bits, bucket, l2, stochastic = coding
    whole = bucket == 0
    if whole and residual is not None:  # the norm of the sum must be known before the first value is encoded
        amax_bits = qsgd_encode(residual.add_(x), coding, seed=seed, norms=norms, packed=packed)
        qsgd_decode(norms, packed, bits=bits, bucket=0, out=residual, weight=-1.0)
        return amax_bits
    n, packed_section = x.numel(), PackedSection(packed, x.numel(), bits)
    assert norms.numel() == 4 * num_buckets(n, bucket)
    if whole:
        bucket = QSGD_TILE
        norms.copy_(whole_norm(x, l2).view(torch.uint8))
    buckets, warps = tile_shape(bucket, QSGD_TILE if residual is None else FEEDBACK_TILE)
    count = num_buckets(n, bucket)
    programs = num_buckets(count, buckets)
    amax_bits = torch.empty(programs, dtype=torch.int32, device=x.device)
    aligned_norms = word_aligned(norms)
    tensors = (
        x, x if residual is None else residual, aligned_norms, packed_section.target, packed_section.tail, amax_bits,
    )  # fmt: skip
    sizes = (n, packed_section.full, count, *split64(random.key(seed, random.ROUNDING)))
    options = exact_options(
        BITS=bits, PERIOD=packing_period(bits), BUCKET=bucket, BUCKETS=buckets, STOCHASTIC=stochastic,
        FEEDBACK=residual is not None, num_warps=warps,
    )  # fmt: skip
    if bits in (2, 4, 8) and not l2 and not whole:
        _qsgd_encode_rows[(programs,)](*tensors, *sizes, **options)
    else:
        _qsgd_encode[(programs,)](
            *tensors, row_factors(x.device), *sizes, L2=l2, STAGES=bucket.bit_length() - 5, WHOLE=whole, **options
        )
    if aligned_norms is not norms and not whole:
        norms.copy_(aligned_norms)
    packed_section.finish()
    return amax_bits


@triton.jit
def _qsgd_tile(
    packed, out, offsets, begin, n, full, step, weight, BITS: tl.constexpr, ADD: tl.constexpr, EDGE: tl.constexpr
):
    levels: tl.constexpr = (1 << (BITS - 1)) - 1
    symbols = load_symbols(packed, offsets, begin, n, full, BITS, EDGE)
    centred = tl.minimum(symbols - levels, levels).to(tl.float32)
    store_or_add(out, offsets, begin, n, centred * step[:, None], weight, ADD, EDGE)


@triton.jit
def decode_part(
    program, norms, packed, out, flag, n, full, count, weight,
    BITS: tl.constexpr, BUCKET: tl.constexpr, BUCKETS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    levels: tl.constexpr = (1 << (BITS - 1)) - 1
    begin, offsets = bucket_tile(program, BUCKET, BUCKETS)
    step = step_size(load_scales(norms, program * BUCKETS, count, flag, BUCKETS), levels, BUCKETS)
    if begin + BUCKETS * BUCKET <= full:
        _qsgd_tile(packed, out, offsets, begin, n, full, step, weight, BITS, ADD, False)
    else:
        _qsgd_tile(packed, out, offsets, begin, n, full, step, weight, BITS, ADD, True)


def qsgd_decode(norms: Tensor, packed: Tensor, *, bits: int, bucket: int, out: Tensor, weight: float | None) -> Tensor:
    n = out.numel()
    assert norms.numel() == 4 * num_buckets(n, bucket)
    if not bucket:  # every program reads its own copy of the norm
        bucket = WHOLE_TILE
        norms = norms.repeat(num_buckets(n, bucket))
    return launch_decode(
        decode_part, bits, norms, packed, out, weight, bits=bits, bucket=bucket, floats=1, tile=QSGD_TILE
    )
