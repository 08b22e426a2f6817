"""LocalOptions: the arguments of LocalSGD, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from laconic.codecs import parse
from laconic.codecs.memory import ErrorFeedback
from laconic.errors import ConfigError

__all__ = ["LocalOptions", "as_optimizers"]


@dataclass(frozen=True)
class LocalOptions:
    """How often and how ranks exchange. ``LocalSGD`` describes the fields."""

    every: int
    codec: str
    fragments: int
    overlap: int
    merge: float | str
    weight_by: str | None
    clip: str | None
    average: str
    continue_from: str
    timeout_s: float | None

    def __post_init__(self) -> None:
        _require_whole("every", self.every, 1)
        _require_whole("fragments", self.fragments, 1)
        _require_whole("overlap", self.overlap, 0)
        if self.fragments > self.every:
            raise ConfigError(
                f"fragments must be at most every, {self.every}, as one is exchanged at a time; got {self.fragments}"
            )
        if self.overlap > self.every // self.fragments:
            raise ConfigError(
                f"overlap must be at most every // fragments, {self.every // self.fragments} steps, after which the "
                f"next exchange begins; got {self.overlap}"
            )
        number = isinstance(self.merge, (int, float)) and not isinstance(self.merge, bool)
        if self.merge != "progress" and not (number and 0.0 <= float(self.merge) < 1.0):
            raise ConfigError(f"merge must be a number from 0 to below 1 or 'progress', got {self.merge!r}")
        for name, value, allowed in (
            ("weight_by", self.weight_by, (None, "tokens")),
            ("clip", self.clip, (None, "median")),
            ("average", self.average, ("all", "senders")),
            ("continue_from", self.continue_from, ("global", "local")),
        ):
            if value not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(f"timeout_s must be above 0, got {self.timeout_s}")
        memories, chain = parse(self.codec)
        if self.average == "senders" and (chain.selector is None or chain.summable):
            raise ConfigError(
                f"average='senders' needs a codec that selects values for each rank, such as 'ef|topk:0.1|sign': with "
                f"{self.codec!r} every rank sends the same positions"
            )
        if self.continue_from == "local" and not any(isinstance(stage, ErrorFeedback) for stage in memories):
            raise ConfigError(
                f"continue_from='local' continues from what a rank has not sent, which needs error feedback: use "
                f"'ef|{self.codec}' instead of {self.codec!r}"
            )

    @property
    def keeps_progress(self) -> bool:
        """Whether all of a rank's progress during an exchange is kept."""
        return self.merge == "progress" and self.overlap > 0

    @property
    def own_weight(self) -> float:
        """The weight of a rank's own parameters when a result is applied."""
        return 0.0 if self.merge == "progress" else float(self.merge)

    @classmethod
    def of(cls, *, overlap: int, merge: float | str | None, **others: Any) -> LocalOptions:
        """Return the options; ``merge`` is by default 0.5 if exchanges overlap with training, and 0 otherwise."""
        if merge is None:
            merge = 0.5 if overlap else 0.0
        return cls(overlap=overlap, merge=merge, **others)


def as_optimizers(optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None) -> tuple[Any, ...]:
    """Return the inner optimizers in the order in which they step; none for None."""
    if optimizer is None:
        return ()
    optimizers = tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)
    for each in optimizers:
        if not hasattr(each, "step") or not hasattr(each, "param_groups"):
            raise ConfigError(
                f"optimizer must be a torch optimizer, a list of them, or None, got {type(each).__name__}"
            )
    return optimizers


def _require_whole(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number from {least} on, got {value!r}")
