"""With returns=sum workers hold the weights: who needs them, who is asked to send them, and what is then kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from laconic.cluster.protocol import Frame
from laconic.cluster.replies import RefusedError, Reply
from laconic.cluster.shared_state import SharedState
from laconic.cluster.weights import Weights
from laconic.errors import FrameError
from laconic.frames import decode, encode

__all__ = ["WeightUploads"]


class WeightUploads:
    """What workers deposit of their weights, of any job: where the server holds them itself, nobody ever asks.

    Args:
        shared: Whose lock callers have, unless it says otherwise.
        weights: Where a deposit goes.
    """

    def __init__(self, shared: SharedState, weights: Weights) -> None:
        self._shared, self._weights, self._job = shared, weights, weights.job
        self._wanted = 0
        """How many wait for weights that are new enough."""
        self._coming = 0
        """How many deposits are on their way in."""
        self._asked: int | None = None
        """The worker that is to deposit its own."""

    @property
    def whole(self) -> bool:
        """Whether the server's parameters are those of the current version. Otherwise workers hold these."""
        return self._job.returns != "sum" or self._weights.deposited == self._weights.version

    @property
    def standing(self) -> str:
        """What a server tells of its weights."""
        return "here" if self.whole else "coming" if self._coming else "missing"

    # ------------------------------------------------------------------------------------------------- who is asked

    def asks(self, worker: int) -> bool:
        """Whether it is this worker, which can, that shall deposit: the first one that comes by."""
        if self._wanted and self._asked is None:
            self._asked = worker
        return self._asked == worker

    def give_up(self, worker: int) -> None:
        """It has done so, or it is gone."""
        if self._asked == worker:
            self._asked = None

    # ------------------------------------------------------------------------------------------------------- taking

    @contextmanager
    def on_its_way(self) -> Iterator[None]:
        """While a deposit comes in. Takes the lock itself."""
        with self._shared.changed:
            self._coming += 1
        try:
            yield
        finally:
            with self._shared.changed:
                self._coming -= 1

    def read(self, worker: int, frames: Sequence[Frame]) -> list[Tensor]:
        """What a worker holds, as in ``Weights.deposits``: one, two or three frames per slot. Needs no lock."""
        like = next((one for one in self._weights.deposits if len(one) == len(frames)), None)
        if self._job.returns != "sum" or like is None:
            raise FrameError(f"{len(frames)} frames are no deposit of {len(self._weights.slots)} slots")
        tensors = [decode(frame, like=x) for frame, x in zip(frames, like, strict=True)]
        if not all(bool(torch.isfinite(x).all()) for x in tensors):
            raise FrameError(f"worker {worker} deposits weights that are not finite")
        return tensors

    def take(self, worker: int, version: int, tensors: Sequence[Tensor]) -> None:
        """What a worker holds of a version, unless it is too old, or here already."""
        self.give_up(worker)
        if self._needed <= version <= self._weights.version and version != self._weights.deposited:
            self._weights.deposit(version, tensors)
            self._shared.event("deposit", worker=worker, version=version)
            self._shared.updated(version)
        self._shared.changed.notify_all()

    @property
    def _needed(self) -> int:
        """The oldest version that is of use: with backup workers the last answer is there to catch up with."""
        return self._weights.version if self._job.exact else self._weights.version - 1

    # ------------------------------------------------------------------------------------------------------- giving

    def fetch(self, deadline: float, alive: Callable[[], bool]) -> Reply:
        """What a worker goes on with that has lost its weights, or has missed too many sums."""
        if self._job.exact and self._weights.deposited < self._needed:
            raise RefusedError(
                "memory", f"no server and no memory holds the weights of exchange {self._weights.version}"
            )
        self._wanted += 1
        try:
            self._shared.changed.notify_all()
            self._shared.wait(
                lambda: self._weights.deposited >= self._needed,
                deadline,
                alive,
                lambda: "a worker to deposit its weights",
            )
        finally:
            self._wanted -= 1
        frames = [*(encode(x, "none") for x in self._weights.snapshot()), *self._weights.scale_frames()]
        return Reply(self._weights.deposited, tuple(frames))
