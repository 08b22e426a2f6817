"""Bins of equal width in float32, tables of values, and samples: what adaptive quantization is made of."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.kernels import random
from laconic.kernels.interface import NONFINITE, Grid, LinearGrid, symbol_bits, symbol_dtype
from laconic.kernels.reference.packing import pack, pack_trits, unpack, unpack_trits
from laconic.kernels.reference.quantizers import uniform_symbols, value_range
from laconic.kernels.reference.reductions import put


def linear_symbols(x: Tensor, grid: LinearGrid) -> Tensor:
    """The bin of each value, as int64. Values outside the grid fall into its first or last bin."""
    bins = (x * grid.pre - grid.base) * grid.inverse
    return bins.clamp(0.0, float(grid.levels - 1)).to(torch.int64)


def grid_symbols(x: Tensor, grid: Grid) -> Tensor:
    """The bin of each value on either kind of grid, as a coder takes it."""
    bins = linear_symbols(x, grid) if isinstance(grid, LinearGrid) else uniform_symbols(x, *grid)
    return bins.to(symbol_dtype(grid.levels))


def linear_encode(x: Tensor, grid: LinearGrid, packed: Tensor) -> None:
    pack(linear_symbols(x, grid), symbol_bits(grid.levels), packed)


def full_table(table: Tensor) -> Tensor:
    """A table with an entry for every pattern of a symbol's bits: those past the last level read as the last."""
    missing = (1 << symbol_bits(table.numel())) - table.numel()
    return torch.cat([table, table[-1:].expand(missing)]) if missing else table


def table_decode(packed: Tensor, table: Tensor, out: Tensor, weight: float | None) -> None:
    symbols = unpack(packed, out.numel(), symbol_bits(table.numel()))
    put(out, full_table(table.to(packed.device))[symbols.long()], weight)


def sample(x: Tensor, count: int, seed: int) -> Tensor:
    """One value out of each of ``count`` equal parts of x, where a hash of the part's number says; all if so many."""
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


def range_histogram(x: Tensor, *, bins: int, zero: bool, count: int, seed: int) -> tuple[float, float, int, list[int]]:
    """The range (no -0; with ``zero`` as far as 0), the key, and how many of a sample fall into each bin of the range.

    No counts where the range is a point, or a value is not finite.
    """
    low, high, amax_bits = value_range(x)
    low, high = low + 0.0, high + 0.0
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high or amax_bits >= NONFINITE:
        return low, high, amax_bits, []
    return low, high, amax_bits, histogram(sample(x, count, seed), LinearGrid.over(low, high, bins)).tolist()


def unpack_symbols(packed: Tensor, n: int, alphabet: int, trits: bool) -> Tensor:
    """Symbols out of a quantizer's packing, one element each."""
    symbols = unpack_trits(packed, n) if trits else unpack(packed, n, symbol_bits(alphabet))
    return symbols.to(symbol_dtype(alphabet))


def pack_symbols(symbols: Tensor, alphabet: int, trits: bool, out: Tensor) -> None:
    if trits:
        pack_trits(symbols, out)
    else:
        pack(symbols, symbol_bits(alphabet), out)
