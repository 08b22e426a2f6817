"""Momentum, casts to 16 bits, and float values stored or accumulated, in one pass each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.sections import num_buckets
from laconic.kernels.triton.launch_cache import launch, launches_for
from laconic.kernels.triton.tile import TILE, exact_options, load_tile, store_or_add

__all__ = ["accumulate_values", "add_momentum", "cast_encode"]


@triton.jit
def _add_momentum(x, velocity, residual, n, momentum, SPAN: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    valid = offsets < n
    new_velocity = tl.load(velocity + offsets, mask=valid) * momentum + tl.load(x + offsets, mask=valid)
    tl.store(velocity + offsets, new_velocity, mask=valid)
    tl.store(residual + offsets, tl.load(residual + offsets, mask=valid) + new_velocity, mask=valid)


def add_momentum(x: Tensor, momentum: float, velocity: Tensor, residual: Tensor) -> None:
    n = x.numel()
    if n:
        _add_momentum[(num_buckets(n, TILE),)](
            x, velocity, residual, n, float(momentum), SPAN=TILE, **exact_options(num_warps=4)
        )


@triton.jit
def _accumulate_values(section, out, flag, n, weight, INFINITE: tl.constexpr, ADD: tl.constexpr, SPAN: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * SPAN
    offsets = tl.arange(0, SPAN)
    v = load_tile(section, offsets, begin, n, SPAN).to(tl.float32)
    good = tl.abs(v) < INFINITE  # false for a NaN
    tl.store(flag, 1, mask=tl.max((good == 0).to(tl.int32), 0) > 0)
    if begin + SPAN <= n:
        store_or_add(out, offsets, begin, n, tl.where(good, v, 0.0), weight, ADD, False)
    else:
        store_or_add(out, offsets, begin, n, tl.where(good, v, 0.0), weight, ADD, True)


def accumulate_values(values: Tensor, out: Tensor, weight: float | None) -> Tensor:
    """Store float values into a float32 tensor, or add ``weight`` times them; return a flag: a value was not finite."""
    flag = torch.zeros(1, dtype=torch.int32, device=out.device)
    n = out.numel()
    if n:
        options = exact_options(INFINITE=float("inf"), ADD=weight is not None, SPAN=TILE, num_warps=4)
        launch(
            _accumulate_values, (values, out, flag), (n, float(weight or 0.0)), launches_for("add", n, weight is None),
            lambda: [(num_buckets(n, TILE), options)],
        )  # fmt: skip
    return flag


@triton.jit
def _cast_encode(x, out, result, n, limit, BF16: tl.constexpr, SPAN: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * SPAN
    offsets = tl.arange(0, SPAN)
    v = load_tile(x, offsets, begin, n, SPAN)
    amax_bits = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0).to(tl.int64)
    saturated = tl.sum((tl.abs(v) > limit).to(tl.int32), 0).to(tl.int64)
    tl.atomic_max(
        result, amax_bits, mask=amax_bits > tl.load(result), sem="relaxed"
    )  # few programs exceed the previous maximum
    tl.atomic_add(result + 1, saturated, mask=saturated > 0, sem="relaxed")
    clipped = tl.minimum(tl.maximum(v, 0.0 - limit), limit)
    if BF16:  # round to nearest even in integers, since the interpreter's cast truncates
        bits = clipped.to(tl.uint32, bitcast=True)
        short = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    else:
        short = clipped.to(tl.float16).to(tl.int16, bitcast=True)
    tl.store(out + begin + offsets, short, mask=begin + offsets < n)


def cast_encode(x: Tensor, out: Tensor, limit: float, bf16: bool) -> Tensor:
    """Round float32 to 16 bits, saturating, into an int16 tensor; return amax_bits and the saturated values' number."""
    result = torch.zeros(2, dtype=torch.int64, device=x.device)
    options = exact_options(BF16=bf16, SPAN=TILE, num_warps=4)
    launch(
        _cast_encode, (x, out, result), (x.numel(), limit), launches_for("cast", x.numel(), bf16),
        lambda: [(num_buckets(x.numel(), TILE), options)],
    )  # fmt: skip
    return result
