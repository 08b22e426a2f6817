"""Momentum, and 16-bit values decoded into a sum, in one pass each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.sections import num_buckets
from laconic.kernels.triton.launch_cache import launch, remembered
from laconic.kernels.triton.tile import TILE, exact, keep, load_tile

__all__ = ["add_momentum", "add_values", "cast_encode"]


@triton.jit
def _add_momentum(x, velocity, residual, n, momentum, SPAN: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    there = at < n
    moved = tl.load(velocity + at, mask=there) * momentum + tl.load(x + at, mask=there)
    tl.store(velocity + at, moved, mask=there)
    tl.store(residual + at, tl.load(residual + at, mask=there) + moved, mask=there)


def add_momentum(x: Tensor, momentum: float, velocity: Tensor, residual: Tensor) -> None:
    n = x.numel()
    if n:
        _add_momentum[(num_buckets(n, TILE),)](
            x, velocity, residual, n, float(momentum), SPAN=TILE, **exact(num_warps=4)
        )


@triton.jit
def _add_values(section, out, flag, n, weight, INFINITE: tl.constexpr, ADD: tl.constexpr, SPAN: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * SPAN
    at = tl.arange(0, SPAN)
    v = load_tile(section, at, begin, n, SPAN).to(tl.float32)
    good = tl.abs(v) < INFINITE  # a NaN is not
    tl.store(flag, 1, mask=tl.max((good == 0).to(tl.int32), 0) > 0)
    if begin + SPAN <= n:
        keep(out, at, begin, n, tl.where(good, v, 0.0), weight, ADD, False)
    else:
        keep(out, at, begin, n, tl.where(good, v, 0.0), weight, ADD, True)


def add_values(values: Tensor, out: Tensor, weight: float | None) -> Tensor:
    """Float values stored into, or added ``weight`` times to, a float32 tensor; a flag: one was not finite."""
    flag = torch.zeros(1, dtype=torch.int32, device=out.device)
    n = out.numel()
    if n:
        how = exact(INFINITE=float("inf"), ADD=weight is not None, SPAN=TILE, num_warps=4)
        launch(
            _add_values, (values, out, flag), (n, float(weight or 0.0)), remembered("add", n, weight is None),
            lambda: [(num_buckets(n, TILE), how)],
        )  # fmt: skip
    return flag


@triton.jit
def _cast_encode(x, out, seen, n, limit, BF16: tl.constexpr, SPAN: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * SPAN
    at = tl.arange(0, SPAN)
    v = load_tile(x, at, begin, n, SPAN)
    key = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0).to(tl.int64)
    beyond = tl.sum((tl.abs(v) > limit).to(tl.int32), 0).to(tl.int64)
    tl.atomic_max(seen, key, mask=key > tl.load(seen), sem="relaxed")  # few find more than was found before
    tl.atomic_add(seen + 1, beyond, mask=beyond > 0, sem="relaxed")
    cut = tl.minimum(tl.maximum(v, 0.0 - limit), limit)
    if BF16:  # to nearest, of two the even one: in whole numbers, since interpreted casts cut off
        bits = cut.to(tl.uint32, bitcast=True)
        short = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    else:
        short = cut.to(tl.float16).to(tl.int16, bitcast=True)
    tl.store(out + begin + at, short, mask=begin + at < n)


def cast_encode(x: Tensor, out: Tensor, limit: float, bf16: bool) -> Tensor:
    """Round float32 to 16 bits, in an int16 tensor, saturating; the key, and how many values saturated."""
    seen = torch.zeros(2, dtype=torch.int64, device=x.device)
    how = exact(BF16=bf16, SPAN=TILE, num_warps=4)
    launch(
        _cast_encode, (x, out, seen), (x.numel(), limit), remembered("cast", x.numel(), bf16),
        lambda: [(num_buckets(x.numel(), TILE), how)],
    )  # fmt: skip
    return seen
