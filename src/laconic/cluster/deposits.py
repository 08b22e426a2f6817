"""Weights that workers hold and a server does not: who needs them, and who is asked to send them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Deposits"]


@dataclass
class Deposits:
    """Of a job with returns=sum. Whoever calls has the core's lock.

    Args:
        wanted: How many wait for weights that are new enough.
        coming: How many deposits are on their way in.
        asked: The worker that is to deposit its own.
    """

    wanted: int = 0
    coming: int = 0
    asked: int | None = None

    def ask(self, worker: int) -> bool:
        """Whether it is this worker, which can, that shall deposit: the first one that comes by."""
        if self.wanted and self.asked is None:
            self.asked = worker
        return self.asked == worker

    def give_up(self, worker: int) -> None:
        """It has done so, or it is gone."""
        if self.asked == worker:
            self.asked = None

    def standing(self, *, whole: bool) -> str:
        """What a server tells of its weights."""
        return "here" if whole else "coming" if self.coming else "missing"
