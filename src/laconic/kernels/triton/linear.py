"""uniform and adaptive: values onto bins of equal width and back, samples and histograms of them."""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels import random
from laconic.kernels.interface import Grid, LinearGrid, UniformGrid
from laconic.kernels.sections import GROUP, num_buckets, packed_nbytes, symbol_bits, symbol_dtype
from laconic.kernels.triton import launch_cache
from laconic.kernels.triton.grid_sync import BARRIER, PARTS, SMALL, STATE, cut, launch, wait_for_all
from laconic.kernels.triton.launch_cache import remembered
from laconic.kernels.triton.packing import BYTES, Packed, pack_tail
from laconic.kernels.triton.tile import (
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

__all__ = [
    "grid_symbols",
    "histogram",
    "pack_bins",
    "range_histogram",
    "sample",
    "table_decode",
    "uniform_decode",
    "uniform_encode",
]


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


@triton.jit
def _range_by_parts(x, ends, n, span, parts, program, programs, SPAN: tl.constexpr, PARTS: tl.constexpr):
    """Smallest, largest and largest magnitude of each part's values. A NaN shows in the last alone."""
    at = tl.arange(0, SPAN)
    part = program
    while part < parts:
        low = tl.full((SPAN,), float("inf"), tl.float32)
        high = tl.full((SPAN,), float("-inf"), tl.float32)
        key = tl.zeros((SPAN,), tl.int32)
        begin = part * span
        stop = tl.minimum(begin + span, n)
        while begin < stop:
            v = load_tile(x, at, begin, n, SPAN)
            there = at < n - begin
            low = tl.minimum(low, tl.where(there, v, float("inf")))
            high = tl.maximum(high, tl.where(there, v, float("-inf")))
            key = tl.maximum(key, v.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
            begin += SPAN
        tl.store(ends + part, tl.min(low, 0))
        tl.store(ends + PARTS + part, tl.max(high, 0))
        tl.store(ends + 2 * PARTS + part, tl.max(key, 0).to(tl.float32, bitcast=True))
        part += programs


@triton.jit
def _range_of_all(ends, state, parts, ZERO: tl.constexpr, PARTS: tl.constexpr):
    """The range, with ZERO always around 0; the state keeps the key and both ends, as bits."""
    part = tl.arange(0, PARTS)
    low = tl.min(tl.load(ends + part, mask=part < parts, other=float("inf")), 0)
    high = tl.max(tl.load(ends + PARTS + part, mask=part < parts, other=float("-inf")), 0)
    key = tl.max(tl.load(ends + 2 * PARTS + part, mask=part < parts, other=0.0).to(tl.int32, bitcast=True), 0)
    low, high = tl.where(low == 0, 0.0, low), tl.where(high == 0, 0.0, high)  # no -0
    if ZERO:
        low, high = tl.minimum(low, 0.0), tl.maximum(high, 0.0)
    tl.store(state, key)
    tl.store(state + 1, low.to(tl.int32, bitcast=True))
    tl.store(state + 2, high.to(tl.int32, bitcast=True))
    return low, high


@triton.jit(do_not_specialize=["span", "parts", "levels"])
def _uniform_encode(
    x, ends, state, bounds, packed, tail, n, full, span, parts, levels,
    FIRST: tl.constexpr, LAST: tl.constexpr, BITS: tl.constexpr, PERIOD: tl.constexpr, SPAN: tl.constexpr,
    BYTES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The range by parts; of all; bins, packed; and those behind the last full group."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    for phase in tl.static_range(FIRST, LAST + 1):
        part = program
        if phase == 0:
            _range_by_parts(x, ends, n, span, parts, program, programs, SPAN, PARTS)
        if phase == 1:
            if program == 0:
                low, high = _range_of_all(ends, state, parts, False, PARTS)
                into = bounds.to(tl.pointer_type(tl.float32))
                tl.store(into, low)
                tl.store(into + 1, high)
        if phase == 2:
            low = tl.load(state + 1).to(tl.float32, bitcast=True).to(tl.float64)
            high = tl.load(state + 2).to(tl.float32, bitcast=True).to(tl.float64)
            inverse = levels.to(tl.float64) / (high - low)
            while part * SPAN < n:
                v = load_tile(x, tl.arange(0, SPAN), part * SPAN, n, SPAN)
                place = (v.to(tl.float64) - low) * inverse
                found = tl.minimum(place.to(tl.int64), levels - 1).to(tl.int32)
                store_symbols(found, packed, tail, part * SPAN, n, full, BITS, PERIOD, SPAN)
                part += programs
        if phase == 3:
            while part * BYTES * 8 < (n - full) * BITS:
                pack_tail(tail, packed + full // 8 * BITS, n - full, part, BITS, BYTES)
                part += programs
        if phase < LAST:
            wait_for_all(state + BARRIER, programs * (phase - FIRST + 1))


@triton.jit
def _cut_to_float(value):
    largest: tl.constexpr = 3.4028234663852886e38
    return tl.minimum(tl.maximum(value, -largest), largest).to(tl.float32)


@triton.jit(do_not_specialize=["span", "parts", "count", "levels", "low_key", "high_key"])
def _range_histogram(
    x, ends, state, n, span, parts, count, levels, low_key, high_key,
    FIRST: tl.constexpr, LAST: tl.constexpr, ZERO: tl.constexpr, ALL: tl.constexpr, BINS: tl.constexpr,
    SPAN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The range by parts; of all; and a sample's histogram over it, behind the state."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    for phase in tl.static_range(FIRST, LAST + 1):
        part = program
        if phase == 0:
            _range_by_parts(x, ends, n, span, parts, program, programs, SPAN, PARTS)
        if phase == 1:
            if program == 0:
                _range_of_all(ends, state, parts, ZERO, PARTS)
        if phase == 2:
            low = tl.load(state + 1).to(tl.float32, bitcast=True).to(tl.float64)
            spread = tl.load(state + 2).to(tl.float32, bitcast=True).to(tl.float64) - low
            pre = tl.where(spread < 2.0**-64, 2.0**64, tl.where(spread > 2.0**64, 2.0**-64, 1.0))
            base = _cut_to_float(low * pre)
            inverse = _cut_to_float(levels.to(tl.float64) / (spread * pre))
            while part * SPAN < count:
                at = part * SPAN + tl.arange(0, SPAN)
                from_at = at if ALL else _sampled_at(at, n, count, low_key, high_key)
                v = tl.load(x + from_at, mask=at < count, other=0.0)
                found = _bins(v, pre.to(tl.float32), base, inverse, 0, 0, 0, 0, levels, True)
                found = tl.where(at < count, found, BINS - 1)  # a bin that no level has
                counted = tl.histogram(found, BINS)
                bins = tl.arange(0, BINS)
                tl.atomic_add(state + 16 + bins, counted, mask=(counted > 0) & (bins < levels), sem="relaxed")
                part += programs
        if phase < LAST:
            wait_for_all(state + BARRIER, programs * (phase - FIRST + 1))


def range_histogram(x: Tensor, bins: int, zero: bool, count: int, seed: int) -> Tensor:
    """The key and the range, as bits, a few numbers more (``STATE`` in all), then the histogram of a sample."""
    n = x.numel()
    span, parts = cut(n, TILE)
    state = torch.zeros(STATE + bins, dtype=torch.int32, device=x.device)
    ends = torch.empty(3 * PARTS, device=x.device)
    keys = halves(random.key(seed, random.SAMPLING))
    constants = exact(ZERO=zero, ALL=count == n, BINS=max(32, 2 * bins), SPAN=TILE, PARTS=PARTS)
    launch(
        _range_histogram, x.device, (x, ends, state), (n, span, parts, count, bins, *keys), constants,
        (parts, 1, num_buckets(count, TILE)), (4, 8, 4), together=n <= SMALL,
        known=remembered("range", n, count, bins, zero),
    )  # fmt: skip
    return state


def uniform_encode(x: Tensor, levels: int, bounds: Tensor, packed: Tensor) -> Tensor:
    """Range and bins, none of them waited for; the key, and the range once more, as bits."""
    n, bits = x.numel(), symbol_bits(levels)
    into, first = Packed(packed, n, bits), words_of(bounds)
    span, parts = cut(n, TILE)
    state = torch.zeros(STATE, dtype=torch.int32, device=x.device)
    ends = torch.empty(3 * PARTS, device=x.device)
    grids: tuple[int, ...] = (parts, 1, num_buckets(n, TILE))
    if into.full < n:
        grids += (num_buckets((n - into.full) * bits, 8 * BYTES),)
    tensors = (x, ends, state, first, into.target, into.tail)
    constants = exact(BITS=bits, PERIOD=period(bits), SPAN=TILE, BYTES=BYTES, PARTS=PARTS)
    launch(
        _uniform_encode, x.device, tensors, (n, into.full, span, parts, levels), constants, grids, (4, 8, 2, 4),
        together=n <= SMALL, known=remembered("uniform", n, levels),
    )  # fmt: skip
    into.copy_back()
    if first is not bounds:
        bounds.copy_(first)
    return state[:3]


def _arguments(grid: Grid) -> tuple[float | int, ...]:
    if isinstance(grid, LinearGrid):
        return (grid.pre, grid.base, grid.inverse, 0, 0, 0, 0, grid.levels)
    return (0.0, 0.0, 0.0, *_double(grid.low), *_double(grid.levels / (grid.high - grid.low)), grid.levels)


def pack_bins(x: Tensor, grid: Grid, packed: Tensor) -> None:
    n, bits = x.numel(), symbol_bits(grid.levels)
    if bits == 0 or n == 0:
        return
    into = Packed(packed, n, bits)
    how = exact(LINEAR=isinstance(grid, LinearGrid), BITS=bits, PERIOD=period(bits), SPAN=TILE, num_warps=2)
    launch_cache.launch(
        _pack_bins, (x, into.target, into.tail), (n, into.full, *_arguments(grid)),
        remembered("bins", n, bits, isinstance(grid, LinearGrid)), lambda: [(num_buckets(n, TILE), how)],
    )  # fmt: skip
    into.finish()


def grid_symbols(x: Tensor, grid: Grid) -> Tensor:
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
    width = _double((grid.high - grid.low) / grid.levels)
    how = exact(BITS=bits, SPAN=TILE, ADD=weight is not None, num_warps=4)
    launch_cache.launch(
        _uniform_decode, (words_of(packed), out),
        (n, n // GROUP * GROUP, *_double(grid.low), *width, grid.levels, float(weight or 0.0)),
        remembered("uniform back", n, bits, weight is None), lambda: [(num_buckets(n, TILE), how)],
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
    how = exact(BITS=bits, SPAN=TILE, ADD=weight is not None, num_warps=4)
    launch_cache.launch(
        _table_decode, (words_of(packed), table.to(out.device), out),
        (n, n // GROUP * GROUP, table.numel(), float(weight or 0.0)),
        remembered("table", n, table.numel(), weight is None), lambda: [(num_buckets(n, TILE), how)],
    )  # fmt: skip


@triton.jit
def _sampled_at(part, n, count, low_key, high_key):
    """Where ``reference.sample`` looks in each of so many equal parts."""
    wide = part.to(tl.int64)
    begin = wide * n // count
    span = (wide + 1) * n // count - begin
    noise = hash32(part, low_key, high_key).to(tl.int64)
    return begin + (noise * span >> 32)


@triton.jit(do_not_specialize=["low_key", "high_key"])
def _sample(x, out, n, count, low_key, high_key, SPAN: tl.constexpr):
    part = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    there = part < count
    tl.store(out + part, tl.load(x + _sampled_at(part, n, count, low_key, high_key), mask=there, other=0.0), mask=there)


def sample(x: Tensor, count: int, seed: int) -> Tensor:
    if count == x.numel():
        return x
    out = torch.empty(count, dtype=torch.float32, device=x.device)
    if count:
        _sample[(num_buckets(count, 1024),)](
            x, out, x.numel(), count, *halves(random.key(seed, random.SAMPLING)), SPAN=1024, **exact(num_warps=4)
        )
    return out
