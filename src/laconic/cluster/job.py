"""What the server and all its workers must agree on."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor

from laconic.channels import Channel
from laconic.cluster.homomorphic.server import SlotSum, check_summable, message_limit
from laconic.codecs import parse
from laconic.errors import ConfigError
from laconic.frames import max_nbytes
from laconic.packet import TensorSpec
from laconic.policy import Policy

__all__ = ["Job", "Slots"]

PULLS = ("weights", "gradients", "delta", "sum")
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
        mode: ``sync``, ``async``, or ``bounded:S``: no gradient misses more than S updates made meanwhile.
        push: The channel of what workers send.
        pull: The channel of what the server sends.
        push_small: The channel of slots that are too small to gain from ``push``: vectors, and less than 4,096 values.
        pull_small: The same of ``pull``.
        returns: What that is: ``weights``, ``gradients`` (workers run the optimizer), ``delta`` (the change of the
            weights since the last time) or ``sum``: what workers pushed, added while compressed. Then the server holds
            no weights but those that workers deposit for its checkpoints, and no float of a gradient.
        every: Iterations between two exchanges.
        sends: What workers push: ``gradients``; or after steps of their own the ``changes`` of their weights, or the
            ``weights``.
        after: ``mean`` of what came, or ``best``: the change of the worker that did best on data held out of training.
        backup: Workers that a synchronous round does not wait for.
        discount: Without rounds: a gradient that missed n updates takes 1 / (1 + n) of a step.
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
    push_small: str = "none"
    pull_small: str = "none"
    returns: str = "weights"
    every: int = 1
    sends: str = "gradients"
    after: str = "mean"
    backup: int = 0
    discount: bool = False
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
        for spec in (self.push, self.pull, self.push_small, self.pull_small):
            parse(spec)
        self.bound  # noqa: B018 - checked here, so that a wrong mode is refused at once
        if self.mode != "sync" and (self.backup or self.after == "best"):
            raise ConfigError(f"backup workers and after=best need mode sync, got {self.mode!r}")
        if self.backup and self.after == "best":
            raise ConfigError("after=best chooses between all workers: give backup=0")
        if self.mode == "sync" and self.discount:
            raise ConfigError("discount is for modes async and bounded: in rounds no gradient misses an update")
        if self.discount and self.sends != "gradients":
            raise ConfigError("discount shortens steps that the server takes: it goes with sends=gradients")
        if self.mode != "sync" and self.returns == "gradients":
            raise ConfigError("returns=gradients needs mode sync: each worker would take other steps than the server")
        if self.returns == "sum":
            self._check_sum()
        if (self.sends == "gradients") != (self.every == 1):
            raise ConfigError("sends=gradients goes with every=1, changes and weights with more: give the other, too")
        if self.sends == "weights" and self.returns != "weights":
            raise ConfigError("sends=weights needs returns=weights: their mean is what comes back")
        if self.after == "best" and self.sends != "changes":
            raise ConfigError("after=best chooses between changes of several iterations: give sends=changes")

    def _check_sum(self) -> None:
        if self.mode != "sync":
            raise ConfigError(f"returns=sum needs mode sync: a sum is that of a round, got {self.mode!r}")
        if self.after != "mean":
            raise ConfigError("returns=sum gives the mean of all workers: give after=mean")
        if (self.pull, self.pull_small) != ("none", "none"):
            raise ConfigError("returns=sum sends back what was pushed, added up: give pull=none and pull_small=none")
        for spec in (self.push, self.push_small):
            check_summable(spec, self.workers)

    @property
    def bound(self) -> int | None:
        """How many updates a gradient may miss; 0 when synchronous, None when it does not matter."""
        name, _, steps = self.mode.partition(":")
        if name == "bounded" and steps.isdecimal() and int(steps) >= 1:
            return int(steps)
        if self.mode == "sync":
            return 0
        if self.mode == "async":
            return None
        raise ConfigError(f"mode must be sync, async or bounded:S with S of at least 1, got {self.mode!r}")

    def push_channel(self) -> Channel:
        return Channel(self.push, policy=Policy(small=self.push_small))

    def pull_channel(self) -> Channel:
        specs = [self.pull, self.pull_small]
        if self.returns == "delta":  # what was not sent is in the next change anyway: a memory would send it twice
            specs = [parse(spec)[1].text for spec in specs]
        return Channel(specs[0], policy=Policy(small=specs[1]))

    def push_spec(self, slot: str, like: Tensor) -> str:
        """The spec by which a slot is pushed."""
        return Policy(small=self.push_small).choose(slot, TensorSpec.of(like), self.push).spec

    def slot_sums(self, like: Mapping[str, Tensor]) -> list[SlotSum]:
        """With returns=sum: how each slot is summed."""
        return [
            SlotSum(name, tuple(x.shape), check_summable(self.push_spec(name, x), self.workers))
            for name, x in like.items()
        ]

    def push_limits(self, tensors: Iterable[Tensor]) -> list[int]:
        """The most bytes that the frame of each slot can have."""
        if self.returns == "sum":
            return [message_limit(x) for x in tensors]
        return _limits((self.push, self.push_small), tensors)

    def pull_limits(self, tensors: Iterable[Tensor]) -> list[int]:
        """The same of what the server sends; also of a snapshot, which is not compressed."""
        if self.returns == "sum":
            return [message_limit(x) for x in tensors]
        return _limits((self.pull, self.pull_small), tensors)

    @property
    def exact(self) -> bool:
        """Whether it ends with the same bits whatever happens on the way: rounds with everybody, and no timing."""
        return self.mode == "sync" and not self.backup

    @property
    def remembers(self) -> bool:
        """Whether workers remember more than the server can tell them: residuals, own steps' momentum, weights."""
        channels = any(parse(spec)[0] for spec in (self.push, self.push_small))
        return channels or self.returns == "sum" or (self.every > 1 and self.momentum > 0)

    @property
    def holds_other_weights(self) -> bool:
        """Whether workers of a synchronous job hold other weights than the server: those of a lossy pull."""
        lossy = any(parse(spec)[1].text != "none" for spec in (self.pull, self.pull_small))
        return self.mode == "sync" and (self.returns == "delta" or (self.returns == "weights" and lossy))

    @property
    def keeps_replies(self) -> bool:
        """Whether an answer cannot be made again, so that it is kept until the next."""
        return self.mode == "sync" or self.returns == "delta"

    @property
    def exchanges_per_checkpoint(self) -> int:
        return max(1, self.checkpoint_every // self.every)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Job:
        known = {field.name for field in fields(cls)}
        if set(values) != known:
            raise ConfigError(f"a job has the fields {', '.join(sorted(known))}, got {', '.join(sorted(values))}")
        return cls(**values)


def _limits(specs: Iterable[str], tensors: Iterable[Tensor]) -> list[int]:
    codecs = [parse("none")[1], *(parse(spec)[1] for spec in specs)]
    return [max(max_nbytes(codec, x) for codec in codecs) for x in tensors]
