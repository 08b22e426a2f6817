"""Positions out of their section, and values put there: a chain of short phases with one wait behind it.

1. *count*: how many ones each part of the unary bits holds, the sum of the low parts of each part of the gaps, and
   whether all values are finite.
2. *list*: where the ones stand.
3. *join*: positions out of both; what lies past the end is cut to it.
4. *find*: how many positions lie before each tile of the output.
5. *place*: a program owns a tile, clears it and stores the values that fall there while it is in the cache. Values that
   are added go where they belong, one by one. Nothing happens where the state says that the frame lies.

In one launch tiles find their positions by themselves; among many of them that would be to wait for memory, over and
over, while it is busy with what is cleared.
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
from laconic.kernels.triton.bitmap import popcount
from laconic.kernels.triton.grid_sync import (
    BARRIER,
    MOST,
    PARTS,
    SMALL,
    STATE,
    before,
    cut,
    launch,
    wait_for_all,
)
from laconic.kernels.triton.launch_cache import remembered
from laconic.kernels.triton.tile import low_part_place, words_of

__all__ = ["GAPS", "SPAN", "WAYS", "add_values", "check_values", "find_starts", "place", "place_tile", "read", "reads"]

WORDS, GAPS, SPAN, WAYS = 128, 2048, 4096, 256
WARPS = (4, 8, 8, 8, 4)
"""Of a program, when a phase has a launch of its own."""


@triton.jit
def _unary(section, index, first_bit, last_bit):
    """Words of the section, with what is not unary bits left out."""
    there = (index >= first_bit // 32) & (index * 32 < last_bit)
    w = tl.load(section.to(tl.pointer_type(tl.int32)) + index, mask=there, other=0).to(tl.uint32, bitcast=True)
    full = tl.full(w.shape, 0xFFFFFFFF, tl.uint32)
    skipped = tl.minimum(tl.maximum(first_bit - index * 32, 0), 31).to(tl.uint32)
    beyond = tl.minimum(tl.maximum(index * 32 + 32 - last_bit, 0), 31).to(tl.uint32)
    return w & (full << skipped) & (full >> beyond)


@triton.jit
def _low_parts(section, at, k, low):
    word, shift, step = low_part_place(at, k, low)
    words = section.to(tl.pointer_type(tl.int32))
    there = (at < k) & (low > 0)
    value = tl.load(words + word, mask=there, other=0).to(tl.uint32, bitcast=True) >> shift
    crosses = there & (shift.to(tl.int32) + low > 32)
    more = tl.load(words + word + step, mask=crosses, other=0).to(tl.uint32, bitcast=True)
    value = value | tl.where(shift > 0, more << ((32 - shift) & 31), 0)
    mask = (tl.full(value.shape, 1, tl.uint32) << low.to(tl.uint32)) - 1
    return tl.where(there, value & mask, 0).to(tl.int32, bitcast=True)


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
def check_values(values, flag, at, k, INFINITE: tl.constexpr):
    """A flag where one of them is not finite."""
    v = tl.load(values + at, mask=at < k, other=0.0)
    if values.dtype.element_ty != tl.float64:
        v = v.to(tl.float32)
    good = tl.abs(v) < INFINITE  # a NaN is not
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
        at = begin + tl.arange(0, GAPS)
        total += tl.sum(_low_parts(section, at, k, low).to(tl.int64), 0)
        if CHECK:
            check_values(values, state + 3, at, k, INFINITE)
        begin += GAPS
    tl.store(lows + part, total)


@triton.jit
def _list_ones(
    section, state, ones, ends, k, first_bit, last_bit, span, parts, part, WORDS: tl.constexpr, PARTS: tl.constexpr
):
    """Ones are dense: each bit of a word finds its own place, by the ones below it."""
    bit = tl.arange(0, 32)[None, :].to(tl.uint32)
    behind = before(ones, part, PARTS)
    block = first_bit // 32 + part * span
    stop = tl.minimum(block + span, (last_bit + 31) // 32)
    while block < stop:
        index = block + tl.arange(0, WORDS)
        w = tl.where(index < stop, _unary(section, index, first_bit, last_bit), 0)
        count = popcount(w)
        first = behind + tl.cumsum(count, 0) - count
        behind += tl.sum(count, 0)
        to = first[:, None] + popcount(w[:, None] & ((1 << bit) - 1))
        end = (index * 32 - first_bit)[:, None] + bit.to(tl.int32)
        tl.store(ends + to, end, mask=(((w[:, None] >> bit) & 1) > 0) & (to < k))
        block += WORDS
    if part == parts - 1:
        tl.store(state, behind)


@triton.jit
def _join(section, state, lows, ends, positions, n, k, low, span, part, GAPS: tl.constexpr, PARTS: tl.constexpr):
    behind = before(lows, part, PARTS)
    begin = part * span
    stop = tl.minimum(begin + span, k)
    while begin < stop:
        at = begin + tl.arange(0, GAPS)
        parts = _low_parts(section, at, k, low).to(tl.int64)
        end = tl.load(ends + at, mask=at < k, other=0)
        found = ((end - at).to(tl.int64) << low.to(tl.int64)) + behind + tl.cumsum(parts, 0) + at
        found = tl.minimum(tl.maximum(found, 0), n).to(tl.int32)
        tl.store(positions + at, found, mask=at < k)
        tl.store(state + 1 + at * 0, end, mask=at == k - 1)
        tl.store(state + 2 + at * 0, found, mask=at == k - 1)
        behind += tl.sum(parts, 0)
        begin += GAPS


@triton.jit
def _head(section, nbytes, k):
    """The Rice parameter that the section says, and whether it is Rice's code of k positions and has room for them."""
    words = section.to(tl.pointer_type(tl.int32))
    first, second = tl.load(words), tl.load(words + 1)
    low = (first >> 8) & 255
    named = ((first & 255) == 1) & (low < 32) & (((first >> 16) & 0xFFFF) == (k & 0xFFFF)) & (second == k >> 16)
    needed = 8 + (k // 256 * 32).to(tl.int64) * low + (k % 256 * low + 7) // 8 + (k + 7) // 8
    return tl.minimum(low, 31), named & (needed <= nbytes)


@triton.jit
def _holds(state, n, k, least_end):
    """Whether the section holds what it promises, and values are finite."""
    whole = (tl.load(state) == k) & (tl.load(state + 1) >= least_end) & (k > 0)
    return whole & (tl.load(state + 2) < n) & (tl.load(state + 3) == 0)


@triton.jit
def _rank(positions, k, value, WAYS: tl.constexpr):
    """How many of the ascending positions are smaller."""
    low, high = k * 0, k
    while low < high:
        step = (high - low + WAYS - 1) // WAYS
        tried = low + (tl.arange(0, WAYS) + 1) * step - 1
        here = tl.load(positions + tried, mask=tried < high, other=0x7FFFFFFF)
        smaller = tl.sum((here < value).to(tl.int32), 0)
        high = tl.minimum(high, low + (smaller + 1) * step - 1)
        low += smaller * step
    return low


@triton.jit
def find_starts(positions, starts, n, k, program, programs, SPAN: tl.constexpr, WAYS: tl.constexpr):
    """How many positions lie before each tile, and before the end: for many tiles at once, by halves."""
    first = program * WAYS
    while (first - 1) * SPAN < n:
        tile = first + tl.arange(0, WAYS)
        low, high = tile * 0, tile * 0 + k
        while tl.max(high - low, 0) > 0:
            middle = (low + high) // 2
            smaller = tl.load(positions + middle, mask=low < high, other=0) < tile.to(tl.int64) * SPAN
            low = tl.where((low < high) & smaller, middle + 1, low)
            high = tl.where((low < high) & ~smaller, middle, high)
        tl.store(starts + tile, low, mask=(tile - 1) * SPAN < n)
        first += programs * WAYS


@triton.jit
def _grown(v, gain, GROWN: tl.constexpr):
    """Values times the gain, saturating; as they are, where there is none."""
    if GROWN:
        v = tl.minimum(tl.maximum(v * gain, -3.4028234663852886e38), 3.4028234663852886e38)
    return v


@triton.jit
def place_tile(
    positions, values, starts, out, n, k, gain, holds, tile,
    GROWN: tl.constexpr, SPAN: tl.constexpr, WAYS: tl.constexpr, STARTED: tl.constexpr,
):  # fmt: skip
    """A tile cleared, and filled with the values that fall there if the frame ``holds`` what it promises."""
    begin = tile * SPAN
    if STARTED:
        index = tl.load(starts + tile)
        stop = tl.load(starts + tile + 1)
    else:
        index = _rank(positions, k, begin, WAYS)
        stop = tl.minimum(index + SPAN, k)
    end = tl.minimum(begin + SPAN, n)
    here = index + tl.arange(0, WAYS)
    to = tl.load(positions + here, mask=here < stop, other=0x7FFFFFFF)
    v = tl.load(values + here, mask=here < stop, other=0.0)
    at = begin + tl.arange(0, SPAN)
    zeros = tl.zeros((SPAN,), out.dtype.element_ty)
    if begin + SPAN <= n:
        tl.store(out + at, zeros)
    else:
        tl.store(out + at, zeros, mask=at < n)
    tl.debug_barrier()  # a value's place may have been cleared by another thread
    if holds:
        tl.store(out + to, _grown(v, gain, GROWN).to(out.dtype.element_ty), mask=(to >= begin) & (to < end))
        last = tl.max(tl.where(here < stop, to, begin), 0)
        index += WAYS
        while (index < stop) & (last < end):
            more = index + tl.arange(0, WAYS)
            place = tl.load(positions + more, mask=more < stop, other=0x7FFFFFFF)
            w = tl.load(values + more, mask=more < stop, other=0.0)
            w = _grown(w, gain, GROWN).to(out.dtype.element_ty)
            tl.store(out + place, w, mask=(place >= begin) & (place < end))
            last = tl.max(tl.where(more < stop, place, begin), 0)
            index += WAYS


@triton.jit
def add_values(
    positions, values, out, k, gain, weight, holds, program, programs, GROWN: tl.constexpr, GAPS: tl.constexpr
):
    if holds:
        begin = program * GAPS
        while begin < k:
            at = begin + tl.arange(0, GAPS)
            to = out + tl.load(positions + at, mask=at < k, other=0)
            v = tl.load(values + at, mask=at < k, other=0.0).to(tl.float32)
            tl.store(to, tl.load(to, mask=at < k, other=0.0) + _grown(v, gain, GROWN) * weight, mask=at < k)
            begin += programs * GAPS


NUMBERS = ("n", "kept", "nbytes", "unary_span", "unary_parts", "gap_span", "gap_parts")
"""Arguments that no kernel is compiled anew for."""


@triton.jit(do_not_specialize=NUMBERS)
def _phases(
    section, values, state, work, positions, out, n, kept, weight, nbytes, unary_span, unary_parts, gap_span, gap_parts,
    FIRST: tl.constexpr, LAST: tl.constexpr, ADD: tl.constexpr, CHECK: tl.constexpr, STARTED: tl.constexpr,
    INFINITE: tl.constexpr, WORDS: tl.constexpr, GAPS: tl.constexpr, SPAN: tl.constexpr, WAYS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    lows = work.to(tl.pointer_type(tl.int64))
    ones = work + 2 * PARTS
    ends = ones + PARTS
    low, fits = _head(section, nbytes, kept)
    k = tl.where(fits, kept, 0)  # then there is nothing to do
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
            if STARTED:
                find_starts(positions, ends + kept, n, k, program, programs, SPAN, WAYS)
        if phase == 4:
            holds = _holds(state, n, k, least_end)
            if ADD:
                add_values(positions, values, out, k, 1.0, weight, holds, program, programs, False, GAPS)
            else:
                while part * SPAN < n:
                    place_tile(positions, values, ends + kept, out, n, k, 1.0, holds, part, False, SPAN, WAYS, STARTED)
                    part += programs
        if phase < LAST and (STARTED or phase != 3):
            wait_for_all(state + BARRIER, programs * (phase - FIRST + 1))


class _Layout(NamedTuple):
    arguments: tuple[int, ...]
    grids: tuple[int, ...]
    work: int


@lru_cache(maxsize=256)
def _layout(nbytes: int, n: int, k: int, add: bool, started: bool) -> _Layout:
    unary_span, unary_parts = cut(max(1, (nbytes + 3) // 4 - 2), WORDS)
    gap_span, gap_parts = cut(k, GAPS)
    tiles = num_buckets(n, SPAN)
    starts = num_buckets(tiles + 1, WAYS) if started else 0
    last = num_buckets(k, GAPS) if add else tiles
    return _Layout(
        (nbytes, unary_span, unary_parts, gap_span, gap_parts),
        (max(unary_parts, gap_parts), unary_parts, gap_parts, starts, last),
        3 * PARTS + k + tiles + 1,
    )


def reads(section: Tensor, n: int) -> bool:
    """Whether such a section can be read here."""
    return n <= MOST and POSITIONS_HEADER <= section.numel() <= MOST // 8


def _run(
    section: Tensor, n: int, k: int, values: Tensor | None, out: Tensor | None, weight: float | None
) -> Tensor | None:
    """The positions; None when the section is not Rice's code of so many. Values are placed, if there are any."""
    together, add = n <= SMALL, weight is not None
    started = not together and not add
    layout = _layout(section.numel(), n, k, add, started)
    state = torch.zeros(STATE, dtype=torch.int32, device=section.device)
    work = torch.empty(layout.work, dtype=torch.int32, device=section.device)
    positions = torch.empty(k, dtype=torch.int32, device=section.device)
    tensors = (
        words_of(section), state if values is None else values, state, work, positions, state if out is None else out
    )  # fmt: skip
    numbers = (n, k, float(weight or 0.0), *layout.arguments)
    constants = {
        "ADD": add, "CHECK": values is not None, "STARTED": started, "INFINITE": float("inf"),
        "WORDS": WORDS, "GAPS": GAPS, "SPAN": SPAN, "WAYS": WAYS, "PARTS": PARTS, "enable_fp_fusion": False,
    }  # fmt: skip
    grids = layout.grids if out is not None else layout.grids[:3]
    launch(
        _phases, section.device, tensors, numbers, constants, grids, WARPS, together=together,
        known=remembered("placing", section.numel(), n, k, add, values is None, out is None),
    )  # fmt: skip
    found, last_end, last, bad, fits, least_end = state[:6].tolist()
    if not fits:
        return None
    if found != k:
        raise FrameError(f"coded positions promise {k} and hold {found}")
    if last_end < least_end:
        raise FrameError(f"coded positions promise {k} and end before their section does")
    if not last < n:
        raise FrameError(f"a coded position is past the end of {n} values")
    if bad:
        raise FrameError("a value in the frame is not finite")
    return positions


def read(section: Tensor, n: int, k: int) -> Tensor | None:
    """The k positions of Rice's code, int32; None when the section says that it is another, or of another number."""
    return _run(section, n, k, None, None, None)


def place(section: Tensor, values: Tensor, out: Tensor, weight: float | None) -> bool:
    """Values at the positions of Rice's code and zeros elsewhere; with a weight, added to what is there.

    False, and nothing was added, when the section says that it is another code, or of another number.
    """
    return _run(section, out.numel(), values.numel(), values, out, weight) is not None
