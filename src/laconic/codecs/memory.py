"""``ef`` and ``momentum``: what a channel remembers between rounds, as stages of the grammar.

They are configuration only; ``laconic.channels`` keeps the memory and does the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.codecs import checks
from laconic.codecs.base import ChannelStage
from laconic.errors import ConfigError

__all__ = ["ErrorFeedback", "MomentumCorrection"]


@dataclass(frozen=True)
class ErrorFeedback(ChannelStage):
    """Add what earlier rounds failed to send, and keep what this one fails to send.

    Seide et al. 2014; Stich et al. 2018 (arXiv:1809.07599). Sum(sent) + residual = sum(inputs), to rounding.
    """

    name: ClassVar[str] = "ef"
    summary: ClassVar[str] = "error feedback: a residual per slot"
    example: ClassVar[str] = "ef|topk:0.01|qsgd:4"


@dataclass(frozen=True)
class MomentumCorrection(ChannelStage):
    """Momentum before compression, with the residual built in, and momentum masked where it was sent.

    Deep Gradient Compression (Lin et al. 2018, arXiv:1712.01887): u = m u + g; v = v + u; send of v; v keeps what was
    not sent, u is zeroed where an entry was sent. The optimizer behind it must then have no momentum of its own.

    Args:
        m: Momentum, in [0, 1).
        nesterov: v = v + m u + g instead.
    """

    m: float = 0.9
    nesterov: bool = False

    name: ClassVar[str] = "momentum"
    summary: ClassVar[str] = "DGC momentum correction, residual included"
    example: ClassVar[str] = "momentum:0.9|topk:0.001|qsgd:4"

    def __post_init__(self) -> None:
        if not 0.0 <= checks.number(self, "m") < 1.0:
            raise ConfigError(f"stage 'momentum': m must be in [0, 1), got {self.m}")
