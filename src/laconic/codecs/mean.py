"""``mean``: float32 values and a count of senders, so that packets can be added and still decode to the mean."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from laconic.codecs.base import ValueStage, refuse_nonfinite
from laconic.errors import FrameError
from laconic.kernels.interface import NONFINITE, Kernels
from laconic.kernels.sections import read_bytes, write_bytes
from laconic.packet import Arena

__all__ = ["FLOAT_HEAD", "FloatHead", "Mean"]

_HEAD = struct.Struct("<II")  # workers, count
FLOAT_HEAD: Final = _HEAD.size


@dataclass(frozen=True, slots=True)
class FloatHead:
    """Whom a sum of floats is of: at most so many, and how many they were."""

    workers: int
    count: int

    def write(self, section: Tensor) -> None:
        write_bytes(section, _HEAD.pack(self.workers, self.count))

    @classmethod
    def read(cls, section: Tensor) -> FloatHead:
        if section.numel() != _HEAD.size:
            raise FrameError(f"the head of a sum has {_HEAD.size} bytes, this one {section.numel()}")
        head = cls(*_HEAD.unpack(read_bytes(section, _HEAD.size)))
        if not head.count <= head.workers or not head.workers:
            raise FrameError(f"a sum of {head.count} senders out of {head.workers} makes no sense")
        return head


@dataclass(frozen=True)
class Mean(ValueStage):
    """The values as float32, to be added to others'; the sum decodes to the mean of those that took part.

    What ``randk`` and ``union`` stand before in sums. Additions of floats round, so their order shows in the last bits.

    Payload: ``uint32 workers, count``, then ``float32 value[n]``.
    """

    name: ClassVar[str] = "mean"
    kind: ClassVar[str] = "cast"
    summary: ClassVar[str] = "float32 and a count, to be added"
    example: ClassVar[str] = "randk:0.1|mean"
    biased: ClassVar[bool | str] = False
    summable: ClassVar[bool] = True
    num_sections: ClassVar[int] = 2

    def encode(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> tuple[Tensor, ...]:
        sections = self.encode_sum(x, FloatHead(1, 1), kernels, arena)
        return sections if bool(x.any()) else ()

    def encode_sum(self, x: Tensor, head: FloatHead, kernels: Kernels, arena: Arena) -> tuple[Tensor, ...]:
        first, values = arena.take(FLOAT_HEAD), arena.take(4 * x.numel())
        head.write(first)
        if not kernels.copy_finite(x, values):
            refuse_nonfinite(NONFINITE, x.numel())
        return first, values

    def decode(
        self, sections: tuple[Tensor, ...], dtype: torch.dtype, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        head = FloatHead.read(sections[0])
        if head.count == 1:
            kernels.raw_decode(sections[1], torch.float32, out, weight)
            return
        values = torch.empty_like(out)
        kernels.raw_decode(sections[1], torch.float32, values, None)
        if head.count:
            values.div_(torch.full((1,), float(head.count), device=out.device))
        elif bool(values.any()):
            raise FrameError("a sum of no senders is not zero")
        if weight is None:
            out.copy_(values)
        else:
            out.add_(values * torch.tensor(weight, dtype=torch.float32, device=out.device))

    def section_nbytes(self, n: int, itemsize: int) -> tuple[int, ...]:
        return FLOAT_HEAD, 4 * n
