"""Layout of the sections that kernels write: sizes, headers, and the constants that all backends share."""

from __future__ import annotations

import math
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from laconic import _core
from laconic._core import bytes_at, set_bytes
from laconic.errors import FrameError

GROUP = 256
"""Values per group of the vertical bit packing: 32 rows of 8 lanes."""

TRIT_GROUP_NBYTES = 64
"""Bytes per group of the base-3 packing; each byte holds five values."""

SUM_BLOCK = 1024
"""Values that share a scale, and are rotated together, in summable codecs."""


def read_bytes(section: Tensor, nbytes: int) -> bytes:
    """Return the first bytes of a section, from any device."""
    return bytes_at(section.data_ptr(), nbytes) if section.is_cpu else bytes(section[:nbytes].tolist())


def write_bytes(section: Tensor, data: bytes) -> None:
    """Write a few bytes of the host to a section on any device."""
    if section.is_cpu:
        set_bytes(section.data_ptr(), data)
    else:
        section.copy_(torch.tensor(list(data), dtype=torch.uint8))


def write_seed(section: Tensor, seed: int) -> None:
    write_bytes(section, (seed & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little"))


def read_seed(section: Tensor) -> int:
    return int.from_bytes(read_bytes(section, 8), "little")


def num_buckets(n: int, bucket: int) -> int:
    """Number of buckets of n values; bucket 0 holds all of them."""
    return -(-n // bucket) if bucket else min(n, 1)


def packed_nbytes(n: int, bits: int) -> int:
    """Bytes of n packed values: whole groups, then a tail that is padded to a byte only."""
    return n // GROUP * 32 * bits + (n % GROUP * bits + 7) // 8


def trits_nbytes(n: int) -> int:
    """Bytes of n ternary values."""
    group = 5 * TRIT_GROUP_NBYTES
    return n // group * TRIT_GROUP_NBYTES + (n % group + 4) // 5


class PackedIntCoding(NamedTuple):
    """Integers from 0 to ``levels`` of ``width`` bits.

    With ``packed`` in the vertical packing; otherwise in 32-bit words that no integer straddles, which can be added.
    """

    levels: int
    width: int
    packed: bool


def num_blocks(n: int) -> int:
    return -(-n // SUM_BLOCK)


def packed_int_count(n: int, rotated: bool) -> int:
    """Number of integers that n values become: a rotation fills the last block."""
    return -(-n // SUM_BLOCK) * SUM_BLOCK if rotated else n


def packed_ints_nbytes(n: int, coding: PackedIntCoding) -> int:
    """Bytes of n integers. In words, each block starts at a vector of 32 bytes."""
    if coding.packed:
        return packed_nbytes(n, coding.width)
    per_word, (blocks, rest) = 32 // coding.width, divmod(n, SUM_BLOCK)
    return 32 * (blocks * num_buckets(SUM_BLOCK // 8, per_word) + num_buckets(num_buckets(rest, 8), per_word))


def wide_sum_nbytes(n: int, sum_width: int) -> int:
    """Bytes of a vertically packed sum of 8, 16 or 32 bits per integer, whose last group is padded."""
    return num_buckets(n, GROUP) * 32 * sum_width


ALL, RICE, BITMAP, GAPS, RANKS, CONTEXTS = 0, 1, 2, 3, 4, 5
"""Modes of a position section."""

POSITIONS_HEADER = 8
MAX_LOW_BITS = 31


class PositionPlan(NamedTuple):
    """How to write a set of positions, and how many bytes that takes."""

    mode: int
    low_bits: int
    nbytes: int


class PositionHeader(NamedTuple):
    """The header of a position section."""

    mode: int
    low_bits: int
    kept: int


def low_bits_candidates(n: int, k: int) -> list[int]:
    """Rice parameters to try: around log2(0.69 n / k), the best one for geometric gaps."""
    middle = min(MAX_LOW_BITS, max(1, 69 * n // (100 * k)).bit_length() - 1)
    return [r for r in (middle - 1, middle, middle + 1) if 0 <= r <= MAX_LOW_BITS]


@lru_cache(maxsize=4096)
def positions_max_nbytes(n: int, k: int) -> int:
    """The most bytes of k out of n positions, rounded up to words unless a bitmap is smaller."""
    bitmap = POSITIONS_HEADER + (n + 7) // 8
    if not 0 < k < n:
        return POSITIONS_HEADER
    coded = min(packed_nbytes(k, r) + (k + ((n - k) >> r) + 7) // 8 for r in low_bits_candidates(n, k))
    return min(bitmap, (POSITIONS_HEADER + coded + 3) // 4 * 4)


def fixed_low_bits(n: int, k: int) -> int:
    """Return how many bits of each of k of n positions are packed in a section of fixed size."""
    return max(0, (n // k).bit_length() - 1)


def fixed_positions_nbytes(n: int, k: int) -> int:
    """Return the bytes of k of n positions, whatever they are: low bits, then a bitmap (an Elias-Fano code)."""
    low_bits = fixed_low_bits(n, k)
    return 4 * (num_buckets(k * low_bits, 32) + num_buckets(k + (n >> low_bits) + 1, 32))


def read_positions_header(section: Tensor, n: int) -> PositionHeader:
    """Read the header; raise ``FrameError`` if it contradicts itself, n or the section's size."""
    if section.numel() < POSITIONS_HEADER:
        raise FrameError(f"a position section must have at least {POSITIONS_HEADER} bytes, got {section.numel()}")
    header = int.from_bytes(read_bytes(section, POSITIONS_HEADER), "little")
    mode, low_bits, k = header & 0xFF, header >> 8 & 0xFF, header >> 16
    body = section.numel() - POSITIONS_HEADER
    if mode == RICE:
        valid = 0 < k <= n and low_bits <= MAX_LOW_BITS and body >= packed_nbytes(k, low_bits) + (k + 7) // 8
    elif mode == BITMAP:
        valid = 0 < k <= n and low_bits == 0 and body == (n + 7) // 8
    elif mode == GAPS:
        valid = 0 < k < n and low_bits == 0 and body >= GAPS_HEADER - POSITIONS_HEADER + 5 * num_buckets(k, CHUNK)
    elif mode == RANKS:
        valid = 0 < k <= n and low_bits == 0 and body > RANKS_HEADER - POSITIONS_HEADER
    elif mode == CONTEXTS:
        valid = 0 < k < n <= MAX_SPACING * k and low_bits == 0 and body >= CONTEXTS_HEADER - POSITIONS_HEADER
    else:
        valid = mode == ALL and k == n and low_bits == 0 and body == 0
    if not valid:
        raise FrameError(
            f"a position section of {section.numel()} bytes cannot hold {k} of {n} positions in mode {mode}, "
            f"parameter {low_bits}"
        )
    return PositionHeader(mode, low_bits, k)


RANKS_HEADER = 16
"""Bytes before the packed ranks: the header of the positions, u32 chunk, u16 each, u16 last."""

MAX_RANKS = 1 << 31
"""A chunk must have fewer ways to keep its entries than this."""


def num_ranks(chunk: int, each: int) -> int:
    """Ways to keep ``each`` of ``chunk`` entries; 0 if that is more than half of them, or 2^31 ways or more."""
    ways = math.comb(chunk, each) if 0 < each <= 31 and 2 * each <= chunk <= 1 << 16 else 0
    return ways if ways < MAX_RANKS else 0


def ranks_nbytes(n: int, chunk: int, each: int) -> int:
    """Bytes of the positions of n values as ranks."""
    return RANKS_HEADER + packed_nbytes(num_buckets(n, chunk), symbol_bits(num_ranks(chunk, each)))


def read_ranks_header(section: Tensor, n: int, k: int) -> tuple[int, int, int]:
    """Return chunk, and how many entries each chunk and the last one keep; ``FrameError`` if that does not give k."""
    fields = read_bytes(section, RANKS_HEADER)[POSITIONS_HEADER:]
    chunk, each, last = (int.from_bytes(fields[at:end], "little") for at, end in ((0, 4), (4, 6), (6, 8)))
    if (
        not num_ranks(chunk, each)
        or not 0 < last <= min(each, (n - 1) % chunk + 1)
        or k != (n - 1) // chunk * each + last
        or section.numel() != ranks_nbytes(n, chunk, each)
    ):
        raise FrameError(
            f"a position section of {section.numel()} bytes cannot hold {k} of {n} positions as ranks of chunks of "
            f"{chunk} that keep {each}, the last one {last}"
        )
    return chunk, each, last


CONTEXTS_HEADER = 16
"""Bytes before the decisions: positions' header, u32 columns, u8 row prior, u8 column prior, u8 chunk bits, u8 0.

With chunk bits, u32 entries of each chunk follow."""

MAX_SPACING = 4096
"""Values for each position that are coded with contexts: every value is a decision, so this bounds a reader's time."""

MAX_COLUMNS = 1 << 14
"""Columns of a matrix whose positions are coded with contexts."""

MAX_PRIOR = 9
"""The largest prior of rows and columns."""

MIN_CHUNK, MAX_CHUNK = 64, 1 << 16
"""Values of a chunk of ``topk``, which are a power of two."""


def columns_of(shape: tuple[int, ...]) -> int:
    """Columns of the matrix as which a tensor's positions are coded: its rows are the first dimension if they fit."""
    n = math.prod(shape)
    if len(shape) > 1:
        for columns in (n // max(1, shape[0]), shape[-1]):
            if 1 < columns <= MAX_COLUMNS:
                return columns
    return max(1, min(n, 256))


class ContextHeader(NamedTuple):
    """The matrix whose positions are coded, priors of the rates of its rows and columns, and 0 or the log2 of a chunk.

    With chunks, all but the final one keep ``each`` entries; there is no prior of rows.
    """

    columns: int
    row_prior: int
    column_prior: int
    chunk_bits: int
    each: int

    @property
    def nbytes(self) -> int:
        """Bytes before the decisions."""
        return CONTEXTS_HEADER + 4 * (self.chunk_bits > 0)


def read_contexts_header(section: Tensor, n: int, k: int) -> ContextHeader:
    """Return the header of decisions about k of n values; ``FrameError`` if it is not valid."""
    fields = read_bytes(section, min(section.numel(), CONTEXTS_HEADER + 4))[POSITIONS_HEADER:]
    each = int.from_bytes(fields[8:], "little") if fields[6] else 0
    columns, (row_prior, column_prior, chunk_bits, zero) = int.from_bytes(fields[:4], "little"), fields[4:8]
    header = ContextHeader(columns, row_prior, column_prior, chunk_bits, each)
    if (
        not 0 < header.columns <= MAX_COLUMNS
        or max(header.row_prior, header.column_prior) > MAX_PRIOR
        or zero
        or section.numel() < header.nbytes
        or (header.chunk_bits and not _fits_chunks(n, k, header))
    ):
        given = fields[: header.nbytes - POSITIONS_HEADER]
        raise FrameError(
            f"positions with contexts need 1 to {MAX_COLUMNS} columns, priors up to {MAX_PRIOR}, a zero after the "
            f"bits of a chunk, and chunks that hold {k} of {n} positions, the frame has {given.hex()}"
        )
    return header


def _fits_chunks(n: int, k: int, header: ContextHeader) -> bool:
    """Return whether chunks that all keep ``header.each`` entries, but for the final one, can keep k of n values."""
    chunk = 1 << header.chunk_bits
    if header.row_prior or not MIN_CHUNK <= chunk <= MAX_CHUNK:
        return False
    last = k - (n - 1) // chunk * header.each
    return 0 < header.each <= chunk and 0 < last <= min(header.each, (n - 1) % chunk + 1)


GAPS_HEADER = 16
"""Bytes before the coded classes of gaps: the header of the positions, and the bytes of the classes."""


def gap_class_width(gap_class: int) -> int:
    """Bits that tell the gaps of a class apart: 4 classes for each power of two."""
    return max(0, gap_class // 4 - 1)


def gap_class_start(gap_class: int) -> int:
    """The smallest gap of a class."""
    return gap_class if gap_class < 8 else (4 + gap_class % 4) << gap_class_width(gap_class)


def gap_alphabet(n: int) -> int:
    """Number of classes of the gaps between positions below n: at most 132, because n is at most 2^34."""
    exponent = max(1, n - 1).bit_length() - 1
    return n if n <= 8 else 4 * (exponent - 1) + ((n - 1) >> (exponent - 2) & 3) + 1


def gaps_max_nbytes(n: int, k: int) -> int:
    """The most bytes of k entropy-coded gaps between positions below n."""
    alphabet = gap_alphabet(n)
    return GAPS_HEADER + coded_max_nbytes(k, alphabet) + (k * gap_class_width(alphabet - 1) + 7) // 8


def read_gaps_header(section: Tensor) -> int:
    """Return where the coded classes end; raise ``FrameError`` if that is not within the section."""
    end = GAPS_HEADER + int.from_bytes(read_bytes(section, GAPS_HEADER)[POSITIONS_HEADER:], "little")
    if end > section.numel():
        raise FrameError(f"the frame holds gap classes up to byte {end} of a section of {section.numel()}")
    return end


CONSTANT, RAW, HUFFMAN, RANS = 0, 1, 2, 3
"""Modes of a coded chunk."""

MAX_ALPHABET = 4096
"""The largest alphabet of a coder."""

CHUNK = 1 << 19
"""Symbols that share a code table."""


class Coding(IntEnum):
    """How to code the chunks of a section: by one method, or each by its smallest, with a preferred method."""

    HUFFMAN = 0
    RANS = 1
    HUFFMAN_AUTO = 2
    RANS_AUTO = 3


def symbol_bits(alphabet: int) -> int:
    """Bits of a packed symbol."""
    return (alphabet - 1).bit_length()


def symbol_dtype(alphabet: int) -> torch.dtype:
    """The dtype of symbols between a quantizer and a coder (int16 because torch supports uint16 poorly)."""
    return torch.uint8 if alphabet <= 256 else torch.int16


def coded_max_nbytes(n: int, alphabet: int) -> int:
    """The most bytes of a section of coded symbols; its writer may use all of them as scratch."""
    return _core.coded_max_nbytes(n, alphabet)
