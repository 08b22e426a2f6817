"""Bitmaps: marking the entries that reach a limit, and listing where marks stand.

A pass over many values leaves a bit for each; what follows reads a thirty-second of them. Listing a word's marks takes
as many rounds as the fullest word of a block has marks, so it is for sparse ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.sections import num_buckets
from laconic.kernels.triton.grid_sync import PARTS

__all__ = ["BLOCK", "TILE", "WORDS", "in_parts", "keep_marks", "load_bits", "popcount", "take_lowest"]

WORDS = 128
TILE = 32 * WORDS
"""Values that are marked together."""

BLOCK = 512
"""Words that are listed together."""


def in_parts(n: int) -> tuple[int, int, int]:
    """Tiles of n values, tiles of a part, and parts."""
    tiles = num_buckets(n, TILE)
    per = num_buckets(tiles, PARTS)
    return tiles, per, num_buckets(tiles, per)


@triton.jit
def popcount(w):
    w = w - ((w >> 1) & 0x55555555)
    w = (w & 0x33333333) + ((w >> 2) & 0x33333333)
    w = (w + (w >> 4)) & 0x0F0F0F0F
    return ((w * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def load_bits(x, n, tile, WORDS: tl.constexpr):
    """A tile's values, as bits of float32; zeros past the end."""
    begin = tile * (WORDS * 32)
    at = tl.arange(0, WORDS * 32)
    if begin + WORDS * 32 <= n:
        v = tl.load(x + begin + at)
    else:
        v = tl.load(x + begin + at, mask=begin + at < n, other=0)
    return v


@triton.jit
def keep_marks(marked, words, counts, tile, per, WORDS: tl.constexpr):
    """A tile's marks as words, and their number added to its part's, which was 0."""
    bit = tl.arange(0, 32)[None, :].to(tl.uint32)
    word = tl.sum(tl.reshape(marked.to(tl.uint32), (WORDS, 32)) << bit, 1)
    tl.store(words + tile * WORDS + tl.arange(0, WORDS), word.to(tl.int32, bitcast=True))
    tl.atomic_add(counts + tile // per, tl.sum(popcount(word), 0), sem="relaxed")


@triton.jit
def take_lowest(w):
    """The place of each word's lowest mark, and the word without it."""
    rest = w & (w - 1)
    lowest = w ^ rest
    return (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127, rest  # a power of two is its exponent
