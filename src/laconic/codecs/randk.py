"""``randk:keep``: random positions, which the receiver computes from the seed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from laconic.codecs import checks
from laconic.codecs.base import Selected, Selector, require_finite
from laconic.codecs.topk import num_kept
from laconic.errors import FrameError
from laconic.kernels.interface import Kernels
from laconic.kernels.sections import read_seed
from laconic.packet import Arena

__all__ = ["RandK"]


@dataclass(frozen=True)
class RandK(Selector):
    """Keep a random fraction of the values. The packet carries the seed instead of positions: always 8 bytes.

    Unbiased with ``scale=true``, which multiplies decoded values by n / k. After ``ef`` or ``momentum`` that factor
    would make the residual grow, so it is switched off there.

    Args:
        keep: Fraction of values kept, in (0, 1]; at least one value.
        scale: Multiply decoded values by n / k.

    Payload: ``uint64 seed``, then the values by the next stage.
    """

    keep: float = 0.01
    scale: bool = True

    name, example = "randk", "randk:0.01"
    summary = "random entries; positions travel as a seed"
    biased = "only with scale=false"
    summable = True

    def __post_init__(self) -> None:
        checks.fraction(self, "keep")

    @property
    def is_biased(self) -> bool:
        return not self.scale

    @property
    def randomized(self) -> bool:
        return True

    @property
    def contractive(self) -> bool:
        return not self.scale

    def select(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> Selected:
        selected = self.select_any(x, kernels, arena, seed)
        require_finite(selected.amax_bits, x.numel())
        return selected

    def select_any(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> Selected:
        """Select from values that may not be finite: the workers of a sum handle that together."""
        section = arena.take(8)
        return Selected(section, *kernels.randk_encode(x, num_kept(self.keep, x.numel()), seed, section))

    def fixed_count(self, n: int) -> int:
        return num_kept(self.keep, n)

    def count(self, section: Tensor, n: int) -> int:
        _check(section)
        return num_kept(self.keep, n)

    def positions(self, section: Tensor, n: int, kernels: Kernels) -> Tensor:
        return kernels.random_positions(n, self.count(section, n), read_seed(section), section)

    def scatter(self, section: Tensor, values: Tensor, kernels: Kernels, out: Tensor, weight: float | None) -> bool:
        _check(section)
        kernels.randk_decode(section, values, self.gain(out.numel()), out, weight)
        return True

    def gain(self, n: int) -> float:
        return n / num_kept(self.keep, n) if self.scale and n else 1.0

    def without_gain(self) -> RandK:
        return replace(self, scale=False) if self.scale else self

    def max_kept(self, n: int) -> int:
        return num_kept(self.keep, n)

    def max_section_nbytes(self, n: int) -> int:
        return 8


def _check(section: Tensor) -> None:
    if section.numel() != 8:
        raise FrameError(f"a randk section holds a seed of 8 bytes, the frame has {section.numel()}")
