"""The setting of one run: a GPT in stages, and what they send each other."""

from __future__ import annotations

from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any

from laconic.errors import ConfigError
from laconic_lab.studies.pipeline.model import SIZES
from laconic_lab.studies.text_runs import TextTraining

__all__ = ["FRESH", "REPEATED", "Setting"]

FRESH, REPEATED = "fresh", "repeated"


@dataclass(frozen=True)
class Setting(TextTraining):
    """One run without its seed.

    Args:
        stages: Stages of the pipeline.
        forward: Codec of activations.
        backward: Codec of their gradients.
        delta: Whether activations are sent as differences to the receiver's copies.
        samples: ``fresh``: other windows in every step; ``repeated``: ``pool`` micro-batches in turns, as in
            fine-tuning on few examples.
        pool: Number of different micro-batches, if repeated.
        bottleneck: A trained matrix projects activations to this part of their width before they are sent: 8 to an
            eighth; 0: no matrix.
        reads_tokens: Whether every stage reads the tokens itself and adds an embedding of its own to what it receives.
        size: One of ``SIZES``.
        micro_batches: Micro-batches of a step.
        windows: Windows of a micro-batch.
    """

    stages: int
    forward: str = "none"
    backward: str = "none"
    delta: bool = False
    samples: str = FRESH
    pool: int = 32
    bottleneck: int = 0
    reads_tokens: bool = False
    micro_batches: int = 4
    windows: int = 4
    size: str = "small"
    _: KW_ONLY
    steps: int = 300
    warmup: int = 30
    lr: float = 2e-3

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise ConfigError(f"size must be one of {', '.join(SIZES)}, got {self.size!r}")
        if self.samples not in (FRESH, REPEATED):
            raise ConfigError(f"samples must be {FRESH} or {REPEATED}, got {self.samples!r}")
        if self.reads_tokens and not self.bottleneck:
            raise ConfigError("reads_tokens completes what a bottleneck leaves out: give a bottleneck")

    @property
    def sent_width(self) -> int:
        """Values of a token that cross a boundary."""
        return SIZES[self.size].width // max(1, self.bottleneck)

    @property
    def method(self) -> str:
        """Its name in tables."""
        names = self.forward if self.forward == self.backward else f"{self.forward} / {self.backward}"
        width = SIZES[self.size].width
        names += f", {self.sent_width} of {width}" if self.sent_width < width else ""
        names += ", tokens" if self.reads_tokens else ""
        return names + (", differences" if self.delta else "")

    def values(self) -> dict[str, Any]:
        """Return the fields for Records."""
        return asdict(self) | {"method": self.method}
