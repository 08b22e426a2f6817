"""What selectors that send their positions share: the position section, and how large it can get."""

from __future__ import annotations

from torch import Tensor

from laconic.codecs.base import Head, Selected, Selector
from laconic.kernels.interface import Kernels
from laconic.kernels.sections import POSITIONS_HEADER, PositionHeader, positions_max_nbytes, read_positions_header
from laconic.packet import Arena

__all__ = ["PositionalSelector", "coded_positions"]


def coded_positions(positions: Tensor, n: int, kernels: Kernels, arena: Arena) -> Tensor:
    """The section of ascending positions."""
    room = arena.take(positions_max_nbytes(n, positions.numel()))
    return arena.trim(room, kernels.positions_encode(positions, n, room))


class PositionalSelector(Selector):
    """Chooses by value, so the receiver must be told where: gaps in a Rice code or a bitmap, whichever is smaller."""

    def choose(self, x: Tensor, kernels: Kernels, seed: int) -> tuple[Tensor, Tensor, int]:
        """Ascending positions, the values there, and the key."""
        raise NotImplementedError

    def select(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> Selected:
        positions, values, amax_bits = self.choose(x, kernels, seed)
        if not positions.numel():
            return Selected(arena.take(0), values, 0)
        return Selected(coded_positions(positions, x.numel(), kernels, arena), values, amax_bits)

    def head(self, section: Tensor, n: int) -> PositionHeader:
        return read_positions_header(section, n)

    def positions(self, section: Tensor, n: int, head: Head, kernels: Kernels) -> Tensor:
        assert isinstance(head, PositionHeader)
        return kernels.positions_decode(section, n, head)

    def put(self, section: Tensor, values: Tensor, kernels: Kernels, out: Tensor, weight: float | None) -> bool:
        return kernels.sparse_decode(section, values, out, weight)

    def max_section_nbytes(self, n: int) -> int:
        return POSITIONS_HEADER + -(-n // 8)  # a bitmap, the larger of the two at worst
