"""``shared:bits`` and ``thc:bits``: integers on a scale that all workers share, added while packed.

Level 0 is minus the clip of the block and level L is plus the clip. The sum S of the levels of M workers is an integer
from 0 to M L and decodes to (2 S / (L M) - 1) times the clip, so that sums need integer additions only.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from laconic.codecs import checks
from laconic.codecs.base import ValueStage, require_finite
from laconic.errors import ConfigError, FrameError
from laconic.kernels.interface import CLIP_LIMIT, IntRounding, Kernels, PackedIntSum
from laconic.kernels.sections import (
    SUM_BLOCK,
    PackedIntCoding,
    num_buckets,
    packed_int_count,
    packed_ints_nbytes,
    packed_nbytes,
    read_bytes,
    write_bytes,
)
from laconic.packet import Arena

__all__ = ["INT_SUM_HEADER", "THC", "IntSumHeader", "PackedIntStage", "Shared"]

MAX_BITS: Final = 16
MAX_TOTAL: Final = (1 << 30) - 1
"""The largest sum of levels: twice it still fits a signed 32-bit integer."""

_HEADER = struct.Struct("<BBHIII")  # layout, width, 0, levels, workers, count
INT_SUM_HEADER: Final = _HEADER.size
_VERTICAL, _WORDS = 0, 1  # layouts

_LEVELS: Final = (1, 2, 3, 5, 7, 15, 31, 63, 127, 255, 511, 1023, 4095, 65535)
_NEAREST: Final = (0.80, 1.22, 1.49, 1.83, 2.05, 2.51, 2.92, 3.28, 3.61, 3.92, 4.22, 4.49, 5.02, 5.94)
_STOCHASTIC: Final = {
    1: (0.65, 1.02, 1.27, 1.61, 1.83, 2.31, 2.73, 3.11, 3.45, 3.77, 4.09, 4.37, 4.90, 5.83),
    2: (0.81, 1.23, 1.50, 1.83, 2.05, 2.51, 2.92, 3.28, 3.61, 3.92, 4.22, 4.49, 5.01, 5.94),
    4: (0.99, 1.45, 1.73, 2.06, 2.27, 2.71, 3.10, 3.44, 3.77, 4.08, 4.36, 4.64, 5.14, 6.05),
    8: (1.19, 1.69, 1.95, 2.27, 2.47, 2.90, 3.27, 3.61, 3.92, 4.22, 4.49, 4.76, 5.26, 6.14),
    16: (1.40, 1.92, 2.17, 2.48, 2.67, 3.08, 3.44, 3.77, 4.06, 4.35, 4.63, 4.89, 5.46, 6.20),
    64: (1.83, 2.38, 2.58, 2.87, 3.04, 3.42, 3.76, 4.07, 4.35, 4.62, 4.89, 5.14, 5.60, 6.30),
}
"""Clips of least squared error of the mean, for N(0, 1), by levels and (stochastic) by workers. The mean of more
workers has less rounding error but the same clipping error, so the clip grows."""


def _interpolate(xs: tuple[int, ...], ys: tuple[float, ...], x: int) -> float:
    """Interpolate linearly, constant beyond the last point, with arithmetic that is the same on every machine."""
    if x >= xs[-1]:
        return ys[-1]
    i = next(i for i, edge in enumerate(xs) if edge > x)
    return ys[i - 1] + (ys[i] - ys[i - 1]) * ((x - xs[i - 1]) / (xs[i] - xs[i - 1]))


@dataclass(frozen=True, slots=True)
class IntSumHeader:
    """The header of packed integers.

    Args:
        packed: Vertically packed, as narrow as the sum allows; otherwise in 32-bit words, ready to be added.
        width: Bits of an integer.
        levels: L: the integers of one worker are 0 to L.
        workers: The most workers that may be added.
        count: The workers that were added.
    """

    packed: bool
    width: int
    levels: int
    workers: int
    count: int

    @classmethod
    def for_server(cls, levels: int, workers: int, count: int = 1) -> IntSumHeader:
        """Return the header of integers that are as narrow as ``count`` workers need."""
        return cls(True, (levels * max(count, 1)).bit_length(), levels, workers, count)

    @property
    def coding(self) -> PackedIntCoding:
        return PackedIntCoding(self.levels, self.width, self.packed)

    @property
    def total(self) -> int:
        """The largest possible sum of ``count`` workers."""
        return self.levels * self.count

    def to_bytes(self) -> bytes:
        layout = _VERTICAL if self.packed else _WORDS
        return _HEADER.pack(layout, self.width, 0, self.levels, self.workers, self.count)

    def write(self, section: Tensor) -> None:
        write_bytes(section, self.to_bytes())

    @classmethod
    def read(cls, section: Tensor, max_levels: int) -> IntSumHeader:
        """Read the header from a section of a frame; ``FrameError`` if it is invalid."""
        if section.numel() != _HEADER.size:
            raise FrameError(f"the header of a sum has {_HEADER.size} bytes, the frame has {section.numel()}")
        layout, width, zero, levels, workers, count = _HEADER.unpack(read_bytes(section, _HEADER.size))
        header = cls(layout == _VERTICAL, width, levels, workers, count)
        if layout not in (_VERTICAL, _WORDS) or zero or not 1 <= levels <= max_levels or not count <= workers:
            raise FrameError(f"the header of a sum is invalid: {header}")
        if not 1 <= workers * levels <= MAX_TOTAL:
            raise FrameError(f"{workers} workers with {levels} levels exceed the largest sum, {MAX_TOTAL}")
        if header.packed:
            fits = header == cls.for_server(levels, workers, count)
        else:
            fits = 1 <= width <= MAX_BITS and workers * levels < 1 << width
        if not fits:
            raise FrameError(f"integers of {width} bits do not fit {count} of {workers} workers with {levels} levels")
        return header


class PackedIntStage(ValueStage):
    """Writes packed integers. Three sections: a header, a clip per block, and the integers."""

    kind = "quantizer"
    summable = True
    num_sections = 3
    bits: int
    round: str

    def __post_init__(self) -> None:
        checks.integer(self, "bits", 1, MAX_BITS)
        checks.one_of(self, "round", ("nearest", "stochastic"))

    @property
    def rotation_seed(self) -> int | None:
        """The seed of the rotation; None if values are not rotated."""
        return None

    def clip_factor(self, levels: int, workers: int) -> float:
        """Return the clip in units of a block's scale."""
        raise NotImplementedError

    @property
    def stochastic(self) -> bool:
        return self.round == "stochastic"

    @property
    def randomized(self) -> bool:
        return self.stochastic

    @property
    def is_biased(self) -> bool:
        return not self.stochastic or self.rotation_seed is not None

    # ------------------------------------------------------------------------------------------------ among workers

    def header(self, workers: int, *, ring: bool) -> IntSumHeader:
        """Return the header for a number of workers; ``ConfigError`` if they are too many.

        A worker sends ``bits`` per value. To a server it sends its own integer, so L = 2^bits - 1, and the server's sum
        is as wide as it needs to be. On a ring it sends partial sums, so the sum must fit: L = floor((2^bits - 1) /
        workers).
        """
        most = (1 << self.bits) - 1
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise ConfigError(f"workers must be a whole number from 1 on, got {workers}")
        if ring:
            if workers > most:
                raise ConfigError(
                    f"{self.name}:{self.bits} can add {most} workers on a ring, not {workers}: its integers would "
                    f"overflow. Use {self.name}:{min(MAX_BITS, workers.bit_length())} or more bits"
                )
            return IntSumHeader(False, self.bits, most // workers, workers, 1)
        if workers * most > MAX_TOTAL:
            raise ConfigError(
                f"{self.name}:{self.bits} can add {MAX_TOTAL // most} workers at a server, not {workers}: "
                "its sums would overflow. Use fewer bits"
            )
        return IntSumHeader.for_server(most, workers)

    def scales(self, x: Tensor, kernels: Kernels) -> Tensor:
        """Return one float32 per block, infinite where x is not finite; the workers agree on the largest of each."""
        return kernels.block_scales(x, self.rotation_seed is not None)

    def clips(self, scales: Tensor, header: IntSumHeader) -> Tensor:
        """Return the scales times the clip factor, limited so that every level is finite in float32."""
        clips = scales * self.clip_factor(header.levels, header.workers)
        return torch.where(clips < CLIP_LIMIT, clips, CLIP_LIMIT)

    def encode_sum(
        self, x: Tensor, header: IntSumHeader, clips: Tensor, kernels: Kernels, arena: Arena, *, rounding_seed: int,
        feedback: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return the sections of one worker's contribution, on clips that all workers share.

        With ``feedback`` x is already rotated, and the decoded values are subtracted from it.
        """
        first = arena.take(_HEADER.size)
        header.write(first)
        second = arena.take(4 * clips.numel())
        second.copy_(clips.view(torch.uint8))
        rotation_seed = None if feedback else self.rotation_seed
        packed = self.encode_packed_ints(
            x, header, second, kernels, arena, rotation_seed=rotation_seed, rounding_seed=rounding_seed,
            feedback=feedback,
        )  # fmt: skip
        return first, second, packed

    def encode_packed_ints(
        self, x: Tensor, header: IntSumHeader, clips: Tensor, kernels: Kernels, arena: Arena, *,
        rotation_seed: int | None, rounding_seed: int, feedback: bool,
    ) -> Tensor:  # fmt: skip
        """Return the section of integers only; ``rotation_seed`` is None if x is already rotated or must not be."""
        packed = arena.take(packed_ints_nbytes(packed_int_count(x.numel(), rotation_seed is not None), header.coding))
        rounding = IntRounding(None, rotation_seed, rounding_seed if self.stochastic else None)
        kernels.packed_int_encode(
            x, header.coding, rounding, feedback=feedback, clips=clips.view(torch.uint8), out=packed
        )
        return packed

    # ------------------------------------------------------------------------------------------- without a sum

    def encode(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> tuple[Tensor, ...]:
        header = self.header(1, ring=False)
        first, clips, packed = (arena.take(nbytes) for nbytes in self.section_nbytes(x.numel(), 4))
        header.write(first)
        factor = self.clip_factor(header.levels, 1)
        rounding = IntRounding(factor, self.rotation_seed, seed if self.stochastic else None)
        amax_bits = kernels.packed_int_encode(x, header.coding, rounding, feedback=False, clips=clips, out=packed)
        require_finite(amax_bits, x.numel())
        return (first, clips, packed) if amax_bits else ()

    def read_header(self, sections: tuple[Tensor, ...], n: int) -> IntSumHeader:
        """Return the header of a packet of n values; all sizes are checked."""
        header = IntSumHeader.read(sections[0], (1 << self.bits) - 1)
        expected, nbytes = packed_ints_nbytes(self._num_ints(n), header.coding), sections[2].numel()
        if nbytes != expected:
            raise FrameError(f"{n} values of {header.width} bits take {expected} bytes, the frame has {nbytes}")
        return header

    def _num_ints(self, n: int) -> int:
        return packed_int_count(n, self.rotation_seed is not None)

    def decode(
        self, sections: tuple[Tensor, ...], dtype: torch.dtype, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        header = self.read_header(sections, out.numel())
        packed = PackedIntSum(sections[2], sections[1], header.coding, header.total)
        if header.count == 0:  # the values are no numbers, but clips and integers are checked, which must be 0
            values = out if weight is None else torch.empty_like(out)
            kernels.packed_int_decode(packed, rotation_seed=self.rotation_seed, out=values, weight=None)
            if weight is None:
                out.zero_()
            return
        kernels.packed_int_decode(packed, rotation_seed=self.rotation_seed, out=out, weight=weight)

    def section_nbytes(self, n: int, itemsize: int) -> tuple[int, ...]:
        return _HEADER.size, 4 * num_buckets(n, SUM_BLOCK), packed_nbytes(self._num_ints(n), self.bits)

    def accepts(self, section_nbytes: tuple[int, ...], n: int, itemsize: int) -> bool:
        # The header says how wide the integers are: at least one bit.
        least = packed_nbytes(self._num_ints(n), 1)
        return section_nbytes[:2] == self.section_nbytes(n, itemsize)[:2] and section_nbytes[2] >= least


@dataclass(frozen=True)
class Shared(PackedIntStage):
    """Equally spaced levels between minus and plus the largest magnitude of each block of 1,024 values.

    In a sum all workers use the largest magnitude of any of them, so that packets can be added without decoding.

    Args:
        bits: Bits that a worker sends per value, 1 to 16.
        round: ``nearest``, best with error feedback; or ``stochastic``, unbiased without it.

    Payload: 16 bytes, ``float32 clip[ceil(n / 1024)]``, packed integers. 8.03 bits a value for ``shared:8``.
    """

    bits: int = 8
    round: str = "nearest"

    name, example = "shared", "ef|shared:8"
    summary = "integers on a shared scale per block"
    biased = "only with round=nearest"

    @property
    def contractive(self) -> bool:
        return self.bits >= (3 if self.stochastic else 2)

    def clip_factor(self, levels: int, workers: int) -> float:
        return 1.0


@dataclass(frozen=True)
class THC(PackedIntStage):
    """``shared`` after a rotation of each block by random signs and a Hadamard matrix, which makes values Gaussian.

    The clip is a fixed multiple of the root mean square, and two bits give the error that ``shared`` needs four bits
    for. The uniform variant of THC (Li et al. 2024, arXiv:2302.08545). It pads its last block to 1,024 values, so it is
    not for small tensors.

    Args:
        bits: Bits that a worker sends per value, 1 to 16.
        round: ``nearest``, best with error feedback; or ``stochastic``, unbiased inside the clip.
        rotation: Seed of the random signs; all workers use the same.

    Payload: 16 bytes, ``float32 clip[b]``, packed integers, 1,024 b of them; b = ceil(n / 1024).
    """

    bits: int = 4
    round: str = "nearest"
    rotation: int = 0

    name, example = "thc", "ef|thc:4"
    summary = "rotated, then integers on a shared scale"
    biased = "rounds to nearest, or clips"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer(self, "rotation", 0, (1 << 63) - 1)

    @property
    def rotation_seed(self) -> int | None:
        return self.rotation

    @property
    def contractive(self) -> bool:
        return self.bits >= 3 or not self.stochastic

    def clip_factor(self, levels: int, workers: int) -> float:
        if not self.stochastic:
            return _interpolate(_LEVELS, _NEAREST, levels)
        by_workers = tuple(_interpolate(_LEVELS, row, levels) for row in _STOCHASTIC.values())
        return _interpolate(tuple(_STOCHASTIC), by_workers, workers)
