"""Bins of equal width: symbols, samples, histograms."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic import _core
from laconic.kernels import random, reference
from laconic.kernels.cpu.pointers import bytes_at, floats_at, packed_at, symbols_at, threads, weight_of
from laconic.kernels.cpu.quantizers import value_range
from laconic.kernels.interface import Grid, LinearGrid
from laconic.kernels.reference.linear import histogram_range
from laconic.kernels.sections import packed_nbytes, symbol_bits, symbol_dtype, trits_nbytes


def linear_encode(x: Tensor, grid: LinearGrid, packed: Tensor) -> None:
    n, bits = x.numel(), symbol_bits(grid.levels)
    _core.linear_encode(floats_at(x), n, *grid, bits, packed_at(packed, n, bits), threads())


def table_decode(packed: Tensor, table: Tensor, out: Tensor, weight: float | None) -> None:
    n, bits = out.numel(), symbol_bits(table.numel())
    full = reference.full_table(table)  # held by name: an address does not keep its tensor alive
    _core.table_decode(
        packed_at(packed, n, bits), bits, floats_at(full), floats_at(out), n, weight_of(weight), threads()
    )


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
    low, high, amax_bits, grid = histogram_range(*value_range(x), bins, zero)
    counts = histogram(sample(x, count, seed), grid).tolist() if grid else []
    return low, high, amax_bits, counts


def _symbols_nbytes(n: int, alphabet: int, trits: bool) -> int:
    return trits_nbytes(n) if trits else packed_nbytes(n, symbol_bits(alphabet))


def unpack_symbols(packed: Tensor, n: int, alphabet: int, trits: bool) -> Tensor:
    symbols = torch.empty(n, dtype=symbol_dtype(alphabet))
    section = bytes_at(packed, _symbols_nbytes(n, alphabet, trits))
    _core.unpack_symbols(section, n, alphabet, trits, symbols.data_ptr())
    return symbols


def pack_symbols(symbols: Tensor, alphabet: int, trits: bool, out: Tensor) -> None:
    n = symbols.numel()
    section = bytes_at(out, _symbols_nbytes(n, alphabet, trits))
    _core.pack_symbols(symbols_at(symbols, alphabet), n, alphabet, trits, section)


def grid_symbols(x: Tensor, grid: Grid) -> Tensor:
    out = torch.empty(x.numel(), dtype=symbol_dtype(grid.levels))
    if isinstance(grid, LinearGrid):
        _core.linear_symbols(floats_at(x), x.numel(), *grid, out.data_ptr(), threads())
    else:
        _core.uniform_symbols(floats_at(x), x.numel(), *grid, out.data_ptr(), threads())
    return out
