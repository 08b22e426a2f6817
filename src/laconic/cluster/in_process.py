"""A worker's connection within one process: the same core, frames and byte counts, without a network."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from laconic.cluster.connection import Standing
from laconic.cluster.core import Core
from laconic.cluster.protocol import Frame
from laconic.cluster.rejoin import Offer
from laconic.cluster.replies import Reply
from laconic.cluster.round import Contribution

__all__ = ["LocalLink"]


class LocalLink:
    """What ``Client`` is to a server, for a ``Core`` in this process.

    Args:
        core: The server's core.
        worker: This worker's number.
        incarnation: Grows with each start of this worker.
        timeout: Seconds that an exchange may wait for the others.
    """

    def __init__(self, core: Core, worker: int, *, incarnation: int = 0, timeout: float = 60.0) -> None:
        self.core, self.worker, self.incarnation, self.timeout = core, worker, incarnation, timeout

    def hello(self) -> Standing:
        answer = self.core.welcome(self.worker, self.incarnation, self.core.slots.fingerprint)
        return Standing(self.core.job, frozenset(answer["versions"]), answer["over"], answer["weights"])

    def join(self, attempt: int, offer: Offer) -> tuple[int, bool]:
        return self.core.join(self.worker, self.incarnation, attempt, offer, deadline=self._deadline())

    def snapshot(self) -> Reply:
        return self.core.snapshot(self.worker, self.incarnation, deadline=self._deadline())

    def exchange(self, sequence: int, frames: Iterable[tuple[int, Frame]], score: Callable[[], float]) -> Reply:
        came = dict(frames)
        push = Contribution(self.worker, self.incarnation, sequence, [came[slot] for slot in range(len(came))], score())
        return self.core.exchange(push, deadline=self._deadline())

    def agree(self, sequence: int, scales: Sequence[Frame]) -> Sequence[Frame]:
        return self.core.agree(self.worker, self.incarnation, sequence, scales, deadline=self._deadline())

    def deposit(self, version: int, frames: Sequence[Frame]) -> None:
        with self.core.depositing():
            self.core.deposit(self.worker, self.incarnation, version, frames)

    def leave(self) -> None:
        self.core.leave(self.worker, self.incarnation)

    def close(self) -> None:
        pass

    def _deadline(self) -> float:
        return time.monotonic() + self.timeout
