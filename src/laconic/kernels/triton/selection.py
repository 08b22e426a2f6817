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
from laconic.kernels.triton.parts import exact, halves, hash32
from laconic.kernels.triton.select import Selector

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


@triton.jit
def _chosen(x, at, n, limit, low_key, high_key, HASHED: tl.constexpr):
    """Of values: those whose magnitude reaches the limit. Of positions by themselves: those with a smaller hash."""
    if HASHED:
        small = hash32(at, low_key, high_key) < limit.to(tl.uint32, bitcast=True)
        taken = small & (at < n)
    else:
        taken = (at < n) & ((tl.load(x + at, mask=at < n, other=0) & 0x7FFFFFFF) >= limit)
    return taken.to(tl.int32)


@triton.jit(do_not_specialize=["limit", "low_key", "high_key"])
def _count(x, counts, n, limit, low_key, high_key, HASHED: tl.constexpr, SPAN: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    at = program * SPAN + tl.arange(0, SPAN)
    tl.store(counts + program, tl.sum(_chosen(x, at, n, limit, low_key, high_key, HASHED), 0))


@triton.jit(do_not_specialize=["limit", "low_key", "high_key"])
def _compact(x, ends, out, n, limit, low_key, high_key, HASHED: tl.constexpr, SPAN: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    at = program * SPAN + tl.arange(0, SPAN)
    taken = _chosen(x, at, n, limit, low_key, high_key, HASHED)
    running = tl.cumsum(taken, 0)
    place = tl.load(ends + program) - tl.sum(taken, 0) + running - 1
    tl.store(out + place, at.to(out.dtype.element_ty), mask=taken > 0)


def _positions(x: Tensor, n: int, limit: int, key: int, hashed: bool) -> Tensor:
    """Ascending positions of what is chosen; one wait, for their number."""
    programs = num_buckets(n, SPAN)
    counts = torch.empty(programs, dtype=torch.int32, device=x.device)
    options = exact(num_warps=4, HASHED=hashed, SPAN=SPAN)
    arguments = (n, halves(limit)[0], *halves(key))
    _count[(programs,)](x, counts, *arguments, **options)
    ends = counts.cumsum(0, dtype=torch.int64)
    out = torch.empty(int(ends[-1]), dtype=index_dtype(n), device=x.device)
    if out.numel():
        _compact[(programs,)](x, ends, out, *arguments, **options)
    return out


def above(x: Tensor, limit: int) -> Tensor:
    """Positions of the float32 values whose magnitude, as a key, is at least ``limit``."""
    return _positions(x.view(torch.int32), x.numel(), limit, 0, False)


def key_of_float(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0]) & 0x7FFFFFFF


@lru_cache(maxsize=64)
def _selector(n: int, k: int, device: torch.device) -> Selector:
    return Selector([(0, n)], [k], device)


def topk(x: Tensor, k: int) -> Tensor:
    """Positions of the k largest magnitudes of a float32 tensor, ascending.

    Of many values those above a sampled threshold, set low enough to leave more than k, are picked out first: two
    passes over all in place of five.
    """
    n = x.numel()
    if n >= MANY and 8 * k <= n:
        share = k * SAMPLES / n
        limit = sampled_threshold(x, min(SAMPLES, int(share + 6 * share**0.5) + 8), 0)
        found = above(x, limit) if limit else None
        room = 2 * k + SAMPLES
        if found is not None and k <= found.numel() <= room:
            # Of one length, so that its selector is kept; zeros are never among the largest of more than k others.
            values = torch.zeros(room, dtype=torch.float32, device=x.device)
            values[: found.numel()] = x[found]
            return found[_selector(room, k, x.device).choose(values)]
    return _selector(n, k, x.device).choose(x).to(index_dtype(n))


def sampled_threshold(x: Tensor, rank: int, seed: int) -> int:
    """The magnitude of a rank (from 1 on) among 65,536 sampled ones, as a key."""
    magnitudes = sample(x, SAMPLES, seed).view(torch.int32) & 0x7FFFFFFF
    return int(magnitudes.sort(descending=True).values[rank - 1])


def random_positions(n: int, k: int, seed: int, like: Tensor) -> Tensor | None:
    """k positions with the smallest hashes, ascending; None in the rare case that too few are found.

    Hashes are uniform, so a limit a little above k/n leaves hardly more than k of them to be sorted.
    """
    key = random.key(seed, random.POSITIONS)
    limit = int((k + 8 * k**0.5 + 64) / n * 2**32)
    if limit >= 1 << 32:
        return None
    found = _positions(like, n, limit, key, True)
    if found.numel() < k:
        return None
    hashes = random.hash32(found.to(torch.int64), key)
    chosen = torch.sort(hashes, stable=True).indices[:k]
    return found[chosen.sort().values]
