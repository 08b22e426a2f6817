"""The setting of one run: a GPT in stages, and what they send each other."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from laconic.errors import ConfigError
from laconic_lab.studies.pipeline.model import SIZES

__all__ = ["FRESH", "REPEATED", "Setting"]

FRESH, REPEATED = "fresh", "repeated"


@dataclass(frozen=True)
class Setting:
    """One run without its seed.

    Args:
        stages: Stages of the pipeline.
        forward: Codec of activations.
        backward: Codec of their gradients.
        delta: Whether activations are sent as differences to the receiver's copies.
        samples: ``fresh``: other windows in every step; ``repeated``: ``pool`` micro-batches in turns, as in
            fine-tuning on few examples.
        pool: Number of different micro-batches, if repeated.
        bottleneck: Width to which a trained matrix projects activations before they are sent; 0: no matrix.
        size: One of ``SIZES``.
        micro_batches: Micro-batches of a step.
        windows: Windows of a micro-batch.
        steps: Steps of AdamW.
        warmup: Steps over which the learning rate grows; afterwards it falls to a tenth along a cosine.
    """

    stages: int
    forward: str = "none"
    backward: str = "none"
    delta: bool = False
    samples: str = FRESH
    pool: int = 32
    bottleneck: int = 0
    size: str = "small"
    micro_batches: int = 4
    windows: int = 4
    steps: int = 300
    warmup: int = 30
    lr: float = 2e-3

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ConfigError(f"size must be one of {', '.join(SIZES)}, got {self.size!r}")
        if self.samples not in (FRESH, REPEATED):
            raise ConfigError(f"samples must be {FRESH} or {REPEATED}, got {self.samples!r}")

    @property
    def method(self) -> str:
        """Its name in tables."""
        names = self.forward if self.forward == self.backward else f"{self.forward} / {self.backward}"
        names += f", {self.bottleneck} of {SIZES[self.size].width}" if self.bottleneck else ""
        return names + (", differences" if self.delta else "")

    def values(self) -> dict[str, Any]:
        """Return the fields for Records."""
        return asdict(self) | {"method": self.method}
