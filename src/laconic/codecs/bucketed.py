"""What quantizers with a few numbers per bucket share: two sections, floats per bucket and packed symbols."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs import checks
from laconic.codecs.base import ValueStage, refuse_nonfinite
from laconic.kernels.interface import Kernels, num_buckets
from laconic.packet import Arena

__all__ = ["BucketedQuantizer"]


class BucketedQuantizer(ValueStage):
    """Buckets are scaled on their own, so one outlier spoils its bucket only, and one pass over memory suffices."""

    kind: ClassVar[str] = "quantizer"
    num_sections: ClassVar[int] = 2
    floats_per_bucket: ClassVar[int] = 1
    bucket: int

    def __post_init__(self) -> None:
        checks.bucket(self.name, self.bucket)

    def symbols_nbytes(self, n: int) -> int:
        raise NotImplementedError

    def quantize(self, x: Tensor, kernels: Kernels, seed: int, floats: Tensor, packed: Tensor) -> int:
        """Fill both sections; returns the key of x (see ``kernels.interface``)."""
        raise NotImplementedError

    def dequantize(self, floats: Tensor, packed: Tensor, kernels: Kernels, out: Tensor, weight: float | None) -> None:
        raise NotImplementedError

    def encode(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> tuple[Tensor, ...]:
        for_floats, for_symbols = self.section_nbytes(x.numel(), 4)
        floats, packed = arena.take(for_floats), arena.take(for_symbols)
        key = self.quantize(x, kernels, seed, floats, packed)
        refuse_nonfinite(key, x.numel())
        return (floats, packed) if key else ()

    def decode(
        self, sections: tuple[Tensor, ...], dtype: torch.dtype, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        floats, packed = sections
        self.dequantize(floats, packed, kernels, out, weight)

    def section_nbytes(self, n: int, itemsize: int) -> tuple[int, ...]:
        return 4 * self.floats_per_bucket * num_buckets(n, self.bucket), self.symbols_nbytes(n)
