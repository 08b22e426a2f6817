"""Coded: a quantizer and the coder after it, as one value stage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.codecs.base import Coder, Quantizer, ValueStage
from laconic.errors import FrameError
from laconic.kernels.interface import Kernels
from laconic.packet import Arena

__all__ = ["Coded"]


class _CodedSymbols(NamedTuple):
    """Reads a coded section for a quantizer."""

    coder: Coder
    section: Tensor
    kernels: Kernels

    def symbols(self, n: int, alphabet: int) -> Tensor:
        return self.coder.decode(self.section, n, alphabet, self.kernels)

    def values(self, table: Tensor, out: Tensor, weight: float | None) -> None:
        self.coder.decode_values(self.section, table, self.kernels, out, weight)


@dataclass(frozen=True)
class Coded(ValueStage):
    """The sections of a quantizer, with coded instead of packed symbols."""

    quantizer: Quantizer
    coder: Coder

    @property
    def num_sections(self) -> int:  # type: ignore[override]
        return self.quantizer.num_sections

    def encode(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> tuple[Tensor, ...]:
        quantized = self.quantizer.to_symbols(x, kernels, arena, seed)
        if quantized is None:
            return ()
        side, symbols = quantized
        return (*side, arena.take(0) if symbols is None else self.coder.encode(symbols, kernels, arena))

    def decode(
        self, sections: tuple[Tensor, ...], dtype: torch.dtype, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        *side, coded = sections
        reader = _CodedSymbols(self.coder, coded, kernels) if coded.numel() else None
        self.quantizer.from_symbols(tuple(side), reader, kernels, out, weight)

    def section_nbytes(self, n: int, itemsize: int) -> tuple[int, ...]:
        *side, _ = self.quantizer.section_nbytes(n, itemsize)
        return (*side, self.coder.max_nbytes(n, self.quantizer.max_alphabet))

    def accepts(self, section_nbytes: tuple[int, ...], n: int, itemsize: int) -> bool:
        *side, coded = section_nbytes
        # The quantizer checks its side; its symbols are given the size that they would have without a coder.
        packed = self.quantizer.section_nbytes(n, itemsize)[-1] if coded else 0
        within = coded <= self.coder.max_nbytes(n, self.quantizer.max_alphabet)
        return within and self.quantizer.accepts((*side, packed), n, itemsize)

    def symbols(self, sections: tuple[Tensor, ...], n: int, kernels: Kernels) -> Tensor | None:
        """Return the symbols of a packet; None if it needs none."""
        *side, coded = sections
        if not coded.numel():
            return None
        alphabet = self.quantizer.alphabet(tuple(side))
        if not 1 <= alphabet <= self.quantizer.max_alphabet:
            raise FrameError(f"the frame declares {alphabet} symbols, {self.quantizer.name!r} has fewer")
        return self.coder.decode(coded, n, alphabet, kernels)
