"""Which entries a selector keeps: exact top-k, all above a threshold, and random ones; with the largest magnitude."""

from __future__ import annotations

import struct
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels import random
from laconic.kernels.interface import num_buckets
from laconic.kernels.reference.selection import SAMPLES, index_dtype
from laconic.kernels.triton.grids import sample
from laconic.kernels.triton.marks import mark_hashed, mark_large
from laconic.kernels.triton.parts import exact
from laconic.kernels.triton.select import FURTHEST, Selector

__all__ = ["above", "keys_of", "random_positions", "sampled_threshold", "topk"]

SPAN = 4096

MANY = 1 << 19
"""Values from which on a sample pays."""


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


def above(x: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Positions and values of the float32 entries whose magnitude, as a key, is at least ``limit``.

    One wait, for their number.
    """
    dtype = index_dtype(x.numel())
    if limit == 0:  # all of them, and marks are for few
        return torch.arange(x.numel(), dtype=dtype, device=x.device), x.clone()
    marks = mark_large(x, torch.full((1,), limit, dtype=torch.int32, device=x.device))
    return marks.places_and_values(x, int(marks.count), dtype)


def key_of_float(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0]) & 0x7FFFFFFF


@lru_cache(maxsize=64)
def _selector(n: int, k: int, device: torch.device) -> Selector:
    return Selector([(0, n)], [k], device)


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor, int]:
    """Of a float32 tensor the k largest magnitudes: positions, ascending, their values, and the largest, as a key.

    Of many values those above a sampled threshold, set low enough to leave more than k, are picked out first: one
    pass over all in place of five. Whether they were enough is found out at the end, with the one wait.
    """
    n, dtype = x.numel(), index_dtype(x.numel())
    if n >= MANY and 8 * k <= n:
        share = k * SAMPLES / n
        limit = _sampled_limit(x, min(SAMPLES, int(share + 6 * share**0.5) + 8), 0)
        marks = mark_large(x, limit)
        # Of one length, so that its selector is kept; zeros are never among the largest of more than k others.
        room = 2 * k + SAMPLES
        found, values = marks.places_and_values(x, room, dtype)
        chosen, kept, reached = _selector(room, k, x.device).choose_above(values, limit, found)
        marked, key, far = torch.stack([marks.count, _largest(kept), reached[0].to(torch.int64)]).tolist()
        if k <= marked <= room and far < FURTHEST.value:
            return chosen, kept, key
    chosen, kept = _selector(n, k, x.device).choose_with_values(x, dtype)
    return chosen, kept, int(_largest(kept))


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


def random_positions(n: int, k: int, seed: int, like: Tensor) -> Tensor | None:
    """k positions with the smallest hashes, ascending; None in the rare case that too few are found.

    Hashes are uniform, so a limit a little above k/n leaves hardly more than k of them to be sorted.
    """
    key = random.key(seed, random.POSITIONS)
    limit = int((k + 8 * k**0.5 + 64) / n * 2**32)
    if limit >= 1 << 32:
        return None
    marks = mark_hashed(n, limit, key, like.device)
    found = marks.places(int(marks.count), index_dtype(n))
    if found.numel() < k:
        return None
    hashes = random.hash32(found.to(torch.int64), key)
    chosen = torch.sort(hashes, stable=True).indices[:k]
    return found[chosen.sort().values]
