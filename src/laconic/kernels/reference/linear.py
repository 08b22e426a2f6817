"""Bins of equal width in float32, tables of values, samples and histograms."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.kernels import random
from laconic.kernels.interface import NONFINITE, Grid, LinearGrid
from laconic.kernels.reference.packing import pack, pack_trits, unpack, unpack_trits
from laconic.kernels.reference.quantizers import uniform_symbols, value_range
from laconic.kernels.reference.reductions import put
from laconic.kernels.sections import symbol_bits, symbol_dtype


def linear_symbols(x: Tensor, grid: LinearGrid) -> Tensor:
    """Return the bin of each value as int64."""
    bins = (x * grid.pre - grid.base) * grid.inverse
    return bins.clamp(0.0, float(grid.levels - 1)).to(torch.int64)


def grid_symbols(x: Tensor, grid: Grid) -> Tensor:
    bins = linear_symbols(x, grid) if isinstance(grid, LinearGrid) else uniform_symbols(x, *grid)
    return bins.to(symbol_dtype(grid.levels))


def linear_encode(x: Tensor, grid: LinearGrid, packed: Tensor) -> None:
    pack(linear_symbols(x, grid), symbol_bits(grid.levels), packed)


def full_table(table: Tensor) -> Tensor:
    """Repeat the last entry until there is one for every pattern of a symbol's bits."""
    missing = (1 << symbol_bits(table.numel())) - table.numel()
    return torch.cat([table, table[-1:].expand(missing)]) if missing else table


def table_decode(packed: Tensor, table: Tensor, out: Tensor, weight: float | None) -> None:
    symbols = unpack(packed, out.numel(), symbol_bits(table.numel()))
    put(out, full_table(table.to(packed.device))[symbols.long()], weight)


def sample(x: Tensor, count: int, seed: int) -> Tensor:
    n = x.numel()
    if count == n:
        return x
    part = torch.arange(count, dtype=torch.int64, device=x.device)
    begin = part * n // count
    span = (part + 1) * n // count - begin
    noise = random.hash32(part, random.key(seed, random.SAMPLING))
    return x[begin + (noise * span >> 32)]


def histogram(x: Tensor, grid: LinearGrid) -> Tensor:
    return torch.bincount(linear_symbols(x, grid), minlength=grid.levels).cpu()


def histogram_range(
    low: float, high: float, amax_bits: int, bins: int, zero: bool
) -> tuple[float, float, int, LinearGrid | None]:
    """Return the range, the amax bits and the grid of ``range_histogram``; no grid if its histogram is empty."""
    low, high = low + 0.0, high + 0.0  # -0 becomes 0: which of the two is met first depends on the backend
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    grid = LinearGrid.over(low, high, bins) if low < high and amax_bits < NONFINITE else None
    return low, high, amax_bits, grid


def range_histogram(x: Tensor, *, bins: int, zero: bool, count: int, seed: int) -> tuple[float, float, int, list[int]]:
    low, high, amax_bits, grid = histogram_range(*value_range(x), bins, zero)
    counts = histogram(sample(x, count, seed), grid).tolist() if grid else []
    return low, high, amax_bits, counts


def unpack_symbols(packed: Tensor, n: int, alphabet: int, trits: bool) -> Tensor:
    symbols = unpack_trits(packed, n) if trits else unpack(packed, n, symbol_bits(alphabet))
    return symbols.to(symbol_dtype(alphabet))


def pack_symbols(symbols: Tensor, alphabet: int, trits: bool, out: Tensor) -> None:
    if trits:
        pack_trits(symbols, out)
    else:
        pack(symbols, symbol_bits(alphabet), out)
