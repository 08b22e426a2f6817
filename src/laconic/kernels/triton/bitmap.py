"""Bitmaps of selected values, and the positions of their set bits.

A pass over all values leaves one bit each; what follows reads a thirty-second of the memory. Listing the bits of a
block takes as many rounds as its fullest word has bits, so it suits sparse bitmaps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.sections import num_buckets
from laconic.kernels.triton.grid_sync import PARTS

__all__ = ["BLOCK", "TILE", "WORDS", "load_bits", "pop_lowest_bit", "popcount", "store_bitmap", "tile_parts"]

WORDS = 128
TILE = 32 * WORDS
"""Values of one tile."""

BLOCK = 512
"""Bitmap words that are listed together."""


def tile_parts(n: int) -> tuple[int, int, int]:
    """Return the number of tiles, tiles per part, and parts."""
    tiles = num_buckets(n, TILE)
    tiles_per_part = num_buckets(tiles, PARTS)
    return tiles, tiles_per_part, num_buckets(tiles, tiles_per_part)


@triton.jit
def popcount(w):
    w = w - ((w >> 1) & 0x55555555)
    w = (w & 0x33333333) + ((w >> 2) & 0x33333333)
    w = (w + (w >> 4)) & 0x0F0F0F0F
    return ((w * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def load_bits(x, n, tile, WORDS: tl.constexpr):
    """Load a tile's values as float32 bit patterns; zeros past the end."""
    begin = tile * (WORDS * 32)
    offsets = tl.arange(0, WORDS * 32)
    if begin + WORDS * 32 <= n:
        v = tl.load(x + begin + offsets)
    else:
        v = tl.load(x + begin + offsets, mask=begin + offsets < n, other=0)
    return v


@triton.jit
def store_bitmap(selected, words, counts, tile, tiles_per_part, WORDS: tl.constexpr):
    """Store a tile's bits as words, and add their number to the count of its part."""
    bit = tl.arange(0, 32)[None, :].to(tl.uint32)
    word = tl.sum(tl.reshape(selected.to(tl.uint32), (WORDS, 32)) << bit, 1)
    tl.store(words + tile * WORDS + tl.arange(0, WORDS), word.to(tl.int32, bitcast=True))
    tl.atomic_add(counts + tile // tiles_per_part, tl.sum(popcount(word), 0), sem="relaxed")


@triton.jit
def pop_lowest_bit(w):
    """Return the index of each word's lowest set bit, and the word without it."""
    rest = w & (w - 1)
    lowest = w ^ rest
    return (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127, rest  # the exponent of a power of two
