"""Exact top-k of each of several slots, without a sort and without synchronization.

Magnitudes of float32 are ordered like their bits. One histogram pass per digit finds each slot's k-th largest; of equal
entries the lowest indices are kept, as in the reference. Positions are ascending because each tile writes where the
tiles before it end. ``topk`` is faster if its sample is good; this always works.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.triton.launch_args import exact_options

__all__ = ["Selector"]

TILE = 4096
DIGITS = ((23, 8), (12, 11), (0, 12))
"""Shift and width of each digit of a magnitude's 31 bits. The first, of all values, is counted by a histogram, which
takes as long as it has bins; the others, of few values, by atomic additions."""


@triton.jit
def _magnitudes(x, offsets, valid):
    """Load magnitude bits; 0, the smallest, outside of the tile."""
    return tl.load(x + offsets, mask=valid, other=0) & 0x7FFFFFFF


@triton.jit
def _first_digits(
    x, tile_begin, tile_end, tile_slot, counts,
    SHIFT: tl.constexpr, TILE: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    offsets = tl.load(tile_begin + tile) + tl.arange(0, TILE)
    counted = tl.histogram(_magnitudes(x, offsets, offsets < tl.load(tile_end + tile)) >> SHIFT, BINS)
    bins = tl.arange(0, BINS)
    tl.atomic_add(counts + tl.load(tile_slot + tile) * BINS + bins, counted, mask=counted > 0)


@triton.jit
def _next_digits(
    x, tile_begin, tile_end, tile_slot, prefix, counts,
    SHIFT: tl.constexpr, TILE: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    slot = tl.load(tile_slot + tile)
    offsets = tl.load(tile_begin + tile) + tl.arange(0, TILE)
    valid = offsets < tl.load(tile_end + tile)
    key = _magnitudes(x, offsets, valid)
    digit = key >> SHIFT
    alike = (key > 0) & ((digit // BINS) == tl.load(prefix + slot))  # one counter of all zeros would be contended
    tl.atomic_add(counts + slot * BINS + digit % BINS, 1, mask=alike)


@triton.jit
def _pick(counts, left, prefix, BINS: tl.constexpr):
    """Determine the digit of each slot's k-th largest, and how many entries with that digit are wanted.

    Zeros need not be counted: they are what is left for digit 0.
    """
    slot = tl.program_id(0)
    bins = tl.arange(0, BINS)
    count = tl.load(counts + slot * BINS + bins)
    wanted = tl.load(left + slot)
    at_least = tl.sum(count, 0) - tl.cumsum(count, 0) + count
    digit = tl.maximum(tl.sum((at_least >= wanted).to(tl.int32), 0) - 1, 0)
    tl.store(left + slot, wanted - tl.sum(tl.where(bins > digit, count, 0), 0))
    tl.store(prefix + slot, tl.load(prefix + slot) * BINS + digit)


@triton.jit
def _count(x, tile_begin, tile_end, tile_slot, limit, above, equal, TILE: tl.constexpr):
    tile = tl.program_id(0)
    offsets = tl.load(tile_begin + tile) + tl.arange(0, TILE)
    valid = offsets < tl.load(tile_end + tile)
    key = _magnitudes(x, offsets, valid)
    kth = tl.load(limit + tl.load(tile_slot + tile))
    tl.store(above + tile, tl.sum((valid & (key > kth)).to(tl.int32), 0))
    tl.store(equal + tile, tl.sum((valid & (key == kth)).to(tl.int32), 0))


@triton.jit
def _settle(above, equal, left, heads, firsts, taken, first, SPAN: tl.constexpr):
    """Compute, tile by tile of a slot, how many equal entries are kept and where the first kept one is written."""
    slot = tl.program_id(0)
    wanted = tl.load(left + slot)
    equal_before = wanted * 0
    written = tl.load(firsts + slot)
    first_tile = tl.load(heads + slot)
    end = tl.load(heads + slot + 1)
    while first_tile < end:
        tile = first_tile + tl.arange(0, SPAN)
        valid = tile < end
        ties = tl.load(equal + tile, mask=valid, other=0)
        kept = tl.minimum(tl.maximum(wanted - (equal_before + tl.cumsum(ties, 0) - ties), 0), ties)
        chosen = tl.load(above + tile, mask=valid, other=0) + kept
        tl.store(taken + tile, kept, mask=valid)
        tl.store(first + tile, written + tl.cumsum(chosen, 0) - chosen, mask=valid)
        equal_before += tl.sum(ties, 0)
        written += tl.sum(chosen, 0)
        first_tile += SPAN


@triton.jit
def _write(x, tile_begin, tile_end, tile_slot, limit, equal, taken, first, out, values, TILE: tl.constexpr):
    tile = tl.program_id(0)
    offsets = tl.load(tile_begin + tile) + tl.arange(0, TILE)
    valid = offsets < tl.load(tile_end + tile)
    key = _magnitudes(x, offsets, valid)
    kth = tl.load(limit + tl.load(tile_slot + tile))
    chosen = (valid & (key >= kth)).to(tl.int32)
    kept = tl.load(taken + tile)
    if kept < tl.load(equal + tile):  # not all of the equal entries, which is rare: the first ones
        ties = (valid & (key == kth)).to(tl.int32)
        chosen = chosen - ((ties > 0) & (tl.cumsum(ties, 0) > kept)).to(tl.int32)
    target = tl.load(first + tile) + tl.cumsum(chosen, 0) - chosen
    tl.store(out + target, offsets.to(out.dtype.element_ty), mask=chosen > 0)
    tl.store(values + target, tl.load(x + offsets, mask=chosen > 0, other=0), mask=chosen > 0)


class Selector:
    """Selects in slots that follow one another in a flat float32 tensor.

    Args:
        spans: Begin and end of each slot.
        counts: How many each slot keeps, between 1 and its size.
        device: A CUDA device.
        firsts: Where the positions and values of each slot begin; one behind the other by default.
    """

    def __init__(
        self, spans: Sequence[tuple[int, int]], counts: Sequence[int], device: torch.device,
        firsts: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        firsts = list(accumulate(counts, initial=0))[:-1] if firsts is None else firsts
        begins = [torch.arange(begin, end, TILE, dtype=torch.int64) for begin, end in spans]
        sizes = [len(each) for each in begins]
        ends = [torch.full((size,), end, dtype=torch.int64) for size, (_, end) in zip(sizes, spans, strict=True)]
        self._num, self._total, self._slots = sum(sizes), firsts[-1] + counts[-1], len(counts)
        self._begin, self._end = torch.cat(begins).to(device), torch.cat(ends).to(device)
        self._slot = torch.repeat_interleave(torch.tensor(sizes)).to(device, torch.int32)
        self._start = torch.tensor([*counts, *([0] * len(counts))], dtype=torch.int32, device=device)
        self._heads = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device)
        self._firsts = torch.tensor(firsts, dtype=torch.int64, device=device)

    def choose(self, x: Tensor) -> Tensor:
        """Return the kept positions of all slots (int64), ascending."""
        return self.choose_with_values(x, torch.int64)[0]

    def choose_with_values(self, x: Tensor, dtype: torch.dtype, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the kept positions and values of all slots, the values in ``values`` if given."""
        bits, device = x.view(torch.int32), x.device
        out = torch.empty(self._total, dtype=dtype, device=device)
        values = torch.empty(self._total, device=device) if values is None else values
        tiles: tuple[Any, ...] = (bits, self._begin, self._end, self._slot)
        grid, options = (self._num,), exact_options(TILE=TILE, num_warps=4)
        left, prefix = torch.split(self._start.clone(), self._slots)
        sizes = [self._slots << width for _, width in DIGITS]
        counted = torch.zeros(sum(sizes), dtype=torch.int32, device=device).split(sizes)
        for number, (counts, (shift, width)) in enumerate(zip(counted, DIGITS, strict=True)):
            bins = {"SHIFT": shift, "BINS": 1 << width, **options}
            if number == 0:
                _first_digits[grid](*tiles, counts, **bins)
            else:
                _next_digits[grid](*tiles, prefix, counts, **bins)
            _pick[(self._slots,)](counts, left, prefix, BINS=1 << width, **exact_options(num_warps=4))
        above, equal, taken = torch.empty(3, self._num, dtype=torch.int32, device=device).unbind()
        first = torch.empty(self._num, dtype=torch.int64, device=device)
        _count[grid](*tiles, prefix, above, equal, **options)
        _settle[(self._slots,)](
            above, equal, left, self._heads, self._firsts, taken, first, SPAN=1024, **exact_options(num_warps=4)
        )
        _write[grid](*tiles, prefix, equal, taken, first, out, values.view(torch.int32), **options)
        return out, values
