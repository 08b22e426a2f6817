"""Selectors that send the positions of the values they keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.codecs.base import Selected, Selector
from laconic.kernels.interface import ChunkCounts, Kernels
from laconic.kernels.sections import (
    MAX_SPACING,
    POSITIONS_HEADER,
    columns_of,
    gaps_max_nbytes,
    positions_max_nbytes,
    read_positions_header,
)
from laconic.packet import Arena

__all__ = ["CODES", "PositionalSelector", "encode_positions"]

CODES = ("rice", "rans", "context")
"""Codes of positions, by their names in specs."""


def encode_positions(
    positions: Tensor, n: int, kernels: Kernels, arena: Arena, code: str = "rice", columns: int = 1,
    counts: ChunkCounts | None = None,
) -> Tensor:  # fmt: skip
    """Return the smallest section of ascending positions: ``rans`` tries gaps, ``context`` gaps and decisions.

    Args:
        columns: Of the matrix that the positions belong to, for ``context``.
        counts: Of its chunks, for ``context``, if all of them keep equally many entries.
    """
    k = positions.numel()
    section = arena.take(positions_max_nbytes(n, k))
    nbytes = kernels.positions_encode(positions, n, section)
    if code in ("rans", "context") and k < n:
        coded = torch.empty(gaps_max_nbytes(n, k), dtype=torch.uint8, device=section.device)
        coded_nbytes = kernels.gaps_encode(positions, n, coded)
        if coded_nbytes < nbytes:
            nbytes = coded_nbytes
            section[:nbytes] = coded[:nbytes]
    if code == "context" and k < n <= MAX_SPACING * k:
        coded = torch.empty(nbytes - 1, dtype=torch.uint8, device=section.device)
        coded_nbytes = kernels.contexts_encode(positions, n, columns, counts, coded)
        if coded_nbytes:
            nbytes = coded_nbytes
            section[:nbytes] = coded[:nbytes]
    return arena.trim(section, nbytes)


class PositionalSelector(Selector):
    """Selects by value and sends the positions: gaps in a Rice or entropy code, a bitmap, or decisions by context."""

    code: str = "rice"

    def for_shape(self, shape: tuple[int, ...]) -> Selector:
        return _OfMatrix(self, columns_of(shape)) if self.code == "context" else self

    def choose(self, x: Tensor, kernels: Kernels, seed: int) -> tuple[Tensor, Tensor, int]:
        """Return ascending positions, the values there, and the ``amax_bits`` of x."""
        raise NotImplementedError

    def select(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> Selected:
        positions, values, amax_bits = self.choose(x, kernels, seed)
        if not positions.numel():
            return Selected(arena.take(0), values, 0)
        return Selected(self.encode(positions, x.numel(), kernels, arena), values, amax_bits)

    def chunk_counts(self, n: int) -> ChunkCounts | None:
        """Return how many of n values each chunk keeps, if the selector chooses by chunks."""
        return None

    def encode(self, positions: Tensor, n: int, kernels: Kernels, arena: Arena) -> Tensor:
        """Return the section of the positions that ``choose`` returned."""
        return encode_positions(positions, n, kernels, arena, self.code)

    def count(self, section: Tensor, n: int) -> int:
        return read_positions_header(section, n).kept

    def positions(self, section: Tensor, n: int, kernels: Kernels) -> Tensor:
        return kernels.positions_decode(section, n, read_positions_header(section, n))

    def scatter(self, section: Tensor, values: Tensor, kernels: Kernels, out: Tensor, weight: float | None) -> bool:
        return kernels.sparse_decode(section, values, out, weight)

    def max_section_nbytes(self, n: int) -> int:
        return POSITIONS_HEADER + -(-n // 8)  # a bitmap: the larger of the two in the worst case


@dataclass(frozen=True)
class _OfMatrix(Selector):
    """Encodes what a selector chooses, by the columns of its matrix."""

    selector: PositionalSelector
    columns: int

    def select(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> Selected:
        positions, values, amax_bits = self.selector.choose(x, kernels, seed)
        if not positions.numel():
            return Selected(arena.take(0), values, 0)
        n, selector = x.numel(), self.selector
        counts = selector.chunk_counts(n)
        section = encode_positions(positions, n, kernels, arena, selector.code, self.columns, counts)
        return Selected(section, values, amax_bits)
