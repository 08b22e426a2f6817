"""A quantizer with a coder behind it, as one value stage."""

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


class _Section(NamedTuple):
    """A coded section as a quantizer sees it."""

    coder: Coder
    section: Tensor
    kernels: Kernels

    def symbols(self, n: int, alphabet: int) -> Tensor:
        return self.coder.decode(self.section, n, alphabet, self.kernels)

    def values(self, table: Tensor, out: Tensor, weight: float | None) -> None:
        self.coder.decode_values(self.section, table, self.kernels, out, weight)


@dataclass(frozen=True)
class Coded(ValueStage):
    """The quantizer's sections, with the packed symbols replaced by coded ones."""

    quantizer: Quantizer
    coder: Coder

    @property
    def num_sections(self) -> int:  # type: ignore[override]
        return self.quantizer.num_sections

    def encode(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> tuple[Tensor, ...]:
        found = self.quantizer.split(x, kernels, arena, seed)
        if found is None:
            return ()
        side, symbols = found
        return (*side, arena.take(0) if symbols is None else self.coder.encode(symbols, kernels, arena))

    def decode(
        self, sections: tuple[Tensor, ...], dtype: torch.dtype, kernels: Kernels, out: Tensor, weight: float | None
    ) -> None:
        *side, coded = sections
        reader = _Section(self.coder, coded, kernels) if coded.numel() else None
        self.quantizer.join(tuple(side), reader, kernels, out, weight)

    def section_nbytes(self, n: int, itemsize: int) -> tuple[int, ...]:
        *side, _ = self.quantizer.section_nbytes(n, itemsize)
        return (*side, self.coder.limit(n, self.quantizer.max_alphabet))

    def fits(self, sections: tuple[int, ...], n: int, itemsize: int) -> bool:
        *side, coded = sections
        # The quantizer knows its other sections; its symbols are as long as they would be without a coder.
        packed = self.quantizer.section_nbytes(n, itemsize)[-1] if coded else 0
        within = coded <= self.coder.limit(n, self.quantizer.max_alphabet)
        return within and self.quantizer.fits((*side, packed), n, itemsize)

    def symbols(self, sections: tuple[Tensor, ...], n: int, kernels: Kernels) -> Tensor | None:
        """The symbols of a packet; None where it needs none."""
        *side, coded = sections
        if not coded.numel():
            return None
        alphabet = self.quantizer.alphabet(tuple(side))
        if not 1 <= alphabet <= self.quantizer.max_alphabet:
            raise FrameError(f"the frame speaks of {alphabet} symbols, {self.quantizer.name!r} has fewer")
        return self.coder.decode(coded, n, alphabet, kernels)
