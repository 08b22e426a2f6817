"""Quantizers with a few floats per bucket: two sections, the floats of all buckets and the packed symbols."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs import checks
from laconic.codecs.base import MultiTensorStage, Quantizer, SymbolReader, Symbols, require_finite
from laconic.errors import FrameError
from laconic.kernels.interface import Kernels
from laconic.kernels.multi_tensor_interface import Addresses, MultiTensorKernels, Tensors
from laconic.kernels.sections import num_buckets
from laconic.packet import Arena

__all__ = ["BucketedQuantizer"]


class BucketedQuantizer(Quantizer):
    """Scales each bucket separately, so that an outlier affects only its bucket and one pass over memory suffices."""

    num_sections = 2
    ternary: ClassVar[bool] = False
    """Symbols are packed five to a byte."""
    bucket: int

    def __post_init__(self) -> None:
        checks.bucket(self)

    @property
    def floats_per_bucket(self) -> int:
        return 1

    def symbols_nbytes(self, n: int) -> int:
        """Return the bytes of n packed symbols."""
        raise NotImplementedError

    def quantize(self, x: Tensor, kernels: Kernels, seed: int, floats: Tensor, packed: Tensor) -> int:
        """Write both sections; return the ``amax_bits`` of x."""
        raise NotImplementedError

    def dequantize(self, floats: Tensor, packed: Tensor, kernels: Kernels, out: Tensor, weight: float | None) -> None:
        raise NotImplementedError

    @property
    def has_multi_tensor_kernels(self) -> bool:
        return False

    @property
    def multi_tensor(self) -> MultiTensorStage | None:
        return self if self.has_multi_tensor_kernels else None

    def quantize_all(
        self, tensors: Tensors, residuals: Tensors | None, kernels: MultiTensorKernels, seeds: Sequence[int] | Tensor,
        floats: Addresses, packed: Addresses, skip: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See ``MultiTensorStage``. Override it where one kernel adds, encodes and subtracts."""
        if residuals is not None:
            kernels.add_all(tensors, residuals, skip)
        amax_bits = self.encode_all(tensors if residuals is None else residuals, kernels, floats, packed, skip)
        if residuals is not None:
            self.dequantize_all(floats, packed, kernels, residuals, -1.0, skip)
        return amax_bits

    def encode_all(
        self, tensors: Tensors, kernels: MultiTensorKernels, floats: Addresses, packed: Addresses, skip: Tensor | None
    ) -> Tensor:
        """Write both sections of each tensor; return the ``amax_bits`` of each."""
        raise NotImplementedError

    def dequantize_all(
        self, floats: Addresses, packed: Addresses, kernels: MultiTensorKernels, outs: Tensors, weight: float | None,
        skip: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See ``MultiTensorStage``."""
        return self.multi_tensor_decoder(kernels)(floats, packed, outs=outs, weight=weight, skip=skip)

    def multi_tensor_decoder(self, kernels: MultiTensorKernels) -> Callable[..., Tensor]:
        """Return the kernel that decodes many tensors, with this stage's arguments."""
        raise NotImplementedError

    def encode(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> tuple[Tensor, ...]:
        floats_nbytes, packed_nbytes = self.section_nbytes(x.numel(), 4)
        floats, packed = arena.take(floats_nbytes), arena.take(packed_nbytes)
        amax_bits = self.quantize(x, kernels, seed, floats, packed)
        require_finite(amax_bits, x.numel())
        return (floats, packed) if amax_bits else ()

    def decode(
        self, sections: tuple[Tensor, ...], dtype: torch.dtype, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        floats, packed = sections
        self.dequantize(floats, packed, kernels, out, weight)

    def section_nbytes(self, n: int, itemsize: int) -> tuple[int, ...]:
        return 4 * self.floats_per_bucket * num_buckets(n, self.bucket), self.symbols_nbytes(n)

    def to_symbols(
        self, x: Tensor, kernels: Kernels, arena: Arena, seed: int
    ) -> tuple[tuple[Tensor, ...], Symbols | None] | None:
        n = x.numel()
        floats = arena.take(self.section_nbytes(n, 4)[0])
        packed = torch.empty(self.symbols_nbytes(n), dtype=torch.uint8, device=x.device)
        amax_bits = self.quantize(x, kernels, seed, floats, packed)
        require_finite(amax_bits, n)
        if not amax_bits:
            return None
        return (floats,), Symbols(self.max_alphabet, self.packed_symbols(packed, (floats,), n, kernels))

    def from_symbols(
        self, side: tuple[Tensor, ...], reader: SymbolReader | None, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        n = out.numel()
        if reader is None:
            raise FrameError(f"codec {self.name!r} needs coded symbols, the frame has none")
        symbols = reader.symbols(n, self.max_alphabet)
        packed = torch.empty(self.symbols_nbytes(n), dtype=torch.uint8, device=symbols.device)
        kernels.pack_symbols(symbols, self.max_alphabet, self.ternary, packed)
        self.dequantize(side[0], packed, kernels, out, weight)

    def packed_bits(self, side: tuple[Tensor, ...], n: int) -> float:
        return 8 * self.symbols_nbytes(n) / n

    def packed_symbols(self, packed: Tensor, side: tuple[Tensor, ...], n: int, kernels: Kernels) -> Tensor:
        return kernels.unpack_symbols(packed, n, self.max_alphabet, self.ternary)
