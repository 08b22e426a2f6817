"""``union``: the entries that are not zero, whatever their number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs.base import Selected
from laconic.codecs.positional import PositionalSelector, coded_positions
from laconic.kernels.interface import NONFINITE, Kernels
from laconic.packet import Arena

__all__ = ["Union"]


@dataclass(frozen=True)
class Union(PositionalSelector):
    """Keep what is not zero: lossless. In sums, what is not zero for any worker, which they settle by an OR of bitmaps.

    For gradients of embeddings and others that are sparse by nature. Where most entries are in use somewhere it costs a
    bitmap more than sending all of them.

    Payload: positions, then the values by the next stage. Nothing at all when every entry is zero.
    """

    name: ClassVar[str] = "union"
    summary: ClassVar[str] = "entries that are not zero, for any worker"
    example: ClassVar[str] = "union"
    summable: ClassVar[bool] = True

    def choose(self, x: Tensor, kernels: Kernels, seed: int) -> tuple[Tensor, Tensor, int]:
        return kernels.threshold_select(x, 5e-324 if x.dtype == torch.float64 else 2.0**-149)

    def max_kept(self, n: int) -> int:
        return n

    # ------------------------------------------------------------------------------------------------ among workers

    def bitmap(self, x: Tensor, kernels: Kernels) -> Tensor:
        """One bit a value, set where it is not zero, and a last byte that is not zero if a value is not finite."""
        bits = torch.empty(-(-x.numel() // 8) + 1, dtype=torch.uint8, device=x.device)
        kernels.pack_symbols((x != 0).to(torch.uint8), 2, False, bits[:-1])
        bits[-1] = int(not kernels.all_finite(x))
        return bits

    def take(self, x: Tensor, bitmap: Tensor, kernels: Kernels, arena: Arena) -> Selected | None:
        """The values where a bitmap is set; None where it is nowhere."""
        n = x.numel()
        positions = torch.nonzero(kernels.unpack_symbols(bitmap[:-1].contiguous(), n, 2, False)).view(-1)
        if not positions.numel():
            return None
        positions = positions.to(torch.int32 if n <= 1 << 31 else torch.int64)
        return Selected(coded_positions(positions, n, kernels, arena), x.index_select(0, positions), NONFINITE - 1)
