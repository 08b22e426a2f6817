"""``none``, ``fp16``, ``bf16``: the values unchanged, or rounded to 16 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic import counters
from laconic.codecs.base import ValueStage, require_finite
from laconic.kernels.interface import NONFINITE, Kernels
from laconic.packet import Arena

__all__ = ["BF16", "FP16", "Raw"]


@dataclass(frozen=True)
class Raw(ValueStage):
    """The values unchanged, in their own dtype. Lossless.

    Payload: ``dtype value[n]``.
    """

    name, example = "none", "none"
    kind = "cast"
    summary = "the values unchanged"
    num_sections = 1
    lossless = True
    copies_values = True

    def encode(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> tuple[Tensor, ...]:
        section = arena.take(x.numel() * x.element_size())
        if not kernels.copy_finite(x, section):
            require_finite(NONFINITE, x.numel())
        return (section,)

    def decode(
        self, sections: tuple[Tensor, ...], dtype: torch.dtype, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        kernels.raw_decode(sections[0], dtype, out, weight)

    def section_nbytes(self, n: int, itemsize: int) -> tuple[int, ...]:
        return (n * itemsize,)


class _Half(ValueStage):
    """Casts to 16 bits: rounds to nearest even, and saturates values beyond the range."""

    kind = "cast"
    biased = "rounds to nearest"
    num_sections = 1

    def encode(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> tuple[Tensor, ...]:
        section = arena.take(2 * x.numel())
        amax_bits, saturated = kernels.cast_encode(x.to(torch.float32), self.name, section)
        require_finite(amax_bits, x.numel())
        if saturated:
            counters.count("saturated", saturated, f"values beyond the range of {self.name} saturate")
        return (section,)

    def decode(
        self, sections: tuple[Tensor, ...], dtype: torch.dtype, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        kernels.cast_decode(sections[0], self.name, out, weight)

    def section_nbytes(self, n: int, itemsize: int) -> tuple[int, ...]:
        return (2 * n,)


@dataclass(frozen=True)
class FP16(_Half):
    """Half precision: 11 significant bits, range ±65,504. Values beyond it saturate, which is logged and counted."""

    name, example = "fp16", "fp16"
    summary = "cast to half precision"


@dataclass(frozen=True)
class BF16(_Half):
    """bfloat16: 8 significant bits, the range of float32."""

    name, example = "bf16", "bf16"
    summary = "cast to bfloat16"
