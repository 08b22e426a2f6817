"""Selectors: exact top-k, all values above a threshold, and the threshold of a sample."""

from __future__ import annotations

import struct
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.reference.selection import SAMPLES, index_dtype
from laconic.kernels.sections import num_buckets
from laconic.kernels.triton import grid_sync
from laconic.kernels.triton.bitmap import BLOCK, WORDS, load_bits, store_bitmap, tile_parts
from laconic.kernels.triton.grid_sync import PARTS, end_phase
from laconic.kernels.triton.launch_args import exact_options
from laconic.kernels.triton.launch_cache import launches_for
from laconic.kernels.triton.linear import sample
from laconic.kernels.triton.topk import TopK, list_bitmap, sampled_topk
from laconic.kernels.triton.topk_batched import Selector

__all__ = ["above", "amax_bits_by_tile", "sampled_threshold", "topk"]

SPAN = 4096


@triton.jit
def _amax_bits(x, amax_bits, n, SPAN: tl.constexpr):
    """Store the largest magnitude of each program's values, which are float32 bit patterns."""
    program = tl.program_id(0).to(tl.int64)
    offsets = program * SPAN + tl.arange(0, SPAN)
    tl.store(amax_bits + program, tl.max(tl.load(x + offsets, mask=offsets < n, other=0) & 0x7FFFFFFF, 0))


def amax_bits_by_tile(x: Tensor) -> Tensor:
    """Return the largest magnitude of each tile of a flat, nonempty float32 tensor."""
    programs = num_buckets(x.numel(), SPAN)
    amax_bits = torch.empty(programs, dtype=torch.int32, device=x.device)
    _amax_bits[(programs,)](x.view(torch.int32), amax_bits, x.numel(), SPAN=SPAN, **exact_options(num_warps=4))
    return amax_bits


@triton.jit(do_not_specialize=["limit", "tiles", "tiles_per_part", "parts", "capacity"])
def _above(
    x, counters, words, positions, values, n, limit, tiles, tiles_per_part, parts, capacity,
    FIRST: tl.constexpr, LAST: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Phases: mark the magnitudes that reach the limit (not 0); list them; gather them."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    for phase in tl.static_range(FIRST, LAST + 1):
        part = program
        if phase == 0:
            while part < tiles:
                large = (load_bits(x, n, part, WORDS) & 0x7FFFFFFF) >= limit
                store_bitmap(large, words, counters + 16, part, tiles_per_part, WORDS)
                part += programs
        if phase == 1:
            list_bitmap(
                counters, counters + 16, words, positions, tiles, tiles_per_part, parts, capacity, program, programs,
                WORDS, BLOCK, PARTS,
            )  # fmt: skip
        if phase == 2:
            largest = limit * 0
            count = tl.minimum(tl.load(counters + 1), capacity)
            begin = program * 1024
            while begin < count:
                offsets = begin + tl.arange(0, 1024)
                v = tl.load(
                    x + tl.load(positions + offsets, mask=offsets < count, other=0), mask=offsets < count, other=0
                )
                tl.store(values + offsets, v, mask=offsets < count)
                largest = tl.maximum(largest, tl.max(v & 0x7FFFFFFF, 0))
                begin += programs * 1024
            tl.atomic_max(counters + 2, largest, sem="relaxed")
        end_phase(counters, programs, phase, FIRST, LAST)


def above(x: Tensor, limit: int) -> tuple[Tensor, Tensor, int]:
    """Return positions and values of the float32 entries whose magnitude bits are at least ``limit``, and amax_bits.

    One synchronization, for their number. The capacity is a guess; if it was too small, the selection runs again.
    """
    n = x.numel()
    if limit == 0 or n > grid_sync.MAX_NUMEL:  # all entries; a bitmap is for few
        positions = torch.nonzero((x.view(torch.int32) & 0x7FFFFFFF) >= limit).view(-1).to(index_dtype(n))
        return positions, x.index_select(0, positions), _amax_bits_of(x)
    tiles, tiles_per_part, parts = tile_parts(n)
    bits = x.view(torch.int32)
    counters = torch.zeros(grid_sync.STATE_WORDS + PARTS, dtype=torch.int32, device=x.device)
    words = torch.empty(tiles * WORDS, dtype=torch.int32, device=x.device)
    capacity = min(n, max(n // 32, 1 << 16))
    constants = exact_options(WORDS=WORDS, BLOCK=BLOCK, PARTS=PARTS)
    while True:
        positions, values = (torch.empty(capacity, dtype=torch.int32, device=x.device) for _ in range(2))
        grid_sync.launch(
            _above, x.device, (bits, counters, words, positions, values),
            (n, limit, tiles, tiles_per_part, parts, capacity), constants,
            (tiles, parts, min(4096, num_buckets(capacity, 1024))), (4, 4, 4),
            single_launch=n <= grid_sync.SINGLE_LAUNCH_NUMEL, cache=launches_for("above", n, capacity),
        )  # fmt: skip
        _, count, key = counters[:3].tolist()
        if count <= capacity:
            return positions[:count], values[:count].view(torch.float32), key
        capacity = count
        counters.zero_()


def float_magnitude_bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0]) & 0x7FFFFFFF


@lru_cache(maxsize=64)
def _selector(n: int, k: int, device: torch.device) -> Selector:
    return Selector([(0, n)], [k], device)


def topk(x: Tensor, k: int, out: Tensor) -> TopK:
    """Return the k largest magnitudes of a float32 tensor; their positions are encoded in ``out`` where that is cheap.

    If the sample misled the selection, exact passes over all values run.
    """
    result = sampled_topk(x, k, out)
    if result is not None:
        return result
    n = x.numel()
    chosen, kept = _selector(n, k, x.device).choose_with_values(x, index_dtype(n))
    return TopK(None, chosen, kept, _amax_bits_of(kept))


def _amax_bits_of(values: Tensor) -> int:
    return int(amax_bits_by_tile(values).max())


@triton.jit(do_not_specialize=["rank"])
def _rank_threshold(x, result, rank, COUNT: tl.constexpr):
    """Find the largest magnitude that ``rank`` values reach, bit by bit."""
    magnitude = tl.load(x + tl.arange(0, COUNT)) & 0x7FFFFFFF
    threshold = rank * 0
    for i in range(31):
        candidate = threshold | (1 << (30 - i))
        threshold = tl.where(tl.sum((magnitude >= candidate).to(tl.int32), 0) >= rank, candidate, threshold)
    tl.store(result, threshold)


def _sampled_limit(x: Tensor, rank: int, seed: int) -> Tensor:
    """Return the magnitude bits of a rank (from 1 on) among 65,536 samples, on the device."""
    result = torch.empty(1, dtype=torch.int32, device=x.device)
    bits = sample(x, SAMPLES, seed).view(torch.int32)
    _rank_threshold[(1,)](bits, result, rank, COUNT=SAMPLES, **exact_options(num_warps=32))
    return result


def sampled_threshold(x: Tensor, rank: int, seed: int) -> int:
    """Return the magnitude bits of a rank among 65,536 samples."""
    return int(_sampled_limit(x, rank, seed))
