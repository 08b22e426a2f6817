"""Counter-based randomness: a keyed 32-bit hash of (seed, stream, counter).

The same number comes out on every backend, whatever the thread count, the chunking or the order of work. Two
multiply-xorshift rounds (constants of Wellons' ``lowbias32``) with a key word mixed in before each, so that streams of
different seeds are not shifted copies of one another.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

ROUNDING, POSITIONS, SAMPLING, ROTATION = 0, 1, 2, 3
"""Streams: what the numbers are for. Stages of one chain share a seed; only samples (of others' values) a stream."""

M32 = 0xFFFFFFFF
M64 = 0xFFFFFFFFFFFFFFFF


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


def stream_word(stream: int) -> int:
    """What tells the streams of a seed apart."""
    return stream * 0xD1B54A32D192ED03 & M64


@lru_cache(maxsize=256)
def key(seed: int, stream: int) -> int:
    """The 64-bit key of one stream of a seed: low and high word enter the two rounds."""
    return splitmix64(splitmix64(seed & M64) ^ stream_word(stream))


def _times(a: Tensor, c: int | Tensor) -> Tensor:
    # Both below 2^32; modulo 2^32, without leaving int64's positive range.
    return (a * (c & 0xFFFF) + (((a * (c >> 16)) & 0xFFFF) << 16)) & M32


def hash32(counter: Tensor, key64: int) -> Tensor:
    """The hash of each counter (int64), as int64 in [0, 2^32)."""
    low_key, high_key = key64 & M32, key64 >> 32
    h = (counter & M32) ^ low_key ^ _times((counter >> 32) & M32, 0x9E3779B9)
    h = h ^ (h >> 16)
    h = _times(h, 0x7FEB352D)
    h = h ^ (h >> 15) ^ high_key
    h = _times(h, 0x846CA68B)
    return h ^ (h >> 16)


def row_factor(row: int) -> int:
    """The odd number that a lane's hash is multiplied by in each of the 32 rows of a packing group."""
    return (splitmix64(row) & M32) | 1


def dither(n: int, fraction_bits: int, key64: int, device: torch.device) -> Tensor:
    """What stochastic rounding adds to a fixed-point value of ``fraction_bits``, for elements 0..n-1.

    One hash per lane of a packing group (256 values, 32 rows of 8 lanes), times an odd factor per row: multiplication
    by an odd number permutes the 32-bit integers, so every element's noise is uniform, and factors without a simple
    ratio leave rows uncorrelated. A hash per element would be half the work of encoding.
    """
    element = torch.arange(n, dtype=torch.int64, device=device)
    row, lane = (element >> 3) & 31, element & 7
    h = hash32(((element >> 8) << 3) | lane, key64)
    factors = torch.tensor([row_factor(r) for r in range(32)], dtype=torch.int64, device=device)[row]
    return _times(h, factors) >> (32 - fraction_bits)
