"""Bins of equal width for ``uniform`` and ``adaptive``: encode, decode, samples and histograms."""

from __future__ import annotations

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels import random
from laconic.kernels.interface import Grid, LinearGrid, UniformGrid
from laconic.kernels.sections import GROUP, num_buckets, packed_nbytes, symbol_bits, symbol_dtype
from laconic.kernels.triton import grid_sync, launch_cache
from laconic.kernels.triton.counter_hash import hash32
from laconic.kernels.triton.grid_sync import PARTS, end_phase
from laconic.kernels.triton.launch_args import TILE, exact_options, packing_period, split64, word_aligned
from laconic.kernels.triton.launch_cache import launches_for
from laconic.kernels.triton.packing import BYTES, PackedSection, pack_tail
from laconic.kernels.triton.tile import load_symbols, load_tile, store_or_add, store_symbols

__all__ = [
    "grid_symbols", "histogram", "pack_bins", "range_histogram", "sample", "table_decode", "uniform_decode",
    "uniform_encode",
]  # fmt: skip


def _float64_words(number: float) -> tuple[int, int]:
    """Return a float64 as two int32 arguments; Triton would pass it as a float32."""
    return split64(struct.unpack("<Q", struct.pack("<d", number))[0])


@triton.jit
def _join_float64(low, high):
    """Join two int32 arguments to a float64."""
    bits = (high.to(tl.int64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.int64)
    return bits.to(tl.float64, bitcast=True)


@triton.jit
def _bins(v, pre, base, inverse, low0, low1, high0, high1, levels, LINEAR: tl.constexpr):
    """Return the bin of each value as int32: linear bins are computed in float32, uniform ones in float64."""
    if LINEAR:
        position = (v * pre - base) * inverse
        position = tl.where(position > 0, position, 0.0)
        bin_index = tl.minimum(position, (levels - 1).to(tl.float32)).to(tl.int32)
    else:
        position = (v.to(tl.float64) - _join_float64(low0, low1)) * _join_float64(high0, high1)
        bin_index = tl.minimum(position.to(tl.int64), levels - 1).to(tl.int32)
    return bin_index


UNSPECIALIZED = ("low0", "low1", "high0", "high1", "levels")


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _pack_bins(
    x, packed, tail, n, full, pre, base, inverse, low0, low1, high0, high1, levels,
    LINEAR: tl.constexpr, BITS: tl.constexpr, PERIOD: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0).to(tl.int64) * SPAN
    offsets = tl.arange(0, SPAN)
    v = load_tile(x, offsets, begin, n, SPAN)
    bin_index = _bins(v, pre, base, inverse, low0, low1, high0, high1, levels, LINEAR)
    store_symbols(bin_index, packed, tail, begin, n, full, BITS, PERIOD, SPAN)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _store_bins(
    x, out, n, pre, base, inverse, low0, low1, high0, high1, levels, LINEAR: tl.constexpr, SPAN: tl.constexpr
):
    begin = tl.program_id(0).to(tl.int64) * SPAN
    offsets = tl.arange(0, SPAN)
    v = load_tile(x, offsets, begin, n, SPAN)
    bin_index = _bins(v, pre, base, inverse, low0, low1, high0, high1, levels, LINEAR)
    tl.store(out + begin + offsets, bin_index.to(out.dtype.element_ty), mask=begin + offsets < n)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _count_bins(
    x, counts, n, pre, base, inverse, low0, low1, high0, high1, levels, BINS: tl.constexpr, SPAN: tl.constexpr
):
    begin = tl.program_id(0).to(tl.int64) * SPAN
    offsets = tl.arange(0, SPAN)
    v = load_tile(x, offsets, begin, n, SPAN)
    bin_index = _bins(v, pre, base, inverse, low0, low1, high0, high1, levels, True)
    bin_index = tl.where(begin + offsets < n, bin_index, BINS - 1)  # a bin that no level uses
    bins = tl.arange(0, BINS)
    bin_counts = tl.histogram(bin_index, BINS)
    tl.atomic_add(counts + bins, bin_counts, mask=(bin_counts > 0) & (bins < levels))


@triton.jit
def _range_by_parts(x, ends, n, span, parts, program, programs, SPAN: tl.constexpr, PARTS: tl.constexpr):
    """Store the smallest value, the largest and the largest magnitude of each part. A NaN shows only in the last."""
    offsets = tl.arange(0, SPAN)
    part = program
    while part < parts:
        low = tl.full((SPAN,), float("inf"), tl.float32)
        high = tl.full((SPAN,), float("-inf"), tl.float32)
        amax_bits = tl.zeros((SPAN,), tl.int32)
        begin = part * span
        stop = tl.minimum(begin + span, n)
        while begin < stop:
            v = load_tile(x, offsets, begin, n, SPAN)
            valid = offsets < n - begin
            low = tl.minimum(low, tl.where(valid, v, float("inf")))
            high = tl.maximum(high, tl.where(valid, v, float("-inf")))
            amax_bits = tl.maximum(amax_bits, v.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
            begin += SPAN
        tl.store(ends + part, tl.min(low, 0))
        tl.store(ends + PARTS + part, tl.max(high, 0))
        tl.store(ends + 2 * PARTS + part, tl.max(amax_bits, 0).to(tl.float32, bitcast=True))
        part += programs


@triton.jit
def _range_of_all(ends, state, parts, ZERO: tl.constexpr, PARTS: tl.constexpr):
    """Store amax_bits and both ends of the range, as bits, in the state; with ZERO the range includes 0."""
    part = tl.arange(0, PARTS)
    low = tl.min(tl.load(ends + part, mask=part < parts, other=float("inf")), 0)
    high = tl.max(tl.load(ends + PARTS + part, mask=part < parts, other=float("-inf")), 0)
    amax_bits = tl.max(tl.load(ends + 2 * PARTS + part, mask=part < parts, other=0.0).to(tl.int32, bitcast=True), 0)
    low, high = tl.where(low == 0, 0.0, low), tl.where(high == 0, 0.0, high)  # no -0.0
    if ZERO:
        low, high = tl.minimum(low, 0.0), tl.maximum(high, 0.0)
    tl.store(state, amax_bits)
    tl.store(state + 1, low.to(tl.int32, bitcast=True))
    tl.store(state + 2, high.to(tl.int32, bitcast=True))
    return low, high


@triton.jit
def _range_phase(
    x, ends, state, bounds, n, span, parts, program, programs,
    PHASE: tl.constexpr, ZERO: tl.constexpr, STORE_BOUNDS: tl.constexpr, SPAN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute the range of each part (PHASE 0), then of all (PHASE 1)."""
    if PHASE == 0:
        _range_by_parts(x, ends, n, span, parts, program, programs, SPAN, PARTS)
    elif program == 0:
        low, high = _range_of_all(ends, state, parts, ZERO, PARTS)
        if STORE_BOUNDS:
            floats = bounds.to(tl.pointer_type(tl.float32))
            tl.store(floats, low)
            tl.store(floats + 1, high)


@triton.jit(do_not_specialize=["span", "parts", "levels"])
def _uniform_encode(
    x, ends, state, bounds, packed, tail, n, full, span, parts, levels,
    FIRST: tl.constexpr, LAST: tl.constexpr, BITS: tl.constexpr, PERIOD: tl.constexpr, SPAN: tl.constexpr,
    BYTES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Phases: range of each part; range of all; bins, packed; the tail after the last full group."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    for phase in tl.static_range(FIRST, LAST + 1):
        part = program
        if phase < 2:
            _range_phase(x, ends, state, bounds, n, span, parts, program, programs, phase, False, True, SPAN, PARTS)
        if phase == 2:
            low = tl.load(state + 1).to(tl.float32, bitcast=True).to(tl.float64)
            high = tl.load(state + 2).to(tl.float32, bitcast=True).to(tl.float64)
            inverse = levels.to(tl.float64) / (high - low)
            while part * SPAN < n:
                v = load_tile(x, tl.arange(0, SPAN), part * SPAN, n, SPAN)
                position = (v.to(tl.float64) - low) * inverse
                bin_index = tl.minimum(position.to(tl.int64), levels - 1).to(tl.int32)
                store_symbols(bin_index, packed, tail, part * SPAN, n, full, BITS, PERIOD, SPAN)
                part += programs
        if phase == 3:
            while part * BYTES * 8 < (n - full) * BITS:
                pack_tail(tail, packed + full // 8 * BITS, n - full, part, BITS, BYTES)
                part += programs
        end_phase(state, programs, phase, FIRST, LAST)


@triton.jit
def _cut_to_float(value):
    largest: tl.constexpr = 3.4028234663852886e38
    return tl.minimum(tl.maximum(value, -largest), largest).to(tl.float32)


@triton.jit(do_not_specialize=["span", "parts", "count", "levels", "key_low", "key_high"])
def _range_histogram(
    x, ends, state, n, span, parts, count, levels, key_low, key_high,
    FIRST: tl.constexpr, LAST: tl.constexpr, ZERO: tl.constexpr, ALL: tl.constexpr, BINS: tl.constexpr,
    SPAN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Phases: range of each part; range of all; histogram of a sample over it, after the state."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    for phase in tl.static_range(FIRST, LAST + 1):
        part = program
        if phase < 2:
            _range_phase(x, ends, state, state, n, span, parts, program, programs, phase, ZERO, False, SPAN, PARTS)
        if phase == 2:
            low = tl.load(state + 1).to(tl.float32, bitcast=True).to(tl.float64)
            spread = tl.load(state + 2).to(tl.float32, bitcast=True).to(tl.float64) - low
            pre = tl.where(spread < 2.0**-64, 2.0**64, tl.where(spread > 2.0**64, 2.0**-64, 1.0))
            base = _cut_to_float(low * pre)
            inverse = _cut_to_float(levels.to(tl.float64) / (spread * pre))
            while part * SPAN < count:
                offsets = part * SPAN + tl.arange(0, SPAN)
                source = offsets if ALL else _sampled_at(offsets, n, count, key_low, key_high)
                v = tl.load(x + source, mask=offsets < count, other=0.0)
                bin_index = _bins(v, pre.to(tl.float32), base, inverse, 0, 0, 0, 0, levels, True)
                bin_index = tl.where(offsets < count, bin_index, BINS - 1)  # a bin that no level uses
                bin_counts = tl.histogram(bin_index, BINS)
                bins = tl.arange(0, BINS)
                tl.atomic_add(state + 16 + bins, bin_counts, mask=(bin_counts > 0) & (bins < levels), sem="relaxed")
                part += programs
        end_phase(state, programs, phase, FIRST, LAST)


def range_histogram(x: Tensor, bins: int, zero: bool, count: int, seed: int) -> Tensor:
    """Return amax_bits and the range as bits, padded to ``grid_sync.STATE_WORDS``, then the histogram of a sample."""
    n = x.numel()
    span, parts = grid_sync.split_into_parts(n, TILE)
    state = torch.zeros(grid_sync.STATE_WORDS + bins, dtype=torch.int32, device=x.device)
    ends = torch.empty(3 * PARTS, device=x.device)
    keys = split64(random.key(seed, random.SAMPLING))
    constants = exact_options(ZERO=zero, ALL=count == n, BINS=max(32, 2 * bins), SPAN=TILE, PARTS=PARTS)
    grid_sync.launch(
        _range_histogram, x.device, (x, ends, state), (n, span, parts, count, bins, *keys), constants,
        (parts, 1, num_buckets(count, TILE)), (4, 8, 4), single_launch=n <= grid_sync.SINGLE_LAUNCH_NUMEL,
        cache=launches_for("range", n, count, bins, zero),
    )  # fmt: skip
    return state


def uniform_encode(x: Tensor, levels: int, bounds: Tensor, packed: Tensor) -> Tensor:
    """Encode without synchronization; return amax_bits and the range as bits, on the device."""
    n, bits = x.numel(), symbol_bits(levels)
    section, first = PackedSection(packed, n, bits), word_aligned(bounds)
    span, parts = grid_sync.split_into_parts(n, TILE)
    state = torch.zeros(grid_sync.STATE_WORDS, dtype=torch.int32, device=x.device)
    ends = torch.empty(3 * PARTS, device=x.device)
    grids: tuple[int, ...] = (parts, 1, num_buckets(n, TILE))
    if section.full < n:
        grids += (num_buckets((n - section.full) * bits, 8 * BYTES),)
    tensors = (x, ends, state, first, section.target, section.tail)
    constants = exact_options(BITS=bits, PERIOD=packing_period(bits), SPAN=TILE, BYTES=BYTES, PARTS=PARTS)
    grid_sync.launch(
        _uniform_encode, x.device, tensors, (n, section.full, span, parts, levels), constants, grids, (4, 8, 2, 4),
        single_launch=n <= grid_sync.SINGLE_LAUNCH_NUMEL, cache=launches_for("uniform", n, levels),
    )  # fmt: skip
    section.copy_back()
    if first is not bounds:
        bounds.copy_(first)
    return state[:3]


def _arguments(grid: Grid) -> tuple[float | int, ...]:
    if isinstance(grid, LinearGrid):
        return (grid.pre, grid.base, grid.inverse, 0, 0, 0, 0, grid.levels)
    return (
        0.0, 0.0, 0.0, *_float64_words(grid.low), *_float64_words(grid.levels / (grid.high - grid.low)), grid.levels,
    )  # fmt: skip


def pack_bins(x: Tensor, grid: Grid, packed: Tensor) -> None:
    n, bits = x.numel(), symbol_bits(grid.levels)
    if bits == 0 or n == 0:
        return
    section = PackedSection(packed, n, bits)
    options = exact_options(
        LINEAR=isinstance(grid, LinearGrid), BITS=bits, PERIOD=packing_period(bits), SPAN=TILE, num_warps=2
    )
    launch_cache.launch(
        _pack_bins, (x, section.target, section.tail), (n, section.full, *_arguments(grid)),
        launches_for("bins", n, bits, isinstance(grid, LinearGrid)), lambda: [(num_buckets(n, TILE), options)],
    )  # fmt: skip
    section.finish()


def grid_symbols(x: Tensor, grid: Grid) -> Tensor:
    out = torch.empty(x.numel(), dtype=symbol_dtype(grid.levels), device=x.device)
    if x.numel():
        _store_bins[(num_buckets(x.numel(), TILE),)](
            x, out, x.numel(), *_arguments(grid), LINEAR=isinstance(grid, LinearGrid), SPAN=TILE,
            **exact_options(num_warps=4),
        )  # fmt: skip
    return out


def histogram(x: Tensor, grid: LinearGrid) -> Tensor:
    """Count the values of each bin, on the device."""
    counts = torch.zeros(grid.levels, dtype=torch.int32, device=x.device)
    bins = max(32, 1 << grid.levels.bit_length())
    if x.numel():
        _count_bins[(num_buckets(x.numel(), TILE),)](
            x, counts, x.numel(), *_arguments(grid), BINS=bins, SPAN=TILE, **exact_options(num_warps=4)
        )
    return counts.to(torch.int64)


@triton.jit
def _uniform_tile(
    packed, out, offsets, begin, n, full, low, width, levels, weight,
    BITS: tl.constexpr, ADD: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    index = tl.minimum(load_symbols(packed, offsets, begin, n, full, BITS, EDGE), levels - 1)
    values = low + (index.to(tl.float64) + 0.5) * width
    store_or_add(out, offsets, begin, n, values.to(tl.float32), weight, ADD, EDGE)


@triton.jit(do_not_specialize=["low0", "low1", "width0", "width1", "levels"])
def _uniform_decode(
    packed, out, n, full, low0, low1, width0, width1, levels, weight,
    BITS: tl.constexpr, SPAN: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    begin = tl.program_id(0).to(tl.int64) * SPAN
    offsets = tl.arange(0, SPAN)
    low = _join_float64(low0, low1)
    width = _join_float64(width0, width1)
    if begin + SPAN <= full:
        _uniform_tile(packed, out, offsets, begin, n, full, low, width, levels, weight, BITS, ADD, False)
    else:
        _uniform_tile(packed, out, offsets, begin, n, full, low, width, levels, weight, BITS, ADD, True)


def uniform_decode(packed: Tensor, grid: UniformGrid, out: Tensor, weight: float | None) -> None:
    n, bits = out.numel(), symbol_bits(grid.levels)
    assert packed.numel() == packed_nbytes(n, bits) and bits > 0
    width = _float64_words((grid.high - grid.low) / grid.levels)
    options = exact_options(BITS=bits, SPAN=TILE, ADD=weight is not None, num_warps=4)
    launch_cache.launch(
        _uniform_decode, (word_aligned(packed), out),
        (n, n // GROUP * GROUP, *_float64_words(grid.low), *width, grid.levels, float(weight or 0.0)),
        launches_for("uniform back", n, bits, weight is None), lambda: [(num_buckets(n, TILE), options)],
    )  # fmt: skip


@triton.jit
def _table_decode(
    packed, table, out, n, full, levels, weight, BITS: tl.constexpr, SPAN: tl.constexpr, ADD: tl.constexpr
):
    begin = tl.program_id(0).to(tl.int64) * SPAN
    offsets = tl.arange(0, SPAN)
    if begin + SPAN <= full:
        index = tl.minimum(load_symbols(packed, offsets, begin, n, full, BITS, False), levels - 1)
        store_or_add(out, offsets, begin, n, tl.load(table + index), weight, ADD, False)
    else:
        edge_index = tl.minimum(load_symbols(packed, offsets, begin, n, full, BITS, True), levels - 1)
        store_or_add(out, offsets, begin, n, tl.load(table + edge_index), weight, ADD, True)


def table_decode(packed: Tensor, table: Tensor, out: Tensor, weight: float | None) -> None:
    """Decode by a table; symbols past the last level read as the last."""
    n, bits = out.numel(), symbol_bits(table.numel())
    assert packed.numel() == packed_nbytes(n, bits) and bits > 0
    options = exact_options(BITS=bits, SPAN=TILE, ADD=weight is not None, num_warps=4)
    launch_cache.launch(
        _table_decode, (word_aligned(packed), table.to(out.device), out),
        (n, n // GROUP * GROUP, table.numel(), float(weight or 0.0)),
        launches_for("table", n, table.numel(), weight is None), lambda: [(num_buckets(n, TILE), options)],
    )  # fmt: skip


@triton.jit
def _sampled_at(part, n, count, key_low, key_high):
    """Return the index that ``reference.sample`` draws from each of ``count`` equal parts."""
    part64 = part.to(tl.int64)
    begin = part64 * n // count
    span = (part64 + 1) * n // count - begin
    noise = hash32(part, key_low, key_high).to(tl.int64)
    return begin + (noise * span >> 32)


@triton.jit(do_not_specialize=["key_low", "key_high"])
def _sample(x, out, n, count, key_low, key_high, SPAN: tl.constexpr):
    part = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    valid = part < count
    tl.store(out + part, tl.load(x + _sampled_at(part, n, count, key_low, key_high), mask=valid, other=0.0), mask=valid)


def sample(x: Tensor, count: int, seed: int) -> Tensor:
    if count == x.numel():
        return x
    out = torch.empty(count, dtype=torch.float32, device=x.device)
    if count:
        _sample[(num_buckets(count, 1024),)](
            x, out, x.numel(), count, *split64(random.key(seed, random.SAMPLING)), SPAN=1024,
            **exact_options(num_warps=4),
        )  # fmt: skip
    return out
