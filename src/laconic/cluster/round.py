"""One synchronous round: pushes are combined as they arrive, in the order of the workers' numbers.

The order is fixed because a sum of floats depends on it, and a run must end with the same bits every time. A push waits
until those before it are added. The byte budget limits what waits, so the server's memory does not grow with the
number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from laconic.aggregate import MeanAccumulator, OpenedFrame
from laconic.cluster.homomorphic.server import Contribution, RoundSums
from laconic.cluster.job import Slots
from laconic.cluster.protocol import Frame
from laconic.cluster.replies import ReplyStream
from laconic.cluster.shared_state import Reservation
from laconic.errors import FrameError

__all__ = ["Best", "Combiner", "Mean", "Push", "Round"]


@dataclass
class Push:
    """A complete push: one frame per slot, or with returns=sum and backup workers one contribution per slot.

    With returns=sum and all workers the contributions were added as they arrived, and both lists are empty.
    """

    worker: int
    incarnation: int
    sequence: int
    score: float
    frames: Sequence[OpenedFrame] = ()
    encoded: Sequence[Frame] = ()
    """The bytes of ``frames``."""
    contributions: Sequence[Contribution] = ()
    reservation: Reservation | None = None
    """The bytes it holds of the budget, once the round has taken it over."""

    def decode(self, like: Sequence[Tensor]) -> dict[str, Tensor]:
        return {frame.slot: frame.decode(x.device) for frame, x in zip(self.frames, like, strict=True)}


class Mean:
    """The mean of all workers' pushes.

    Args:
        sums: Zeros of the slots' shapes, which the pushes are added to.
        workers: Number of pushes in a round.
    """

    in_order = True

    def __init__(self, slots: Slots, sums: Sequence[Tensor], workers: int) -> None:
        self._slots, self._accumulator = slots, MeanAccumulator(sums, workers)

    def add(self, push: Push) -> None:
        """Add a push. After an error the sums are invalid: the round must start again."""
        self._accumulator.add(push.frames)

    def result(self) -> dict[str, Tensor]:
        return dict(zip(self._slots.names, self._accumulator.sums, strict=True))

    def frames(self) -> None:
        return None

    def clear(self) -> None:
        self._accumulator.clear()


class Best:
    """The push of the worker with the lowest score; among equal ones the worker with the lowest number."""

    in_order = True

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._like = like
        self._push: Push | None = None
        self._update: dict[str, Tensor] = {}

    def add(self, push: Push) -> None:
        update = push.decode(self._like)  # so that the update cannot fail on it
        if self._push is None or (push.score, push.worker) < (self._push.score, self._push.worker):
            self._push, self._update = push, update

    def result(self) -> dict[str, Tensor]:
        return self._update

    def frames(self) -> tuple[Frame, ...]:
        return () if self._push is None else tuple(self._push.encoded)

    def clear(self) -> None:
        """Nothing is used again."""


class Combiner(Protocol):
    """Combines the pushes of a round: ``Mean``, ``Best`` or ``Robust``."""

    in_order: bool
    """Whether pushes are added in the order of the workers' numbers."""

    def add(self, push: Push) -> None: ...
    def result(self) -> dict[str, Tensor]: ...
    def frames(self) -> Sequence[Frame] | None: ...
    def clear(self) -> None: ...


@dataclass
class Round:
    """The state between two updates of a synchronous job."""

    total: Combiner | RoundSums
    reply: ReplyStream | None = None
    """The reply, where it is made while pushes arrive."""
    waiting: dict[int, Push] = field(default_factory=dict)
    """Complete pushes that are not added yet, by worker."""
    pushed: set[int] = field(default_factory=set)
    """The workers whose pushes are complete."""
    added: int = 0
    """Number of pushes added; in an ordered round also the worker whose turn it is."""
    busy: bool = False
    """Whether a thread is adding a push."""
    faults: dict[int, FrameError] = field(default_factory=dict)
    """Workers whose push could not be decoded."""

    def next_worker(self) -> int | None:
        """Return the worker whose push is to be added next, if it is complete."""
        if self.total.in_order:
            return self.added if self.added in self.waiting else None
        return next(iter(self.waiting), None)
