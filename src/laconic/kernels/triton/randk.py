"""Random entries: those with the k smallest hashes, selected, gathered and scattered in phases.

1. *mark*: positions whose hash is below a limit that admits a few more than k; hashes are uniform. An encoder computes
   the largest magnitude of all values on the way.
2. *list*, *digits*, *count*, *select*: as in ``topk``, by the distance of the hashes from the limit.
3. *find*, *scatter*: as in ``scatter``.
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
from laconic.kernels.triton import grid_sync
from laconic.kernels.triton.bitmap import BLOCK, WORDS, load_bits, store_bitmap, tile_parts
from laconic.kernels.triton.counter_hash import hash32
from laconic.kernels.triton.grid_sync import PARTS, end_phase
from laconic.kernels.triton.launch_args import split64
from laconic.kernels.triton.launch_cache import launches_for
from laconic.kernels.triton.scatter import (
    GAPS,
    SEARCH_SPAN,
    SPAN,
    add_at_positions,
    find_starts,
    flag_nonfinite,
    scatter_tile,
)
from laconic.kernels.triton.topk import LIST_SPAN, list_bitmap, refine_digits, select_positions

__all__ = ["randk_decode", "randk_encode", "random_positions"]

BINS, MORE_BINS = 256, 1024
"""Values of a digit. Hashes of fewer positions are further apart."""

MARKED_WORD, AMAX_WORD, KTH_WORD, NONFINITE_WORD = 1, 2, 5, 7
WARPS = (4, 4, 8, 8, 8, 8, 8, 8, 4)
"""Warps of a program when a phase has its own grid_sync.launch."""


@triton.jit
def _splitmix64(x):
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _keys(section, STREAM: tl.constexpr):
    """Compute ``random.key`` of the seed in a section, as two int32."""
    words = section.to(tl.pointer_type(tl.int32))
    low = tl.load(words).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(words + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    key = _splitmix64(_splitmix64(low | (high << 32)) ^ STREAM)
    key_low = (key & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    return key_low, (key >> 32).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def _distances(
    state, counts, marked_positions, values, last, key_low, key_high, capacity, program, programs,
    LIST_SPAN: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Store the distances of the marked hashes from the limit, and count their first digits."""
    count = tl.minimum(tl.load(state + 1), capacity)
    total = tl.zeros((BINS,), tl.int32)
    begin = program * LIST_SPAN
    while begin < count:
        offsets = begin + tl.arange(0, LIST_SPAN)
        hashed = hash32(tl.load(marked_positions + offsets, mask=offsets < count, other=0), key_low, key_high)
        distance = last - hashed.to(tl.int32, bitcast=True)
        tl.store(values + offsets, distance, mask=offsets < count)
        total += tl.histogram(tl.minimum(distance // (BINS * BINS), BINS - 1), BINS, mask=offsets < count)
        begin += programs * LIST_SPAN
    tl.atomic_add(counts + tl.arange(0, BINS), total, mask=total > 0, sem="relaxed")


UNSPECIALIZED = (
    "k", "last", "low_seed", "high_seed", "key_low", "key_high", "tiles", "tiles_per_part", "parts", "capacity", "span",
    "chosen_parts",
)  # fmt: skip
"""Arguments for which no kernel is specialized."""


@triton.jit(do_not_specialize=UNSPECIALIZED)
def _randk_phases(
    x, counters, work, kept, values, section, out, n, k, last, low_seed, high_seed, key_low, key_high, tiles,
    tiles_per_part, parts, capacity, span, chosen_parts, gain, weight,
    FIRST: tl.constexpr, LAST: tl.constexpr, GATHER: tl.constexpr, ADD: tl.constexpr, HAS_STARTS: tl.constexpr,
    INFINITE: tl.constexpr, LIST_SPAN: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, GAPS: tl.constexpr,
    SPAN: tl.constexpr, SEARCH_SPAN: tl.constexpr, PARTS: tl.constexpr, BINS: tl.constexpr, STREAM: tl.constexpr,
    READ_SEED: tl.constexpr, WRITE_SEED: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    if READ_SEED:
        key_low, key_high = _keys(section, STREAM)
    elif WRITE_SEED:
        if program == 0:
            tl.store(section.to(tl.pointer_type(tl.int32)), low_seed)
            tl.store(section.to(tl.pointer_type(tl.int32)) + 1, high_seed)
    state = counters
    digits = counters + 16
    marks = digits + 3 * BINS
    random_positions = work
    above = random_positions + (k + 15) // 16 * 16
    equal = above + PARTS
    marked_positions = equal + PARTS
    distances = marked_positions + tl.multiple_of(capacity, 16)
    words = distances + tl.multiple_of(capacity, 16)
    starts = words + tiles * WORDS
    for phase in tl.static_range(FIRST, LAST + 1):
        part = program
        if phase == 0:
            while part < tiles:
                offsets = part * (WORDS * 32) + tl.arange(0, WORDS * 32)
                small = hash32(offsets, key_low, key_high) <= last.to(tl.uint32, bitcast=True)
                store_bitmap(small & (offsets < n), words, marks, part, tiles_per_part, WORDS)
                if GATHER:
                    amax_bits = tl.max(load_bits(x, n, part, WORDS) & 0x7FFFFFFF, 0)
                    tl.atomic_max(state + 2, amax_bits, mask=amax_bits > tl.load(state + 2), sem="relaxed")
                part += programs
        if phase == 1:
            list_bitmap(
                state, marks, words, marked_positions, tiles, tiles_per_part, parts, capacity, program, programs,
                WORDS, BLOCK, PARTS,
            )  # fmt: skip
        if phase == 2:
            _distances(
                state, digits, marked_positions, distances, last, key_low, key_high, capacity, program, programs,
                LIST_SPAN, BINS,
            )  # fmt: skip
        if (phase >= 3) & (phase <= 5):
            refine_digits(
                state, digits, distances, above, equal, k, capacity, span, chosen_parts, program, programs, phase - 3,
                LIST_SPAN, BINS,
            )  # fmt: skip
        if phase == 6:
            while part < chosen_parts:
                select_positions(
                    x, state, above, equal, marked_positions, distances, random_positions, kept, k, capacity, span,
                    part, 2 if GATHER else 0, LIST_SPAN, PARTS, BINS,
                )  # fmt: skip
                part += programs
        if phase == 7:
            begin = program * GAPS
            while begin < k:
                flag_nonfinite(values, state + 7, begin + tl.arange(0, GAPS), k, INFINITE)
                begin += programs * GAPS
            if HAS_STARTS:
                find_starts(random_positions, starts, n, k, program, programs, SPAN, SEARCH_SPAN)
        if phase == 8:
            marked = tl.load(state + 1)
            holds = (
                (marked >= k)
                & (marked <= capacity)
                & (tl.load(state + 5) < BINS * BINS * BINS - 1)
                & (tl.load(state + 7) == 0)
            )
            if ADD:
                add_at_positions(random_positions, values, out, k, gain, weight, holds, program, programs, True, GAPS)
            else:
                while part * SPAN < n:
                    scatter_tile(
                        random_positions, values, starts, out, n, k, gain, holds, part, True, SPAN, SEARCH_SPAN,
                        HAS_STARTS,
                    )  # fmt: skip
                    part += programs
        end_phase(state, programs, phase, FIRST, LAST)


class _Layout(NamedTuple):
    """Division of the work for k of n values, and its buffer sizes."""

    last: int
    arguments: tuple[int, ...]
    capacity: int
    work: int
    grids: tuple[int, ...]


@lru_cache(maxsize=256)
def _layout(n: int, k: int, bins: int) -> _Layout | None:
    """Return None if the hashes are too far apart, or if nearly all positions are kept."""
    margin = 5 * k**0.5 + 16
    limit = int((k + margin) / n * 2**32)
    if not 0 < k < n <= grid_sync.MAX_NUMEL or limit >= 1 << 31 or 2 * margin / n * 2**32 >= bins**3:
        return None
    tiles, tiles_per_part, parts = tile_parts(n)
    capacity = num_buckets(int(k + margin + 6 * (k + margin) ** 0.5 + 16), 16) * 16
    span, chosen_parts = grid_sync.split_into_parts(capacity, LIST_SPAN)
    busy = min(528, num_buckets(capacity, LIST_SPAN))
    out_tiles = num_buckets(n, SPAN)
    return _Layout(
        limit - 1, (tiles, tiles_per_part, parts, capacity, span, chosen_parts), capacity,
        num_buckets(k, 16) * 16 + 2 * PARTS + 2 * capacity + tiles * WORDS + out_tiles + 1,
        (tiles, parts, busy, busy, busy, busy, chosen_parts, min(528, num_buckets(max(k, out_tiles), GAPS)), out_tiles),
    )  # fmt: skip


def _run(
    n: int, k: int, like: Tensor, *, seed: int | None = None, section: Tensor | None = None, x: Tensor | None = None,
    kept: Tensor | None = None, values: Tensor | None = None, out: Tensor | None = None, gain: float = 1.0,
    weight: float | None = None,
) -> tuple[Tensor, list[int]] | None:  # fmt: skip
    """Return positions and state; None if too few or too many hashes were marked, or none can be.

    The seed is written to the section, or read from it if it is None.
    """
    single_launch, add = n <= grid_sync.SINGLE_LAUNCH_NUMEL, weight is not None
    bins = MORE_BINS if single_launch else BINS
    layout = _layout(n, k, bins)
    if layout is None or (section is not None and section.data_ptr() % 4):
        return None
    device = like.device
    counters = torch.zeros(grid_sync.STATE_WORDS + 3 * bins + PARTS, dtype=torch.int32, device=device)
    work = torch.empty(layout.work, dtype=torch.int32, device=device)
    tensors = (
        counters if x is None else x.view(torch.int32), counters, work,
        counters if kept is None else kept.view(torch.int32), counters if values is None else values,
        counters if section is None else section, counters if out is None else out,
    )  # fmt: skip
    seeds = (0, 0, 0, 0) if seed is None else (*split64(seed), *split64(random.key(seed, random.POSITIONS)))
    numbers = (n, k, layout.last, *seeds, *layout.arguments, float(gain), float(weight or 0.0))
    constants = {
        "GATHER": x is not None, "ADD": add, "HAS_STARTS": not single_launch and not add, "INFINITE": float("inf"),
        "LIST_SPAN": LIST_SPAN, "WORDS": WORDS, "BLOCK": BLOCK, "GAPS": GAPS, "SPAN": SPAN, "SEARCH_SPAN": SEARCH_SPAN,
        "PARTS": PARTS, "BINS": bins, "STREAM": random.stream_word(random.POSITIONS), "READ_SEED": seed is None,
        "WRITE_SEED": section is not None, "enable_fp_fusion": False,
    }  # fmt: skip
    grids = layout.grids[:7] if out is None else layout.grids
    if add:
        grids = (*grids[:8], num_buckets(k, GAPS))
    grid_sync.launch(
        _randk_phases, device, tensors, numbers, constants, grids, WARPS, single_launch=single_launch,
        cache=launches_for("drawing", n, k, x is None, section is None, out is None, add),
    )  # fmt: skip
    state = counters[:8].tolist()
    if not k <= state[MARKED_WORD] <= layout.capacity or state[KTH_WORD] >= bins**3 - 1:
        return None
    return work[:k], state


def random_positions(n: int, k: int, seed: int, like: Tensor) -> Tensor | None:
    """Return the k positions with the smallest hashes, ascending (int32); None in the rare case that marking failed."""
    result = _run(n, k, like, seed=seed)
    return None if result is None else result[0]


def randk_encode(x: Tensor, k: int, seed: int, section: Tensor) -> tuple[Tensor, int] | None:
    """Return the float32 values at random positions and amax_bits of x, and write the seed; None as above."""
    kept = torch.empty(k, dtype=torch.float32, device=x.device)
    result = _run(x.numel(), k, x, seed=seed, section=section, x=x, kept=kept)
    return None if result is None else (kept, result[1][AMAX_WORD])


def randk_decode(section: Tensor, values: Tensor, gain: float, out: Tensor, weight: float | None) -> bool:
    """Store float32 values times the gain at their random positions, or add them; False: nothing was added."""
    result = _run(
        out.numel(), values.numel(), out, section=section, values=values, out=out, gain=gain, weight=weight
    )  # fmt: skip
    if result is None:
        return False
    if result[1][NONFINITE_WORD]:
        raise FrameError("a value in the frame is not finite")
    return True
