"""What the server and all its workers must agree on."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor

from laconic.codecs import parse
from laconic.errors import ConfigError

__all__ = ["Job", "Slots"]

PULLS = ("weights", "gradients", "delta")
PUSHES = ("gradients", "changes", "weights")
AFTER = ("mean", "best")


@dataclass(frozen=True)
class Slots:
    """Names and shapes of the tensors that are exchanged, in order. All are float32."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Slots:
        return cls(tuple(tensors), tuple(tuple(x.shape) for x in tensors.values()))

    def __len__(self) -> int:
        return len(self.names)

    @property
    def fingerprint(self) -> str:
        """Equal for equal models."""
        text = json.dumps([[name, *shape] for name, shape in zip(self.names, self.shapes, strict=True)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Job:
    """One training. The methods of ``laconic.train.methods`` are nothing but values of these fields.

    Args:
        workers: How many there are.
        mode: ``sync``, ``async``, or ``bounded:S``: nobody is more than S iterations ahead of the slowest.
        push: The channel of what workers send.
        pull: The channel of what the server sends.
        returns: What that is: ``weights``, ``gradients`` (workers run the optimizer) or ``delta`` (the change of the
            weights since the last time).
        every: Iterations between two exchanges.
        sends: What workers push: ``gradients``; or after steps of their own the ``changes`` of their weights, or the
            ``weights``.
        after: ``mean`` of what came, or ``best``: the change of the worker that did best on data held out of training.
        backup: Workers that a synchronous round does not wait for.
        lr: Learning rate.
        momentum: Of the descent.
        weight_decay: Of the descent.
        checkpoint_every: Iterations between two checkpoints.
        seed: Of everything random.
    """

    workers: int = 2
    mode: str = "sync"
    push: str = "none"
    pull: str = "none"
    returns: str = "weights"
    every: int = 1
    sends: str = "gradients"
    after: str = "mean"
    backup: int = 0
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 0.0
    checkpoint_every: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("workers", 1), ("every", 1), ("backup", 0), ("checkpoint_every", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be a whole number, at least {least}, got {value!r}")
        if self.backup >= self.workers:
            raise ConfigError(f"backup must be less than workers ({self.workers}), got {self.backup}")
        for name, valid in (("returns", PULLS), ("sends", PUSHES), ("after", AFTER)):
            if getattr(self, name) not in valid:
                raise ConfigError(f"{name} must be one of {', '.join(valid)}, got {getattr(self, name)!r}")
        for name in ("lr", "momentum", "weight_decay"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
                raise ConfigError(f"{name} must be a number, not negative, got {value!r}")
        parse(self.push)
        parse(self.pull)
        self.bound  # noqa: B018 - checked here, so that a wrong mode is refused at once
        if self.mode != "sync" and (self.backup or self.after == "best"):
            raise ConfigError(f"backup workers and after=best need mode sync, got {self.mode!r}")
        if self.mode != "sync" and self.returns == "gradients":
            raise ConfigError("returns=gradients needs mode sync: each worker would take other steps than the server")
        if (self.sends == "gradients") != (self.every == 1):
            raise ConfigError("sends=gradients goes with every=1, changes and weights with more: give the other, too")
        if self.sends == "weights" and self.returns != "weights":
            raise ConfigError("sends=weights needs returns=weights: their mean is what comes back")
        if self.after == "best" and self.sends != "changes":
            raise ConfigError("after=best chooses between changes of several iterations: give sends=changes")

    @property
    def bound(self) -> int | None:
        """How far ahead a worker may be; 0 when synchronous, None when it does not matter."""
        name, _, steps = self.mode.partition(":")
        if name == "bounded" and steps.isdecimal() and int(steps) >= 1:
            return int(steps)
        if self.mode == "sync":
            return 0
        if self.mode == "async":
            return None
        raise ConfigError(f"mode must be sync, async or bounded:S with S of at least 1, got {self.mode!r}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Job:
        known = {field.name for field in fields(cls)}
        if set(values) != known:
            raise ConfigError(f"a job has the fields {', '.join(sorted(known))}, got {', '.join(sorted(values))}")
        return cls(**values)
