"""``shared:bits`` and ``thc:bits``: integers on a scale that all senders share, added while packed.

Level 0 stands for minus the block's clip and level L for plus. The sum of M senders' levels is a whole number from 0 to
M L, and means (2 S / (L M) - 1) times the clip: whoever adds needs to know neither, and makes no float.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from laconic.codecs import checks
from laconic.codecs.base import ValueStage, refuse_nonfinite
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

__all__ = ["HEAD_NBYTES", "THC", "PackedIntHead", "PackedIntStage", "Shared"]

MAX_BITS: Final = 16
MAX_TOTAL: Final = (1 << 30) - 1
"""The largest sum of levels: twice it still fits a signed 32-bit integer."""

_HEAD = struct.Struct("<BBHIII")  # layout, width, 0, levels, workers, count
HEAD_NBYTES: Final = _HEAD.size
_PACKED, _LANES = 0, 1


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
"""Clips of least squared error of the mean, for N(0, 1), by levels and (stochastic) by workers. More workers average
rounding out but not clipping, so they clip less."""


def _between(xs: tuple[int, ...], ys: tuple[float, ...], x: int) -> float:
    """Straight lines between the points, flat beyond them: arithmetic that is the same on every machine."""
    if x >= xs[-1]:
        return ys[-1]
    i = next(i for i, edge in enumerate(xs) if edge > x)
    return ys[i - 1] + (ys[i] - ys[i - 1]) * ((x - xs[i - 1]) / (xs[i] - xs[i - 1]))


@dataclass(frozen=True, slots=True)
class PackedIntHead:
    """What it takes to read a packet's integers.

    Args:
        packed: In the vertical packing, as narrow as the sum allows; otherwise in words of lanes, ready to be added.
        width: Bits of an integer.
        levels: L: one sender's integers go from 0 to L.
        workers: The most senders that may be added up.
        count: How many were.
    """

    packed: bool
    width: int
    levels: int
    workers: int
    count: int

    @classmethod
    def for_server(cls, levels: int, workers: int, count: int = 1) -> PackedIntHead:
        """As narrow as ``count`` senders need."""
        return cls(True, (levels * max(count, 1)).bit_length(), levels, workers, count)

    @property
    def coding(self) -> PackedIntCoding:
        return PackedIntCoding(self.levels, self.width, self.packed)

    @property
    def total(self) -> int:
        """The largest sum that so many senders can make."""
        return self.levels * self.count

    def to_bytes(self) -> bytes:
        layout = _PACKED if self.packed else _LANES
        return _HEAD.pack(layout, self.width, 0, self.levels, self.workers, self.count)

    def write(self, section: Tensor) -> None:
        write_bytes(section, self.to_bytes())

    @classmethod
    def read(cls, section: Tensor, most_levels: int) -> PackedIntHead:
        """From a section of a frame; ``FrameError`` unless its numbers fit together."""
        if section.numel() != _HEAD.size:
            raise FrameError(f"the head of a sum has {_HEAD.size} bytes, this one {section.numel()}")
        layout, width, zero, levels, workers, count = _HEAD.unpack(read_bytes(section, _HEAD.size))
        head = cls(layout == _PACKED, width, levels, workers, count)
        if layout not in (_PACKED, _LANES) or zero or not 1 <= levels <= most_levels or not count <= workers:
            raise FrameError(f"the head of a sum makes no sense: {head}")
        if not 1 <= workers * levels <= MAX_TOTAL:
            raise FrameError(f"{workers} workers with {levels} levels are more than a sum can hold")
        if head.packed:
            fits = head == cls.for_server(levels, workers, count)
        else:
            fits = 1 <= width <= MAX_BITS and workers * levels < 1 << width
        if not fits:
            raise FrameError(f"integers of {width} bits do not fit {count} of {workers} workers with {levels} levels")
        return head


class PackedIntStage(ValueStage):
    """What both have in common: three sections, a head, a clip per block, and integers."""

    kind: ClassVar[str] = "quantizer"
    summable: ClassVar[bool] = True
    num_sections: ClassVar[int] = 3
    bits: int
    round: str

    def __post_init__(self) -> None:
        checks.whole(self.name, "bits", self.bits, 1, MAX_BITS)
        checks.one_of(self.name, "round", self.round, ("nearest", "stochastic"))

    @property
    def signs(self) -> int | None:
        """The seed of the rotation; None without one."""
        return None

    def clip_factor(self, levels: int, workers: int) -> float:
        """The clip, in units of a block's scale."""
        raise NotImplementedError

    @property
    def stochastic(self) -> bool:
        return self.round == "stochastic"

    @property
    def is_biased(self) -> bool:
        return not self.stochastic or self.signs is not None

    # ------------------------------------------------------------------------------------------------ among workers

    def head(self, workers: int, *, ring: bool) -> PackedIntHead:
        """How so many workers lay out their integers, or ``ConfigError`` where one of them is too many.

        ``bits`` are what a worker sends for a value. To a server it sends its own integer, so L = 2^bits - 1, and the
        server's sum grows as wide as it must. On a ring it passes partial sums on, so the sum must fit as well:
        L = floor((2^bits - 1) / workers).
        """
        most = (1 << self.bits) - 1
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise ConfigError(f"workers must be a whole number from 1 on, got {workers}")
        if ring:
            if workers > most:
                raise ConfigError(
                    f"{self.name}:{self.bits} can add {most} workers on a ring, not {workers}: its lanes would "
                    f"overflow. Use {self.name}:{min(MAX_BITS, workers.bit_length())} or more bits"
                )
            return PackedIntHead(False, self.bits, most // workers, workers, 1)
        if workers * most > MAX_TOTAL:
            raise ConfigError(
                f"{self.name}:{self.bits} can add {MAX_TOTAL // most} workers at a server, not {workers}: "
                "its sums would overflow. Use fewer bits"
            )
        return PackedIntHead.for_server(most, workers)

    def scales(self, x: Tensor, kernels: Kernels) -> Tensor:
        """One float32 per block: what the workers agree on by taking the largest. Infinite where x is not finite."""
        return kernels.block_scales(x, self.signs is not None)

    def clips(self, scales: Tensor, head: PackedIntHead) -> Tensor:
        """What travels: scales times the clip factor, cut so that no level leaves float32."""
        factor = torch.tensor(self.clip_factor(head.levels, head.workers), dtype=torch.float32, device=scales.device)
        clips = scales * factor
        return torch.where(clips < CLIP_LIMIT, clips, CLIP_LIMIT)

    def encode_sum(
        self,
        x: Tensor,
        head: PackedIntHead,
        clips: Tensor,
        kernels: Kernels,
        arena: Arena,
        *,
        rounding_seed: int,
        feedback: bool,
    ) -> tuple[Tensor, ...]:
        """Sections of one worker's values on clips that all share.

        With ``feedback`` x has been rotated already, and what is sent is taken away from it.
        """
        first = arena.take(_HEAD.size)
        head.write(first)
        second = arena.take(4 * clips.numel())
        second.copy_(clips.view(torch.uint8))
        rotation_seed = None if feedback else self.signs
        integers = self.encode_packed_ints(
            x, head, second, kernels, arena, rotation_seed=rotation_seed, rounding_seed=rounding_seed, feedback=feedback
        )
        return first, second, integers

    def encode_packed_ints(
        self,
        x: Tensor,
        head: PackedIntHead,
        clips: Tensor,
        kernels: Kernels,
        arena: Arena,
        *,
        rotation_seed: int | None,
        rounding_seed: int,
        feedback: bool,
    ) -> Tensor:
        """The last of these sections alone, of values that are rotated here, or have been, or need not be."""
        integers = arena.take(packed_ints_nbytes(packed_int_count(x.numel(), rotation_seed is not None), head.coding))
        rounding = IntRounding(None, rotation_seed, rounding_seed if self.stochastic else None)
        kernels.packed_int_encode(
            x, head.coding, rounding, feedback=feedback, clips=clips.view(torch.uint8), out=integers
        )
        return integers

    # ------------------------------------------------------------------------------------------------ as any codec

    def encode(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> tuple[Tensor, ...]:
        head = self.head(1, ring=False)
        first, clips, integers = (arena.take(nbytes) for nbytes in self.section_nbytes(x.numel(), 4))
        head.write(first)
        rounding = IntRounding(self.clip_factor(head.levels, 1), self.signs, seed if self.stochastic else None)
        amax_bits = kernels.packed_int_encode(x, head.coding, rounding, feedback=False, clips=clips, out=integers)
        refuse_nonfinite(amax_bits, x.numel())
        return (first, clips, integers) if amax_bits else ()

    def read_head(self, sections: tuple[Tensor, ...], n: int) -> PackedIntHead:
        """The head of a packet of n values, with all sizes checked."""
        head = PackedIntHead.read(sections[0], (1 << self.bits) - 1)
        wanted = packed_ints_nbytes(packed_int_count(n, self.signs is not None), head.coding)
        if sections[2].numel() != wanted:
            raise FrameError(f"integers of {head.width} bits for {n} values take {wanted} bytes, the frame has "
                             f"{sections[2].numel()}")  # fmt: skip
        return head

    def decode(
        self, sections: tuple[Tensor, ...], dtype: torch.dtype, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        head = self.read_head(sections, out.numel())
        if head.count == 0:  # nobody took part
            if weight is None:
                out.zero_()
            return
        packed = PackedIntSum(sections[2], sections[1], head.coding, head.total)
        kernels.packed_int_decode(packed, rotation_seed=self.signs, out=out, weight=weight)

    def section_nbytes(self, n: int, itemsize: int) -> tuple[int, ...]:
        values = packed_int_count(n, self.signs is not None)
        return _HEAD.size, 4 * num_buckets(n, SUM_BLOCK), packed_nbytes(values, self.bits)

    def fits(self, sections: tuple[int, ...], n: int, itemsize: int) -> bool:
        # How wide the integers are stands in the head; at one bit each they fill this at least.
        least = packed_nbytes(packed_int_count(n, self.signs is not None), 1)
        return sections[:2] == self.section_nbytes(n, itemsize)[:2] and sections[2] >= least


@dataclass(frozen=True)
class Shared(PackedIntStage):
    """Levels of equal width between minus and plus the largest magnitude of each block of 1,024 values.

    Among workers the largest magnitude is that of all of them, so that packets can be added without decoding.

    Args:
        bits: Bits of a value that a worker sends, 1 to 16.
        round: ``nearest``, best with error feedback; or ``stochastic``, unbiased without it.

    Payload: 16 bytes, ``float32 clip[ceil(n / 1024)]``, packed integers. 8.03 bits a value for ``shared:8``.
    """

    bits: int = 8
    round: str = "nearest"

    name: ClassVar[str] = "shared"
    summary: ClassVar[str] = "integers on a shared scale per block"
    example: ClassVar[str] = "ef|shared:8"
    biased: ClassVar[bool | str] = "only with round=nearest"

    @property
    def contractive(self) -> bool:
        return self.bits >= (3 if self.stochastic else 2)

    def clip_factor(self, levels: int, workers: int) -> float:
        return 1.0


@dataclass(frozen=True)
class THC(PackedIntStage):
    """The same after a rotation of each block by random signs and a Hadamard matrix, which makes any values Gaussian.

    So the clip can be a fixed multiple of the root mean square, and two bits do what ``shared`` needs four for. The
    uniform variant of THC (Li et al. 2024, arXiv:2302.08545). Fills its last block, so it is not for small tensors.

    Args:
        bits: Bits of a value that a worker sends, 1 to 16.
        round: ``nearest``, best with error feedback; or ``stochastic``, unbiased inside the clip.
        rotation: Seed of the signs: the same for all workers.

    Payload: 16 bytes, ``float32 clip[b]``, packed integers, 1,024 b of them; b = ceil(n / 1024).
    """

    bits: int = 4
    round: str = "nearest"
    rotation: int = 0

    name: ClassVar[str] = "thc"
    summary: ClassVar[str] = "rotated, then integers on a shared scale"
    example: ClassVar[str] = "ef|thc:4"
    biased: ClassVar[bool | str] = "rounds to nearest, or clips"

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.whole(self.name, "rotation", self.rotation, 0, (1 << 63) - 1)

    @property
    def signs(self) -> int | None:
        return self.rotation

    @property
    def contractive(self) -> bool:
        return self.bits >= 3 or not self.stochastic

    def clip_factor(self, levels: int, workers: int) -> float:
        if not self.stochastic:
            return _between(_LEVELS, _NEAREST, levels)
        found = tuple(_between(_LEVELS, row, levels) for row in _STOCHASTIC.values())
        return _between(tuple(_STOCHASTIC), found, workers)
