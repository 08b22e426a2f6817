"""Random entries: those with the k smallest hashes, drawn, gathered and put back, in phases.

1. *mark*: positions whose hash is smaller than a limit that lets a few more than k through; hashes are uniform. An
   encoder looks for the largest magnitude of all values on the way.
2. *list*, *digits*, *count*, *choose*: as in ``largest``, by the distance of hashes from the limit.
3. *find*, *place*: as in ``placing``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.errors import FrameError
from laconic.kernels import random
from laconic.kernels.sections import num_buckets
from laconic.kernels.triton.bitmap import BLOCK, WORDS, in_parts, keep_marks, load_bits
from laconic.kernels.triton.grid_sync import BARRIER, MOST, PARTS, SMALL, STATE, cut, launch, wait_for_all
from laconic.kernels.triton.launch_cache import remembered
from laconic.kernels.triton.scatter import GAPS, SPAN, WAYS, add_values, check_values, find_starts, place_tile
from laconic.kernels.triton.tile import halves, hash32
from laconic.kernels.triton.topk import LISTED, choose, count_above, count_digits, list_marked, settle_digit

__all__ = ["positions", "randk_decode", "randk_encode"]

BINS, MORE_BINS = 256, 1024
"""Values of a digit. Hashes of fewer positions lie further apart."""

MARKED, KEY, KTH, BAD = 1, 2, 5, 7
WARPS = (4, 4, 8, 8, 8, 8, 8, 8, 4)
"""Of a program, when a phase has a launch of its own."""


@triton.jit
def _splitmix64(x):
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _keys(section, STREAM: tl.constexpr):
    """``random.key`` of the seed in a section, as two int32."""
    words = section.to(tl.pointer_type(tl.int32))
    low = tl.load(words).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(words + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    key = _splitmix64(_splitmix64(low | (high << 32)) ^ STREAM)
    low_key = (key & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    return low_key, (key >> 32).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def _distances(
    state, counts, found, values, last, low_key, high_key, room, program, programs,
    LISTED: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """How far the marked hashes lie below the limit, and how many have each first digit."""
    count = tl.minimum(tl.load(state + 1), room)
    total = tl.zeros((BINS,), tl.int32)
    begin = program * LISTED
    while begin < count:
        at = begin + tl.arange(0, LISTED)
        hashed = hash32(tl.load(found + at, mask=at < count, other=0), low_key, high_key)
        distance = last - hashed.to(tl.int32, bitcast=True)
        tl.store(values + at, distance, mask=at < count)
        total += tl.histogram(tl.minimum(distance // (BINS * BINS), BINS - 1), BINS, mask=at < count)
        begin += programs * LISTED
    tl.atomic_add(counts + tl.arange(0, BINS), total, mask=total > 0, sem="relaxed")


NUMBERS = (
    "k",
    "last",
    "low_seed",
    "high_seed",
    "low_key",
    "high_key",
    "tiles",
    "per",
    "parts",
    "room",
    "span",
    "chosen_parts",
)
"""Arguments that no kernel is compiled anew for."""


@triton.jit(do_not_specialize=NUMBERS)
def _phases(
    x, counters, work, kept, values, section, out, n, k, last, low_seed, high_seed, low_key, high_key, tiles, per,
    parts, room, span, chosen_parts, gain, weight,
    FIRST: tl.constexpr, LAST: tl.constexpr, GATHER: tl.constexpr, ADD: tl.constexpr, STARTED: tl.constexpr,
    INFINITE: tl.constexpr, LISTED: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, GAPS: tl.constexpr,
    SPAN: tl.constexpr, WAYS: tl.constexpr, PARTS: tl.constexpr, BINS: tl.constexpr, STREAM: tl.constexpr,
    READ: tl.constexpr, TELL: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    if READ:
        low_key, high_key = _keys(section, STREAM)
    elif TELL:
        if program == 0:
            tl.store(section.to(tl.pointer_type(tl.int32)), low_seed)
            tl.store(section.to(tl.pointer_type(tl.int32)) + 1, high_seed)
    state = counters
    digits = counters + 16
    marks = digits + 3 * BINS
    positions = work
    above = positions + (k + 15) // 16 * 16
    equal = above + PARTS
    found = equal + PARTS
    distances = found + tl.multiple_of(room, 16)
    words = distances + tl.multiple_of(room, 16)
    starts = words + tiles * WORDS
    for phase in tl.static_range(FIRST, LAST + 1):
        part = program
        if phase == 0:
            while part < tiles:
                at = part * (WORDS * 32) + tl.arange(0, WORDS * 32)
                small = hash32(at, low_key, high_key) <= last.to(tl.uint32, bitcast=True)
                keep_marks(small & (at < n), words, marks, part, per, WORDS)
                if GATHER:
                    key = tl.max(load_bits(x, n, part, WORDS) & 0x7FFFFFFF, 0)
                    tl.atomic_max(state + 2, key, mask=key > tl.load(state + 2), sem="relaxed")
                part += programs
        if phase == 1:
            while part < parts:
                list_marked(state, marks, words, found, tiles, per, parts, room, part, WORDS, BLOCK, PARTS)
                part += programs
        if phase == 2:
            _distances(state, digits, found, distances, last, low_key, high_key, room, program, programs, LISTED, BINS)
        if phase == 3:
            digit = settle_digit(state, digits, k, program, 0, BINS)
            count_digits(state, digits + BINS, distances, digit, room, program, programs, BINS, LISTED, BINS)
        if phase == 4:
            digit = settle_digit(state, digits, k, program, 1, BINS)
            count_digits(state, digits + 2 * BINS, distances, digit, room, program, programs, 1, LISTED, BINS)
        if phase == 5:
            digit = settle_digit(state, digits, k, program, 2, BINS)
            count_above(
                state, above, equal, distances, digit, room, span, chosen_parts, program, programs, LISTED, BINS
            )
        if phase == 6:
            while part < chosen_parts:
                choose(
                    x, state, above, equal, found, distances, positions, kept, k, room, span, part,
                    2 if GATHER else 0, LISTED, PARTS, BINS,
                )  # fmt: skip
                part += programs
        if phase == 7:
            begin = program * GAPS
            while begin < k:
                check_values(values, state + 7, begin + tl.arange(0, GAPS), k, INFINITE)
                begin += programs * GAPS
            if STARTED:
                find_starts(positions, starts, n, k, program, programs, SPAN, WAYS)
        if phase == 8:
            marked = tl.load(state + 1)
            holds = (
                (marked >= k)
                & (marked <= room)
                & (tl.load(state + 5) < BINS * BINS * BINS - 1)
                & (tl.load(state + 7) == 0)
            )
            if ADD:
                add_values(positions, values, out, k, gain, weight, holds, program, programs, True, GAPS)
            else:
                while part * SPAN < n:
                    place_tile(positions, values, starts, out, n, k, gain, holds, part, True, SPAN, WAYS, STARTED)
                    part += programs
        if phase < LAST:
            wait_for_all(state + BARRIER, programs * (phase - FIRST + 1))


class _Layout(NamedTuple):
    """How the work for k of n values is cut, and what room it takes."""

    last: int
    arguments: tuple[int, ...]
    room: int
    work: int
    grids: tuple[int, ...]


@lru_cache(maxsize=256)
def _layout(n: int, k: int, bins: int) -> _Layout | None:
    """None where hashes lie too far apart, or where nearly all are wanted."""
    margin = 5 * k**0.5 + 16
    limit = int((k + margin) / n * 2**32)
    if not 0 < k < n <= MOST or limit >= 1 << 31 or 2 * margin / n * 2**32 >= bins**3:
        return None
    tiles, per, parts = in_parts(n)
    room = num_buckets(int(k + margin + 6 * (k + margin) ** 0.5 + 16), 16) * 16
    span, chosen_parts = cut(room, LISTED)
    busy = min(528, num_buckets(room, LISTED))
    out_tiles = num_buckets(n, SPAN)
    return _Layout(
        limit - 1,
        (tiles, per, parts, room, span, chosen_parts),
        room,
        num_buckets(k, 16) * 16 + 2 * PARTS + 2 * room + tiles * WORDS + out_tiles + 1,
        (tiles, parts, busy, busy, busy, busy, chosen_parts, min(528, num_buckets(max(k, out_tiles), GAPS)), out_tiles),
    )


def _run(
    n: int,
    k: int,
    like: Tensor,
    *,
    seed: int | None = None,
    section: Tensor | None = None,
    x: Tensor | None = None,
    kept: Tensor | None = None,
    values: Tensor | None = None,
    out: Tensor | None = None,
    gain: float = 1.0,
    weight: float | None = None,
) -> tuple[Tensor, list[int]] | None:
    """Positions and state; None where too few or too many hashes were marked, or none can be.

    The seed is told to the section, or, if it is None, read from there.
    """
    together, add = n <= SMALL, weight is not None
    bins = MORE_BINS if together else BINS
    layout = _layout(n, k, bins)
    if layout is None or (section is not None and section.data_ptr() % 4):
        return None
    device = like.device
    counters = torch.zeros(STATE + 3 * bins + PARTS, dtype=torch.int32, device=device)
    work = torch.empty(layout.work, dtype=torch.int32, device=device)
    tensors = (
        counters if x is None else x.view(torch.int32), counters, work,
        counters if kept is None else kept.view(torch.int32), counters if values is None else values,
        counters if section is None else section, counters if out is None else out,
    )  # fmt: skip
    seeds = (0, 0, 0, 0) if seed is None else (*halves(seed), *halves(random.key(seed, random.POSITIONS)))
    numbers = (n, k, layout.last, *seeds, *layout.arguments, float(gain), float(weight or 0.0))
    constants = {
        "GATHER": x is not None, "ADD": add, "STARTED": not together and not add, "INFINITE": float("inf"),
        "LISTED": LISTED, "WORDS": WORDS, "BLOCK": BLOCK, "GAPS": GAPS, "SPAN": SPAN, "WAYS": WAYS, "PARTS": PARTS,
        "BINS": bins, "STREAM": random.stream_word(random.POSITIONS), "READ": seed is None, "TELL": section is not None,
        "enable_fp_fusion": False,
    }  # fmt: skip
    grids = layout.grids[:7] if out is None else layout.grids
    if add:
        grids = (*grids[:8], num_buckets(k, GAPS))
    launch(
        _phases, device, tensors, numbers, constants, grids, WARPS, together=together,
        known=remembered("drawing", n, k, x is None, section is None, out is None, add),
    )  # fmt: skip
    state = counters[:8].tolist()
    if not k <= state[MARKED] <= layout.room or state[KTH] >= bins**3 - 1:
        return None
    return work[:k], state


def positions(n: int, k: int, seed: int, like: Tensor) -> Tensor | None:
    """k positions with the smallest hashes, ascending (int32); None in the rare case that they are not found."""
    found = _run(n, k, like, seed=seed)
    return None if found is None else found[0]


def randk_encode(x: Tensor, k: int, seed: int, section: Tensor) -> tuple[Tensor, int] | None:
    """The float32 values there, and the key of all of x; the section is told the seed."""
    kept = torch.empty(k, dtype=torch.float32, device=x.device)
    found = _run(x.numel(), k, x, seed=seed, section=section, x=x, kept=kept)
    return None if found is None else (kept, found[1][KEY])


def randk_decode(section: Tensor, values: Tensor, gain: float, out: Tensor, weight: float | None) -> bool:
    """Float32 values times the gain where they were drawn, zeros elsewhere; or added. False: nothing was added."""
    found = _run(
        out.numel(), values.numel(), out, section=section, values=values, out=out, gain=gain, weight=weight
    )  # fmt: skip
    if found is None:
        return False
    if found[1][BAD]:
        raise FrameError("a value in the frame is not finite")
    return True
