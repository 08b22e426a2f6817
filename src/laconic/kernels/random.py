"""Counter-based random numbers: a keyed 32-bit hash of (seed, stream, counter).

Every backend gets the same numbers, whatever the number of threads, the chunks or the order of work. The hash has two
multiply-xorshift rounds (constants of Wellons' ``lowbias32``) with a key word mixed in before each, so that streams of
different seeds are not shifted copies of one another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

ROUNDING, POSITIONS, SAMPLING, ROTATION, RESIDUALS = 0, 1, 2, 3, 4
"""Streams: the purposes of random numbers. The stages of a chain share a seed but, except for samples, no stream."""

M32 = 0xFFFFFFFF
M64 = 0xFFFFFFFFFFFFFFFF


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


@lru_cache(maxsize=4096)
def hash_of(name: str) -> int:
    """Return 64 bits of a name, the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def stream_word(stream: int) -> int:
    """Return the word that distinguishes the streams of a seed."""
    return stream * 0xD1B54A32D192ED03 & M64


@lru_cache(maxsize=256)
def key(seed: int, stream: int) -> int:
    """Return the 64-bit hash key of one stream of a seed; its two words enter the two rounds."""
    return splitmix64(splitmix64(seed & M64) ^ stream_word(stream))


def keys(seeds: Sequence[int], stream: int) -> Tensor:
    """Return ``key`` of many seeds as pairs of int32 words, the low one first."""
    import numpy as np

    numbers = seeds if isinstance(seeds, np.ndarray) else np.array([seed & M64 for seed in seeds], dtype=np.uint64)
    of_stream = splitmix64_all(splitmix64_all(numbers) ^ np.uint64(stream_word(stream)))
    return torch.from_numpy(of_stream.view(np.int32).reshape(-1, 2))


def splitmix64_all(x: Any) -> Any:
    """Return ``splitmix64`` of each number of a numpy array of uint64."""
    import numpy as np

    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def multiply32(a: Tensor, c: int | Tensor) -> Tensor:
    """Return a * c modulo 2^32 for int64 factors below 2^32; no intermediate leaves int64's positive range."""
    return (a * (c & 0xFFFF) + (((a * (c >> 16)) & 0xFFFF) << 16)) & M32


def hash32(counter: Tensor, key64: int) -> Tensor:
    """Return the hash of each int64 counter, as int64 in [0, 2^32)."""
    return hash32_by_words(counter, key64 & M32, key64 >> 32)


def hash32_by_words(counter: Tensor, low_key: int | Tensor, high_key: int | Tensor) -> Tensor:
    """Return ``hash32`` of each counter with the two words of a key, which may differ from counter to counter."""
    h = (counter & M32) ^ low_key ^ multiply32((counter >> 32) & M32, 0x9E3779B9)
    h = h ^ (h >> 16)
    h = multiply32(h, 0x7FEB352D)
    h = h ^ (h >> 15) ^ high_key
    h = multiply32(h, 0x846CA68B)
    return h ^ (h >> 16)


def row_factor(row: int) -> int:
    """Return the odd factor of a lane's hash in one of the 32 rows of a packing group."""
    return (splitmix64(row) & M32) | 1


def dither(n: int, fraction_bits: int, key64: int, device: torch.device) -> Tensor:
    """Return the noise that stochastic rounding adds to n fixed-point values with ``fraction_bits`` fractional bits.

    It is one hash per lane of a packing group (32 rows of 8 lanes) times an odd factor per row. Multiplication by an
    odd number permutes the 32-bit integers, so the noise of each element is uniform; factors without a simple ratio
    leave rows uncorrelated. A hash per element would be half the work of encoding.
    """
    element = torch.arange(n, dtype=torch.int64, device=device)
    row, lane = (element >> 3) & 31, element & 7
    h = hash32(((element >> 8) << 3) | lane, key64)
    factors = torch.tensor([row_factor(r) for r in range(32)], dtype=torch.int64, device=device)[row]
    return multiply32(h, factors) >> (32 - fraction_bits)
