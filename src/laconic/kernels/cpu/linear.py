"""Bins of equal width: symbols, samples, histograms."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic import _core
from laconic.kernels import random, reference
from laconic.kernels.cpu.checked_pointers import bytes_at, floats_at, symbols_at, threads, weight_of
from laconic.kernels.cpu.quantizers import value_range
from laconic.kernels.interface import (
    NONFINITE,
    Grid,
    LinearGrid,
    packed_nbytes,
    symbol_bits,
    symbol_dtype,
    trits_nbytes,
)


def linear_encode(x: Tensor, grid: LinearGrid, packed: Tensor) -> None:
    n = x.numel()
    bits = symbol_bits(grid.levels)
    _core.linear_encode(floats_at(x), n, *grid, bits, bytes_at(packed, packed_nbytes(n, bits)), threads())


def table_decode(packed: Tensor, table: Tensor, out: Tensor, weight: float | None) -> None:
    n, bits = out.numel(), symbol_bits(table.numel())
    full = reference.full_table(table)  # symbols beyond the last level read as the last
    address = bytes_at(packed, packed_nbytes(n, bits))
    _core.table_decode(address, bits, floats_at(full), floats_at(out), n, weight_of(weight), threads())


def sample(x: Tensor, count: int, seed: int) -> Tensor:
    if count == x.numel():
        return x
    out = torch.empty(count)
    _core.sample(floats_at(x), x.numel(), count, random.key(seed, random.SAMPLING), out.data_ptr(), threads())
    return out


def histogram(x: Tensor, grid: LinearGrid) -> Tensor:
    counts = torch.empty(grid.levels, dtype=torch.int64)
    _core.histogram(floats_at(x), x.numel(), *grid, counts.data_ptr(), threads())
    return counts


def range_histogram(x: Tensor, *, bins: int, zero: bool, count: int, seed: int) -> tuple[float, float, int, list[int]]:
    low, high, amax_bits = value_range(x)
    low, high = low + 0.0, high + 0.0  # whichever of -0 and +0 was met first
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high or amax_bits >= NONFINITE:
        return low, high, amax_bits, []
    return low, high, amax_bits, histogram(sample(x, count, seed), LinearGrid.over(low, high, bins)).tolist()


def unpack_symbols(packed: Tensor, n: int, alphabet: int, trits: bool) -> Tensor:
    symbols = torch.empty(n, dtype=symbol_dtype(alphabet))
    nbytes = trits_nbytes(n) if trits else packed_nbytes(n, symbol_bits(alphabet))
    _core.unpack_symbols(bytes_at(packed, nbytes), n, alphabet, trits, symbols.data_ptr())
    return symbols


def pack_symbols(symbols: Tensor, alphabet: int, trits: bool, out: Tensor) -> None:
    n = symbols.numel()
    nbytes = trits_nbytes(n) if trits else packed_nbytes(n, symbol_bits(alphabet))
    _core.pack_symbols(symbols_at(symbols, alphabet), n, alphabet, trits, bytes_at(out, nbytes))


def grid_symbols(x: Tensor, grid: Grid) -> Tensor:
    out = torch.empty(x.numel(), dtype=symbol_dtype(grid.levels))
    if isinstance(grid, LinearGrid):
        _core.linear_symbols(floats_at(x), x.numel(), *grid, out.data_ptr(), threads())
    else:
        _core.uniform_symbols(floats_at(x), x.numel(), *grid, out.data_ptr(), threads())
    return out
