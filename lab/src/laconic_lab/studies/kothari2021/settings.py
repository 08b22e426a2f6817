"""Settings of the study: a model, a method with its options, and hyper-parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

from laconic.cluster.job import Job
from laconic.errors import ConfigError
from laconic.policy import Policy
from laconic.train.methods import method_options
from laconic.train.models import MODELS as KNOWN
from laconic_lab.studies.stepper import StepperSetting

__all__ = ["HYPER", "MODELS", "PAPER_MODELS", "Hyper", "Setting", "setting_of"]

MODELS = {"lenet5": "mnist", "vgg11": "cifar10", "vgg11fc": "cifar10", "resnet50": "cifar10"}
"""The paper's models and the one that it names as future work, with their data sets; ``vgg11fc`` has its layers."""


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of a model that the paper does not state.

    Args:
        lr: Highest learning rate.
        ramp: Epochs of linear warm-up to it; a cosine schedule follows.
        decay: Weight decay for an optimizer with momentum 0.9.
        epochs: Number of epochs in the paper.
        rates: Highest learning rate of methods that need another one.
    """

    lr: float
    ramp: float
    decay: float
    epochs: int
    rates: Mapping[str, float] = field(default_factory=dict)


HYPER = {
    "lenet5": Hyper(0.02, 1, 0.0, 20),
    # Both rates were tried with methods 1 and laconic; each has the better one. Averaging the weights of workers after
    # local steps damps the noise of a high rate.
    "vgg11": Hyper(0.05, 2, 5e-4, 50, {"laconic": 0.08, "laconic-min": 0.08}),
    "vgg11fc": Hyper(0.05, 2, 5e-4, 50, {"laconic": 0.08, "laconic-min": 0.08}),  # VGG-11's, not tuned
    "resnet50": Hyper(0.05, 2, 5e-4, 50, {"laconic": 0.08, "laconic-min": 0.08}),  # VGG-11's, not tuned
}
PAPER_MODELS = ("lenet5", "vgg11")


@dataclass(frozen=True)
class Setting(StepperSetting):
    """One row of a table.

    Args:
        name: Name of the row: a method, or how it was changed.
        options: Options of the job, and ``warm``: a list of epochs, push and pull codec for the start of a run.
    """

    name: str
    model: str = "vgg11"
    data: str = "cifar10"
    options: Mapping[str, Any] = field(default_factory=dict)
    mode: str = "sync"
    _: KW_ONLY
    decay: float = 5e-4

    def job(self, seed: int) -> Job:
        """Return the job; without momentum in the optimizer, weight decay must be ten times as large."""
        known = {option.name for option in fields(Job)}
        options = {name: value for name, value in self.options.items() if name in known}
        decay = self.decay if options.get("momentum", Job.momentum) else self.decay / (1 - Job.momentum)
        return Job(workers=self.workers, mode=self.mode, lr=self.lr, weight_decay=decay, seed=seed, **options)

    def policy(self, direction: str) -> Policy:
        return Policy(small=self.options.get(f"{direction}_small", "none"))

    def channels(self, epoch: float) -> tuple[str, str]:
        """Return the push and pull codecs of an epoch."""
        for epochs, push, pull in self.options.get("warm", ()):
            if epoch < epochs:
                return push, pull
            epoch -= epochs
        return self.options.get("push", "none"), self.options.get("pull", "none")

    def values(self) -> dict[str, Any]:
        return super().values() | {"options": dict(self.options)}


def setting_of(model: str, method: str, *, name: str | None = None, data: str | None = None, **changes: Any) -> Setting:
    """Return a method on a model with some options changed; None removes an option."""
    if model not in HYPER:
        raise ConfigError(f"unknown model {model!r}: the study trains {', '.join(HYPER)}")
    hyper = HYPER[model]
    shape: dict[str, Any] = {key: changes.pop(key) for key in ("workers", "mode", "batch", "lr") if key in changes}
    options = method_options(method) | changes
    options = {key: value for key, value in options.items() if value is not None}
    data = data or MODELS[model]
    if data not in KNOWN[model].data:
        raise ConfigError(f"model {model!r} takes {KNOWN[model].takes}, such as {MODELS[model]}, not {data!r}")
    lr = hyper.rates.get(method, hyper.lr)
    values: dict[str, Any] = {"lr": lr, "ramp": hyper.ramp, "decay": hyper.decay, **shape}
    return Setting(name or method, model, data, options, **values)
