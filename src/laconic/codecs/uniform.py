"""``uniform:bits``: bins of equal width over the tensor's own range."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs import checks
from laconic.codecs.base import ValueStage, refuse_nonfinite
from laconic.errors import FrameError
from laconic.kernels.interface import Kernels, packed_nbytes, read_bytes, write_bytes
from laconic.packet import Arena

__all__ = ["Uniform"]


@dataclass(frozen=True)
class Uniform(ValueStage):
    """Min-max quantization: 2^bits bins of equal width over [min, max], decoded to the bin's centre.

    Deterministic, so biased by at most half a bin. One far outlier widens every bin: for gradients prefer ``qsgd``.

    Args:
        bits: Bits per value, 1 to 16.

    Payload: ``float32 min, max``, then packed symbols (none when min = max: a constant tensor costs 8 bytes).
    """

    bits: int = 8

    name: ClassVar[str] = "uniform"
    kind: ClassVar[str] = "quantizer"
    summary: ClassVar[str] = "min-max bins of equal width"
    example: ClassVar[str] = "uniform:8"
    biased: ClassVar[bool | str] = "decodes to the bin's centre"
    num_sections: ClassVar[int] = 2

    def __post_init__(self) -> None:
        checks.whole(self.name, "bits", self.bits, 1, 16)

    def encode(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> tuple[Tensor, ...]:
        low, high, key = kernels.value_range(x)
        refuse_nonfinite(key, x.numel())
        low, high = (
            low + 0.0,
            high + 0.0,
        )  # whichever of -0 and +0 was met first
        if key == 0:
            return ()
        bounds = arena.take(8)
        write_bytes(bounds, struct.pack("<ff", low, high))
        packed = arena.take(packed_nbytes(x.numel(), self.bits) if low < high else 0)
        if low < high:
            kernels.uniform_encode(x, low=low, high=high, levels=1 << self.bits, packed=packed)
        return bounds, packed

    def decode(
        self, sections: tuple[Tensor, ...], dtype: torch.dtype, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        bounds, packed = sections
        low, high = struct.unpack("<ff", read_bytes(bounds, 8))
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise FrameError(f"a uniform range must be finite and ordered, got [{low}, {high}]")
        if (low < high) != (packed.numel() > 0):
            raise FrameError(f"{packed.numel()} bytes of symbols do not go with the range [{low}, {high}]")
        if low < high:
            kernels.uniform_decode(packed, low=low, high=high, levels=1 << self.bits, out=out, weight=weight)
        elif weight is None:
            out.fill_(low)
        else:
            out.add_(torch.tensor(low, dtype=torch.float32) * torch.tensor(weight, dtype=torch.float32))

    def section_nbytes(self, n: int, itemsize: int) -> tuple[int, ...]:
        return 8, packed_nbytes(n, self.bits)

    def fits(self, sections: tuple[int, ...], n: int, itemsize: int) -> bool:
        return sections in (self.section_nbytes(n, itemsize), (8, 0))
