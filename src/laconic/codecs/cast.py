"""``none``, ``fp16``, ``bf16``: the bytes as they are, or rounded to 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic import counters
from laconic.codecs.base import ValueStage, refuse_nonfinite
from laconic.kernels.interface import NONFINITE, Kernels
from laconic.packet import Arena

__all__ = ["BF16", "FP16", "Raw"]


@dataclass(frozen=True)
class Raw(ValueStage):
    """The values themselves, in their own dtype. Lossless.

    Payload: ``dtype value[n]``.
    """

    name: ClassVar[str] = "none"
    kind: ClassVar[str] = "cast"
    summary: ClassVar[str] = "the values as they are"
    example: ClassVar[str] = "none"
    num_sections: ClassVar[int] = 1
    lossless: ClassVar[bool] = True

    def encode(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> tuple[Tensor, ...]:
        section = arena.take(x.numel() * x.element_size())
        if not kernels.copy_finite(x, section):
            refuse_nonfinite(NONFINITE, x.numel())
        return (section,)

    def copy(self, x: Tensor, arena: Arena) -> Tensor:
        """The section of values that are known to be finite."""
        section = arena.take(x.numel() * x.element_size())
        section.copy_(x.view(torch.uint8))
        return section

    def view(self, section: Tensor, dtype: torch.dtype) -> Tensor:
        """The values of a section as they lie there; nobody has looked whether they are finite."""
        return (section if section.data_ptr() % dtype.itemsize == 0 else section.clone()).view(dtype)

    def decode(
        self, sections: tuple[Tensor, ...], dtype: torch.dtype, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        kernels.raw_decode(sections[0], dtype, out, weight)

    def section_nbytes(self, n: int, itemsize: int) -> tuple[int, ...]:
        return (n * itemsize,)


class _Half(ValueStage):
    """A cast to 16 bits, to nearest even, saturating where float32 goes further."""

    kind: ClassVar[str] = "cast"
    biased: ClassVar[bool | str] = "rounds to nearest"
    num_sections: ClassVar[int] = 1

    def encode(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> tuple[Tensor, ...]:
        section = arena.take(2 * x.numel())
        amax_bits, saturated = kernels.cast_encode(x.to(torch.float32), self.name, section)
        refuse_nonfinite(amax_bits, x.numel())
        if saturated:
            counters.count(
                "saturated", saturated, f"values lie beyond {self.name} and saturate at the largest it holds"
            )
        return (section,)

    def decode(
        self, sections: tuple[Tensor, ...], dtype: torch.dtype, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        kernels.cast_decode(sections[0], self.name, out, weight)

    def section_nbytes(self, n: int, itemsize: int) -> tuple[int, ...]:
        return (2 * n,)


@dataclass(frozen=True)
class FP16(_Half):
    """Half precision: 11 significant bits, range ±65,504 (beyond it saturates and says so)."""

    name: ClassVar[str] = "fp16"
    summary: ClassVar[str] = "cast to half precision"
    example: ClassVar[str] = "fp16"


@dataclass(frozen=True)
class BF16(_Half):
    """bfloat16: 8 significant bits, the range of float32."""

    name: ClassVar[str] = "bf16"
    summary: ClassVar[str] = "cast to bfloat16"
    example: ClassVar[str] = "bf16"
