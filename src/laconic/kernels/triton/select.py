"""The k entries of largest magnitude in each of several slots, exactly, without a sort and without a wait.

Magnitudes of float32 are ordered like their bits. Three passes of histograms (11, 10 and 10 bits) find each slot's
k-th largest; of entries that are equal to it the lowest indices are taken, as the reference does. Positions come out
in ascending order because tiles are written where the tiles before them end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Selector"]

TILE = 4096
DIGITS = ((20, 11), (10, 10), (0, 10))
"""Shift and width of each digit of a magnitude's 31 bits."""


@triton.jit
def _first_digits(x, tile_begin, tile_end, tile_slot, counts, TILE: tl.constexpr, BINS: tl.constexpr):
    tile = tl.program_id(0)
    at = tl.load(tile_begin + tile) + tl.arange(0, TILE)
    there = at < tl.load(tile_end + tile)
    magnitude = tl.load(x + at, mask=there, other=0) & 0x7FFFFFFF  # what is not there counts as 0, and is taken off
    found = tl.histogram(magnitude >> 20, BINS)
    bins = tl.arange(0, BINS)
    tl.atomic_add(counts + tl.load(tile_slot + tile) * BINS + bins, found, mask=found > 0)


@triton.jit
def _next_digits(
    x, tile_begin, tile_end, tile_slot, prefix, counts, SHIFT: tl.constexpr, TILE: tl.constexpr, BINS: tl.constexpr
):
    tile = tl.program_id(0)
    slot = tl.load(tile_slot + tile)
    at = tl.load(tile_begin + tile) + tl.arange(0, TILE)
    there = at < tl.load(tile_end + tile)
    magnitude = tl.load(x + at, mask=there, other=0) & 0x7FFFFFFF
    digit = magnitude >> SHIFT
    alike = there & ((digit // BINS) == tl.load(prefix + slot))
    tl.atomic_add(counts + slot * BINS + digit % BINS, 1, mask=alike)


@triton.jit
def _count(x, tile_begin, tile_end, tile_slot, limit, above, equal, TILE: tl.constexpr):
    tile = tl.program_id(0)
    at = tl.load(tile_begin + tile) + tl.arange(0, TILE)
    there = at < tl.load(tile_end + tile)
    magnitude = tl.load(x + at, mask=there, other=0) & 0x7FFFFFFF
    kth = tl.load(limit + tl.load(tile_slot + tile))
    tl.store(above + tile, tl.sum((there & (magnitude > kth)).to(tl.int32), 0))
    tl.store(equal + tile, tl.sum((there & (magnitude == kth)).to(tl.int32), 0))


@triton.jit
def _write(x, tile_begin, tile_end, tile_slot, limit, taken, first, out, TILE: tl.constexpr):
    tile = tl.program_id(0)
    at = tl.load(tile_begin + tile) + tl.arange(0, TILE)
    there = at < tl.load(tile_end + tile)
    magnitude = tl.load(x + at, mask=there, other=0) & 0x7FFFFFFF
    kth = tl.load(limit + tl.load(tile_slot + tile))
    equal = (there & (magnitude == kth)).to(tl.int32)
    rank = tl.cumsum(equal, 0) - equal
    chosen = ((there & (magnitude > kth)) | ((equal > 0) & (rank < tl.load(taken + tile)))).to(tl.int32)
    place = tl.load(first + tile) + tl.cumsum(chosen, 0) - chosen
    tl.store(out + place, at, mask=chosen > 0)


class Selector:
    """Selects in slots that lie one behind the other in a flat float32 tensor.

    Args:
        spans: Begin and end of each slot.
        counts: How many each keeps, between 1 and its size.
        device: A CUDA device.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], counts: Sequence[int], device: torch.device) -> None:
        tiles = [
            (at, end, slot) for slot, (begin, end) in enumerate(spans) for at in range(begin, end, TILE)
        ]  # fmt: skip
        self._num = len(tiles)
        begins, ends, slots = zip(*tiles, strict=True)
        self._begin = torch.tensor(begins, dtype=torch.int64, device=device)
        self._end = torch.tensor(ends, dtype=torch.int64, device=device)
        self._slot = torch.tensor(slots, dtype=torch.int32, device=device)
        self._slot_index = self._slot.to(torch.int64)
        self._k = torch.tensor(list(counts), dtype=torch.int32, device=device)
        padding = [-(end - begin) % TILE for begin, end in spans]
        self._padding = torch.tensor(padding, dtype=torch.int32, device=device)
        heads = [next(i for i, tile in enumerate(tiles) if tile[2] == slot) for slot in range(len(counts))]
        self._head = torch.tensor(heads, dtype=torch.int64, device=device)[self._slot_index]
        self._total = sum(counts)

    def choose(self, x: Tensor) -> Tensor:
        """Positions (int64) of what all slots keep, ascending."""
        bits = x.view(torch.int32)
        slots = self._k.numel()
        tiles: tuple[Any, ...] = (bits, self._begin, self._end, self._slot)
        grid = (self._num,)
        left, prefix = self._k, torch.zeros_like(self._k)
        for shift, width in DIGITS:
            bins = 1 << width
            counts = torch.zeros(slots, bins, dtype=torch.int32, device=x.device)
            if shift == 20:
                _first_digits[grid](*tiles, counts, TILE=TILE, BINS=bins)
                counts[:, 0] -= self._padding
            else:
                _next_digits[grid](*tiles, prefix, counts, SHIFT=shift, TILE=TILE, BINS=bins)
            at_least = counts.flip(1).cumsum(1, dtype=torch.int32).flip(1)
            digit = (at_least >= left.unsqueeze(1)).sum(1) - 1
            above = at_least.gather(1, digit.unsqueeze(1)).squeeze(1) - counts.gather(1, digit.unsqueeze(1)).squeeze(1)
            left = left - above
            prefix = (prefix << width) | digit.to(torch.int32)
        above, equal = (torch.empty(self._num, dtype=torch.int32, device=x.device) for _ in range(2))
        _count[grid](*tiles, prefix, above, equal, TILE=TILE)
        before = equal.cumsum(0, dtype=torch.int32) - equal
        before = before - before[self._head]
        taken = torch.minimum((left[self._slot_index] - before).clamp(min=0), equal).to(torch.int32)
        written = above + taken
        first = written.cumsum(0, dtype=torch.int32) - written
        out = torch.empty(self._total, dtype=torch.int64, device=x.device)
        _write[grid](*tiles, prefix, taken, first, out, TILE=TILE)
        return out
