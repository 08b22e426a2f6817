"""What is trained: a model, a method with all its options, and the hyper-parameters around it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from laconic.cluster.job import Job
from laconic.errors import ConfigError
from laconic.optim import Schedule
from laconic.policy import Policy
from laconic.train.methods import method_options
from laconic.train.models import MODELS as KNOWN

__all__ = ["HYPER", "MODELS", "Hyper", "Setting", "setting_of"]

MODELS = {"lenet5": "mnist", "vgg11": "cifar10"}
"""The paper's models, and what it trains them with."""


@dataclass(frozen=True)
class Hyper:
    """What the paper leaves open, for each model.

    Args:
        lr: The highest learning rate.
        ramp: Epochs that lead up to it on a straight line; then half a cosine wave leads down to 0.
        decay: Weight decay as a momentum of 0.9 in the optimizer makes it felt.
        epochs: The paper's number.
        rates: The highest learning rate of methods that do better with another one.
    """

    lr: float
    ramp: float
    decay: float
    epochs: int
    rates: Mapping[str, float] = field(default_factory=dict)


HYPER = {
    "lenet5": Hyper(0.02, 1, 0.0, 20),
    # Both were tried with methods 1 and laconic: each has the one that is better for it. Averaging the weights of
    # workers that went on by themselves damps what a high rate stirs up.
    "vgg11": Hyper(0.05, 2, 5e-4, 50, {"laconic": 0.08, "laconic-min": 0.08}),
}


@dataclass(frozen=True)
class Setting:
    """One row of a table.

    Args:
        name: Of the row: a method, or what was changed about it.
        model: Name of the model.
        data: Name of the data set.
        options: Of the job; and ``warm`` for other channels at the start: epochs, push and pull, one after the other.
        batch: Examples of a worker in an iteration.
        holdout: Fraction of the training examples that only judge.
        lr: Highest learning rate.
        ramp: Epochs up to it.
        decay: Weight decay as momentum 0.9 makes it felt.
        workers: How many.
        mode: Of the job.
    """

    name: str
    model: str = "vgg11"
    data: str = "cifar10"
    options: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 64
    holdout: float = 0.02
    lr: float = 0.05
    ramp: float = 2
    decay: float = 5e-4
    workers: int = 2
    mode: str = "sync"

    @property
    def layers(self) -> None:
        """All of them are dense."""

    @property
    def rules(self) -> tuple[tuple[str, str], ...]:
        return ()

    def job(self, seed: int) -> Job:
        """Where momentum is in the channel the optimizer has none: its decay acts once, and needs ten times as much."""
        known = {one.name for one in fields(Job)}
        options = {name: value for name, value in self.options.items() if name in known}
        decay = self.decay if options.get("momentum", Job.momentum) else self.decay / (1 - Job.momentum)
        return Job(workers=self.workers, mode=self.mode, lr=self.lr, weight_decay=decay, seed=seed, **options)

    def policy(self, direction: str) -> Policy:
        return Policy(small=self.options.get(f"{direction}_small", "none"))

    def channels(self, epoch: float) -> tuple[str, str]:
        """Push and pull spec at some time."""
        for epochs, push, pull in self.options.get("warm", ()):
            if epoch < epochs:
                return push, pull
            epoch -= epochs
        return self.options.get("push", "none"), self.options.get("pull", "none")

    def schedule(self, iterations: int, per_epoch: int) -> Schedule:
        ramp = min(round(self.ramp * per_epoch), iterations // 4)
        return Schedule(self.lr, "cosine", warmup=ramp, iterations=iterations)

    def values(self) -> dict[str, Any]:
        values: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        return values | {"options": dict(self.options)}

    def key(self, experiment: str, epochs: int, seed: int) -> str:
        """Equal for equal work."""
        return json.dumps([experiment, epochs, seed, self.values()], sort_keys=True)


def setting_of(model: str, method: str, *, name: str | None = None, data: str | None = None, **changes: Any) -> Setting:
    """A method on a model, with some of its options changed; None takes an option away."""
    if model not in HYPER:
        raise ConfigError(f"unknown model {model!r}: the study trains {', '.join(HYPER)}")
    hyper = HYPER[model]
    shape: dict[str, Any] = {key: changes.pop(key) for key in ("workers", "mode", "batch", "lr") if key in changes}
    options = method_options(method) | changes
    options = {key: value for key, value in options.items() if value is not None}
    data = data or MODELS[model]
    if data not in KNOWN[model].data:
        raise ConfigError(f"model {model!r} takes {KNOWN[model].takes}, such as {MODELS[model]} has, not {data!r}")
    lr = hyper.rates.get(method, hyper.lr)
    values: dict[str, Any] = {"lr": lr, "ramp": hyper.ramp, "decay": hyper.decay, **shape}
    return Setting(name or method, model, data, options, **values)
