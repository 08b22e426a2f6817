"""What quantizers with a few numbers per bucket share: two sections, floats per bucket and packed symbols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs import checks
from laconic.codecs.base import Quantizer, SymbolReader, Symbols, refuse_nonfinite
from laconic.errors import FrameError
from laconic.kernels.interface import Kernels, MultiTensorKernels
from laconic.kernels.sections import num_buckets
from laconic.packet import Arena

__all__ = ["BucketedQuantizer"]


class BucketedQuantizer(Quantizer):
    """Buckets are scaled on their own, so one outlier spoils its bucket only, and one pass over memory suffices."""

    num_sections: ClassVar[int] = 2
    floats_per_bucket: ClassVar[int] = 1
    ternary: ClassVar[bool] = False
    """Symbols are packed five a byte."""
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

    @property
    def together(self) -> bool:
        """Whether there are kernels that take many tensors at once."""
        return False

    def quantize_all(
        self,
        tensors: Sequence[Tensor],
        residuals: Sequence[Tensor] | None,
        kernels: MultiTensorKernels,
        seeds: Sequence[int],
        floats: Sequence[int],
        packed: Sequence[int],
    ) -> Tensor:
        """Fill both sections of many, by address; their keys, on the device.

        With residuals their sums with the tensors are encoded, and what the receiver will not have stays there.
        """
        raise NotImplementedError

    def dequantize_all(
        self,
        floats: Sequence[int],
        packed: Sequence[int],
        kernels: MultiTensorKernels,
        outs: Sequence[Tensor],
        weight: float | None,
    ) -> Tensor:
        """Decode many; a flag of the device that is not 0 where a section held what no encoder writes."""
        raise NotImplementedError

    def encode(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> tuple[Tensor, ...]:
        for_floats, for_symbols = self.section_nbytes(x.numel(), 4)
        floats, packed = arena.take(for_floats), arena.take(for_symbols)
        amax_bits = self.quantize(x, kernels, seed, floats, packed)
        refuse_nonfinite(amax_bits, x.numel())
        return (floats, packed) if amax_bits else ()

    def decode(
        self, sections: tuple[Tensor, ...], dtype: torch.dtype, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        floats, packed = sections
        self.dequantize(floats, packed, kernels, out, weight)

    def section_nbytes(self, n: int, itemsize: int) -> tuple[int, ...]:
        return 4 * self.floats_per_bucket * num_buckets(n, self.bucket), self.symbols_nbytes(n)

    def split(
        self, x: Tensor, kernels: Kernels, arena: Arena, seed: int
    ) -> tuple[tuple[Tensor, ...], Symbols | None] | None:
        n = x.numel()
        floats = arena.take(self.section_nbytes(n, 4)[0])
        packed = torch.empty(self.symbols_nbytes(n), dtype=torch.uint8, device=x.device)
        amax_bits = self.quantize(x, kernels, seed, floats, packed)
        refuse_nonfinite(amax_bits, n)
        if not amax_bits:
            return None
        return (floats,), Symbols(self.max_alphabet, self.packed_symbols(packed, (floats,), n, kernels))

    def join(
        self, side: tuple[Tensor, ...], reader: SymbolReader | None, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        n = out.numel()
        if reader is None:
            raise FrameError(f"codec {self.name!r} has coded symbols, the frame none")
        symbols = reader.symbols(n, self.max_alphabet)
        packed = torch.empty(self.symbols_nbytes(n), dtype=torch.uint8, device=symbols.device)
        kernels.pack_symbols(symbols, self.max_alphabet, self.ternary, packed)
        self.dequantize(side[0], packed, kernels, out, weight)

    def packed_bits(self, side: tuple[Tensor, ...], n: int) -> float:
        return 8 * self.symbols_nbytes(n) / n

    def packed_symbols(self, packed: Tensor, side: tuple[Tensor, ...], n: int, kernels: Kernels) -> Tensor:
        return kernels.unpack_symbols(packed, n, self.max_alphabet, self.ternary)
