"""``union``: the entries that are not zero."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.codecs.base import Selected
from laconic.codecs.positional import PositionalSelector, encode_positions
from laconic.kernels.interface import NONFINITE, Kernels
from laconic.packet import Arena

__all__ = ["Union"]


@dataclass(frozen=True)
class Union(PositionalSelector):
    """Keep the entries that are not zero: lossless. In sums, those that are not zero for any worker.

    The workers of a sum agree on the entries by a bitwise or of their bitmaps. For gradients that are sparse, such as
    those of embeddings. If most entries are used by some worker, it costs a bitmap more than sending all of them.

    Payload: positions, then the values by the next stage. Empty if every entry is zero.
    """

    name, example = "union", "union"
    summary = "entries that are not zero, for any worker"
    summable = True

    def choose(self, x: Tensor, kernels: Kernels, seed: int) -> tuple[Tensor, Tensor, int]:
        return kernels.threshold_select(x, 5e-324 if x.dtype == torch.float64 else 2.0**-149)

    def max_kept(self, n: int) -> int:
        return n

    def bitmap(self, x: Tensor, kernels: Kernels) -> Tensor:
        """Return one bit per value, set if it is not zero, and a last byte, not zero if a value is not finite."""
        bits = torch.empty(-(-x.numel() // 8) + 1, dtype=torch.uint8, device=x.device)
        kernels.pack_symbols((x != 0).to(torch.uint8), 2, False, bits[:-1])
        bits[-1] = int(not kernels.all_finite(x))
        return bits

    def select_bitmap(self, x: Tensor, bitmap: Tensor, kernels: Kernels, arena: Arena) -> Selected | None:
        """Select the values whose bit is set; None if no bit is set."""
        n = x.numel()
        positions = torch.nonzero(kernels.unpack_symbols(bitmap[:-1].contiguous(), n, 2, False)).view(-1)
        if not positions.numel():
            return None
        positions = positions.to(torch.int32 if n <= 1 << 31 else torch.int64)
        return Selected(encode_positions(positions, n, kernels, arena), x.index_select(0, positions), NONFINITE - 1)
