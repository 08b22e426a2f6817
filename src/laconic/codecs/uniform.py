"""``uniform:bits``: bins of equal width over the range of the tensor."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic._core import level_table
from laconic.codecs import checks
from laconic.codecs.base import Quantizer, SymbolReader, Symbols, add_weighted, require_finite
from laconic.errors import FrameError
from laconic.kernels.interface import Kernels, UniformGrid
from laconic.kernels.sections import packed_nbytes, read_bytes, write_bytes
from laconic.packet import Arena

__all__ = ["Uniform"]


@dataclass(frozen=True)
class Uniform(Quantizer):
    """Min-max quantization: 2^bits bins of equal width over [min, max], decoded to the bin's centre.

    Deterministic and biased by at most half a bin. One outlier widens every bin: for gradients prefer ``qsgd``.

    Args:
        bits: Bits per value, 1 to 30; at most 12 before a coder.

    Payload: ``float32 min, max``, then packed symbols (none when min = max: a constant tensor costs 8 bytes).
    """

    bits: int = 8

    name, example = "uniform", "uniform:8"
    summary = "min-max bins of equal width"
    biased = "decodes to the bin's centre"
    num_sections = 2

    def __post_init__(self) -> None:
        checks.integer(self, "bits", 1, 30)

    @property
    def max_alphabet(self) -> int:
        return 1 << self.bits

    @property
    def contractive(self) -> bool:
        # The largest entry of a gradient is about 100 times a typical one, and wide bins move those by more than that.
        return self.bits >= 8

    def encode(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> tuple[Tensor, ...]:
        bounds, packed = arena.take(8), arena.take(packed_nbytes(x.numel(), self.bits))
        low, high, amax_bits = kernels.uniform_encode(x, levels=self.max_alphabet, bounds=bounds, packed=packed)
        require_finite(amax_bits, x.numel())
        if amax_bits == 0:
            return ()
        return bounds, packed if low < high else arena.trim(packed, 0)

    def to_symbols(
        self, x: Tensor, kernels: Kernels, arena: Arena, seed: int
    ) -> tuple[tuple[Tensor, ...], Symbols | None] | None:
        low, high, amax_bits = kernels.value_range(x)
        require_finite(amax_bits, x.numel())
        if amax_bits == 0:
            return None
        low, high = low + 0.0, high + 0.0  # -0 becomes +0
        bounds = arena.take(8)
        write_bytes(bounds, struct.pack("<ff", low, high))
        if low == high:
            return (bounds,), None
        return (bounds,), Symbols(self.max_alphabet, x, UniformGrid(low, high, self.max_alphabet))

    def _range(self, bounds: Tensor, has_symbols: bool) -> tuple[float, float]:
        low, high = struct.unpack("<ff", read_bytes(bounds, 8))
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise FrameError(f"the range of uniform must be finite and ordered, got [{low}, {high}]")
        if (low < high) != has_symbols:
            raise FrameError(f"the range [{low}, {high}] needs {'symbols' if low < high else 'no symbols'}")
        return low, high

    def decode(
        self, sections: tuple[Tensor, ...], dtype: torch.dtype, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        bounds, packed = sections
        low, high = self._range(bounds, packed.numel() > 0)
        if low < high:
            kernels.uniform_decode(packed, low=low, high=high, levels=self.max_alphabet, out=out, weight=weight)
        else:
            add_weighted(torch.tensor(low), out, weight)

    def from_symbols(
        self, side: tuple[Tensor, ...], reader: SymbolReader | None, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        low, high = self._range(side[0], reader is not None)
        if reader is None:
            add_weighted(torch.tensor(low), out, weight)
            return
        centres = torch.empty(self.max_alphabet, dtype=torch.float32)
        level_table(self.max_alphabet, low, 0.5, (high - low) / self.max_alphabet, centres.data_ptr())
        reader.values(centres, out, weight)

    def describe(self, side: tuple[Tensor, ...], n: int) -> dict[str, Any]:
        low, high = struct.unpack("<ff", read_bytes(side[0], 8))
        return {"levels": self.max_alphabet, "low": low, "high": high}

    def section_nbytes(self, n: int, itemsize: int) -> tuple[int, ...]:
        return 8, packed_nbytes(n, self.bits)

    def accepts(self, section_nbytes: tuple[int, ...], n: int, itemsize: int) -> bool:
        return section_nbytes in (self.section_nbytes(n, itemsize), (8, 0))
