"""Positions as entropy-coded gaps: the classes of the gaps by a coder, then the bits that tell gaps of a class apart.

The functions take the coder of a backend, because classes are coded symbol by symbol, which torch cannot do quickly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from laconic.errors import FrameError
from laconic.kernels.reference.entropy_coding import decode_symbols, encode_symbols
from laconic.kernels.reference.selection import index_dtype
from laconic.kernels.sections import (
    GAPS,
    GAPS_HEADER,
    Coding,
    coded_max_nbytes,
    gap_alphabet,
    gap_class_start,
    gap_class_width,
    read_gaps_header,
    symbol_dtype,
    write_bytes,
)

__all__ = ["gaps_decode", "gaps_encode", "gaps_of", "read_gaps", "write_gaps"]

_WORD = 0xFFFFFFFF


def gaps_of(positions: Tensor) -> Tensor:
    """Return how many positions are skipped before each position."""
    wide = positions.to(torch.int64)
    previous = torch.cat([torch.full((1,), -1, dtype=torch.int64, device=wide.device), wide[:-1]])
    return wide - previous - 1


def _class_tables(n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the smallest gap and the width of each class."""
    classes = range(gap_alphabet(n))
    starts, widths = [gap_class_start(c) for c in classes], [gap_class_width(c) for c in classes]
    return torch.tensor(starts, device=device), torch.tensor(widths, device=device)


def _pack_bits(values: Tensor, widths: Tensor) -> Tensor:
    """Return a bit stream of values below 2^width, each of its own width (at most 31)."""
    ends = widths.cumsum(0)
    nbits = int(ends[-1])
    first, word = ends - widths, (ends - widths) >> 5
    words = torch.zeros(nbits // 32 + 2, dtype=torch.int64, device=values.device)
    shifted = values << (first & 31)
    words.index_add_(0, word, shifted & _WORD)  # no two values share a bit
    words.index_add_(0, word + 1, shifted >> 32)
    signed = (words ^ 0x80000000) - 0x80000000
    return signed.to(torch.int32).view(torch.uint8)[: -(-nbits // 8)]


def _unpack_bits(stream: Tensor, widths: Tensor) -> Tensor:
    ends = widths.cumsum(0)
    nbits = int(ends[-1])
    if stream.numel() != -(-nbits // 8) or (nbits % 8 and int(stream[-1]) >> nbits % 8):
        raise FrameError(
            f"the frame holds {stream.numel()} bytes of low bits, the classes of its gaps need {nbits} bits"
        )
    first, word = ends - widths, (ends - widths) >> 5
    padded = torch.zeros(4 * (nbits // 32 + 2), dtype=torch.uint8, device=stream.device)
    padded[: stream.numel()] = stream
    words = padded.view(torch.int32).to(torch.int64) & _WORD
    return ((words[word + 1] << 32 | words[word]) >> (first & 31)) & ((1 << widths) - 1)


def write_gaps(positions: Tensor, n: int, out: Tensor, encode: Callable[[Tensor, int, int, Tensor], int]) -> int:
    """Write the header (mode, count, bytes of the classes), the coded classes, and the low bits of the gaps."""
    gaps, k, alphabet = gaps_of(positions), positions.numel(), gap_alphabet(n)
    starts, widths = _class_tables(n, out.device)
    classes = torch.bucketize(gaps, starts, right=True) - 1
    coded = torch.empty(coded_max_nbytes(k, alphabet), dtype=torch.uint8, device=out.device)
    nbytes = encode(classes.to(symbol_dtype(alphabet)), alphabet, Coding.RANS_AUTO, coded)
    low = _pack_bits(gaps - starts[classes], widths[classes])
    write_bytes(out[:GAPS_HEADER], (GAPS | k << 16 | nbytes << 64).to_bytes(GAPS_HEADER, "little"))
    end = GAPS_HEADER + nbytes
    out[GAPS_HEADER:end] = coded[:nbytes]
    out[end : end + low.numel()] = low
    return end + low.numel()


def read_gaps(section: Tensor, n: int, k: int, decode: Callable[[Tensor, int, int], Tensor]) -> Tensor:
    """Return k ascending positions below n; ``FrameError`` if the section does not hold them."""
    end = read_gaps_header(section)
    classes = decode(section[GAPS_HEADER:end], k, gap_alphabet(n)).long()
    starts, widths = _class_tables(n, section.device)
    gaps = starts[classes] + _unpack_bits(section[end:], widths[classes])
    positions = (gaps + 1).cumsum(0) - 1
    largest = int(positions.max())  # a gap is below 2^35, so a sum that overflows has first passed n
    if largest >= n:
        raise FrameError(f"the frame holds a coded position {largest}, the tensor has {n} values")
    return positions.to(index_dtype(n))


def gaps_encode(positions: Tensor, n: int, out: Tensor) -> int:
    return write_gaps(positions, n, out, encode_symbols)


def gaps_decode(section: Tensor, n: int, k: int) -> Tensor:
    return read_gaps(section, n, k, decode_symbols)
