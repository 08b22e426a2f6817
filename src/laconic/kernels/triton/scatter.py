"""Decode Rice-coded positions and scatter values to them: several short phases with one synchronization at the end.

1. *count*: the ones of each part of the unary bits, the sum of the low parts of each part of the gaps, and whether all
   values are finite.
2. *list*: the bit index of each one.
3. *join*: positions from both; positions past the end are clamped to it.
4. *find*: the number of positions before each tile of the output.
5. *scatter*: a program owns a tile, clears it and stores the values that fall into it while it is in the cache. Values
   that are added go to their positions one by one. Nothing is stored if the state says that the frame is invalid.

In one launch the tiles find their positions themselves; with many tiles this would wait for memory that is busy with
clearing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.errors import FrameError
from laconic.kernels.sections import POSITIONS_HEADER, num_buckets
from laconic.kernels.triton import grid_sync
from laconic.kernels.triton.bitmap import popcount
from laconic.kernels.triton.grid_sync import PARTS, end_phase, sum_before
from laconic.kernels.triton.launch_args import whole_words
from laconic.kernels.triton.launch_cache import launches_for
from laconic.kernels.triton.tile import low_bits_location

__all__ = [
    "GAPS", "SEARCH_SPAN", "SPAN", "add_at_positions", "can_decode", "decode_and_scatter", "decode_positions",
    "find_starts", "flag_nonfinite", "scatter_tile",
]  # fmt: skip

WORDS, GAPS, SPAN, SEARCH_SPAN = 128, 2048, 4096, 256
WARPS = (4, 8, 8, 8, 4)
"""Warps of a program when a phase has its own grid_sync.launch."""


@triton.jit
def _unary(section, index, first_bit, last_bit):
    """Load words of the section with all bits cleared that are not unary bits."""
    valid = (index >= first_bit // 32) & (index * 32 < last_bit)
    w = tl.load(section.to(tl.pointer_type(tl.int32)) + index, mask=valid, other=0).to(tl.uint32, bitcast=True)
    full = tl.full(w.shape, 0xFFFFFFFF, tl.uint32)
    skipped = tl.minimum(tl.maximum(first_bit - index * 32, 0), 31).to(tl.uint32)
    beyond = tl.minimum(tl.maximum(index * 32 + 32 - last_bit, 0), 31).to(tl.uint32)
    return w & (full << skipped) & (full >> beyond)


@triton.jit
def _low_parts(section, offsets, k, low):
    word, shift, step = low_bits_location(offsets, k, low)
    words = section.to(tl.pointer_type(tl.int32))
    valid = (offsets < k) & (low > 0)
    value = tl.load(words + word, mask=valid, other=0).to(tl.uint32, bitcast=True) >> shift
    crosses = valid & (shift.to(tl.int32) + low > 32)
    next_word = tl.load(words + word + step, mask=crosses, other=0).to(tl.uint32, bitcast=True)
    value = value | tl.where(shift > 0, next_word << ((32 - shift) & 31), 0)
    mask = (tl.full(value.shape, 1, tl.uint32) << low.to(tl.uint32)) - 1
    return tl.where(valid, value & mask, 0).to(tl.int32, bitcast=True)


@triton.jit
def _count_ones(section, ones, first_bit, last_bit, span, part, WORDS: tl.constexpr):
    total = part * 0
    block = first_bit // 32 + part * span
    stop = tl.minimum(block + span, (last_bit + 31) // 32)
    while block < stop:
        index = block + tl.arange(0, WORDS)
        w = _unary(section, index, first_bit, last_bit)
        total += tl.sum(tl.where(index < stop, popcount(w), 0), 0)
        block += WORDS
    tl.store(ones + part, total)


@triton.jit
def flag_nonfinite(values, flag, offsets, k, INFINITE: tl.constexpr):
    """Set a flag if a value is not finite."""
    v = tl.load(values + offsets, mask=offsets < k, other=0.0)
    if values.dtype.element_ty != tl.float64:
        v = v.to(tl.float32)
    good = tl.abs(v) < INFINITE  # false for a NaN
    tl.store(flag, 1, mask=tl.max((good == 0).to(tl.int32), 0) > 0)


@triton.jit
def _sum_low(
    section, values, state, lows, k, low, span, part,
    CHECK: tl.constexpr, INFINITE: tl.constexpr, GAPS: tl.constexpr,
):  # fmt: skip
    total = (part * 0).to(tl.int64)
    begin = part * span
    stop = tl.minimum(begin + span, k)
    while begin < stop:
        offsets = begin + tl.arange(0, GAPS)
        total += tl.sum(_low_parts(section, offsets, k, low).to(tl.int64), 0)
        if CHECK:
            flag_nonfinite(values, state + 3, offsets, k, INFINITE)
        begin += GAPS
    tl.store(lows + part, total)


@triton.jit
def _list_ones(
    section, state, ones, ends, k, first_bit, last_bit, span, parts, part, WORDS: tl.constexpr, PARTS: tl.constexpr
):
    """List the ones. They are dense, so each bit of a word computes its own index from the ones below it."""
    bit = tl.arange(0, 32)[None, :].to(tl.uint32)
    ones_before = sum_before(ones, part, PARTS)
    block = first_bit // 32 + part * span
    stop = tl.minimum(block + span, (last_bit + 31) // 32)
    while block < stop:
        index = block + tl.arange(0, WORDS)
        w = tl.where(index < stop, _unary(section, index, first_bit, last_bit), 0)
        count = popcount(w)
        first = ones_before + tl.cumsum(count, 0) - count
        ones_before += tl.sum(count, 0)
        target = first[:, None] + popcount(w[:, None] & ((1 << bit) - 1))
        end = (index * 32 - first_bit)[:, None] + bit.to(tl.int32)
        tl.store(ends + target, end, mask=(((w[:, None] >> bit) & 1) > 0) & (target < k))
        block += WORDS
    if part == parts - 1:
        tl.store(state, ones_before)


@triton.jit
def _join(section, state, lows, ends, positions, n, k, low, span, part, GAPS: tl.constexpr, PARTS: tl.constexpr):
    low_sum = sum_before(lows, part, PARTS)
    begin = part * span
    stop = tl.minimum(begin + span, k)
    while begin < stop:
        offsets = begin + tl.arange(0, GAPS)
        low_parts = _low_parts(section, offsets, k, low).to(tl.int64)
        end = tl.load(ends + offsets, mask=offsets < k, other=0)
        position = ((end - offsets).to(tl.int64) << low.to(tl.int64)) + low_sum + tl.cumsum(low_parts, 0) + offsets
        position = tl.minimum(tl.maximum(position, 0), n).to(tl.int32)
        tl.store(positions + offsets, position, mask=offsets < k)
        tl.store(state + 1 + offsets * 0, end, mask=offsets == k - 1)
        tl.store(state + 2 + offsets * 0, position, mask=offsets == k - 1)
        low_sum += tl.sum(low_parts, 0)
        begin += GAPS


@triton.jit
def _read_header(section, nbytes, k):
    """Return the Rice parameter of the section, and whether it is a Rice code of k positions that fits into it."""
    words = section.to(tl.pointer_type(tl.int32))
    first, second = tl.load(words), tl.load(words + 1)
    low = (first >> 8) & 255
    named = ((first & 255) == 1) & (low < 32) & (((first >> 16) & 0xFFFF) == (k & 0xFFFF)) & (second == k >> 16)
    needed = 8 + (k // 256 * 32).to(tl.int64) * low + (k % 256 * low + 7) // 8 + (k + 7) // 8
    return tl.minimum(low, 31), named & (needed <= nbytes)


@triton.jit
def _is_valid(state, n, k, least_end):
    """Return whether the section has k positions and all values are finite."""
    whole = (tl.load(state) == k) & (tl.load(state + 1) >= least_end) & (k > 0)
    return whole & (tl.load(state + 2) < n) & (tl.load(state + 3) == 0)


@triton.jit
def _rank(positions, k, value, SEARCH_SPAN: tl.constexpr):
    """Count the ascending positions that are smaller than ``value``."""
    low, high = k * 0, k
    while low < high:
        step = (high - low + SEARCH_SPAN - 1) // SEARCH_SPAN
        probes = low + (tl.arange(0, SEARCH_SPAN) + 1) * step - 1
        positions_there = tl.load(positions + probes, mask=probes < high, other=0x7FFFFFFF)
        smaller = tl.sum((positions_there < value).to(tl.int32), 0)
        high = tl.minimum(high, low + (smaller + 1) * step - 1)
        low += smaller * step
    return low


@triton.jit
def find_starts(positions, starts, n, k, program, programs, SPAN: tl.constexpr, SEARCH_SPAN: tl.constexpr):
    """Count the positions before each tile, and before the end, by binary search for many tiles at once."""
    first = program * SEARCH_SPAN
    while (first - 1) * SPAN < n:
        tile = first + tl.arange(0, SEARCH_SPAN)
        low, high = tile * 0, tile * 0 + k
        while tl.max(high - low, 0) > 0:
            middle = (low + high) // 2
            smaller = tl.load(positions + middle, mask=low < high, other=0) < tile.to(tl.int64) * SPAN
            low = tl.where((low < high) & smaller, middle + 1, low)
            high = tl.where((low < high) & ~smaller, middle, high)
        tl.store(starts + tile, low, mask=(tile - 1) * SPAN < n)
        first += programs * SEARCH_SPAN


@triton.jit
def _apply_gain(v, gain, HAS_GAIN: tl.constexpr):
    """Multiply values by the gain, saturating; without a gain return them."""
    if HAS_GAIN:
        v = tl.minimum(tl.maximum(v * gain, -3.4028234663852886e38), 3.4028234663852886e38)
    return v


@triton.jit
def scatter_tile(
    positions, values, starts, out, n, k, gain, holds, tile,
    HAS_GAIN: tl.constexpr, SPAN: tl.constexpr, SEARCH_SPAN: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """Clear a tile and store the values that fall into it, if the frame is valid (``holds``)."""
    begin = tile * SPAN
    if HAS_STARTS:
        index = tl.load(starts + tile)
        stop = tl.load(starts + tile + 1)
    else:
        index = _rank(positions, k, begin, SEARCH_SPAN)
        stop = tl.minimum(index + SPAN, k)
    end = tl.minimum(begin + SPAN, n)
    candidates = index + tl.arange(0, SEARCH_SPAN)
    target = tl.load(positions + candidates, mask=candidates < stop, other=0x7FFFFFFF)
    v = tl.load(values + candidates, mask=candidates < stop, other=0.0)
    offsets = begin + tl.arange(0, SPAN)
    zeros = tl.zeros((SPAN,), out.dtype.element_ty)
    if begin + SPAN <= n:
        tl.store(out + offsets, zeros)
    else:
        tl.store(out + offsets, zeros, mask=offsets < n)
    tl.debug_barrier()  # another thread may have cleared a value's position
    if holds:
        tl.store(
            out + target,
            _apply_gain(v, gain, HAS_GAIN).to(out.dtype.element_ty),
            mask=(target >= begin) & (target < end),
        )
        last = tl.max(tl.where(candidates < stop, target, begin), 0)
        index += SEARCH_SPAN
        while (index < stop) & (last < end):
            next_candidates = index + tl.arange(0, SEARCH_SPAN)
            decode_and_scatter = tl.load(positions + next_candidates, mask=next_candidates < stop, other=0x7FFFFFFF)
            next_values = tl.load(values + next_candidates, mask=next_candidates < stop, other=0.0)
            next_values = _apply_gain(next_values, gain, HAS_GAIN).to(out.dtype.element_ty)
            tl.store(
                out + decode_and_scatter, next_values, mask=(decode_and_scatter >= begin) & (decode_and_scatter < end)
            )
            last = tl.max(tl.where(next_candidates < stop, decode_and_scatter, begin), 0)
            index += SEARCH_SPAN


@triton.jit
def add_at_positions(
    positions, values, out, k, gain, weight, holds, program, programs, HAS_GAIN: tl.constexpr, GAPS: tl.constexpr
):
    if holds:
        begin = program * GAPS
        while begin < k:
            offsets = begin + tl.arange(0, GAPS)
            target = out + tl.load(positions + offsets, mask=offsets < k, other=0)
            v = tl.load(values + offsets, mask=offsets < k, other=0.0).to(tl.float32)
            tl.store(
                target,
                tl.load(target, mask=offsets < k, other=0.0) + _apply_gain(v, gain, HAS_GAIN) * weight,
                mask=offsets < k,
            )
            begin += programs * GAPS


UNSPECIALIZED = ("n", "kept", "nbytes", "unary_span", "unary_parts", "gap_span", "gap_parts")
"""Arguments for which no kernel is specialized."""


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _decode_phases(
    section, values, state, work, positions, out, n, kept, weight, nbytes, unary_span, unary_parts, gap_span, gap_parts,
    FIRST: tl.constexpr, LAST: tl.constexpr, ADD: tl.constexpr, CHECK: tl.constexpr, HAS_STARTS: tl.constexpr,
    INFINITE: tl.constexpr, WORDS: tl.constexpr, GAPS: tl.constexpr, SPAN: tl.constexpr, SEARCH_SPAN: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    lows = work.to(tl.pointer_type(tl.int64))
    ones = work + 2 * PARTS
    ends = ones + PARTS
    low, fits = _read_header(section, nbytes, kept)
    k = tl.where(fits, kept, 0)  # then nothing is done
    last_bit = tl.where(fits, 8 * nbytes, 0)
    low_end = 8 + k // 256 * 32 * low + (k % 256 * low + 7) // 8
    first_bit = 8 * low_end
    least_end = (nbytes - low_end - 1) * 8
    for phase in tl.static_range(FIRST, LAST + 1):
        part = program
        if phase == 0:
            if program == 0:
                tl.store(state + 4, fits.to(tl.int32))
                tl.store(state + 5, least_end)
            while part < unary_parts:
                _count_ones(section, ones, first_bit, last_bit, unary_span, part, WORDS)
                part += programs
            part = program
            while part < gap_parts:
                _sum_low(section, values, state, lows, k, low, gap_span, part, CHECK, INFINITE, GAPS)
                part += programs
        if phase == 1:
            while part < unary_parts:
                _list_ones(
                    section, state, ones, ends, k, first_bit, last_bit, unary_span, unary_parts, part, WORDS, PARTS
                )
                part += programs
        if phase == 2:
            while part < gap_parts:
                _join(section, state, lows, ends, positions, n, k, low, gap_span, part, GAPS, PARTS)
                part += programs
        if phase == 3:
            if HAS_STARTS:
                find_starts(positions, ends + kept, n, k, program, programs, SPAN, SEARCH_SPAN)
        if phase == 4:
            holds = _is_valid(state, n, k, least_end)
            if ADD:
                add_at_positions(positions, values, out, k, 1.0, weight, holds, program, programs, False, GAPS)
            else:
                while part * SPAN < n:
                    scatter_tile(
                        positions, values, ends + kept, out, n, k, 1.0, holds, part, False, SPAN, SEARCH_SPAN,
                        HAS_STARTS,
                    )  # fmt: skip
                    part += programs
        if HAS_STARTS or phase != 3:
            end_phase(state, programs, phase, FIRST, LAST)


class _Layout(NamedTuple):
    arguments: tuple[int, ...]
    grids: tuple[int, ...]
    work: int


@lru_cache(maxsize=256)
def _layout(nbytes: int, n: int, k: int, add: bool, started: bool) -> _Layout:
    unary_span, unary_parts = grid_sync.split_into_parts(max(1, (nbytes + 3) // 4 - 2), WORDS)
    gap_span, gap_parts = grid_sync.split_into_parts(k, GAPS)
    tiles = num_buckets(n, SPAN)
    starts = num_buckets(tiles + 1, SEARCH_SPAN) if started else 0
    last = num_buckets(k, GAPS) if add else tiles
    return _Layout(
        (nbytes, unary_span, unary_parts, gap_span, gap_parts),
        (max(unary_parts, gap_parts), unary_parts, gap_parts, starts, last),
        3 * PARTS + k + tiles + 1,
    )


def can_decode(section: Tensor, n: int) -> bool:
    """Return whether these kernels can decode such a section."""
    return n <= grid_sync.MAX_NUMEL and POSITIONS_HEADER <= section.numel() <= grid_sync.MAX_NUMEL // 8


def _run(
    section: Tensor, n: int, k: int, values: Tensor | None, out: Tensor | None, weight: float | None
) -> Tensor | None:
    """Decode the positions and scatter the values, if given; None if the section is not a Rice code of k positions."""
    single_launch, add = n <= grid_sync.SINGLE_LAUNCH_NUMEL, weight is not None
    started = not single_launch and not add
    layout = _layout(section.numel(), n, k, add, started)
    state = torch.zeros(grid_sync.STATE_WORDS, dtype=torch.int32, device=section.device)
    work = torch.empty(layout.work, dtype=torch.int32, device=section.device)
    positions = torch.empty(k, dtype=torch.int32, device=section.device)
    tensors = (
        whole_words(section), state if values is None else values, state, work, positions,
        state if out is None else out
    )  # fmt: skip
    numbers = (n, k, float(weight or 0.0), *layout.arguments)
    constants = {
        "ADD": add, "CHECK": values is not None, "HAS_STARTS": started, "INFINITE": float("inf"), "WORDS": WORDS,
        "GAPS": GAPS, "SPAN": SPAN, "SEARCH_SPAN": SEARCH_SPAN, "PARTS": PARTS, "enable_fp_fusion": False,
    }  # fmt: skip
    grids = layout.grids if out is not None else layout.grids[:3]
    grid_sync.launch(
        _decode_phases, section.device, tensors, numbers, constants, grids, WARPS, single_launch=single_launch,
        cache=launches_for("placing", section.numel(), n, k, add, values is None, out is None),
    )  # fmt: skip
    num_positions, last_end, last, bad, fits, least_end = state[:6].tolist()
    if not fits:
        return None
    if num_positions != k:
        raise FrameError(f"coded positions promise {k} and hold {num_positions}")
    if last_end < least_end:
        raise FrameError(f"coded positions promise {k} and end before their section does")
    if not last < n:
        raise FrameError(f"a coded position is past the end of {n} values")
    if bad:
        raise FrameError("a value in the frame is not finite")
    return positions


def decode_positions(section: Tensor, n: int, k: int) -> Tensor | None:
    """Return the k positions of a Rice code as int32; None if the section has another mode or number."""
    return _run(section, n, k, None, None, None)


def decode_and_scatter(section: Tensor, values: Tensor, out: Tensor, weight: float | None) -> bool:
    """Store values at Rice-coded positions and zeros elsewhere; with a weight, add them.

    False, and nothing was added, if the section has another mode or number.
    """
    return _run(section, out.numel(), values.numel(), values, out, weight) is not None
