"""The setting of one run: model, optimizer, and what is exchanged how often by which codecs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from laconic.errors import ConfigError
from laconic_lab.studies.gpt.model import SIZES
from laconic_lab.studies.text_runs import TextTraining

__all__ = ["EVEN", "GRADIENTS", "LATE", "LOCAL", "PROGRESS", "RATE", "Setting"]

LOCAL = "local"
PROGRESS = "progress"
EVEN, RATE, LATE = "even", "rate", "late"
GRADIENTS = ("ddp", "codec", "powersgd", "onebit-adam", "demo")
"""Exchanges of gradients in every step: exact, by a codec with error feedback, or by a named method."""


@dataclass(frozen=True)
class Setting(TextTraining):
    """One run without its seed.

    Args:
        method: Its name in tables.
        exchange: ``local``: workers step alone and exchange changes; otherwise one of ``GRADIENTS``.
        size: One of ``SIZES``.
        workers: Number of replicas.
        batch: Windows of all workers together in one step.
        optimizer: ``adamw``, or ``muon`` for hidden matrices with AdamW for the rest.
        muon_factor: Muon's learning rate over AdamW's, which is ``lr``.
        momentum: Muon's.
        every: Local steps between two exchanges of a parameter.
        pace: ``even``: every interval has this many steps; ``rate``: as many exchanges, but intervals are in inverse
            proportion to the learning rate; ``late``: at the end three times as often as at the beginning.
        up: Codec of each worker's contribution.
        down: Codec of the mean.
        small: Codec of vectors, in both directions, without error feedback.
        decay: Factor of residuals in each round: ``ef:decay``.
        outer_lr: Factor of the mean.
        outer_momentum: Nesterov momentum of the outer step; 0 is a plain mean.
        outer_first: Whether the outer step comes before the mean is coded (at its owner) instead of after (everywhere).
        outer_norm: Exponent of the factor by which the mean of a matrix is shorter than the workers' messages: 1 gives
            the mean their length, 0 leaves it as it is.
        outer_flat: Share of the outer step whose singular values are made equal, at the same norm, as Muon does.
        carry: Share of its own residual that a worker keeps in its parameters.
        fragments: Groups of matrices that are exchanged in turns.
        overlap: Steps that a fragment's exchange takes beside training.
        merge: With overlap: ``progress``, or the weight of a worker's own parameters, as in ``laconic.LocalSGD``.
        gather: Whether every worker receives all frames; otherwise it receives their mean, coded once more.
        senders: Whether a coordinate's mean is taken over the workers that sent it.
        settle: Exchanges of everything after the last step, of which all but the first one only send residuals.
        averaged: Share of the exchanges, the last ones, whose global models are averaged into the final one.
        rank: Rank of PowerSGD.
    """

    method: str
    exchange: str = "ddp"
    size: str = "7m"
    workers: int = 8
    batch: int = 64
    optimizer: str = "adamw"
    muon_factor: float = 20.0
    momentum: float = 0.95
    weight_decay: float = 0.1
    every: int = 1
    pace: str = EVEN
    up: str = "none"
    down: str = "none"
    small: str = "bf16"
    decay: float = 1.0
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    outer_first: bool = False
    outer_norm: float = 0.0
    outer_flat: float = 0.0
    carry: float = 0.0
    fragments: int = 1
    overlap: int = 0
    merge: str = PROGRESS
    gather: bool = False
    senders: bool = False
    settle: int = 1
    averaged: float = 0.0
    rank: int = 4

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ConfigError(f"size must be one of {', '.join(SIZES)}, got {self.size!r}")
        if self.exchange != LOCAL and self.exchange not in GRADIENTS:
            raise ConfigError(f"exchange must be one of {', '.join((LOCAL, *GRADIENTS))}, got {self.exchange!r}")
        if self.optimizer not in ("adamw", "muon"):
            raise ConfigError(f"optimizer must be adamw or muon, got {self.optimizer!r}")
        if self.pace not in (EVEN, RATE, LATE):
            raise ConfigError(f"pace must be one of {EVEN}, {RATE}, {LATE}, got {self.pace!r}")
        if self.overlap * self.fragments > self.every:
            raise ConfigError(f"overlap must be at most every / fragments, got {self.overlap}")
        if self.batch % self.workers:
            raise ConfigError(f"batch must be a multiple of {self.workers} workers, got {self.batch}")

    def values(self) -> dict[str, Any]:
        """Return the fields for Records."""
        return asdict(self)
