"""``randk:keep``: random entries, known to the receiver from the seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from laconic.codecs import checks
from laconic.codecs.base import Head, SeedHeader, Selected, Selector, refuse_nonfinite
from laconic.codecs.topk import kept
from laconic.errors import FrameError
from laconic.kernels.interface import Kernels
from laconic.kernels.sections import read_seed
from laconic.packet import Arena

__all__ = ["RandK"]


@dataclass(frozen=True)
class RandK(Selector):
    """Keep a random fraction. The packet carries the seed instead of positions: 8 bytes, whatever k is.

    Unbiased with ``scale=true``: decoded values are multiplied by n / k. Behind ``ef`` or ``momentum`` scaling would
    make the residual grow, so there it is off.

    Args:
        keep: Fraction of entries kept, in (0, 1]. At least one survives.
        scale: Multiply by n / k on decoding.

    Payload: ``uint64 seed``, then the values by the next stage.
    """

    keep: float = 0.01
    scale: bool = True

    name: ClassVar[str] = "randk"
    summary: ClassVar[str] = "random entries; positions travel as a seed"
    example: ClassVar[str] = "randk:0.01"
    biased: ClassVar[bool | str] = "only with scale=false"
    summable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.fraction(self, "keep")

    @property
    def is_biased(self) -> bool:
        return not self.scale

    @property
    def contractive(self) -> bool:
        return not self.scale

    def select(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> Selected:
        chosen = self.take(x, kernels, arena, seed)
        refuse_nonfinite(chosen.amax_bits, x.numel())
        return chosen

    def take(self, x: Tensor, kernels: Kernels, arena: Arena, seed: int) -> Selected:
        """The same for values that need not be finite: workers of a sum find out together."""
        n = x.numel()
        section = arena.take(8)
        return Selected(section, *kernels.randk_encode(x, kept(self.keep, n), seed, section))

    def expected(self, n: int) -> int:
        return kept(self.keep, n)

    def head(self, section: Tensor, n: int) -> SeedHeader:
        self._check(section)
        return SeedHeader(read_seed(section), kept(self.keep, n))

    def positions(self, section: Tensor, n: int, head: Head, kernels: Kernels) -> Tensor:
        assert isinstance(head, SeedHeader)
        return kernels.random_positions(n, head.kept, head.seed, section)

    def put(self, section: Tensor, values: Tensor, kernels: Kernels, out: Tensor, weight: float | None) -> bool:
        self._check(section)
        kernels.randk_decode(section, values, self.gain(out.numel()), out, weight)
        return True

    def _check(self, section: Tensor) -> None:
        if section.numel() != 8:
            raise FrameError(f"a randk section holds a seed of 8 bytes, this one has {section.numel()}")

    def gain(self, n: int) -> float:
        return n / kept(self.keep, n) if self.scale and n else 1.0

    def max_kept(self, n: int) -> int:
        return kept(self.keep, n)

    def max_section_nbytes(self, n: int) -> int:
        return 8
