"""uniform and adaptive: values onto bins of equal width and back, samples and histograms of them."""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels import random
from laconic.kernels.interface import (
    GROUP,
    Grid,
    LinearGrid,
    UniformGrid,
    num_buckets,
    packed_nbytes,
    symbol_bits,
    symbol_dtype,
)
from laconic.kernels.triton.packing import Packed
from laconic.kernels.triton.parts import (
    TILE,
    exact,
    halves,
    hash32,
    keep,
    load_tile,
    period,
    read_symbols,
    store_symbols,
    words_of,
)

__all__ = ["histogram", "make_symbols", "pack_bins", "sample", "table_decode", "uniform_decode"]


def _double(number: float) -> tuple[int, int]:
    """A float64 as two int32 arguments: as one it would arrive as a float32."""
    return halves(struct.unpack("<Q", struct.pack("<d", number))[0])


@triton.jit
def _join(low, high):
    """The float64 of two int32 arguments."""
    bits = (high.to(tl.int64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.int64)
    return bits.to(tl.float64, bitcast=True)


@triton.jit
def _bins(v, pre, base, inverse, low0, low1, high0, high1, levels, LINEAR: tl.constexpr):
    """The bin of each value, int32. Linear ones are found in float32, uniform ones in float64."""
    if LINEAR:
        place = (v * pre - base) * inverse
        place = tl.where(place > 0, place, 0.0)
        found = tl.minimum(place, (levels - 1).to(tl.float32)).to(tl.int32)
    else:
        place = (v.to(tl.float64) - _join(low0, low1)) * _join(high0, high1)
        found = tl.minimum(place.to(tl.int64), levels - 1).to(tl.int32)
    return found


UNTYPED = ("low0", "low1", "high0", "high1", "levels")


@triton.jit(do_not_specialize=UNTYPED)
def _pack_bins(
    x,
    packed,
    tail,
    n,
    full,
    pre,
    base,
    inverse,
    low0,
    low1,
    high0,
    high1,
    levels,
    LINEAR: tl.constexpr,
    BITS: tl.constexpr,
    PERIOD: tl.constexpr,
    SPAN: tl.constexpr,
):
    begin = tl.program_id(0).to(tl.int64) * SPAN
    at = tl.arange(0, SPAN)
    v = load_tile(x, at, begin, n, SPAN)
    found = _bins(v, pre, base, inverse, low0, low1, high0, high1, levels, LINEAR)
    store_symbols(found, packed, tail, begin, n, full, BITS, PERIOD, SPAN)


@triton.jit(do_not_specialize=UNTYPED)
def _make_bins(
    x, out, n, pre, base, inverse, low0, low1, high0, high1, levels, LINEAR: tl.constexpr, SPAN: tl.constexpr
):
    begin = tl.program_id(0).to(tl.int64) * SPAN
    at = tl.arange(0, SPAN)
    v = load_tile(x, at, begin, n, SPAN)
    found = _bins(v, pre, base, inverse, low0, low1, high0, high1, levels, LINEAR)
    tl.store(out + begin + at, found.to(out.dtype.element_ty), mask=begin + at < n)


@triton.jit(do_not_specialize=UNTYPED)
def _count_bins(
    x, counts, n, pre, base, inverse, low0, low1, high0, high1, levels, BINS: tl.constexpr, SPAN: tl.constexpr
):
    begin = tl.program_id(0).to(tl.int64) * SPAN
    at = tl.arange(0, SPAN)
    v = load_tile(x, at, begin, n, SPAN)
    found = _bins(v, pre, base, inverse, low0, low1, high0, high1, levels, True)
    found = tl.where(begin + at < n, found, BINS - 1)  # a bin that no level has
    bins = tl.arange(0, BINS)
    counted = tl.histogram(found, BINS)
    tl.atomic_add(counts + bins, counted, mask=(counted > 0) & (bins < levels))


def _arguments(grid: Grid) -> tuple[float | int, ...]:
    if isinstance(grid, LinearGrid):
        return (grid.pre, grid.base, grid.inverse, 0, 0, 0, 0, grid.levels)
    return (0.0, 0.0, 0.0, *_double(grid.low), *_double(grid.levels / (grid.high - grid.low)), grid.levels)


def pack_bins(x: Tensor, grid: Grid, packed: Tensor) -> None:
    n, bits = x.numel(), symbol_bits(grid.levels)
    if bits == 0 or n == 0:
        return
    into = Packed(packed, n, bits)
    _pack_bins[(num_buckets(n, TILE),)](
        x, into.target, into.tail, n, into.full, *_arguments(grid), LINEAR=isinstance(grid, LinearGrid),
        BITS=bits, PERIOD=period(bits), SPAN=TILE, **exact(num_warps=2),
    )  # fmt: skip
    into.finish()


def make_symbols(x: Tensor, grid: Grid) -> Tensor:
    out = torch.empty(x.numel(), dtype=symbol_dtype(grid.levels), device=x.device)
    if x.numel():
        _make_bins[(num_buckets(x.numel(), TILE),)](
            x, out, x.numel(), *_arguments(grid), LINEAR=isinstance(grid, LinearGrid), SPAN=TILE, **exact(num_warps=4)
        )
    return out


def histogram(x: Tensor, grid: LinearGrid) -> Tensor:
    """How many values fall into each bin, on the device."""
    counts = torch.zeros(grid.levels, dtype=torch.int32, device=x.device)
    bins = max(32, 1 << grid.levels.bit_length())
    if x.numel():
        _count_bins[(num_buckets(x.numel(), TILE),)](
            x, counts, x.numel(), *_arguments(grid), BINS=bins, SPAN=TILE, **exact(num_warps=4)
        )
    return counts.to(torch.int64)


@triton.jit
def _uniform_tile(
    packed,
    out,
    at,
    begin,
    n,
    full,
    low,
    width,
    levels,
    weight,
    BITS: tl.constexpr,
    ADD: tl.constexpr,
    EDGE: tl.constexpr,
):
    index = tl.minimum(read_symbols(packed, at, begin, n, full, BITS, EDGE), levels - 1)
    values = low + (index.to(tl.float64) + 0.5) * width
    keep(out, at, begin, n, values.to(tl.float32), weight, ADD, EDGE)


@triton.jit(do_not_specialize=["low0", "low1", "width0", "width1", "levels"])
def _uniform_decode(
    packed,
    out,
    n,
    full,
    low0,
    low1,
    width0,
    width1,
    levels,
    weight,
    BITS: tl.constexpr,
    SPAN: tl.constexpr,
    ADD: tl.constexpr,
):
    begin = tl.program_id(0).to(tl.int64) * SPAN
    at = tl.arange(0, SPAN)
    low = _join(low0, low1)
    width = _join(width0, width1)
    if begin + SPAN <= full:
        _uniform_tile(packed, out, at, begin, n, full, low, width, levels, weight, BITS, ADD, False)
    else:
        _uniform_tile(packed, out, at, begin, n, full, low, width, levels, weight, BITS, ADD, True)


def uniform_decode(packed: Tensor, grid: UniformGrid, out: Tensor, weight: float | None) -> None:
    n, bits = out.numel(), symbol_bits(grid.levels)
    assert packed.numel() == packed_nbytes(n, bits) and bits > 0
    _uniform_decode[(num_buckets(n, TILE),)](
        words_of(packed), out, n, n // GROUP * GROUP, *_double(grid.low),
        *_double((grid.high - grid.low) / grid.levels), grid.levels, weight or 0.0,
        BITS=bits, SPAN=TILE, ADD=weight is not None, **exact(num_warps=4),
    )  # fmt: skip


@triton.jit
def _table_decode(
    packed, table, out, n, full, levels, weight, BITS: tl.constexpr, SPAN: tl.constexpr, ADD: tl.constexpr
):
    begin = tl.program_id(0).to(tl.int64) * SPAN
    at = tl.arange(0, SPAN)
    if begin + SPAN <= full:
        index = tl.minimum(read_symbols(packed, at, begin, n, full, BITS, False), levels - 1)
        keep(out, at, begin, n, tl.load(table + index), weight, ADD, False)
    else:
        last = tl.minimum(read_symbols(packed, at, begin, n, full, BITS, True), levels - 1)
        keep(out, at, begin, n, tl.load(table + last), weight, ADD, True)


def table_decode(packed: Tensor, table: Tensor, out: Tensor, weight: float | None) -> None:
    """Symbols past the last level read as the last."""
    n, bits = out.numel(), symbol_bits(table.numel())
    assert packed.numel() == packed_nbytes(n, bits) and bits > 0
    _table_decode[(num_buckets(n, TILE),)](
        words_of(packed), table.to(out.device), out, n, n // GROUP * GROUP, table.numel(), weight or 0.0,
        BITS=bits, SPAN=TILE, ADD=weight is not None, **exact(num_warps=4),
    )  # fmt: skip


@triton.jit(do_not_specialize=["low_key", "high_key"])
def _sample(x, out, n, count, low_key, high_key, SPAN: tl.constexpr):
    part = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    there = part < count
    wide = part.to(tl.int64)
    begin = wide * n // count
    span = (wide + 1) * n // count - begin
    noise = hash32(part, low_key, high_key).to(tl.int64)
    tl.store(out + part, tl.load(x + begin + (noise * span >> 32), mask=there, other=0.0), mask=there)


def sample(x: Tensor, count: int, seed: int) -> Tensor:
    if count == x.numel():
        return x
    out = torch.empty(count, dtype=torch.float32, device=x.device)
    if count:
        _sample[(num_buckets(count, 1024),)](
            x, out, x.numel(), count, *halves(random.key(seed, random.SAMPLING)), SPAN=1024, **exact(num_warps=4)
        )
    return out
