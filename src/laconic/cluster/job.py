"""The options that a server and all its workers agree on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from torch import Tensor

from laconic.aggregate.robust import ROBUST, parse_robust
from laconic.channels import Channel
from laconic.cluster.homomorphic.server import SlotSum, check_summable
from laconic.cluster.modes import Mode
from laconic.cluster.returns import REPLY_KINDS, ReplyKind
from laconic.codecs import parse
from laconic.errors import ConfigError
from laconic.optim import OptimizerSettings
from laconic.packet import TensorSpec
from laconic.policy import Policy

__all__ = ["Job", "Slots"]

PUSHES = ("gradients", "changes", "weights")
AFTER = ("mean", "best", *ROBUST)


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
        """A hash that is equal for equal models."""
        text = json.dumps([[name, *shape] for name, shape in zip(self.names, self.shapes, strict=True)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Job(OptimizerSettings):
    """The options of one training job. A method of ``laconic.train.methods`` is a set of values for these fields.

    Args:
        mode: ``sync``, ``async``, or ``bounded:S``: no gradient is more than S updates stale.
        push: Channel spec of what workers send.
        pull: Channel spec of what the server sends.
        push_small: Channel spec of slots too small to gain from ``push``: vectors, and fewer than 4,096 values.
        pull_small: The same for ``pull``.
        returns: What the server sends: ``weights``, ``gradients`` (workers run the optimizer), ``delta`` (the change
            of the weights since the last reply) or ``sum``: the pushes, added while compressed. With ``sum`` the server
            sees no float of a gradient, and no weights but those that workers upload for its checkpoints.
        sends: What workers push: ``gradients``; or, after local steps, the ``changes`` of their weights or the
            ``weights``.
        after: ``mean`` of the pushes, or ``best``: the change or weights of the worker with the lowest held-out loss.
            Means that one worker cannot move far: ``clipped`` to the median norm of the pushes; ``trimmed:K``, without
            the K smallest and the K largest values of each coordinate; ``median``.
        backup: Workers that a synchronous round does not wait for.
        discount: Without rounds: a gradient that is n updates stale takes 1 / (1 + n) of a step.
        optimizer: As in ``OptimizerSettings``; ``adamw`` and ``muon`` run on the server.
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
    checkpoint_every: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("workers", 1), ("every", 1), ("backup", 0), ("checkpoint_every", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}")
        if self.backup >= self.workers:
            raise ConfigError(f"backup must be less than workers ({self.workers}), got {self.backup}")
        for name, valid in (("returns", tuple(REPLY_KINDS)), ("sends", PUSHES), ("after", AFTER)):
            robust = name == "after" and self.trim is not None
            if getattr(self, name) not in valid and not robust:
                raise ConfigError(f"{name} must be one of {', '.join(valid)}, got {getattr(self, name)!r}")
        super().__post_init__()
        for spec in (self.push, self.pull, self.push_small, self.pull_small):
            parse(spec)
        self._check_combination()

    def _check_combination(self) -> None:
        in_rounds, best = self.update_mode.in_rounds, self.after == "best"
        if not in_rounds and (self.backup or best):
            raise ConfigError(f"backup workers and after=best need mode sync, got {self.mode!r}")
        if not in_rounds and self.after != "mean":
            raise ConfigError(f"after={self.after} compares workers and needs mode sync, got {self.mode!r}")
        if self.backup and self.after != "mean":
            raise ConfigError(f"after={self.after} compares all workers and needs backup=0, got {self.backup}")
        if in_rounds and self.discount:
            raise ConfigError("discount needs mode async or bounded: in rounds no gradient is stale")
        if self.discount and self.sends != "gradients":
            raise ConfigError(f"discount shortens the server's steps and needs sends=gradients, got {self.sends!r}")
        self.reply_kind.check(self)
        if (self.sends == "gradients") != (self.every == 1):
            raise ConfigError(
                f"sends=gradients needs every=1, sends=changes and sends=weights need more, got sends={self.sends!r} "
                f"and every={self.every}"
            )
        if self.optimizer != "sgd" and (self.reply_kind.workers_step or self.sends != "gradients"):
            raise ConfigError(
                f"optimizer={self.optimizer} runs on the server and needs sends=gradients and returns=weights or delta,"
                f" got sends={self.sends!r} and returns={self.returns!r}"
            )
        if self.sends == "weights" and not self.reply_kind.is_weights:
            raise ConfigError(f"sends=weights needs returns=weights, got {self.returns!r}")
        if best and self.sends_gradients:
            raise ConfigError(f"after=best needs sends=changes or sends=weights, got {self.sends!r}")

    @cached_property
    def update_mode(self) -> Mode:
        """The parsed ``mode``."""
        return Mode.parse(self.mode)

    @cached_property
    def trim(self) -> int | None:
        """How many values ``after`` drops at each end of a coordinate, 0 with ``clipped``; None for other values."""
        return parse_robust(self.after, self.workers)

    @property
    def reply_kind(self) -> ReplyKind:
        """The object that ``returns`` names."""
        return REPLY_KINDS[self.returns]

    @property
    def sends_gradients(self) -> bool:
        return self.sends == "gradients"

    def push_channel(self) -> Channel:
        return Channel(self.push, policy=Policy(small=self.push_small))

    def pull_channel(self) -> Channel:
        return self.reply_kind.pull_channel(self)

    def push_spec(self, slot: str, like: Tensor) -> str:
        """Return the spec by which a slot is pushed."""
        return Policy(small=self.push_small).choose(slot, TensorSpec.of(like), self.push).spec

    def slot_sums(self, like: Mapping[str, Tensor]) -> list[SlotSum]:
        """With returns=sum: return how each slot is summed."""
        return [
            SlotSum(name, tuple(x.shape), check_summable(self.push_spec(name, x), self.workers))
            for name, x in like.items()
        ]

    def push_limits(self, tensors: Iterable[Tensor]) -> list[int]:
        """Return the largest possible frame of each slot that a worker pushes, in bytes."""
        return self.reply_kind.push_limits(self, tensors)

    def pull_limits(self, tensors: Iterable[Tensor]) -> list[int]:
        """Return the largest possible frame of each slot in a reply or a snapshot, in bytes."""
        return self.reply_kind.pull_limits(self, tensors)

    @property
    def exact(self) -> bool:
        """Whether the result has the same bits whatever fails: rounds with all workers do not depend on timing."""
        return self.update_mode.in_rounds and not self.backup

    @property
    def remembers(self) -> bool:
        """Whether workers have state that the server cannot restore: residuals, momentum of local steps, weights."""
        residuals = any(parse(spec)[0] for spec in (self.push, self.push_small))
        return residuals or not self.reply_kind.server_has_weights or (self.every > 1 and self.momentum > 0)

    @property
    def holds_other_weights(self) -> bool:
        """Whether workers of a synchronous job hold other weights than the server."""
        return self.update_mode.in_rounds and self.reply_kind.workers_differ(self)

    @property
    def keeps_replies(self) -> bool:
        """Whether a reply cannot be made a second time, so that the server keeps it until the next one."""
        return self.update_mode.in_rounds or self.reply_kind.is_change

    @property
    def updates_per_exchange(self) -> int:
        """Updates of the server while each worker makes one exchange."""
        return 1 if self.update_mode.in_rounds else self.workers

    @property
    def exchanges_per_checkpoint(self) -> int:
        return max(1, self.checkpoint_every // self.every)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Job:
        values = {"optimizer": "sgd", **values}  # a run of an earlier version
        require_fields(cls, values, "a job")
        return cls(**values)


def require_fields(cls: type[Any], values: Mapping[str, Any], name: str) -> None:
    """Raise ``ConfigError`` unless the keys are the names of a dataclass's fields."""
    known = {field.name for field in fields(cls)}
    if set(values) != known:
        raise ConfigError(f"{name} has the fields {', '.join(sorted(known))}, got {', '.join(sorted(values))}")
