"""``mean``: float32 values and a count of workers; the sum of packets decodes to the mean."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from laconic.codecs.base import ValueStage, add_weighted, require_finite
from laconic.errors import FrameError
from laconic.kernels.interface import NONFINITE, Kernels
from laconic.kernels.sections import read_bytes, write_bytes
from laconic.packet import Arena

__all__ = ["FLOAT_SUM_HEADER", "FloatSumHeader", "Mean"]

_HEADER = struct.Struct("<II")  # workers, count
FLOAT_SUM_HEADER: Final = _HEADER.size


@dataclass(frozen=True, slots=True)
class FloatSumHeader:
    """The header of a sum of floats: how many workers it may hold, and how many it holds."""

    workers: int
    count: int

    def write(self, section: Tensor) -> None:
        write_bytes(section, _HEADER.pack(self.workers, self.count))

    @classmethod
    def read(cls, section: Tensor) -> FloatSumHeader:
        if section.numel() != _HEADER.size:
            raise FrameError(f"the header of a sum has {_HEADER.size} bytes, the frame has {section.numel()}")
        header = cls(*_HEADER.unpack(read_bytes(section, _HEADER.size)))
        if not header.count <= header.workers or not header.workers:
            raise FrameError(f"the header of a sum is invalid: {header.count} of {header.workers} workers")
        return header


@dataclass(frozen=True)
class Mean(ValueStage):
    """The values as float32; the sum of packets decodes to the mean of the workers that contributed.

    The value stage of ``randk`` and ``union`` in sums. Float additions round, so their order affects the last bits.

    Payload: ``uint32 workers, count``, then ``float32 value[n]``.
    """

    name, example = "mean", "randk:0.1|mean"
    kind = "cast"
    summary = "float32 and a count, to be added"
    biased = False
    summable = True
    num_sections = 2

    def encode(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> tuple[Tensor, ...]:
        sections = self.encode_sum(x, FloatSumHeader(1, 1), kernels, arena)
        return sections if bool(x.any()) else ()

    def encode_sum(self, x: Tensor, header: FloatSumHeader, kernels: Kernels, arena: Arena) -> tuple[Tensor, ...]:
        """Return the sections of one worker's contribution."""
        first, values = arena.take(FLOAT_SUM_HEADER), arena.take(4 * x.numel())
        header.write(first)
        if not kernels.copy_finite(x, values):
            require_finite(NONFINITE, x.numel())
        return first, values

    def decode(
        self, sections: tuple[Tensor, ...], dtype: torch.dtype, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        header = FloatSumHeader.read(sections[0])
        if header.count == 1:
            kernels.raw_decode(sections[1], torch.float32, out, weight)
            return
        values = torch.empty_like(out)
        kernels.raw_decode(sections[1], torch.float32, values, None)
        if header.count:
            values.div_(torch.full((1,), float(header.count), device=out.device))
        elif bool(values.any()):
            raise FrameError("a sum of 0 workers is not zero")
        add_weighted(values, out, weight)

    def section_nbytes(self, n: int, itemsize: int) -> tuple[int, ...]:
        return FLOAT_SUM_HEADER, 4 * n
