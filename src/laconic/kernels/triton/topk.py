"""The k largest magnitudes and their encoded positions, in phases.

1. *limit*: a sample gives the magnitude that admits a few more than k values.
2. *mark*: one pass over all values leaves a bit for each that reaches it.
3. *list*: the positions of the marked values, in order.
4. *digits*: the distance of each from the limit; a histogram of its highest digit, then of the next digit of those that
   share the k-th largest's, and once more.
5. *count*: per part, the values above the k-th largest, and those equal to it.
6. *select*: positions and values of the k; of equal magnitudes the lowest indices, as in the reference.
7. *sum*: the high parts of the gaps between them, for each candidate Rice parameter.
8. *code*: the position section, with the parameter that makes it shortest.

A wrong sample shows in the state, which is all that the host waits for.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.reference.positions import plan_of
from laconic.kernels.sections import RICE, low_bits_candidates, num_buckets
from laconic.kernels.triton import grid_sync
from laconic.kernels.triton.bitmap import BLOCK, WORDS, load_bits, pop_lowest_bit, popcount, store_bitmap, tile_parts
from laconic.kernels.triton.counter_hash import hash32
from laconic.kernels.triton.grid_sync import PARTS, end_phase, sum_before
from laconic.kernels.triton.launch_cache import CompiledLaunches
from laconic.kernels.triton.rice import GAPS, sum_gaps, write_gaps, zero_words

__all__ = ["BINS", "LIST_SPAN", "TopK", "list_bitmap", "refine_digits", "sampled_topk", "select_positions"]

LIST_SPAN = 2048
BINS = 256
"""Values of a digit. Three digits distinguish distances up to four times the limit."""

MARKED_WORD, AMAX_WORD, KTH_WORD, LOW_BITS_WORD, SUMS_WORD = 1, 2, 5, 7, 8

SAMPLES, MORE_SAMPLES = 8192, 16384

FULL_CAPACITY_NUMEL = 1 << 16
"""Up to this many values the capacity suffices for all of them."""

WARPS = (32, 4, 4, 8, 8, 8, 8, 8, 4, 8)
"""Warps of a program when a phase has its own grid_sync.launch."""


@triton.jit
def _limit(x, state, n, rank, WHOLE: tl.constexpr, SAMPLES: tl.constexpr, LOG: tl.constexpr):
    """Find the magnitude of a rank (from 1 on) among samples: exact for all values, else to 20 bits, rounded down."""
    slot = tl.arange(0, SAMPLES)
    if WHOLE:
        magnitude = tl.load(x + slot, mask=slot < n, other=0) & 0x7FFFFFFF
    else:
        zero = rank * 0
        within = (slot.to(tl.uint32) << (32 - LOG)) | (hash32(slot, zero, zero) >> LOG)
        magnitude = tl.load(x + (within.to(tl.int64) * n >> 32)) & 0x7FFFFFFF
    limit = rank * 0
    for i in range(16 if WHOLE else 10):  # two bits at a time; three counts share a sum
        unit = 1 << (30 - 2 * i)
        first = (magnitude >= limit + unit).to(tl.int64)
        second = (magnitude - unit >= limit + unit).to(tl.int64)
        third = (magnitude - unit - unit >= limit + unit).to(tl.int64)
        reached = tl.sum(first + (second << 20) + (third << 40), 0)
        enough = (reached & 0xFFFFF) >= rank
        digit = enough.to(tl.int32) + (((reached >> 20) & 0xFFFFF) >= rank).to(tl.int32)
        digit += ((reached >> 40) >= rank).to(tl.int32)
        limit += digit * unit
    tl.store(state, limit)


@triton.jit
def _distance(v, limit, BINS: tl.constexpr):
    """Return the distance of a magnitude from the limit, in three digits; larger distances are all equal."""
    return tl.minimum((v & 0x7FFFFFFF) - limit, BINS * BINS * BINS - 1)


@triton.jit
def list_bitmap(
    state, marks, words, positions, tiles, tiles_per_part, parts, capacity, program, programs,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Store the positions of the set bits in order; the state keeps their number."""
    part = program
    while part < parts:
        listed = sum_before(marks, part, PARTS)
        block = part * tiles_per_part * WORDS
        end = tl.minimum((part + 1) * tiles_per_part, tiles) * WORDS
        while block < end:
            index = block + tl.arange(0, BLOCK)
            w = tl.load(words + index, mask=index < end, other=0).to(tl.uint32, bitcast=True)
            ones = popcount(w)
            target = listed + tl.cumsum(ones, 0) - ones
            listed += tl.sum(ones, 0)
            while tl.max((w != 0).to(tl.int32), 0) > 0:
                bit, rest = pop_lowest_bit(w)
                tl.store(positions + target, index * 32 + bit, mask=(w != 0) & (target < capacity))
                target += (w != 0).to(tl.int32)
                w = rest
            block += BLOCK
        if part == parts - 1:
            tl.store(state + 1, listed)
        part += programs


@triton.jit
def _pick_digit(counts, wanted, BINS: tl.constexpr):
    """Return the digit that the k-th largest has, and how many entries with that digit are wanted."""
    bins = tl.arange(0, BINS)
    count = tl.load(counts + bins)
    at_least = tl.sum(count, 0) - tl.cumsum(count, 0) + count
    digit = tl.sum((at_least >= wanted).to(tl.int32), 0) - 1
    return digit, wanted - tl.sum(tl.where(bins > digit, count, 0), 0)


@triton.jit
def _next_digit(state, digits, k, program, STEP: tl.constexpr, BINS: tl.constexpr):
    """Determine one more digit of the k-th largest's distance from the histogram; return all digits so far.

    The state keeps them and the number still wanted for the next step; after the last step these are distance and ties.
    """
    state_word: tl.constexpr = 3 if STEP == 0 else 11 if STEP == 1 else 5
    if STEP == 0:
        digit, left = _pick_digit(digits, k, BINS)
    else:
        earlier: tl.constexpr = 3 if STEP == 1 else 11
        digit, left = _pick_digit(digits + STEP * BINS, tl.load(state + earlier + 1), BINS)
        digit += tl.load(state + earlier) * BINS
    if program == 0:
        tl.store(state + state_word, digit)
        tl.store(state + state_word + 1, left)
    return digit


@triton.jit
def _limit_and_count(state, capacity):
    """Return the limit that marked values reach, and how many of them were listed."""
    return tl.load(state), tl.minimum(tl.load(state + 1), capacity)


@triton.jit
def _count_digits(
    state, counts, values, prefix, capacity, program, programs,
    UNIT: tl.constexpr, LIST_SPAN: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Count the next digits of the entries whose digits so far are the k-th largest's."""
    limit, count = _limit_and_count(state, capacity)
    total = tl.zeros((BINS,), tl.int32)
    begin = program * LIST_SPAN
    while begin < count:
        offsets = begin + tl.arange(0, LIST_SPAN)
        valid = offsets < count
        distance = _distance(tl.load(values + offsets, mask=valid, other=0), limit, BINS)
        alike = valid & (distance // (UNIT * BINS) == prefix)
        total += tl.histogram(distance // UNIT % BINS, BINS, mask=alike)
        begin += programs * LIST_SPAN
    tl.atomic_add(counts + tl.arange(0, BINS), total, mask=total > 0, sem="relaxed")


@triton.jit
def _gather(
    x, state, counts, positions, values, capacity, program, programs, LIST_SPAN: tl.constexpr, BINS: tl.constexpr
):
    """Gather the marked values, and count their first digits."""
    limit, count = _limit_and_count(state, capacity)
    total = tl.zeros((BINS,), tl.int32)
    begin = program * LIST_SPAN
    while begin < count:
        offsets = begin + tl.arange(0, LIST_SPAN)
        v = tl.load(x + tl.load(positions + offsets, mask=offsets < count, other=0), mask=offsets < count, other=0)
        tl.store(values + offsets, v, mask=offsets < count)
        total += tl.histogram(_distance(v, limit, BINS) // (BINS * BINS), BINS, mask=offsets < count)
        begin += programs * LIST_SPAN
    tl.atomic_add(counts + tl.arange(0, BINS), total, mask=total > 0, sem="relaxed")


@triton.jit
def _count_above(
    state, above, equal, values, kth, capacity, span, parts, program, programs,
    LIST_SPAN: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    limit, count = _limit_and_count(state, capacity)
    part = program
    while part < parts:
        more, same = kth * 0, kth * 0
        begin = part * span
        end = tl.minimum((part + 1) * span, count)
        while begin < end:
            offsets = begin + tl.arange(0, LIST_SPAN)
            distance = tl.where(
                offsets < count, _distance(tl.load(values + offsets, mask=offsets < count, other=0), limit, BINS), -1
            )
            more += tl.sum((distance > kth).to(tl.int32), 0)
            same += tl.sum((distance == kth).to(tl.int32), 0)
            begin += LIST_SPAN
        tl.store(above + part, more)
        tl.store(equal + part, same)
        part += programs


@triton.jit
def refine_digits(
    state, digits, values, above, equal, k, capacity, span, parts, program, programs,
    STEP: tl.constexpr, LIST_SPAN: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Determine one more digit of the k-th largest's distance, and count by it: the next digits, or what is above."""
    digit = _next_digit(state, digits, k, program, STEP, BINS)
    if STEP < 2:
        counts = digits + (STEP + 1) * BINS
        unit: tl.constexpr = BINS if STEP == 0 else 1
        _count_digits(state, counts, values, digit, capacity, program, programs, unit, LIST_SPAN, BINS)
    else:
        _count_above(state, above, equal, values, digit, capacity, span, parts, program, programs, LIST_SPAN, BINS)


@triton.jit
def select_positions(
    x, state, above, equal, marked_positions, values, positions, kept, k, capacity, span, part,
    KEEP: tl.constexpr, LIST_SPAN: tl.constexpr, PARTS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Store the selected positions in order; with KEEP 1 their ``values`` and amax_bits, with KEEP 2 their x."""
    limit, kth, ties = tl.load(state), tl.load(state + 5), tl.load(state + 6)
    count = tl.minimum(tl.load(state + 1), capacity)
    equal_before = sum_before(equal, part, PARTS)
    index = sum_before(above, part, PARTS) + tl.minimum(equal_before, ties)
    largest = kth * 0
    begin = part * span
    end = tl.minimum((part + 1) * span, count)
    while begin < end:
        offsets = begin + tl.arange(0, LIST_SPAN)
        v = tl.load(values + offsets, mask=offsets < count, other=0)
        distance = tl.where(offsets < count, _distance(v, limit, BINS), -1)
        equals = (distance == kth).to(tl.int32)
        rank = equal_before + tl.cumsum(equals, 0) - equals
        chosen = ((distance > kth) | ((equals > 0) & (rank < ties))).to(tl.int32)
        target = index + tl.cumsum(chosen, 0) - chosen
        valid = (chosen > 0) & (target < k)
        tl.store(positions + target, tl.load(marked_positions + offsets, mask=valid, other=0), mask=valid)
        if KEEP == 1:
            tl.store(kept + target, v, mask=valid)
            largest = tl.maximum(largest, tl.max(tl.where(valid, v & 0x7FFFFFFF, 0), 0))
        if KEEP == 2:
            tl.store(
                kept + target,
                tl.load(x + tl.load(marked_positions + offsets, mask=valid, other=0), mask=valid, other=0),
                mask=valid,
            )
        equal_before += tl.sum(equals, 0)
        index += tl.sum(chosen, 0)
        begin += LIST_SPAN
    if KEEP == 1:
        tl.atomic_max(state + 2, largest, sem="relaxed")


UNSPECIALIZED = ("k", "rank", "tiles", "tiles_per_part", "parts", "capacity", "span", "chosen_parts", "first_low",
                 "candidates", "gap_span", "gap_parts", "nwords")  # fmt: skip
"""Arguments for which no kernel is specialized."""


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _topk_phases(
    x, counters, work, kept, section, n, k, rank, tiles, tiles_per_part, parts, capacity, span, chosen_parts, first_low,
    candidates, gap_span, gap_parts, nwords, FIRST: tl.constexpr, LAST: tl.constexpr, WHOLE: tl.constexpr,
    SAMPLES: tl.constexpr, LOG: tl.constexpr, LIST_SPAN: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
    GAPS: tl.constexpr, PARTS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    state = counters
    digits = counters + 16
    marks = digits + 3 * BINS
    above = work
    equal = above + PARTS
    sums = equal + PARTS
    marked_positions = sums + 3 * PARTS
    values = marked_positions + tl.multiple_of(capacity, 16)
    positions = values + tl.multiple_of(capacity, 16)
    words = positions + (k + 15) // 16 * 16
    for phase in tl.static_range(FIRST, LAST + 1):
        if phase == 0:
            if program == 0:
                _limit(x, state, n, rank, WHOLE, SAMPLES, LOG)
            zero_words(section, nwords, program, programs, LIST_SPAN)
        if phase == 1:
            tile = program
            while tile < tiles:
                large = (load_bits(x, n, tile, WORDS) & 0x7FFFFFFF) >= tl.load(state)
                valid = tl.arange(0, WORDS * 32) < n - tile * (WORDS * 32)
                store_bitmap(large & valid, words, marks, tile, tiles_per_part, WORDS)
                tile += programs
        if phase == 2:
            list_bitmap(
                state, marks, words, marked_positions, tiles, tiles_per_part, parts, capacity, program, programs,
                WORDS, BLOCK, PARTS,
            )  # fmt: skip
        if phase == 3:
            _gather(x, state, digits, marked_positions, values, capacity, program, programs, LIST_SPAN, BINS)
        if (phase >= 4) & (phase <= 6):
            refine_digits(
                state, digits, values, above, equal, k, capacity, span, chosen_parts, program, programs, phase - 4,
                LIST_SPAN, BINS,
            )  # fmt: skip
        if phase == 7:
            part = program
            while part < chosen_parts:
                select_positions(
                    x, state, above, equal, marked_positions, values, positions, kept, k, capacity, span, part, 1,
                    LIST_SPAN, PARTS, BINS,
                )  # fmt: skip
                part += programs
        if phase == 8:
            part = program
            while part < gap_parts:
                sum_gaps(positions, sums, k, first_low, gap_span, part, GAPS, PARTS)
                part += programs
        if phase == 9:
            part = program
            while part < gap_parts:
                write_gaps(
                    state, positions, sums, section, k, first_low, candidates, nwords, gap_span, gap_parts, part, GAPS,
                    PARTS,
                )  # fmt: skip
                part += programs
        end_phase(state, programs, phase, FIRST, LAST)


class _Layout(NamedTuple):
    """Division of the work for k of n values, and its buffer sizes."""

    arguments: tuple[int, ...]
    constants: dict[str, int | bool]
    counters: int
    work: int
    positions: int
    grids: tuple[int, ...]
    candidates: tuple[int, ...]
    capacity: int
    cache: CompiledLaunches


@lru_cache(maxsize=256)
def _layout(n: int, k: int, samples: int, nwords: int) -> _Layout:
    sample_rank = k if n <= samples else k * samples / n
    rank = k if n <= samples else min(samples, int(sample_rank + 6 * sample_rank**0.5) + 8)
    tiles, tiles_per_part, parts = tile_parts(n)
    # The sample's error works both ways: this many may be marked.
    capacity = n if n <= FULL_CAPACITY_NUMEL else min(n, int((rank + 6 * rank**0.5 + 8) * n / samples) + LIST_SPAN)
    capacity = num_buckets(capacity, 16) * 16
    span, chosen_parts = grid_sync.split_into_parts(capacity, LIST_SPAN)
    gap_span, gap_parts = grid_sync.split_into_parts(k, GAPS)
    candidates = low_bits_candidates(n, k)
    positions = 5 * PARTS + 2 * capacity
    busy = min(528, num_buckets(capacity, LIST_SPAN))
    return _Layout(
        (n, k, rank, tiles, tiles_per_part, parts, capacity, span, chosen_parts, candidates[0], len(candidates),
         gap_span, gap_parts, nwords),
        {"WHOLE": n <= samples, "SAMPLES": samples, "LOG": samples.bit_length() - 1, "LIST_SPAN": LIST_SPAN,
         "WORDS": WORDS, "BLOCK": BLOCK, "GAPS": GAPS, "PARTS": PARTS, "BINS": BINS, "enable_fp_fusion": False},
        grid_sync.STATE_WORDS + 3 * BINS + PARTS, positions + num_buckets(k, 16) * 16 + tiles * WORDS, positions,
        (max(1, min(64, num_buckets(nwords, LIST_SPAN))), tiles, parts, busy, busy, busy, busy, chosen_parts,
         gap_parts, gap_parts),
        tuple(candidates), capacity, {},
    )  # fmt: skip


class TopK(NamedTuple):
    """The k largest magnitudes of a tensor."""

    nbytes: int | None
    """Bytes of the encoded positions; None if they were not encoded."""
    positions: Tensor
    values: Tensor
    amax_bits: int


def sampled_topk(x: Tensor, k: int, out: Tensor) -> TopK | None:
    """Select the k largest magnitudes of a float32 tensor, and encode their positions in ``out`` if a Rice code fits.

    None if the sample was wrong, if there are too many values, or if all are kept. One synchronization.
    """
    n = x.numel()
    if not 0 < k < n <= grid_sync.MAX_NUMEL:
        return None
    small = n <= grid_sync.SINGLE_LAUNCH_NUMEL
    nwords = 0 if out.data_ptr() % 4 else out.numel() // 4
    layout = _layout(n, k, SAMPLES if small else MORE_SAMPLES, nwords)
    counters = torch.zeros(layout.counters, dtype=torch.int32, device=x.device)
    work = torch.empty(layout.work, dtype=torch.int32, device=x.device)
    values = torch.empty(k, dtype=torch.float32, device=x.device)
    grid_sync.launch(
        _topk_phases, x.device, (x.view(torch.int32), counters, work, values.view(torch.int32), out), layout.arguments,
        layout.constants, layout.grids, WARPS, single_launch=small, cache=layout.cache,
    )  # fmt: skip
    state = counters[: grid_sync.STATE_WORDS].tolist()
    if not k <= state[MARKED_WORD] <= layout.capacity or state[KTH_WORD] >= BINS**3 - 1:
        return None
    plan = plan_of(n, k, list(zip(layout.candidates, state[SUMS_WORD:], strict=False)))
    written = plan.mode == RICE and plan.nbytes <= 4 * nwords and plan.low_bits == state[LOW_BITS_WORD]
    positions = work[layout.positions : layout.positions + k]
    return TopK(plan.nbytes if written else None, positions, values, state[AMAX_WORD])
