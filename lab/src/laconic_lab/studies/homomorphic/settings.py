"""Settings of the study: a model, the scheme of its layers, and a summable codec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from laconic.cluster.job import Job
from laconic.errors import ConfigError
from laconic_lab.studies.stepper import StepperSetting

__all__ = ["HYPER", "Hyper", "Setting", "scheme_text", "setting_of"]


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of a model, with dense or compressed layers.

    Args:
        lr: Highest learning rate.
        ramp: Epochs of warm-up.
        batch: Images of all workers together in an iteration.
    """

    data: str
    lr: float
    ramp: float
    decay: float
    epochs: int
    batch: int = 128


HYPER: Mapping[str, Hyper] = {
    "mlp": Hyper("mnist", 0.05, 0.5, 0.0, 10),
    "lenet5": Hyper("mnist", 0.05, 0.5, 0.0, 10),
    "vgg11": Hyper("cifar10", 0.05, 2, 5e-4, 20),
    "vgg11fc": Hyper("cifar10", 0.05, 2, 5e-4, 20),  # VGG-11's, not tuned
}


@dataclass(frozen=True)
class Setting(StepperSetting):
    """One run without its seed and length.

    Args:
        layers: Scheme of the layers; None for dense layers.
        rules: Patterns of layers with another scheme, or ``dense``.
        codec: Summable codec of the gradients: ``ef|thc:2``, ``ef|shared:4``, …; ``none`` for float32.
        small: The same for tensors below 4,096 values.
        carry: Whether scales are those of the round before, as on the server, or agreed in the same round.
        at_renewal: What happens to the momentum of a subspace that is renewed: ``forget`` it, or ``spend`` it on the
            weights at once.
    """

    model: str
    data: str
    layers: str | None = None
    rules: tuple[tuple[str, str], ...] = ()
    codec: str = "none"
    small: str = "shared:16"
    carry: bool = True
    at_renewal: str = "spend"

    @property
    def name(self) -> str:
        """Scheme and codec as text."""
        return " × ".join([scheme_text(self.layers, self.rules), *([self.codec] if self.codec != "none" else [])])

    def job(self, seed: int) -> Job:
        job = Job(workers=self.workers, lr=self.lr, weight_decay=self.decay, seed=seed)
        if self.codec == "none":
            return job
        return replace(job, push=self.codec, push_small=self.small, returns="sum")

    def values(self) -> dict[str, Any]:
        return super().values() | {"rules": [list(rule) for rule in self.rules]}


def scheme_text(layers: str | None, rules: Sequence[Sequence[str]]) -> str:
    """Return a scheme with its exceptions as text.

    >>> scheme_text("subspace:0.1", [("conv2", "dense")])
    'subspace:0.1, conv2 dense'
    """
    return (layers or "dense") + "".join(f", {pattern} {scheme}" for pattern, scheme in rules)


def setting_of(
    model: str, layers: str | None = None, codec: str = "none", *, workers: int = 2, data: str | None = None,
    **rest: Any,
) -> Setting:  # fmt: skip
    """Return a setting with the model's hyper-parameters; the workers share its batch."""
    if model not in HYPER:
        raise ConfigError(f"unknown model {model!r}: the study trains {', '.join(HYPER)}")
    hyper = HYPER[model]
    batch, over = divmod(hyper.batch, workers)
    if over or not batch:
        raise ConfigError(f"{workers} workers cannot share a batch of {hyper.batch} images evenly")
    known: dict[str, Any] = {"lr": hyper.lr, "ramp": hyper.ramp, "decay": hyper.decay, "batch": batch, **rest}
    return Setting(model, data or hyper.data, layers, codec=codec, workers=workers, **known)
