"""The kernels that every backend offers, and the types of their arguments.

``reference`` (torch) defines the bytes; the other backends must produce the same ones, faster. Conventions:

- Tensors are flat and contiguous, of float32 unless stated otherwise; sections are uint8.
- An encoder returns the *amax bits* of its input: the float32 bit pattern of the largest magnitude. 0 means that all
  values are zero, ``>= NONFINITE`` that one is an infinity or a NaN; neither check costs a pass of its own. In both
  cases the sections are undefined.
- A decoder stores into ``out`` if ``weight`` is None; otherwise it adds ``weight`` times each value to ``out``, the
  fused decode-and-accumulate of aggregation. It raises ``FrameError`` if a section holds bytes that no encoder writes.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from laconic.kernels.sections import PackedIntCoding, PositionHeader

NONFINITE = 0x7F800000
"""Amax bits from here on mean an infinity or a NaN."""

FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127

CLIP_LIMIT = (2.0 - 2.0**-20) * 2.0**127
"""The largest clip: none of its levels leaves float32, however it is rounded."""


class QsgdCoding(NamedTuple):
    """How ``qsgd`` rounds: bits per symbol, values per norm, l2 norms instead of maxima, stochastic rounding."""

    bits: int
    bucket: int
    l2: bool
    stochastic: bool


class ChunkCounts(NamedTuple):
    """How many entries each chunk of ``chunk`` consecutive values keeps; ``last`` is of the final chunk, whole or not.

    ``chunk`` is a power of two from 64 to 65536; every chunk keeps at least one of its entries.
    """

    chunk: int
    each: int
    last: int

    def total(self, n: int) -> int:
        """Return how many of n > 0 values are kept."""
        return (n - 1) // self.chunk * self.each + self.last

    @property
    def chunk_bits(self) -> int:
        """The logarithm of ``chunk``, which must be a power of two."""
        return self.chunk.bit_length() - 1


class BinCoding(NamedTuple):
    """How ``bins`` chooses a value's bin: bits per symbol, values per bucket, and the bins of each side of the mean.

    A value at distance d from the mean of its bucket is in bin ``slope * (d - mean of d) / (deviation of d) + offset``
    of its side, truncated and clamped to the 2^(bits - 1) bins of a side.
    """

    bits: int
    bucket: int
    slope: float
    offset: float


class IntRounding(NamedTuple):
    """How values become packed integers.

    Args:
        factor: A block's clip is this factor times its largest magnitude (root mean square if rotated); None: clips
            are given.
        rotation_seed: Seed of the signs of the rotation; None: no rotation.
        rounding_seed: Seed of stochastic rounding; None: round to nearest.
    """

    factor: float | None
    rotation_seed: int | None
    rounding_seed: int | None


class PackedIntSum(NamedTuple):
    """Sums of packed integers. ``total``, levels times the number of workers, stands for a block's clip."""

    integers: Tensor
    clips: Tensor
    coding: PackedIntCoding
    total: int


def nearest_float32(value: float) -> float:
    """Round to float32, saturating."""
    return float(struct.unpack("<f", struct.pack("<f", max(-FLOAT32_MAX, min(value, FLOAT32_MAX))))[0])


def safe_prescale(spread: float) -> float:
    """The factor that keeps differences and quotients of values in a range of this width from overflowing."""
    return 2.0**64 if spread < 2.0**-64 else 2.0**-64 if spread > 2.0**64 else 1.0


class LinearGrid(NamedTuple):
    """Bins of equal width in float32: ``trunc((x * pre - base) * inverse)``, clamped to [0, levels - 1]."""

    pre: float
    base: float
    inverse: float
    levels: int

    @classmethod
    def over(cls, low: float, high: float, levels: int) -> LinearGrid:
        """Return bins over [low, high]; low must be less than high."""
        pre = safe_prescale(high - low)
        return cls(pre, nearest_float32(low * pre), nearest_float32(levels / ((high - low) * pre)), levels)


class UniformGrid(NamedTuple):
    """Bins of equal width over [low, high] in float64, for ``uniform``."""

    low: float
    high: float
    levels: int


Grid = LinearGrid | UniformGrid


class Kernels(Protocol):
    """The functions of a backend: a module that has them all."""

    # --- bit packing

    def pack(self, symbols: Tensor, bits: int, out: Tensor) -> None:
        """Write symbols of ``bits`` bits (0 to 31) in the vertical packing."""

    def unpack(self, packed: Tensor, n: int, bits: int) -> Tensor:
        """Return n packed symbols as int32."""

    # --- plain values and casts

    def all_finite(self, x: Tensor) -> bool: ...

    def copy_finite(self, x: Tensor, out: Tensor) -> bool:
        """Copy the bytes of x; return False if one of its floats is not finite (the copy is then undefined)."""

    def raw_decode(self, section: Tensor, dtype: torch.dtype, out: Tensor, weight: float | None) -> None:
        """Decode plain values: store into ``out`` of the same dtype, or accumulate into a float32 one."""

    def add_momentum(self, x: Tensor, momentum: float, velocity: Tensor, residual: Tensor) -> None:
        """In place: velocity = momentum * velocity + x; residual += velocity. Each operation rounds to float32."""

    def stochastic_bf16(self, x: Tensor, seed: int, out: Tensor) -> None:
        """Round to one of the two nearest bfloat16 values, so that the expectation is x.

        The random bits of a value are a hash of the seed and its index. Values that bfloat16 holds stay as they are,
        and none becomes infinite.
        """

    def cast_encode(self, x: Tensor, to: str, out: Tensor) -> tuple[int, int]:
        """Round to ``fp16`` or ``bf16``, saturating; return the amax bits and how many values saturated."""

    def cast_decode(self, section: Tensor, source: str, out: Tensor, weight: float | None) -> None: ...

    # --- quantizers with a few floats per bucket; all encoders return the amax bits

    def qsgd_encode(self, x: Tensor, coding: QsgdCoding, *, seed: int, norms: Tensor, packed: Tensor) -> int: ...

    def qsgd_feedback(
        self, x: Tensor, residual: Tensor, coding: QsgdCoding, *, seed: int, norms: Tensor, packed: Tensor
    ) -> int:
        """Encode residual + x; the residual becomes what the decoder will not recover, and is lost if not finite."""

    def qsgd_decode(
        self, norms: Tensor, packed: Tensor, *, bits: int, bucket: int, out: Tensor, weight: float | None
    ) -> None: ...

    def ternary_encode(self, x: Tensor, *, bucket: int, seed: int, norms: Tensor, packed: Tensor) -> int: ...

    def ternary_decode(
        self, norms: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None
    ) -> None: ...

    def sign_encode(self, x: Tensor, *, bucket: int, scales: Tensor, packed: Tensor) -> int:
        """Write sign bits, and the mean magnitude of each bucket."""

    def sign_decode(
        self, scales: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None
    ) -> None: ...

    def onebit_encode(self, x: Tensor, *, bucket: int, means: Tensor, packed: Tensor) -> int:
        """Write sign bits, and per bucket the mean magnitude of its non-negative and of its negative values."""

    def onebit_decode(
        self, means: Tensor, packed: Tensor, *, bucket: int, out: Tensor, weight: float | None
    ) -> None: ...

    def bins_encode(self, x: Tensor, coding: BinCoding, *, means: Tensor, packed: Tensor) -> int:
        """Write each value's bin, and the mean of the values of each of the 2^bits bins of a bucket (0 if empty)."""

    def bins_decode(
        self, means: Tensor, packed: Tensor, *, bits: int, bucket: int, out: Tensor, weight: float | None
    ) -> None: ...

    # --- grids over a range

    def value_range(self, x: Tensor) -> tuple[float, float, int]:
        """Return the smallest and the largest value (0, 0 if one is not finite), and the amax bits."""

    def uniform_encode(self, x: Tensor, *, levels: int, bounds: Tensor, packed: Tensor) -> tuple[float, float, int]:
        """Write the range (two float32, no -0) and each value's bin; return the range and the amax bits.

        No bins are written if the range is a point.
        """

    def uniform_decode(
        self, packed: Tensor, *, low: float, high: float, levels: int, out: Tensor, weight: float | None
    ) -> None: ...

    def linear_encode(self, x: Tensor, grid: LinearGrid, packed: Tensor) -> None:
        """Write each value's bin. Values outside the grid go to its first or last bin."""

    def table_decode(self, packed: Tensor, table: Tensor, out: Tensor, weight: float | None) -> None:
        """Decode packed symbols to entries of a table; symbols beyond the table read as its last entry."""

    def sample(self, x: Tensor, count: int, seed: int) -> Tensor:
        """Return one value of each of ``count`` equal parts of x, chosen by a hash; x itself if count is its size."""

    def histogram(self, x: Tensor, grid: LinearGrid) -> Tensor:
        """Count the values of each bin, on the host."""

    def range_histogram(
        self, x: Tensor, *, bins: int, zero: bool, count: int, seed: int
    ) -> tuple[float, float, int, list[int]]:
        """Return the range, the amax bits, and the histogram of a sample over that range.

        The range has no -0 and includes 0 if ``zero``. The histogram is empty if the range is a point or not finite.
        """

    # --- selection; positions are ascending, int32 for up to 2^31 values and int64 beyond. x has any float dtype.

    def topk(self, x: Tensor, k: int) -> tuple[Tensor, Tensor, int]:
        """Return positions, values and amax bits of the k largest magnitudes; among equals the lowest index wins."""

    def topk_encode(self, x: Tensor, k: int, out: Tensor) -> tuple[int, Tensor, int]:
        """``topk`` that writes the positions to ``out`` (``positions_max_nbytes``) and returns their bytes."""

    def topk_chunks(self, x: Tensor, counts: ChunkCounts) -> tuple[Tensor, Tensor, int]:
        """``topk`` of each chunk, one behind the other; the amax bits are those of all."""

    def topk_chunks_encode(self, x: Tensor, counts: ChunkCounts, out: Tensor) -> tuple[int, Tensor, int]:
        """``topk_chunks`` that writes the positions to ``out`` (``positions_max_nbytes``) and returns their bytes."""

    def topk_sampled(self, x: Tensor, k: int, seed: int) -> tuple[Tensor, Tensor, int]:
        """``topk`` of about k entries: those that reach the k/n quantile of 65,536 sampled magnitudes.

        Falls back to ``topk`` if the threshold is 0 or more than 2 k + 16 entries reach it.
        """

    def threshold_select(self, x: Tensor, threshold: float) -> tuple[Tensor, Tensor, int]:
        """Return positions, values and amax bits of the entries of at least this magnitude (in x's precision)."""

    def random_positions(self, n: int, k: int, seed: int, like: Tensor) -> Tensor:
        """Return the k of n positions with the smallest hash, on the device of ``like``."""

    def randk_encode(self, x: Tensor, k: int, seed: int, section: Tensor) -> tuple[Tensor, int]:
        """Write the seed to a section of 8 bytes; return the values at ``random_positions`` and the amax bits of x."""

    def randk_decode(self, section: Tensor, values: Tensor, gain: float, out: Tensor, weight: float | None) -> None:
        """``scatter`` the values times ``gain``, saturating, to the ``random_positions`` of the section's seed."""

    def positions_encode(self, positions: Tensor, n: int, out: Tensor) -> int:
        """Write positions to ``out`` (``positions_max_nbytes``) in as few bytes as possible; return their number."""

    def gaps_encode(self, positions: Tensor, n: int, out: Tensor) -> int:
        """Write fewer than n positions to ``out`` (``gaps_max_nbytes``), their gaps entropy-coded; return the bytes."""

    def ranks_encode(self, positions: Tensor, n: int, counts: ChunkCounts, out: Tensor) -> int:
        """Write positions of ``topk_chunks`` to ``out`` (``ranks_nbytes``), a number per chunk; return the bytes."""

    def contexts_encode(self, positions: Tensor, n: int, columns: int, counts: ChunkCounts | None, out: Tensor) -> int:
        """Write fewer than n positions of a matrix to ``out`` if it has room for them; return the bytes, or 0.

        Args:
            counts: Of the chunks, if the positions are those of ``topk_chunks``.
        """

    def positions_decode(self, section: Tensor, n: int, header: PositionHeader) -> Tensor: ...

    def sparse_decode(self, section: Tensor, values: Tensor, out: Tensor, weight: float | None) -> bool:
        """``scatter`` unchecked values to the positions of a section.

        Returns False, without any effect, if the section has positions for another number of values.
        """

    def scatter(self, positions: Tensor, values: Tensor, out: Tensor, weight: float | None) -> None:
        """Store values at their positions and zeros elsewhere, or accumulate the values."""

    # --- symbols and entropy coding

    def unpack_symbols(self, packed: Tensor, n: int, alphabet: int, trits: bool) -> Tensor:
        """Return a quantizer's packed symbols, one element each (``symbol_dtype``)."""

    def pack_symbols(self, symbols: Tensor, alphabet: int, trits: bool, out: Tensor) -> None: ...

    def grid_symbols(self, x: Tensor, grid: Grid) -> Tensor:
        """Return each value's bin as a symbol for a coder."""

    def encode_symbols(self, symbols: Tensor, alphabet: int, coding: int, out: Tensor) -> int:
        """Entropy-code symbols into ``out`` (``coded_max_nbytes``); return the number of bytes."""

    def encode_values(self, x: Tensor, grid: Grid, coding: int, out: Tensor) -> int:
        """``encode_symbols`` of ``grid_symbols``."""

    def decode_symbols(self, section: Tensor, n: int, alphabet: int) -> Tensor: ...

    def decode_values(self, section: Tensor, table: Tensor, out: Tensor, weight: float | None) -> None:
        """Decode coded symbols to entries of a table (on the host)."""

    def chunk_modes(self, section: Tensor, n: int) -> Tensor:
        """Return the mode of each coded chunk, on the host."""

    # --- packed integers of summable codecs

    def block_scales(self, x: Tensor, rms: bool) -> Tensor:
        """Return the largest magnitude (or root mean square) of each block; infinity if one is not finite."""

    def rotate(self, x: Tensor, seed: int, addend: Tensor | None, out: Tensor) -> None:
        """Multiply each block by random signs and a Hadamard matrix / 32; add ``addend``, of the rotated length.

        ``addend`` may be ``out``.
        """

    def packed_int_encode(
        self, x: Tensor, coding: PackedIntCoding, rounding: IntRounding, *, feedback: bool, clips: Tensor, out: Tensor
    ) -> int:
        """Return the amax bits if clips are computed, else 0. ``feedback`` subtracts the decoded values from x."""

    def packed_int_decode(
        self, packed: PackedIntSum, *, rotation_seed: int | None, out: Tensor, weight: float | None
    ) -> None: ...

    def packed_int_add(self, other: Tensor, total: Tensor) -> None:
        """Add 32-bit words; no integer carries into the next as long as sums fit their width."""

    def packed_int_accumulate(self, packed: Tensor, n: int, width: int, sum_width: int, total: Tensor) -> None:
        """Add packed integers to a vertically packed sum of 8, 16 or 32 bits whose last group is padded."""

    def packed_int_repack(self, total: Tensor, n: int, sum_width: int, width: int, out: Tensor) -> None:
        """Write such a sum with fewer bits per integer."""

    def packed_int_max(self, integers: Tensor, n: int, coding: PackedIntCoding) -> int:
        """Return the largest integer."""

    # --- low rank

    def project_rows(self, x: Tensor, q: Tensor) -> Tensor:
        """Return x q^T for x (rows, columns) and q (rank, columns)."""

    def project_columns(self, x: Tensor, p: Tensor) -> Tensor:
        """Return p^T x for x (rows, columns) and p (rows, rank)."""

    def lowrank_decode(
        self, p: Tensor, q: Tensor, *, rows: int, columns: int, rank: int, out: Tensor, weight: float | None
    ) -> None:
        """Decode p q from two sections of float32."""
