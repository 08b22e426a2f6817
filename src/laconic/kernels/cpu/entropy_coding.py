"""Entropy coding of symbols."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic import _core
from laconic.errors import InputError
from laconic.kernels.cpu.pointers import bytes_at, floats_at, require_valid, symbols_at, threads, weight_of
from laconic.kernels.interface import Grid, LinearGrid
from laconic.kernels.sections import CHUNK, MAX_ALPHABET, coded_max_nbytes, num_buckets, symbol_dtype


def encode_symbols(symbols: Tensor, alphabet: int, coding: int, out: Tensor) -> int:
    n = symbols.numel()
    section = bytes_at(out, coded_max_nbytes(n, alphabet))
    return _core.encode_symbols(symbols_at(symbols, alphabet), n, alphabet, coding, section, threads())


def encode_values(x: Tensor, grid: Grid, coding: int, out: Tensor) -> int:
    n = x.numel()
    section = bytes_at(out, coded_max_nbytes(n, grid.levels))
    if isinstance(grid, LinearGrid):
        return _core.encode_linear(floats_at(x), n, *grid, coding, section, threads())
    return _core.encode_uniform(floats_at(x), n, *grid, coding, section, threads())


def decode_symbols(section: Tensor, n: int, alphabet: int) -> Tensor:
    symbols = torch.empty(n, dtype=symbol_dtype(alphabet))
    valid = _core.decode_symbols(section.data_ptr(), section.numel(), n, alphabet, symbols.data_ptr(), threads())
    require_valid(valid, f"{n} symbols of {alphabet} that no coder wrote")
    return symbols


def decode_values(section: Tensor, table: Tensor, out: Tensor, weight: float | None) -> None:
    n, alphabet, nbytes = out.numel(), table.numel(), section.numel()
    valid = _core.decode_values(
        section.data_ptr(), nbytes, alphabet, floats_at(table), floats_at(out), n, weight_of(weight), threads()
    )
    require_valid(valid, f"{n} symbols of {alphabet} that no coder wrote")


def chunk_modes(section: Tensor, n: int) -> Tensor:
    modes = torch.empty(num_buckets(n, CHUNK), dtype=torch.uint8)
    valid = _core.chunk_modes(section.data_ptr(), section.numel(), n, modes.data_ptr())
    require_valid(valid, "chunks that do not fit")
    return modes


def huffman_nbytes(counts: Tensor) -> Tensor:
    """Return the bytes of the coded section of one chunk, for each row of symbol counts."""
    if counts.dim() != 2 or not 1 <= counts.shape[1] <= MAX_ALPHABET:
        raise InputError(f"counts must have the shape [batch, 1 to {MAX_ALPHABET} symbols], got {list(counts.shape)}")
    if counts.numel() and (int(counts.min()) < 0 or int(counts.sum(1).max()) > CHUNK):
        raise InputError(f"counts must not be negative, and each row must add up to at most {CHUNK}")
    rows = counts.to(device="cpu", dtype=torch.int32).contiguous()
    out = torch.empty(rows.shape[0], dtype=torch.int64)
    _core.huffman_nbytes(rows.data_ptr(), rows.shape[0], rows.shape[1], out.data_ptr(), threads())
    return out
