"""What a backend offers. ``reference`` (torch) defines the bytes; ``cpu`` (C++) must give the same ones, faster.

All tensors are flat and contiguous; sections are uint8. Encoders return the largest magnitude they saw as the bit
pattern of a float32 without its sign (a *key*), so that one number tells "all zero" (0) and "not finite"
(``>= NONFINITE``) and neither costs a pass of its own. Decoders store into ``out`` (float32), or add ``weight`` times
the value to it when a weight is given: that is the fused decode-accumulate of aggregation. Decoders raise
``FrameError`` when a section holds what no encoder writes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from laconic import _core
from laconic._core import bytes_at, set_bytes
from laconic.errors import FrameError

NONFINITE = 0x7F800000
"""Keys from here on are infinities and NaNs."""

GROUP = 256
"""Values per group of the vertical bit packing: 32 rows of 8 lanes."""

TRIT_GROUP_NBYTES = 64
"""Bytes per group of the base-3 packing; each holds five values."""


SUM_BLOCK = 1024
"""Values that share a scale, and are rotated together, in summable codecs."""

CLIP_LIMIT = (2.0 - 2.0**-20) * 2.0**127
"""The largest clip: no level of it, however rounded, leaves float32."""


class PackedIntCoding(NamedTuple):
    """Integers from 0 to ``levels`` in ``width`` bits: in the vertical packing, or in words of lanes to be added."""

    levels: int
    width: int
    packed: bool


class PositionPlan(NamedTuple):
    """How a set of positions will be written, and how many bytes that takes."""

    mode: int
    low_bits: int
    nbytes: int


class PositionHeader(NamedTuple):
    """What a position section says of itself."""

    mode: int
    low_bits: int
    kept: int


ALL, RICE, BITMAP = 0, 1, 2
"""Modes of a position section."""

POSITIONS_HEADER = 8
MAX_LOW_BITS = 31


FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127


def nearest_float32(value: float) -> float:
    """As a float32 has it; the largest, where it lies beyond."""
    return float(struct.unpack("<f", struct.pack("<f", max(-FLOAT32_MAX, min(value, FLOAT32_MAX))))[0])


def safe_prescale(spread: float) -> float:
    """What values are multiplied by, so that no difference overflows and no quotient does."""
    return 2.0**64 if spread < 2.0**-64 else 2.0**-64 if spread > 2.0**64 else 1.0


class LinearGrid(NamedTuple):
    """Bins of equal width in float32: ``trunc((x * pre - base) * inverse)``, cut to 0 … levels - 1."""

    pre: float
    base: float
    inverse: float
    levels: int

    @classmethod
    def over(cls, low: float, high: float, levels: int) -> LinearGrid:
        """Bins over a range that is not a point."""
        pre = safe_prescale(high - low)
        return cls(pre, nearest_float32(low * pre), nearest_float32(levels / ((high - low) * pre)), levels)


class UniformGrid(NamedTuple):
    """Bins of equal width over [low, high] in float64: what ``uniform`` uses."""

    low: float
    high: float
    levels: int


Grid = LinearGrid | UniformGrid


class Coding(IntEnum):
    """How the chunks of a section are coded: by one method, or each by the smallest, with the one named preferred."""

    HUFFMAN = 0
    RANS = 1
    HUFFMAN_AUTO = 2
    RANS_AUTO = 3


CONSTANT, RAW, HUFFMAN, RANS = 0, 1, 2, 3
"""Modes of a coded chunk."""

MAX_ALPHABET = 4096
"""Symbols that a coder can tell apart."""

CHUNK = 1 << 19
"""Symbols that share a codebook."""


def symbol_bits(alphabet: int) -> int:
    """Bits of a symbol as it is packed."""
    return (alphabet - 1).bit_length()


def coded_max_nbytes(n: int, alphabet: int) -> int:
    """The most bytes a section of coded symbols can take, and its writer touch."""
    return _core.coded_max_nbytes(n, alphabet)


def symbol_dtype(alphabet: int) -> torch.dtype:
    """How symbols lie in memory between a quantizer and a coder. (int16: torch can do little with uint16.)"""
    return torch.uint8 if alphabet <= 256 else torch.int16


def read_bytes(section: Tensor, nbytes: int) -> bytes:
    """The first few bytes of a section, on the host."""
    return bytes_at(section.data_ptr(), nbytes) if section.is_cpu else bytes(section[:nbytes].tolist())


def write_bytes(section: Tensor, data: bytes) -> None:
    """A few bytes into a section, from the host."""
    if section.is_cpu:
        set_bytes(section.data_ptr(), data)
    else:
        section.copy_(torch.tensor(list(data), dtype=torch.uint8))


def write_seed(section: Tensor, seed: int) -> None:
    write_bytes(section, (seed & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little"))


def read_seed(section: Tensor) -> int:
    return int.from_bytes(read_bytes(section, 8), "little")


def packed_nbytes(n: int, bits: int) -> int:
    """Bytes of n values of the given width: full groups, then a tail without padding beyond its last byte."""
    return n // GROUP * 32 * bits + (n % GROUP * bits + 7) // 8


def packed_int_count(n: int, rotated: bool) -> int:
    """Values in the lanes of n: a rotation fills its last block."""
    return -(-n // SUM_BLOCK) * SUM_BLOCK if rotated else n


def packed_ints_nbytes(n: int, coding: PackedIntCoding) -> int:
    """Bytes of n integers. In words of lanes each block starts a vector of 32 bytes of its own."""
    if coding.packed:
        return packed_nbytes(n, coding.width)
    integers, (blocks, rest) = 32 // coding.width, divmod(n, SUM_BLOCK)
    return 32 * (blocks * num_buckets(SUM_BLOCK // 8, integers) + num_buckets(num_buckets(rest, 8), integers))


def trits_nbytes(n: int) -> int:
    return n // (5 * TRIT_GROUP_NBYTES) * TRIT_GROUP_NBYTES + (n % (5 * TRIT_GROUP_NBYTES) + 4) // 5


def low_bits_candidates(n: int, k: int) -> list[int]:
    """Rice parameters worth trying: around log2(0.69 n / k), where a geometric gap is coded best."""
    middle = min(MAX_LOW_BITS, max(1, 69 * n // (100 * k)).bit_length() - 1)
    return [r for r in (middle - 1, middle, middle + 1) if 0 <= r <= MAX_LOW_BITS]


def positions_max_nbytes(n: int, k: int) -> int:
    """The most bytes that k of n positions take; whole words, unless that is more than a bitmap takes."""
    bitmap = POSITIONS_HEADER + (n + 7) // 8
    if not 0 < k < n:
        return POSITIONS_HEADER
    coded = min(packed_nbytes(k, r) + (k + ((n - k) >> r) + 7) // 8 for r in low_bits_candidates(n, k))
    return min(bitmap, (POSITIONS_HEADER + coded + 3) // 4 * 4)


def read_positions_header(section: Tensor, n: int) -> PositionHeader:
    """Mode, Rice parameter and count, checked against each other and against the section's size."""
    if section.numel() < POSITIONS_HEADER:
        raise FrameError(f"a position section needs at least {POSITIONS_HEADER} bytes, this one has {section.numel()}")
    header = int.from_bytes(read_bytes(section, POSITIONS_HEADER), "little")
    mode, low_bits, k = header & 0xFF, header >> 8 & 0xFF, header >> 16
    body = section.numel() - POSITIONS_HEADER
    if mode == RICE:
        fits = 0 < k <= n and low_bits <= MAX_LOW_BITS and body >= packed_nbytes(k, low_bits) + (k + 7) // 8
    elif mode == BITMAP:
        fits = 0 < k <= n and low_bits == 0 and body == (n + 7) // 8
    else:
        fits = mode == ALL and k == n and low_bits == 0 and body == 0
    if not fits:
        raise FrameError(
            f"a position section of {section.numel()} bytes cannot hold {k} of {n} positions in mode {mode}, "
            f"parameter {low_bits}"
        )
    return PositionHeader(mode, low_bits, k)


def num_buckets(n: int, bucket: int) -> int:
    return -(-n // bucket)


class Kernels(Protocol):
    """The signature that every backend shares."""

    def pack(self, symbols: Tensor, bits: int, out: Tensor) -> None: ...
    def unpack(self, packed: Tensor, n: int, bits: int) -> Tensor: ...

    def copy_finite(self, x: Tensor, out: Tensor) -> bool: ...
    def raw_decode(self, section: Tensor, dtype: torch.dtype, out: Tensor, weight: float | None) -> None: ...
    def all_finite(self, x: Tensor) -> bool: ...
    def add_momentum(self, x: Tensor, momentum: float, velocity: Tensor, residual: Tensor) -> None: ...
    def cast_encode(self, x: Tensor, to: str, out: Tensor) -> tuple[int, int]: ...
    def cast_decode(self, section: Tensor, source: str, out: Tensor, weight: float | None) -> None: ...

    def qsgd_encode(
        self, x: Tensor, *, bits: int, bucket: int, l2: bool, stochastic: bool, seed: int, norms: Tensor, packed: Tensor
    ) -> int: ...
    def qsgd_feedback(
        self,
        x: Tensor,
        residual: Tensor,
        *,
        bits: int,
        bucket: int,
        l2: bool,
        stochastic: bool,
        seed: int,
        norms: Tensor,
        packed: Tensor,
    ) -> int: ...
    def qsgd_decode(
        self, norms: Tensor, packed: Tensor, *, bits: int, bucket: int, out: Tensor, weight: float | None
    ) -> None: ...
    def ternary_encode(self, x: Tensor, *, bucket: int, seed: int, norms: Tensor, packed: Tensor) -> int: ...
    def ternary_decode(
        self, norms: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None
    ) -> None: ...

    def value_range(self, x: Tensor) -> tuple[float, float, int]: ...
    def uniform_encode(self, x: Tensor, *, levels: int, bounds: Tensor, packed: Tensor) -> tuple[float, float, int]: ...
    def uniform_decode(
        self, packed: Tensor, *, low: float, high: float, levels: int, out: Tensor, weight: float | None
    ) -> None: ...

    def linear_encode(self, x: Tensor, grid: LinearGrid, packed: Tensor) -> None: ...
    def table_decode(self, packed: Tensor, table: Tensor, out: Tensor, weight: float | None) -> None: ...
    def sample(self, x: Tensor, count: int, seed: int) -> Tensor: ...
    def histogram(self, x: Tensor, grid: LinearGrid) -> Tensor: ...
    def range_histogram(
        self, x: Tensor, *, bins: int, zero: bool, count: int, seed: int
    ) -> tuple[float, float, int, list[int]]: ...

    def sign_encode(self, x: Tensor, *, bucket: int, scales: Tensor, packed: Tensor) -> int: ...
    def sign_decode(
        self, scales: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None
    ) -> None: ...
    def onebit_encode(self, x: Tensor, *, bucket: int, means: Tensor, packed: Tensor) -> int: ...
    def onebit_decode(
        self, means: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None
    ) -> None: ...

    def topk(self, x: Tensor, k: int) -> tuple[Tensor, Tensor, int]: ...
    def topk_encode(self, x: Tensor, k: int, out: Tensor) -> tuple[int, Tensor, int]: ...
    def topk_sampled(self, x: Tensor, k: int, seed: int) -> tuple[Tensor, Tensor, int]: ...
    def threshold_select(self, x: Tensor, threshold: float) -> tuple[Tensor, Tensor, int]: ...
    def random_positions(self, n: int, k: int, seed: int, like: Tensor) -> Tensor: ...
    def randk_encode(self, x: Tensor, k: int, seed: int, section: Tensor) -> tuple[Tensor, int]: ...

    def positions_encode(self, positions: Tensor, n: int, out: Tensor) -> int: ...
    def positions_decode(self, section: Tensor, n: int, header: PositionHeader) -> Tensor: ...
    def sparse_decode(self, section: Tensor, values: Tensor, out: Tensor, weight: float | None) -> bool: ...
    def randk_decode(self, section: Tensor, values: Tensor, gain: float, out: Tensor, weight: float | None) -> None: ...
    def scatter(self, positions: Tensor, values: Tensor, out: Tensor, weight: float | None) -> None: ...

    def unpack_symbols(self, packed: Tensor, n: int, alphabet: int, trits: bool) -> Tensor: ...
    def pack_symbols(self, symbols: Tensor, alphabet: int, trits: bool, out: Tensor) -> None: ...
    def encode_symbols(self, symbols: Tensor, alphabet: int, coding: int, out: Tensor) -> int: ...
    def grid_symbols(self, x: Tensor, grid: Grid) -> Tensor: ...
    def encode_values(self, x: Tensor, grid: Grid, coding: int, out: Tensor) -> int: ...
    def decode_symbols(self, section: Tensor, n: int, alphabet: int) -> Tensor: ...
    def decode_values(self, section: Tensor, table: Tensor, out: Tensor, weight: float | None) -> None: ...
    def chunk_modes(self, section: Tensor, n: int) -> Tensor: ...

    def block_scales(self, x: Tensor, rms: bool) -> Tensor: ...
    def rotate(self, x: Tensor, seed: int, more: Tensor | None, out: Tensor) -> None: ...
    def packed_int_encode(
        self,
        x: Tensor,
        coding: PackedIntCoding,
        *,
        factor: float | None,
        rotation_seed: int | None,
        rounding_seed: int | None,
        feedback: bool,
        clips: Tensor,
        out: Tensor,
    ) -> int: ...
    def packed_int_decode(
        self,
        integers: Tensor,
        clips: Tensor,
        coding: PackedIntCoding,
        *,
        total: int,
        rotation_seed: int | None,
        out: Tensor,
        weight: float | None,
    ) -> None: ...
    def packed_int_add(self, other: Tensor, total: Tensor) -> None: ...
    def packed_int_accumulate(self, packed: Tensor, n: int, width: int, sum_width: int, total: Tensor) -> None: ...
    def packed_int_repack(self, total: Tensor, n: int, sum_width: int, width: int, out: Tensor) -> None: ...
    def packed_int_max(self, integers: Tensor, n: int, coding: PackedIntCoding) -> int: ...

    def project_rows(self, x: Tensor, q: Tensor) -> Tensor: ...
    def project_columns(self, x: Tensor, p: Tensor) -> Tensor: ...
    def lowrank_decode(
        self, p: Tensor, q: Tensor, *, rows: int, columns: int, rank: int, out: Tensor, weight: float | None
    ) -> None: ...


@runtime_checkable
class MultiTensorKernels(Protocol):
    """What a backend may offer besides: many tensors in one launch, for devices where small ones cost little else.

    Nothing here waits: keys and flags stay on the device until all that can be launched has been.
    """

    def amax_bits_all(self, tensors: Sequence[Tensor]) -> Tensor:
        """The key of each of several float32 tensors."""
        ...

    def qsgd_encode_all(
        self,
        tensors: Sequence[Tensor],
        residuals: Sequence[Tensor] | None,
        *,
        bits: int,
        bucket: int,
        stochastic: bool,
        seeds: Sequence[int],
        norms: Sequence[int],
        packed: Sequence[int],
    ) -> Tensor:
        """``qsgd_encode`` of each, or ``qsgd_feedback``, to addresses; their keys. For 2, 4 and 8 bits, by maximum."""
        ...

    def qsgd_decode_all(
        self,
        norms: Sequence[int],
        packed: Sequence[int],
        *,
        bits: int,
        bucket: int,
        outs: Sequence[Tensor],
        weight: float | None,
    ) -> Tensor:
        """``qsgd_decode`` of each, from addresses; not 0 where a section held what no encoder writes."""
        ...

    def sign_encode_all(
        self, tensors: Sequence[Tensor], *, bucket: int, sides: int, means: Sequence[int], packed: Sequence[int]
    ) -> Tensor:
        """``sign_encode`` of each, or with two sides ``onebit_encode``; their keys. For buckets of 256 or more."""
        ...

    def sign_decode_all(
        self,
        means: Sequence[int],
        packed: Sequence[int],
        *,
        bucket: int,
        sides: int,
        outs: Sequence[Tensor],
        weight: float | None,
    ) -> Tensor:
        """``sign_decode`` of each, or with two sides ``onebit_decode``; not 0 as above."""
        ...

    def gather_blocks(
        self, tensors: Sequence[Tensor], residuals: Sequence[Tensor | None], rotation_seed: int | None, out: Tensor
    ) -> None:
        """Each tensor, ``rotate``d if asked for, plus its residual, as whole blocks one behind the other in ``out``."""
        ...

    def packed_int_decode_all(
        self,
        integers: Tensor,
        clips: Tensor,
        coding: PackedIntCoding,
        *,
        total: int,
        rotation_seed: int | None,
        outs: Sequence[Tensor],
    ) -> Tensor:
        """``packed_int_decode`` of such blocks in words of lanes, each to its tensor; not 0 as above."""
        ...
