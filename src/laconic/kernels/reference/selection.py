"""Selection: the largest values, those above a threshold, random ones."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.kernels import random
from laconic.kernels.interface import FLOAT32_MAX, NONFINITE, ChunkCounts
from laconic.kernels.reference.casts import all_finite
from laconic.kernels.sections import write_seed

SAMPLES = 65536
"""Values that a sampled threshold looks at."""


def _magnitudes(x: Tensor) -> Tensor:
    """Return the bits of |x|, integers in the order of magnitudes (16-bit floats as float32, which is exact)."""
    if x.dtype == torch.float64:
        return x.view(torch.int64) & 0x7FFFFFFFFFFFFFFF
    return x.to(torch.float32).view(torch.int32) & 0x7FFFFFFF


def amax_bits_any_dtype(x: Tensor) -> int:
    """Return the amax bits of a tensor of any float dtype; a finite float64 beyond float32 counts as finite."""
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
    # The amax bits of the kept values are those of x: they include its largest magnitude and anything not finite.
    order = torch.sort(_magnitudes(x), descending=True, stable=True).indices[:k]
    return _selected(x, order.sort().values)


def topk_chunks(x: Tensor, counts: ChunkCounts) -> tuple[Tensor, Tensor, int]:
    (chunk, each, last), magnitudes = counts, _magnitudes(x)
    rows = torch.nn.functional.pad(magnitudes, (0, -x.numel() % chunk), value=-1).view(-1, chunk)  # below any magnitude
    order = torch.sort(rows, dim=1, descending=True, stable=True).indices
    starts = torch.arange(0, x.numel(), chunk, device=x.device).view(-1, 1)
    whole = order[:-1, :each].sort(dim=1).values + starts[:-1]
    final = order[-1, :last].sort().values + starts[-1]
    return _selected(x, torch.cat([whole.reshape(-1), final]))


def topk_sampled(x: Tensor, k: int, seed: int) -> tuple[Tensor, Tensor, int]:
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
    limit = torch.tensor([threshold], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    at_least = _magnitudes(x) >= _magnitudes(limit).to(x.device)
    return _selected(x, torch.nonzero(at_least).view(-1))


def random_positions(n: int, k: int, seed: int, like: Tensor) -> Tensor:
    """Return the k indices of the smallest hashes, ascending; of equal hashes the lower index is taken."""
    hashes = random.hash32(torch.arange(n, dtype=torch.int64, device=like.device), random.key(seed, random.POSITIONS))
    order = torch.sort(hashes, stable=True).indices[:k]
    return order.sort().values.to(index_dtype(n))


def randk_encode(x: Tensor, k: int, seed: int, section: Tensor) -> tuple[Tensor, int]:
    # The amax bits are those of all of x: values that are not sent must be finite, too.
    write_seed(section, seed)
    return x[random_positions(x.numel(), k, seed, x).long()], amax_bits_any_dtype(x)
