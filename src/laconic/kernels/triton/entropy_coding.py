"""Entropy coding of symbols on a GPU, with one synchronization per section."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.errors import FrameError
from laconic.kernels import torch_fallback
from laconic.kernels.sections import HUFFMAN, Coding, symbol_dtype
from laconic.kernels.triton import coded_chunks, huffman_decode, huffman_encode

__all__ = ["decode_symbols", "decode_values", "encode_symbols"]


def encode_symbols(symbols: Tensor, alphabet: int, coding: int, out: Tensor) -> int:
    if not symbols.numel():
        return 0
    if coding == Coding.HUFFMAN:
        return int(huffman_encode.encode_section(symbols, alphabet, out))
    return int(coded_chunks.encode_chunks(symbols, alphabet, coding, out))


class _LastModes:
    """Modes of the previous section, one bit each: the next section is expected to have the same."""

    modes = 1 << HUFFMAN


def _decode(section: Tensor, n: int, alphabet: int, table: Tensor | None, out: Tensor, weight: float | None) -> None:
    """Decode symbols, or values of the table, into ``out``, or add ``weight`` times the values.

    One synchronization tells whether the section is valid and which modes it has; if there are more than expected, it
    is decoded again.
    """
    coded, invalid = huffman_decode.open_section(section, n, alphabet), 1
    if coded is not None:
        coded_chunks.decode_chunks(coded, _LastModes.modes, alphabet, table, out, weight)
        invalid, modes = coded.status.tolist()
        expected, _LastModes.modes = _LastModes.modes, modes or _LastModes.modes
        if not invalid and modes & ~expected:
            coded_chunks.decode_chunks(coded, modes, alphabet, table, out, weight)
            invalid = int(coded.status[0])
    if invalid:
        raise FrameError(f"the frame holds {n} symbols of {alphabet} that no coder wrote")


def decode_symbols(section: Tensor, n: int, alphabet: int) -> Tensor:
    if not n:
        return torch_fallback.decode_symbols(section, n, alphabet)
    symbols = torch.empty(coded_chunks.round_up_16(n), dtype=symbol_dtype(alphabet), device=section.device)
    _decode(section, n, alphabet, None, symbols, None)
    return symbols[:n]


def decode_values(section: Tensor, table: Tensor, out: Tensor, weight: float | None) -> None:
    if not out.numel():
        torch_fallback.decode_values(section, table, out, weight)
    else:
        _decode(section, out.numel(), table.numel(), table.to(out.device), out, weight)
