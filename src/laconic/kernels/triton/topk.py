"""The k largest magnitudes, and where they stand, coded, in phases.

1. *limit*: a sample says which magnitude lets a few more than k through.
2. *mark*: one pass over all values leaves a bit for each that reaches it.
3. *list*: where the marked ones stand, in order.
4. *digits*: how far each lies above the limit; how often the highest digit of that distance has each value, then the
   next one's of those that share the k-th largest's, and once more.
5. *count*: how many of each part lie above the k-th largest, and how many are equal to it.
6. *choose*: positions and values of the k; of equal magnitudes the lowest indices, as in the reference.
7. *sum*: the high parts of the gaps between them, under each Rice parameter worth trying.
8. *code*: the position section, under the parameter that makes it shortest.

What the sample got wrong shows in the state, which is all that anyone waits for.
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
from laconic.kernels.triton.bitmap import BLOCK, WORDS, in_parts, keep_marks, load_bits, popcount, take_lowest
from laconic.kernels.triton.grid_sync import BARRIER, MOST, PARTS, SMALL, STATE, before, cut, launch, wait_for_all
from laconic.kernels.triton.launch_cache import Known
from laconic.kernels.triton.rice import GAPS, clear_words, code_gaps, sum_gaps
from laconic.kernels.triton.tile import hash32

__all__ = [
    "BINS",
    "LISTED",
    "Largest",
    "choose",
    "count_above",
    "count_digits",
    "largest",
    "list_marked",
    "settle_digit",
]

LISTED = 2048
BINS = 256
"""Values of a digit. Three of them tell distances from the limit apart up to four times the limit."""

MARKED, KEY, KTH, LOW, SUMS = 1, 2, 5, 7, 8

SAMPLES, MORE_SAMPLES = 8192, 16384

ROOMY = 1 << 16
"""Up to so many values there is room for marks on all of them."""

WARPS = (32, 4, 4, 8, 8, 8, 8, 8, 4, 8)
"""Of a program, when a phase has a launch of its own."""


@triton.jit
def _limit(x, state, n, rank, WHOLE: tl.constexpr, SAMPLES: tl.constexpr, LOG: tl.constexpr):
    """The magnitude of a rank (from 1 on) among sampled ones: exact if all are, else to 20 bits, rounded down."""
    slot = tl.arange(0, SAMPLES)
    if WHOLE:
        key = tl.load(x + slot, mask=slot < n, other=0) & 0x7FFFFFFF
    else:
        none = rank * 0
        within = (slot.to(tl.uint32) << (32 - LOG)) | (hash32(slot, none, none) >> LOG)
        key = tl.load(x + (within.to(tl.int64) * n >> 32)) & 0x7FFFFFFF
    found = rank * 0
    for i in range(16 if WHOLE else 10):  # two bits at a time; three counts share a sum
        unit = 1 << (30 - 2 * i)
        first = (key >= found + unit).to(tl.int64)
        second = (key - unit >= found + unit).to(tl.int64)
        third = (key - unit - unit >= found + unit).to(tl.int64)
        reached = tl.sum(first + (second << 20) + (third << 40), 0)
        more = (reached & 0xFFFFF) >= rank
        digit = more.to(tl.int32) + (((reached >> 20) & 0xFFFFF) >= rank).to(tl.int32)
        digit += ((reached >> 40) >= rank).to(tl.int32)
        found += digit * unit
    tl.store(state, found)


@triton.jit
def _distance(v, limit, BINS: tl.constexpr):
    """How far a magnitude lies above the limit, in three digits; what lies further is all alike."""
    return tl.minimum((v & 0x7FFFFFFF) - limit, BINS * BINS * BINS - 1)


@triton.jit
def list_marked(
    state, marks, words, found, tiles, per, parts, room, part,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    behind = before(marks, part, PARTS)
    block = part * per * WORDS
    end = tl.minimum((part + 1) * per, tiles) * WORDS
    while block < end:
        index = block + tl.arange(0, BLOCK)
        w = tl.load(words + index, mask=index < end, other=0).to(tl.uint32, bitcast=True)
        ones = popcount(w)
        to = behind + tl.cumsum(ones, 0) - ones
        behind += tl.sum(ones, 0)
        while tl.max((w != 0).to(tl.int32), 0) > 0:
            bit, rest = take_lowest(w)
            tl.store(found + to, index * 32 + bit, mask=(w != 0) & (to < room))
            to += (w != 0).to(tl.int32)
            w = rest
        block += BLOCK
    if part == parts - 1:
        tl.store(state + 1, behind)


@triton.jit
def _pick_digit(counts, wanted, BINS: tl.constexpr):
    """The digit at which enough entries are as large, and how many of them are wanted of those that have it."""
    bins = tl.arange(0, BINS)
    count = tl.load(counts + bins)
    at_least = tl.sum(count, 0) - tl.cumsum(count, 0) + count
    digit = tl.sum((at_least >= wanted).to(tl.int32), 0) - 1
    return digit, wanted - tl.sum(tl.where(bins > digit, count, 0), 0)


@triton.jit
def settle_digit(state, digits, k, program, STEP: tl.constexpr, BINS: tl.constexpr):
    """One digit more of the k-th largest's distance, from what was counted of it: all digits so far.

    The state keeps them for the step after, with how many are still wanted; from the last on as the distance and ties.
    """
    kept: tl.constexpr = 3 if STEP == 0 else 11 if STEP == 1 else 5
    if STEP == 0:
        digit, left = _pick_digit(digits, k, BINS)
    else:
        earlier: tl.constexpr = 3 if STEP == 1 else 11
        digit, left = _pick_digit(digits + STEP * BINS, tl.load(state + earlier + 1), BINS)
        digit += tl.load(state + earlier) * BINS
    if program == 0:
        tl.store(state + kept, digit)
        tl.store(state + kept + 1, left)
    return digit


@triton.jit
def count_digits(
    state, counts, values, prefix, room, program, programs,
    UNIT: tl.constexpr, LISTED: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Of the entries whose digits so far are the k-th largest's, how many have each next one."""
    limit = tl.load(state)
    count = tl.minimum(tl.load(state + 1), room)
    total = tl.zeros((BINS,), tl.int32)
    begin = program * LISTED
    while begin < count:
        at = begin + tl.arange(0, LISTED)
        there = at < count
        distance = _distance(tl.load(values + at, mask=there, other=0), limit, BINS)
        alike = there & (distance // (UNIT * BINS) == prefix)
        total += tl.histogram(distance // UNIT % BINS, BINS, mask=alike)
        begin += programs * LISTED
    tl.atomic_add(counts + tl.arange(0, BINS), total, mask=total > 0, sem="relaxed")


@triton.jit
def _gather(x, state, counts, found, values, room, program, programs, LISTED: tl.constexpr, BINS: tl.constexpr):
    """The marked values, and how many have each first digit."""
    limit = tl.load(state)
    count = tl.minimum(tl.load(state + 1), room)
    total = tl.zeros((BINS,), tl.int32)
    begin = program * LISTED
    while begin < count:
        at = begin + tl.arange(0, LISTED)
        v = tl.load(x + tl.load(found + at, mask=at < count, other=0), mask=at < count, other=0)
        tl.store(values + at, v, mask=at < count)
        total += tl.histogram(_distance(v, limit, BINS) // (BINS * BINS), BINS, mask=at < count)
        begin += programs * LISTED
    tl.atomic_add(counts + tl.arange(0, BINS), total, mask=total > 0, sem="relaxed")


@triton.jit
def count_above(
    state, above, equal, values, kth, room, span, parts, program, programs, LISTED: tl.constexpr, BINS: tl.constexpr
):
    limit = tl.load(state)
    count = tl.minimum(tl.load(state + 1), room)
    part = program
    while part < parts:
        more, same = kth * 0, kth * 0
        begin = part * span
        end = tl.minimum((part + 1) * span, count)
        while begin < end:
            at = begin + tl.arange(0, LISTED)
            distance = tl.where(at < count, _distance(tl.load(values + at, mask=at < count, other=0), limit, BINS), -1)
            more += tl.sum((distance > kth).to(tl.int32), 0)
            same += tl.sum((distance == kth).to(tl.int32), 0)
            begin += LISTED
        tl.store(above + part, more)
        tl.store(equal + part, same)
        part += programs


@triton.jit
def choose(
    x, state, above, equal, found, values, positions, kept, k, room, span, part,
    KEEP: tl.constexpr, LISTED: tl.constexpr, PARTS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """The chosen positions in order; with KEEP 1 what ``values`` has there, the largest in the state; with 2 x's."""
    limit, kth, ties = tl.load(state), tl.load(state + 5), tl.load(state + 6)
    count = tl.minimum(tl.load(state + 1), room)
    same = before(equal, part, PARTS)
    to = before(above, part, PARTS) + tl.minimum(same, ties)
    largest = kth * 0
    begin = part * span
    end = tl.minimum((part + 1) * span, count)
    while begin < end:
        at = begin + tl.arange(0, LISTED)
        v = tl.load(values + at, mask=at < count, other=0)
        distance = tl.where(at < count, _distance(v, limit, BINS), -1)
        equals = (distance == kth).to(tl.int32)
        rank = same + tl.cumsum(equals, 0) - equals
        chosen = ((distance > kth) | ((equals > 0) & (rank < ties))).to(tl.int32)
        place = to + tl.cumsum(chosen, 0) - chosen
        there = (chosen > 0) & (place < k)
        tl.store(positions + place, tl.load(found + at, mask=there, other=0), mask=there)
        if KEEP == 1:
            tl.store(kept + place, v, mask=there)
            largest = tl.maximum(largest, tl.max(tl.where(there, v & 0x7FFFFFFF, 0), 0))
        if KEEP == 2:
            tl.store(
                kept + place, tl.load(x + tl.load(found + at, mask=there, other=0), mask=there, other=0), mask=there
            )
        same += tl.sum(equals, 0)
        to += tl.sum(chosen, 0)
        begin += LISTED
    if KEEP == 1:
        tl.atomic_max(state + 2, largest, sem="relaxed")


NUMBERS = ("k", "rank", "tiles", "per", "parts", "room", "span", "chosen_parts", "first_low", "tried", "gap_span",
           "gap_parts", "nwords")  # fmt: skip
"""Arguments that no kernel is compiled anew for."""


@triton.jit(do_not_specialize=NUMBERS)
def _phases(
    x, counters, work, kept, section, n, k, rank, tiles, per, parts, room, span, chosen_parts, first_low, tried,
    gap_span, gap_parts, nwords,
    FIRST: tl.constexpr, LAST: tl.constexpr, WHOLE: tl.constexpr, SAMPLES: tl.constexpr, LOG: tl.constexpr,
    LISTED: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, GAPS: tl.constexpr, PARTS: tl.constexpr,
    BINS: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    state = counters
    digits = counters + 16
    marks = digits + 3 * BINS
    above = work
    equal = above + PARTS
    sums = equal + PARTS
    found = sums + 3 * PARTS
    values = found + tl.multiple_of(room, 16)
    positions = values + tl.multiple_of(room, 16)
    words = positions + (k + 15) // 16 * 16
    for phase in tl.static_range(FIRST, LAST + 1):
        if phase == 0:
            if program == 0:
                _limit(x, state, n, rank, WHOLE, SAMPLES, LOG)
            clear_words(section, nwords, program, programs, LISTED)
        if phase == 1:
            tile = program
            while tile < tiles:
                large = (load_bits(x, n, tile, WORDS) & 0x7FFFFFFF) >= tl.load(state)
                there = tl.arange(0, WORDS * 32) < n - tile * (WORDS * 32)
                keep_marks(large & there, words, marks, tile, per, WORDS)
                tile += programs
        if phase == 2:
            part = program
            while part < parts:
                list_marked(state, marks, words, found, tiles, per, parts, room, part, WORDS, BLOCK, PARTS)
                part += programs
        if phase == 3:
            _gather(x, state, digits, found, values, room, program, programs, LISTED, BINS)
        if phase == 4:
            digit = settle_digit(state, digits, k, program, 0, BINS)
            count_digits(state, digits + BINS, values, digit, room, program, programs, BINS, LISTED, BINS)
        if phase == 5:
            digit = settle_digit(state, digits, k, program, 1, BINS)
            count_digits(state, digits + 2 * BINS, values, digit, room, program, programs, 1, LISTED, BINS)
        if phase == 6:
            digit = settle_digit(state, digits, k, program, 2, BINS)
            count_above(state, above, equal, values, digit, room, span, chosen_parts, program, programs, LISTED, BINS)
        if phase == 7:
            part = program
            while part < chosen_parts:
                choose(
                    x, state, above, equal, found, values, positions, kept, k, room, span, part, 1, LISTED, PARTS, BINS
                )
                part += programs
        if phase == 8:
            part = program
            while part < gap_parts:
                sum_gaps(positions, sums, k, first_low, gap_span, part, GAPS, PARTS)
                part += programs
        if phase == 9:
            part = program
            while part < gap_parts:
                code_gaps(
                    state, positions, sums, section, k, first_low, tried, nwords, gap_span, gap_parts, part, GAPS, PARTS
                )
                part += programs
        if phase < LAST:
            wait_for_all(state + BARRIER, programs * (phase - FIRST + 1))


class _Layout(NamedTuple):
    """How the work for k of n values is cut, and what room it takes."""

    arguments: tuple[int, ...]
    constants: dict[str, int | bool]
    counters: int
    work: int
    positions: int
    grids: tuple[int, ...]
    tried: tuple[int, ...]
    room: int
    known: Known


@lru_cache(maxsize=256)
def _layout(n: int, k: int, samples: int, nwords: int) -> _Layout:
    share = k if n <= samples else k * samples / n
    rank = k if n <= samples else min(samples, int(share + 6 * share**0.5) + 8)
    tiles, per, parts = in_parts(n)
    # The sample's error works both ways: so many may be marked.
    room = n if n <= ROOMY else min(n, int((rank + 6 * rank**0.5 + 8) * n / samples) + LISTED)
    room = num_buckets(room, 16) * 16
    span, chosen_parts = cut(room, LISTED)
    gap_span, gap_parts = cut(k, GAPS)
    tried = low_bits_candidates(n, k)
    positions = 5 * PARTS + 2 * room
    busy = min(528, num_buckets(room, LISTED))
    return _Layout(
        (n, k, rank, tiles, per, parts, room, span, chosen_parts, tried[0], len(tried), gap_span, gap_parts, nwords),
        {"WHOLE": n <= samples, "SAMPLES": samples, "LOG": samples.bit_length() - 1, "LISTED": LISTED, "WORDS": WORDS,
         "BLOCK": BLOCK, "GAPS": GAPS, "PARTS": PARTS, "BINS": BINS, "enable_fp_fusion": False},
        STATE + 3 * BINS + PARTS,
        positions + num_buckets(k, 16) * 16 + tiles * WORDS,
        positions,
        (max(1, min(64, num_buckets(nwords, LISTED))), tiles, parts, busy, busy, busy, busy, chosen_parts,
         gap_parts, gap_parts),
        tuple(tried),
        room,
        {},
    )  # fmt: skip


class Largest(NamedTuple):
    """The k largest of a tensor."""

    nbytes: int | None
    """Of their positions, coded; None where that is left to others."""
    positions: Tensor
    values: Tensor
    amax_bits: int


def largest(x: Tensor, k: int, out: Tensor) -> Largest | None:
    """Of a float32 tensor the k largest magnitudes; their positions go to ``out`` if Rice's code has room in its words.

    None where the sample was wrong, or where there are too many values, or all are wanted. One wait.
    """
    n = x.numel()
    if not 0 < k < n <= MOST:
        return None
    small = n <= SMALL
    nwords = 0 if out.data_ptr() % 4 else out.numel() // 4
    layout = _layout(n, k, SAMPLES if small else MORE_SAMPLES, nwords)
    counters = torch.zeros(layout.counters, dtype=torch.int32, device=x.device)
    work = torch.empty(layout.work, dtype=torch.int32, device=x.device)
    values = torch.empty(k, dtype=torch.float32, device=x.device)
    launch(
        _phases, x.device, (x.view(torch.int32), counters, work, values.view(torch.int32), out), layout.arguments,
        layout.constants, layout.grids, WARPS, together=small, known=layout.known,
    )  # fmt: skip
    state = counters[:STATE].tolist()
    if not k <= state[MARKED] <= layout.room or state[KTH] >= BINS**3 - 1:
        return None
    plan = plan_of(n, k, list(zip(layout.tried, state[SUMS:], strict=False)))
    written = plan.mode == RICE and plan.nbytes <= 4 * nwords and plan.low_bits == state[LOW]
    positions = work[layout.positions : layout.positions + k]
    return Largest(plan.nbytes if written else None, positions, values, state[KEY])
