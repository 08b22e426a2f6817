"""``ef`` and ``momentum``: the memory of a channel, as stages of the grammar.

The stages are configuration only; ``laconic.channels`` keeps the memory and does the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from laconic.codecs import checks
from laconic.codecs.base import ChannelStage
from laconic.errors import ConfigError

__all__ = ["ErrorFeedback", "MomentumCorrection", "residual_decay"]


@dataclass(frozen=True)
class ErrorFeedback(ChannelStage):
    """Add the residual of earlier rounds to the input, and keep the error of this round as the residual.

    Seide et al. 2014; Stich et al. 2018 (arXiv:1809.07599). Without decay sum(sent) + residual = sum(inputs), up to
    rounding.

    Args:
        decay: Factor of the residual, in (0, 1], before the input is added: a = decay * residual + x; send C(a);
            residual = a - sent. Below 1, what stays unsent fades, and sums of earlier inputs are not sent in full
            (SparseLoCo, arXiv:2508.15706, uses 0.95).
    """

    decay: float = field(default=1.0, metadata={"omit_default": True})

    name, example = "ef", "ef|topk:0.01|qsgd:4"
    summary = "error feedback: a residual per slot"

    def __post_init__(self) -> None:
        checks.fraction(self, "decay")


@dataclass(frozen=True)
class MomentumCorrection(ChannelStage):
    """Apply momentum before compression; the residual is included, and momentum is masked where values were sent.

    Deep Gradient Compression (Lin et al. 2018, arXiv:1712.01887): u = m u + g; v = v + u; encode v; v keeps what was
    not sent, u is set to zero where a value was sent. The optimizer after it must have no momentum.

    Args:
        m: Momentum, in [0, 1).
        nesterov: v = v + m u + g instead.
    """

    m: float = 0.9
    nesterov: bool = False

    name, example = "momentum", "momentum:0.9|topk:0.001|qsgd:4"
    summary = "DGC momentum correction, residual included"

    def __post_init__(self) -> None:
        if not 0.0 <= checks.number(self, "m") < 1.0:
            raise ConfigError(f"stage 'momentum': m must be in [0, 1), got {self.m}")


def residual_decay(stages: Iterable[ChannelStage]) -> float:
    """Return the factor of the residual before a round's input is added: the argument of ``ef``, or 1."""
    return next((stage.decay for stage in stages if isinstance(stage, ErrorFeedback)), 1.0)
