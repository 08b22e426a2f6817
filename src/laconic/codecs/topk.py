"""``topk:keep``: the entries of largest magnitude."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from laconic.codecs import checks
from laconic.codecs.base import Selected
from laconic.codecs.positional import PositionalSelector
from laconic.kernels.interface import Kernels
from laconic.kernels.sections import positions_max_nbytes
from laconic.packet import Arena

__all__ = ["TopK", "num_kept"]


def num_kept(keep: float, n: int) -> int:
    """Return how many of n entries a fraction keeps: at least one, unless n is 0."""
    return min(n, max(1, int(keep * n + 0.5))) if n else 0


@dataclass(frozen=True)
class TopK(PositionalSelector):
    """Keep the entries of largest magnitude; send their positions and values.

    Biased: the other entries are lost. For training, put ``ef`` (Stich et al. 2018, arXiv:1809.07599) or ``momentum``
    before it. Of equal magnitudes the lowest index wins.

    Args:
        keep: Fraction of entries kept, in (0, 1]; at least one entry.
        approx: Estimate the threshold from 65,536 sampled magnitudes: keeps about ``keep``, at most twice as many
            entries, and takes half the time.

    Payload: positions (at most 1.06 times the entropy of k of n), then the values by the next stage.
    """

    keep: float = 0.01
    approx: bool = False

    name, example = "topk", "ef|topk:0.01|qsgd:4"
    summary = "entries of largest magnitude"
    biased = True

    def __post_init__(self) -> None:
        checks.fraction(self, "keep")

    @property
    def randomized(self) -> bool:
        return self.approx

    def select(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> Selected:
        if self.approx:
            return super().select(x, kernels, arena, seed)
        k = num_kept(self.keep, x.numel())
        section = arena.take(positions_max_nbytes(x.numel(), k))
        nbytes, values, amax_bits = kernels.topk_encode(x, k, section)
        return Selected(arena.trim(section, nbytes), values, amax_bits)

    def choose(self, x: Tensor, kernels: Kernels, seed: int) -> tuple[Tensor, Tensor, int]:
        return kernels.topk_sampled(x, num_kept(self.keep, x.numel()), seed)

    def fixed_count(self, n: int) -> int | None:
        return None if self.approx else num_kept(self.keep, n)

    def max_kept(self, n: int) -> int:
        k = num_kept(self.keep, n)
        return min(n, 2 * k + 16) if self.approx else k
