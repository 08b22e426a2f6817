"""Selectors that send the positions of the values they keep."""

from __future__ import annotations

from torch import Tensor

from laconic.codecs.base import Selected, Selector
from laconic.kernels.interface import Kernels
from laconic.kernels.sections import POSITIONS_HEADER, positions_max_nbytes, read_positions_header
from laconic.packet import Arena

__all__ = ["PositionalSelector", "encode_positions"]


def encode_positions(positions: Tensor, n: int, kernels: Kernels, arena: Arena) -> Tensor:
    """Return the section of ascending positions."""
    section = arena.take(positions_max_nbytes(n, positions.numel()))
    return arena.trim(section, kernels.positions_encode(positions, n, section))


class PositionalSelector(Selector):
    """Selects by value and sends the positions: gaps in a Rice code, or a bitmap if that is smaller."""

    def choose(self, x: Tensor, kernels: Kernels, seed: int) -> tuple[Tensor, Tensor, int]:
        """Return ascending positions, the values there, and the ``amax_bits`` of x."""
        raise NotImplementedError

    def select(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> Selected:
        positions, values, amax_bits = self.choose(x, kernels, seed)
        if not positions.numel():
            return Selected(arena.take(0), values, 0)
        return Selected(encode_positions(positions, x.numel(), kernels, arena), values, amax_bits)

    def count(self, section: Tensor, n: int) -> int:
        return read_positions_header(section, n).kept

    def positions(self, section: Tensor, n: int, kernels: Kernels) -> Tensor:
        return kernels.positions_decode(section, n, read_positions_header(section, n))

    def scatter(self, section: Tensor, values: Tensor, kernels: Kernels, out: Tensor, weight: float | None) -> bool:
        return kernels.sparse_decode(section, values, out, weight)

    def max_section_nbytes(self, n: int) -> int:
        return POSITIONS_HEADER + -(-n // 8)  # a bitmap: the larger of the two in the worst case
