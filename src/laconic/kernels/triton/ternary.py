"""terngrad: norms of buckets, and five ternary values in each byte."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels import random
from laconic.kernels.sections import TRIT_GROUP_NBYTES, num_buckets, trits_nbytes
from laconic.kernels.triton.buckets import load_floats, magnitudes, scale_to, store_floats, tile
from laconic.kernels.triton.packing import trit_of, trit_place
from laconic.kernels.triton.tile import exact, factors, halves, keep, load_tile, noise_of, words_of

__all__ = ["ternary_decode", "ternary_encode"]


@triton.jit
def _norms(x, norms, keys, n, count, BUCKET: tl.constexpr, BUCKETS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BUCKETS)[:, None] * BUCKET + tl.arange(0, BUCKET)[None, :]
    largest = tl.max(magnitudes(load_tile(x, at, program * BUCKETS * BUCKET, n, BUCKETS * BUCKET)), 1)
    tl.store(keys + program, tl.max(largest, 0))
    store_floats(norms, program * BUCKETS, count, largest.to(tl.float32, bitcast=True), BUCKETS)


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
        up, scale = scale_to(norm, 1 << 29, BYTES)
        symbol = ((v * up) * scale).to(tl.int32) + noise_of(at, 0, factors, low_key, high_key, 29)
        value += tl.where(there, (symbol + (1 << 29)) >> 29, 0) * (3**k)
    tl.store(packed + byte, value.to(tl.uint8), mask=byte < nbytes)


def ternary_encode(x: Tensor, *, bucket: int, seed: int, norms: Tensor, packed: Tensor) -> Tensor:
    n, span = x.numel(), 5 * TRIT_GROUP_NBYTES
    buckets, warps = tile(bucket)
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
    step = load_floats(norms, program * BUCKETS, count, flag, BUCKETS)
    place, power = trit_place(begin + at, full)
    byte = tl.load(packed + place, mask=begin + at < n, other=0).to(tl.int32)
    tl.store(flag, 1, mask=tl.max(tl.max(byte, 1), 0) > 242)
    centred = (trit_of(byte, power) - 1).to(tl.float32)
    keep(out, at, begin, n, centred * step[:, None], weight, ADD, True)


def ternary_decode(norms: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None) -> Tensor:
    n, span = out.numel(), 5 * TRIT_GROUP_NBYTES
    buckets, warps = tile(bucket)
    count = num_buckets(n, bucket)
    assert norms.numel() == 4 * count and packed.numel() == trits_nbytes(n)
    flag = torch.zeros(1, dtype=torch.int32, device=out.device)
    _ternary_decode[(num_buckets(count, buckets),)](
        words_of(norms), packed, out, flag, n, n // span * span, count, weight or 0.0,
        BUCKET=bucket, BUCKETS=buckets, ADD=weight is not None, **exact(num_warps=warps),
    )  # fmt: skip
    return flag
