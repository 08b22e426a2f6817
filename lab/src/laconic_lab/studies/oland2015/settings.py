"""Settings of the study: a quantizer, its hyper-parameters, and what all runs share."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from laconic.errors import ConfigError

__all__ = ["BASELINE", "EPOCHS", "LAYERS", "NUM_WEIGHTS", "CommonSettings", "Quantizer", "Setting"]

LAYERS = ((392, 784), (50, 392), (10, 50))
"""Outputs and inputs of each layer."""
NUM_WEIGHTS = sum(rows * cols for rows, cols in LAYERS)
EPOCHS = 100
"""The paper's."""


@dataclass(frozen=True)
class Quantizer:
    """How a layer's weights are sent; the fields are those of the codec of that name.

    Args:
        kind: ``none`` (float32), ``uniform`` (``bits`` for every layer) or ``adaptive``.
    """

    kind: str = "none"
    c: float = 0.0
    m: int = 4
    f: float = 0.03
    integer: bool = False
    by: str = "entropy"
    zero: bool = False
    tail: float = 0.0
    bits: int = 8

    @property
    def spec(self) -> str:
        """The spec of the codec."""
        if self.kind == "none":
            return "none"
        if self.kind == "uniform":
            return f"uniform:{self.bits}"
        words = [f"{self.c:g}"]
        for name in ("m", "f", "integer", "by", "zero", "tail"):
            value = getattr(self, name)
            if value != getattr(Quantizer, name):
                words.append(f"{name}={str(value).lower() if isinstance(value, bool) else value}")
        return f"adaptive:{','.join(words)}|huffman"

    @property
    def family(self) -> tuple[object, ...]:
        """Key of the quantizers that differ only in numbers, so that their runs are quantized together."""
        if self.kind != "adaptive":
            return (self.kind,)
        return ("adaptive", self.f, self.by, self.zero, self.tail)


BASELINE = Quantizer()


@dataclass(frozen=True)
class Setting:
    """One point of an experiment: a quantizer, and hyper-parameters that the paper does not state.

    Args:
        lr: Learning rate of the first epoch, on the mean over batch and outputs of the squared error.
        decay: Factor of the learning rate after each epoch.
        l1: Weight of the sum of magnitudes of the weights (not of the biases) in the loss.
        batch: Images of a mini-batch, per worker.
        pixels: ``unit`` for grey values in [0, 1], ``centred`` for [-1, 1].
        sends: ``weights`` after every epoch, or ``gradients`` after every mini-batch.
    """

    quantizer: Quantizer = BASELINE
    lr: float = 0.8
    decay: float = 0.99
    l1: float = 1.1e-5
    batch: int = 100
    pixels: str = "unit"
    sends: str = "weights"

    def __post_init__(self) -> None:
        if not (self.lr > 0 and 0 < self.decay <= 1 and self.l1 >= 0 and self.batch >= 1):
            raise ConfigError(f"expected lr > 0, decay in (0, 1], l1 >= 0 and batch >= 1, got {self}")
        if self.pixels not in ("unit", "centred"):
            raise ConfigError(f"pixels must be unit or centred, got {self.pixels!r}")
        if self.sends not in ("weights", "gradients"):
            raise ConfigError(f"sends must be weights or gradients, got {self.sends!r}")

    def values(self) -> dict[str, Any]:
        return {"codec": self.quantizer.spec} | {k: v for k, v in asdict(self).items() if k != "quantizer"}


@dataclass(frozen=True)
class CommonSettings:
    """What all runs share.

    Args:
        data: Name of the images, see ``laconic.train.data``.
        workers: Number of workers, each with an exclusive share of the images.
        epochs: Passes over the images; weights are exchanged after each.
        seed: Seed of initial weights, shares, order of images and sampling.
        default: Hyper-parameters that an experiment does not vary.
    """

    data: str = "digits"
    workers: int = 5
    epochs: int = 100
    seed: int = 0
    default: Setting = field(default_factory=Setting)

    def __post_init__(self) -> None:
        for name, least in (("workers", 1), ("epochs", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")

    def values(self) -> dict[str, Any]:
        """Return the common values of a Record; settings add their own."""
        return {"data": self.data, "workers": self.workers, "epochs": self.epochs, "seed": self.seed}
