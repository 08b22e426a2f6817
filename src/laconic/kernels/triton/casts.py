"""Momentum, casts to 16 bits, and float values stored or accumulated, in one pass each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.multi_tensor_interface import Addresses, Tensors
from laconic.kernels.sections import num_buckets
from laconic.kernels.triton.buckets import magnitude_bits
from laconic.kernels.triton.launch_args import TILE, exact_options
from laconic.kernels.triton.launch_cache import launch, launches_for
from laconic.kernels.triton.tensor_table import TensorTable, load_pointer, program_part, size_unless_skipped
from laconic.kernels.triton.tile import load_tile, store_or_add

__all__ = ["accumulate_values", "add_momentum", "cast_decode_all", "cast_encode", "cast_encode_all"]


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


# ------------------------------------------------------------------------------------------------------ many tensors


@triton.jit
def _rounded(v, limit, KIND: tl.constexpr):
    """Return the 16 bits of values, saturated; their own 32 bits if there is nothing to round."""
    clipped = tl.minimum(tl.maximum(v, 0.0 - limit), limit)
    if KIND == "bf16":
        bits = clipped.to(tl.uint32, bitcast=True)
        short = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
    elif KIND == "fp16":
        short = clipped.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        short = v.to(tl.int32, bitcast=True)
    return short


@triton.jit
def _widened(short, KIND: tl.constexpr):
    if KIND == "bf16":
        v = (short.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif KIND == "fp16":
        v = short.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        v = short.to(tl.float32, bitcast=True)
    return v


@triton.jit
def _cast_encode_all(
    table, parts, amax_bits, skip, saturated, limit,
    KIND: tl.constexpr, FEEDBACK: tl.constexpr, SKIP: tl.constexpr, SPAN: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    slot, row, part = program_part(table, parts)
    n = size_unless_skipped(row, slot, skip, SKIP)
    offsets = tl.arange(0, SPAN)
    begin = part * SPAN
    v = load_tile(load_pointer(row, 0, ALIGNED), offsets, begin, n, SPAN)
    residual = load_pointer(row, 1, ALIGNED)
    if FEEDBACK:
        v = load_tile(residual, offsets, begin, n, SPAN) + v
    tl.atomic_max(amax_bits + slot, tl.max(magnitude_bits(v), 0), sem="relaxed")
    beyond = tl.sum(((tl.abs(v) > limit) & (tl.abs(v) < float("inf"))).to(tl.int32), 0)
    tl.atomic_add(saturated, beyond, mask=beyond > 0, sem="relaxed")
    short = _rounded(v, limit, KIND)
    section = tl.load(row + 2).to(tl.pointer_type(short.dtype))
    tl.store(section + begin + offsets, short, mask=begin + offsets < n)
    if FEEDBACK:
        tl.store(residual + begin + offsets, v - _widened(short, KIND), mask=begin + offsets < n)


def cast_encode_all(
    tensors: Tensors, residuals: Tensors | None, *, kind: str, limit: float, sections: Addresses, saturated: Tensor,
    skip: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Round each tensor to ``fp16`` or ``bf16``, or copy it (``none``), to addresses; return amax_bits.

    Args:
        limit: The largest value, at which others saturate.
        saturated: Counts them, int32.
    """
    table_args = TensorTable.of(
        tensors, TILE, residuals=tensors if residuals is None else residuals, scale_addresses=sections
    )
    amax_bits = torch.zeros(len(tensors), dtype=torch.int32, device=tensors[0].device)
    _cast_encode_all[table_args.grid](
        table_args.table, table_args.parts, amax_bits, amax_bits if skip is None else skip, saturated, limit, KIND=kind,
        FEEDBACK=residuals is not None, SKIP=skip is not None, SPAN=TILE, ALIGNED=table_args.aligned,
        **exact_options(num_warps=4),
    )  # fmt: skip
    return amax_bits


@triton.jit
def _cast_decode_all(
    table, parts, flag, skip, weight,
    KIND: tl.constexpr, ADD: tl.constexpr, SKIP: tl.constexpr, SPAN: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    slot, row, part = program_part(table, parts)
    n = size_unless_skipped(row, slot, skip, SKIP)
    offsets = tl.arange(0, SPAN)
    begin = part * SPAN
    inside = begin + offsets < n
    if KIND == "none":
        short = tl.load(tl.load(row + 2).to(tl.pointer_type(tl.int32)) + begin + offsets, mask=inside, other=0)
    else:
        short = tl.load(tl.load(row + 2).to(tl.pointer_type(tl.int16)) + begin + offsets, mask=inside, other=0)
    v = _widened(short, KIND)
    good = tl.abs(v) < float("inf")
    tl.store(flag, 1, mask=tl.max((good == 0).to(tl.int32), 0) > 0)
    store_or_add(load_pointer(row, 0, ALIGNED), offsets, begin, n, tl.where(good, v, 0.0), weight, ADD, True)


def cast_decode_all(
    sections: Addresses, *, kind: str, outs: Tensors, weight: float | None, skip: Tensor | None = None
) -> Tensor:
    """Decode such sections into each tensor, or add ``weight`` times the values; return the flag."""
    table_args = TensorTable.of(outs, TILE, scale_addresses=sections)
    flag = torch.zeros(1, dtype=torch.int32, device=outs[0].device)
    _cast_decode_all[table_args.grid](
        table_args.table, table_args.parts, flag, flag if skip is None else skip, weight or 0.0, KIND=kind,
        ADD=weight is not None, SKIP=skip is not None, SPAN=TILE, ALIGNED=table_args.aligned,
        **exact_options(num_warps=4),
    )  # fmt: skip
    return flag
