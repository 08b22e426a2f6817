"""What a worker needs of a connection, whether to one server, to several, or to a core in its own process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from laconic.cluster.job import Job
from laconic.cluster.protocol import Frame
from laconic.cluster.rejoin import Offer
from laconic.cluster.replies import Reply

__all__ = ["Link", "Standing"]


@dataclass(frozen=True)
class Standing:
    """What a server says of itself.

    Args:
        job: What it serves.
        versions: Those it can go on from.
        over: Nothing is left to do.
        weights: Whether it holds those of its version: ``here``, ``coming`` or ``missing`` (only with returns=sum).
    """

    job: Job
    versions: frozenset[int]
    over: bool
    weights: str = "here"


class Link(Protocol):
    """``laconic.cluster.client.Client`` is one."""

    def hello(self) -> Standing: ...
    def join(self, attempt: int, offer: Offer) -> tuple[int, bool]:
        """Where to go on, and whether with an empty memory; see ``Core.join``."""
        ...

    def snapshot(self) -> Reply: ...
    def exchange(self, sequence: int, frames: Iterable[tuple[int, Frame]], score: Callable[[], float]) -> Reply:
        """Push a frame per slot, as they become ready, and wait for what comes back.

        Args:
            sequence: The number of the exchange.
            frames: Slots and their frames; iterated again when they must be sent again.
            score: Asked when all frames are out.
        """
        ...

    def agree(self, sequence: int, scales: Sequence[Frame]) -> Sequence[Frame]:
        """With returns=sum, before a push: a frame of scales per slot, and what all workers have agreed on."""
        ...

    def deposit(self, version: int, frames: Sequence[Frame]) -> None:
        """The same: the weights of a version, and the optimizer's memory: a frame per slot, or two."""
        ...

    def leave(self) -> None: ...
    def close(self) -> None: ...
