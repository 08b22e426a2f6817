"""Which entries a selector keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.kernels import random
from laconic.kernels.interface import NONFINITE, write_seed
from laconic.kernels.reference.casts import all_finite
from laconic.kernels.reference.reductions import FLOAT32_MAX

SAMPLES = 65536
"""Values looked at by a sampled threshold."""


def _magnitudes(x: Tensor) -> Tensor:
    """Order-preserving integers: the bits of |x|. (bf16 and fp16 take the road over float32, which is exact.)"""
    if x.dtype == torch.float64:
        return x.view(torch.int64) & 0x7FFFFFFFFFFFFFFF
    return x.to(torch.float32).view(torch.int32) & 0x7FFFFFFF


def amax_bits_any_dtype(x: Tensor) -> int:
    """The key of a tensor of any float dtype; a float64 beyond float32 stays finite here."""
    if not x.numel():
        return 0
    if not all_finite(x):
        return NONFINITE
    largest = float(x.abs().max())
    if largest == 0.0:
        return 0
    nearest = torch.tensor(min(max(largest, 2.0**-149), FLOAT32_MAX), dtype=torch.float32)
    return int(nearest.view(torch.int32))


def index_dtype(n: int) -> torch.dtype:
    return torch.int32 if n <= 1 << 31 else torch.int64


def _selected(x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, int]:
    values = x[positions]
    return positions.to(index_dtype(x.numel())), values, amax_bits_any_dtype(values)


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor, int]:
    """Positions (ascending) and values of the k entries of largest magnitude; of equal ones the lowest index wins.

    The returned key is that of the values: they hold the largest magnitude of all, and any value that is not finite.
    """
    order = torch.sort(_magnitudes(x), descending=True, stable=True).indices[:k]
    return _selected(x, order.sort().values)


def topk_sampled(x: Tensor, k: int, seed: int) -> tuple[Tensor, Tensor, int]:
    """About k entries: all that reach the k/n quantile of 65,536 sampled magnitudes; exact where that goes astray."""
    n = x.numel()
    if n <= SAMPLES:
        return topk(x, k)
    slot = torch.arange(SAMPLES, dtype=torch.int64, device=x.device)
    start = slot * n // SAMPLES
    span = (slot + 1) * n // SAMPLES - start
    noise = random.hash32(slot, random.key(seed, random.SAMPLING))
    magnitudes = _magnitudes(x)
    sampled = magnitudes[start + (noise * span >> 32)]
    rank = max(1, min(SAMPLES, (k * SAMPLES + n // 2) // n))
    threshold = sampled.sort(descending=True).values[rank - 1]
    positions = torch.nonzero(magnitudes >= threshold).view(-1)
    if int(threshold) == 0 or positions.numel() > 2 * k + 16:
        return topk(x, k)
    return _selected(x, positions)


def threshold_select(x: Tensor, threshold: float) -> tuple[Tensor, Tensor, int]:
    """All entries of magnitude at least ``threshold`` (rounded to the tensor's precision)."""
    limit = torch.tensor([threshold], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    at_least = _magnitudes(x) >= _magnitudes(limit).to(x.device)
    return _selected(x, torch.nonzero(at_least).view(-1))


def random_positions(n: int, k: int, seed: int, like: Tensor) -> Tensor:
    """k of n positions, ascending: those with the smallest hash, the lower index first where hashes are equal."""
    hashes = random.hash32(torch.arange(n, dtype=torch.int64, device=like.device), random.key(seed, random.POSITIONS))
    order = torch.sort(hashes, stable=True).indices[:k]
    return order.sort().values.to(index_dtype(n))


def randk_encode(x: Tensor, k: int, seed: int, section: Tensor) -> tuple[Tensor, int]:
    """The values at ``random_positions``, and the key of all of x: what is not sent must be finite, too.

    The section, of 8 bytes, is told the seed.
    """
    write_seed(section, seed)
    return x[random_positions(x.numel(), k, seed, x).long()], amax_bits_any_dtype(x)
