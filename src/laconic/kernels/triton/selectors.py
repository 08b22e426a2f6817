"""Which entries a selector keeps: exact top-k, all above a threshold, and random ones; with the largest magnitude."""

from __future__ import annotations

import struct
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.reference.selection import SAMPLES, index_dtype
from laconic.kernels.sections import num_buckets
from laconic.kernels.triton.bitmap import BLOCK, WORDS, in_parts, keep_marks, load_bits
from laconic.kernels.triton.grid_sync import BARRIER, MOST, PARTS, SMALL, STATE, launch, wait_for_all
from laconic.kernels.triton.launch_cache import remembered
from laconic.kernels.triton.linear import sample
from laconic.kernels.triton.tile import exact
from laconic.kernels.triton.topk import Largest, largest, list_marked
from laconic.kernels.triton.topk_batched import Selector

__all__ = ["above", "keys_of", "sampled_threshold", "topk"]

SPAN = 4096


@triton.jit
def _keys(x, keys, n, SPAN: tl.constexpr):
    """The largest magnitude of each program, out of the bits of float32 values."""
    program = tl.program_id(0).to(tl.int64)
    at = program * SPAN + tl.arange(0, SPAN)
    tl.store(keys + program, tl.max(tl.load(x + at, mask=at < n, other=0) & 0x7FFFFFFF, 0))


def keys_of(x: Tensor) -> Tensor:
    """Largest magnitudes of parts of a flat float32 tensor that is not empty."""
    programs = num_buckets(x.numel(), SPAN)
    keys = torch.empty(programs, dtype=torch.int32, device=x.device)
    _keys[(programs,)](x.view(torch.int32), keys, x.numel(), SPAN=SPAN, **exact(num_warps=4))
    return keys


@triton.jit(do_not_specialize=["limit", "tiles", "per", "parts", "room"])
def _above(
    x, counters, words, found, values, n, limit, tiles, per, parts, room,
    FIRST: tl.constexpr, LAST: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Marks what reaches the limit, which is not 0, lists it and gathers it; the state: how many, and the largest."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    for phase in tl.static_range(FIRST, LAST + 1):
        part = program
        if phase == 0:
            while part < tiles:
                large = (load_bits(x, n, part, WORDS) & 0x7FFFFFFF) >= limit
                keep_marks(large, words, counters + 16, part, per, WORDS)
                part += programs
        if phase == 1:
            while part < parts:
                list_marked(counters, counters + 16, words, found, tiles, per, parts, room, part, WORDS, BLOCK, PARTS)
                part += programs
        if phase == 2:
            largest = limit * 0
            count = tl.minimum(tl.load(counters + 1), room)
            begin = program * 1024
            while begin < count:
                at = begin + tl.arange(0, 1024)
                v = tl.load(x + tl.load(found + at, mask=at < count, other=0), mask=at < count, other=0)
                tl.store(values + at, v, mask=at < count)
                largest = tl.maximum(largest, tl.max(v & 0x7FFFFFFF, 0))
                begin += programs * 1024
            tl.atomic_max(counters + 2, largest, sem="relaxed")
        if phase < LAST:
            wait_for_all(counters + BARRIER, programs * (phase - FIRST + 1))


def above(x: Tensor, limit: int) -> tuple[Tensor, Tensor, int]:
    """Positions and values of the float32 entries whose magnitude, as a key, is at least ``limit``; the largest.

    One wait, for their number. Room is made before it is known, and again where it was too little.
    """
    n = x.numel()
    if limit == 0 or n > MOST:  # all of them, and marks are for few
        positions = torch.nonzero((x.view(torch.int32) & 0x7FFFFFFF) >= limit).view(-1).to(index_dtype(n))
        return positions, x.index_select(0, positions), int(_largest(x))
    tiles, per, parts = in_parts(n)
    bits = x.view(torch.int32)
    counters = torch.zeros(STATE + PARTS, dtype=torch.int32, device=x.device)
    words = torch.empty(tiles * WORDS, dtype=torch.int32, device=x.device)
    room = min(n, max(n // 32, 1 << 16))
    constants = exact(WORDS=WORDS, BLOCK=BLOCK, PARTS=PARTS)
    while True:
        found, values = (torch.empty(room, dtype=torch.int32, device=x.device) for _ in range(2))
        launch(
            _above, x.device, (bits, counters, words, found, values), (n, limit, tiles, per, parts, room), constants,
            (tiles, parts, min(4096, num_buckets(room, 1024))), (4, 4, 4), together=n <= SMALL,
            known=remembered("above", n, room),
        )  # fmt: skip
        _, count, key = counters[:3].tolist()
        if count <= room:
            return found[:count], values[:count].view(torch.float32), key
        room = count
        counters.zero_()


def key_of_float(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0]) & 0x7FFFFFFF


@lru_cache(maxsize=64)
def _selector(n: int, k: int, device: torch.device) -> Selector:
    return Selector([(0, n)], [k], device)


def topk(x: Tensor, k: int, out: Tensor) -> Largest:
    """Of a float32 tensor the k largest magnitudes; their positions are coded in ``out`` if that is little more work.

    Where a sample did not lead to them, exact passes over all values do.
    """
    found = largest(x, k, out)
    if found is not None:
        return found
    n = x.numel()
    chosen, kept = _selector(n, k, x.device).choose_with_values(x, index_dtype(n))
    return Largest(None, chosen, kept, int(_largest(kept)))


def _largest(values: Tensor) -> Tensor:
    return keys_of(values).max().to(torch.int64)


@triton.jit(do_not_specialize=["rank"])
def _rank(x, found, rank, COUNT: tl.constexpr):
    """The largest key that so many magnitudes reach, bit by bit."""
    magnitude = tl.load(x + tl.arange(0, COUNT)) & 0x7FFFFFFF
    key = rank * 0
    for i in range(31):
        tried = key | (1 << (30 - i))
        key = tl.where(tl.sum((magnitude >= tried).to(tl.int32), 0) >= rank, tried, key)
    tl.store(found, key)


def _sampled_limit(x: Tensor, rank: int, seed: int) -> Tensor:
    """The magnitude of a rank (from 1 on) among 65,536 sampled ones, as a key on the device."""
    found = torch.empty(1, dtype=torch.int32, device=x.device)
    bits = sample(x, SAMPLES, seed).view(torch.int32)
    _rank[(1,)](bits, found, rank, COUNT=SAMPLES, **exact(num_warps=32))
    return found


def sampled_threshold(x: Tensor, rank: int, seed: int) -> int:
    """The same, known here."""
    return int(_sampled_limit(x, rank, seed))
