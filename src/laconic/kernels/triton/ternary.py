"""terngrad: norms of buckets, and five ternary values per byte."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels import random
from laconic.kernels.sections import TRIT_GROUP_NBYTES, num_buckets, trits_nbytes
from laconic.kernels.triton.buckets import load_scales, magnitude_bits, quantization_scale, store_scales, tile_shape
from laconic.kernels.triton.counter_hash import rounding_noise, row_factors
from laconic.kernels.triton.launch_args import exact_options, split64, word_aligned
from laconic.kernels.triton.packing import trit_digit, trit_location
from laconic.kernels.triton.tile import load_tile, store_or_add

__all__ = ["ternary_decode", "ternary_encode"]


@triton.jit
def _norms(x, norms, amax_bits, n, count, BUCKET: tl.constexpr, BUCKETS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BUCKETS)[:, None] * BUCKET + tl.arange(0, BUCKET)[None, :]
    largest = tl.max(magnitude_bits(load_tile(x, offsets, program * BUCKETS * BUCKET, n, BUCKETS * BUCKET)), 1)
    tl.store(amax_bits + program, tl.max(largest, 0))
    store_scales(norms, program * BUCKETS, count, largest.to(tl.float32, bitcast=True), BUCKETS)


@triton.jit(do_not_specialize=["key_low", "key_high"])
def _ternary_encode(
    x, norms, packed, row_factors, n, full, nbytes, key_low, key_high, BUCKET: tl.constexpr, BYTES: tl.constexpr
):
    """Pack five values per byte; groups of 320 span buckets, so the norms come from memory."""
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    value = tl.zeros((BYTES,), tl.int32)
    for k in tl.static_range(5):
        offsets = tl.where(byte < full // 5, byte // 64 * 320 + k * 64 + byte % 64, full + (byte - full // 5) * 5 + k)
        valid = (byte < nbytes) & (offsets < n)
        v = tl.load(x + offsets, mask=valid, other=0.0)
        norm = tl.load(norms.to(tl.pointer_type(tl.float32)) + offsets // BUCKET, mask=valid, other=0.0)
        upscale, scale = quantization_scale(norm, 1 << 29, BYTES)
        symbol = ((v * upscale) * scale).to(tl.int32) + rounding_noise(offsets, 0, row_factors, key_low, key_high, 29)
        value += tl.where(valid, (symbol + (1 << 29)) >> 29, 0) * (3**k)
    tl.store(packed + byte, value.to(tl.uint8), mask=byte < nbytes)


def ternary_encode(x: Tensor, *, bucket: int, seed: int, norms: Tensor, packed: Tensor) -> Tensor:
    n, span = x.numel(), 5 * TRIT_GROUP_NBYTES
    buckets, warps = tile_shape(bucket)
    count = num_buckets(n, bucket)
    assert norms.numel() == 4 * count and packed.numel() == trits_nbytes(n)
    programs = num_buckets(count, buckets)
    amax_bits = torch.empty(programs, dtype=torch.int32, device=x.device)
    aligned_norms = word_aligned(norms)
    _norms[(programs,)](
        x, aligned_norms, amax_bits, n, count, BUCKET=bucket, BUCKETS=buckets, **exact_options(num_warps=warps)
    )
    _ternary_encode[(num_buckets(packed.numel(), 512),)](
        x, aligned_norms, packed, row_factors(x.device), n, n // span * span, packed.numel(),
        *split64(random.key(seed, random.ROUNDING)), BUCKET=bucket, BYTES=512, **exact_options(num_warps=4),
    )  # fmt: skip
    if aligned_norms is not norms:
        norms.copy_(aligned_norms)
    return amax_bits


@triton.jit
def _ternary_decode(
    norms, packed, out, flag, n, full, count, weight, BUCKET: tl.constexpr, BUCKETS: tl.constexpr, ADD: tl.constexpr
):
    span: tl.constexpr = BUCKETS * BUCKET
    program = tl.program_id(0).to(tl.int64)
    begin = program * span
    offsets = tl.arange(0, BUCKETS)[:, None] * BUCKET + tl.arange(0, BUCKET)[None, :]
    step = load_scales(norms, program * BUCKETS, count, flag, BUCKETS)
    byte_index, power = trit_location(begin + offsets, full)
    byte = tl.load(packed + byte_index, mask=begin + offsets < n, other=0).to(tl.int32)
    tl.store(flag, 1, mask=tl.max(tl.max(byte, 1), 0) > 242)
    centred = (trit_digit(byte, power) - 1).to(tl.float32)
    store_or_add(out, offsets, begin, n, centred * step[:, None], weight, ADD, True)


def ternary_decode(norms: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None) -> Tensor:
    n, span = out.numel(), 5 * TRIT_GROUP_NBYTES
    buckets, warps = tile_shape(bucket)
    count = num_buckets(n, bucket)
    assert norms.numel() == 4 * count and packed.numel() == trits_nbytes(n)
    flag = torch.zeros(1, dtype=torch.int32, device=out.device)
    _ternary_decode[(num_buckets(count, buckets),)](
        word_aligned(norms), packed, out, flag, n, n // span * span, count, weight or 0.0,
        BUCKET=bucket, BUCKETS=buckets, ADD=weight is not None, **exact_options(num_warps=warps),
    )  # fmt: skip
    return flag
