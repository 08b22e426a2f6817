"""Bitmaps: marking the entries that reach a limit, and listing where marks stand.

A pass over many values leaves a bit for each; what follows reads a thirty-second of them. Listing a word's marks takes
as many rounds as the fullest word of a tile has marks, so it is for sparse ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.interface import num_buckets
from laconic.kernels.triton.parts import exact, halves, hash32

__all__ = ["Marks", "mark_hashed", "mark_large", "marks_of_bytes"]

WORDS = 128
"""Words of a program."""

SPAN = 32 * WORDS


@triton.jit
def _popcount(w):
    w = w - ((w >> 1) & 0x55555555)
    w = (w & 0x33333333) + ((w >> 2) & 0x33333333)
    w = (w + (w >> 4)) & 0x0F0F0F0F
    return ((w * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _keep_marks(marked, words, counts, program, WORDS: tl.constexpr):
    bit = tl.arange(0, 32)[None, :].to(tl.uint32)
    word = tl.sum(tl.reshape(marked.to(tl.uint32), (WORDS, 32)) << bit, 1)
    tl.store(words + program * WORDS + tl.arange(0, WORDS), word.to(tl.int32, bitcast=True))
    tl.store(counts + program, tl.sum(_popcount(word), 0))


@triton.jit
def _mark_large(x, limit, words, counts, n, WORDS: tl.constexpr):
    """The limit lies on the device, so that nobody waits for it. Zeros are never marked, nor what is not there."""
    program = tl.program_id(0).to(tl.int64)
    begin = program * (WORDS * 32)
    at = tl.arange(0, WORDS * 32)
    if begin + WORDS * 32 <= n:
        v = tl.load(x + begin + at)
    else:
        v = tl.load(x + begin + at, mask=begin + at < n, other=0)
    _keep_marks((v & 0x7FFFFFFF) >= tl.maximum(tl.load(limit), 1), words, counts, program, WORDS)


@triton.jit(do_not_specialize=["limit", "low_key", "high_key"])
def _mark_hashed(words, counts, n, limit, low_key, high_key, WORDS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    at = program * (WORDS * 32) + tl.arange(0, WORDS * 32)
    small = hash32(at, low_key, high_key) < limit.to(tl.uint32, bitcast=True)
    _keep_marks(small & (at < n), words, counts, program, WORDS)


@triton.jit
def _count_marks(words, counts, WORDS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    word = tl.load(words + program * WORDS + tl.arange(0, WORDS)).to(tl.uint32, bitcast=True)
    tl.store(counts + program, tl.sum(_popcount(word), 0))


@triton.jit
def _list_marks(words, ends, source, places, values, room, GATHER: tl.constexpr, WORDS: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    index = program * WORDS + tl.arange(0, WORDS)
    w = tl.load(words + index).to(tl.uint32, bitcast=True)
    ones = _popcount(w)
    to = tl.load(ends + program) - tl.sum(ones, 0) + tl.cumsum(ones, 0) - ones
    while tl.max((w != 0).to(tl.int32), 0) > 0:
        rest = w & (w - 1)
        lowest = w ^ rest
        bit = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # a power of two is its exponent
        at = index * 32 + bit
        there = (w != 0) & (to < room)
        tl.store(places + to, at.to(places.dtype.element_ty), mask=there)
        if GATHER:
            tl.store(values + to, tl.load(source + at, mask=there, other=0.0), mask=there)
        to += (w != 0).to(tl.int64)
        w = rest


class Marks:
    """A bitmap on the device, and how many marks its tiles hold up to each one's end."""

    def __init__(self, words: Tensor, counts: Tensor) -> None:
        self.words = words
        self.ends = counts.cumsum(0, dtype=torch.int64)

    @property
    def count(self) -> Tensor:
        """All marks; still on the device."""
        return self.ends[-1]

    def places(self, room: int, dtype: torch.dtype) -> Tensor:
        """Where the first ``room`` marks stand, ascending; what lies behind them is left as it was."""
        found = torch.empty(room, dtype=dtype, device=self.words.device)
        self._list(found, found, found, room, gather=False)
        return found

    def places_and_values(self, x: Tensor, room: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The same with the values of a float32 tensor that stand there; zeros behind them."""
        found, values = torch.empty(room, dtype=dtype, device=x.device), torch.zeros(room, device=x.device)
        self._list(x, found, values, room, gather=True)
        return found, values

    def _list(self, source: Tensor, places: Tensor, values: Tensor, room: int, *, gather: bool) -> None:
        _list_marks[(self.ends.numel(),)](
            self.words, self.ends, source, places, values, room, GATHER=gather, WORDS=WORDS, **exact(num_warps=4)
        )


def _empty(programs: int, device: torch.device) -> tuple[Tensor, Tensor]:
    words = torch.empty(programs * WORDS, dtype=torch.int32, device=device)
    return words, torch.empty(programs, dtype=torch.int32, device=device)


def mark_large(x: Tensor, limit: Tensor) -> Marks:
    """Float32 values, except zeros, whose magnitude, as a key, reaches the limit: an int32 of the device."""
    words, counts = _empty(num_buckets(x.numel(), SPAN), x.device)
    _mark_large[(counts.numel(),)](
        x.view(torch.int32), limit, words, counts, x.numel(), WORDS=WORDS, **exact(num_warps=4)
    )
    return Marks(words, counts)


def mark_hashed(n: int, limit: int, key: int, device: torch.device) -> Marks:
    """Of n positions those whose hash is smaller than the limit."""
    words, counts = _empty(num_buckets(n, SPAN), device)
    _mark_hashed[(counts.numel(),)](words, counts, n, halves(limit)[0], *halves(key), WORDS=WORDS, **exact(num_warps=4))
    return Marks(words, counts)


def marks_of_bytes(section: Tensor) -> Marks:
    """The set bits of a section that is not empty."""
    programs = num_buckets(section.numel(), 4 * WORDS)
    words = torch.zeros(programs * WORDS, dtype=torch.int32, device=section.device)
    words.view(torch.uint8)[: section.numel()].copy_(section)
    counts = torch.empty(programs, dtype=torch.int32, device=section.device)
    _count_marks[(programs,)](words, counts, WORDS=WORDS, **exact(num_warps=4))
    return Marks(words, counts)
