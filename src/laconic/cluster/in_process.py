"""A worker's connection to a ``Core`` in its own process: the same frames and byte counts, without a network."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from laconic.cluster.connection import ServerStatus
from laconic.cluster.core import Core
from laconic.cluster.protocol import Frame
from laconic.cluster.rejoin import Offer
from laconic.cluster.replies import Reply

__all__ = ["InProcessConnection"]


class InProcessConnection:
    """Implements ``Connection`` on a ``Core``.

    Args:
        incarnation: Grows with each start of this worker.
        timeout: Seconds that an exchange may wait for other workers.
    """

    def __init__(self, core: Core, worker: int, *, incarnation: int = 0, timeout: float = 60.0) -> None:
        self.core, self.worker, self.incarnation, self.timeout = core, worker, incarnation, timeout

    def hello(self) -> ServerStatus:
        answer = self.core.welcome(self.worker, self.incarnation, self.core.slots.fingerprint)
        return ServerStatus(self.core.job, frozenset(answer["versions"]), answer["over"], answer["weights"])

    def join(self, attempt: int, offer: Offer) -> tuple[int, bool]:
        return self.core.join(self.worker, self.incarnation, attempt, offer, deadline=self._deadline())

    def snapshot(self) -> Reply:
        return self.core.snapshot(self.worker, self.incarnation, deadline=self._deadline())

    def exchange(self, sequence: int, frames: Iterable[tuple[int, Frame]], score: Callable[[], float]) -> Reply:
        by_slot = dict(frames)
        in_order = [by_slot[slot] for slot in range(len(by_slot))]
        return self.core.exchange(self.worker, self.incarnation, sequence, in_order, score(), deadline=self._deadline())

    def agree_scales(self, sequence: int, scales: Sequence[Frame]) -> Sequence[Frame]:
        return self.core.agree_scales(self.worker, self.incarnation, sequence, scales, deadline=self._deadline())

    def upload_weights(self, version: int, frames: Sequence[Frame]) -> None:
        with self.core.receiving_upload(self.worker):
            self.core.upload_weights(self.worker, self.incarnation, version, frames)

    def compare_weights(self, version: int, digests: Sequence[Frame]) -> None:
        self.core.compare_weights(self.worker, self.incarnation, version, digests)

    def leave(self) -> None:
        self.core.leave(self.worker, self.incarnation)

    def close(self) -> None:
        pass

    def _deadline(self) -> float:
        return time.monotonic() + self.timeout
