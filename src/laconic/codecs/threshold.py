"""``threshold:t``: the entries of magnitude t or more."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from laconic.codecs import checks
from laconic.codecs.positional import CODES, PositionalSelector
from laconic.errors import ConfigError
from laconic.kernels.interface import Kernels

__all__ = ["Threshold"]


@dataclass(frozen=True)
class Threshold(PositionalSelector):
    """Keep the entries with |x| >= t. The size of a frame depends on the data. Biased: use it after ``ef``.

    Strom 2015, without its quantization to ±t.

    Args:
        t: The smallest magnitude that is sent; positive.
        code: Code of the positions: ``rice``, ``rans`` or ``context``, as for ``topk``.

    Payload: positions, then the values by the next stage. Empty if no entry reaches t.
    """

    t: float = 0.001
    code: str = "rice"

    keeps_largest = True
    name, example = "threshold", "ef|threshold:0.001"
    summary = "entries of magnitude at least t"
    biased = True

    def __post_init__(self) -> None:
        if not 1e-37 <= checks.number(self, "t") <= 1e37:
            raise ConfigError(f"stage 'threshold': t must be a positive number (1e-37 to 1e37), got {self.t}")
        checks.one_of(self, "code", CODES)

    def choose(self, x: Tensor, kernels: Kernels, seed: int) -> tuple[Tensor, Tensor, int]:
        return kernels.threshold_select(x, self.t)

    def max_kept(self, n: int) -> int:
        return n
