"""What all modes of a server have in common: they take frames, apply pushes and make replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laconic.aggregate import OpenedFrame
from laconic.cluster.homomorphic.server import Contribution
from laconic.cluster.membership import Membership, WorkerSession
from laconic.cluster.protocol import Frame
from laconic.cluster.push_receiver import PushReceiver
from laconic.cluster.replies import Reply
from laconic.cluster.round import Push, Round
from laconic.cluster.shared_state import ByteBudget, SharedState
from laconic.cluster.weights import Weights

__all__ = ["ServerMode"]


class ServerMode:
    """A job's mode on the server. Methods take the lock themselves unless they say otherwise.

    Args:
        budget: Limits the bytes of pushes in memory.
    """

    def __init__(self, shared: SharedState, weights: Weights, members: Membership, budget: ByteBudget) -> None:
        self._shared, self._weights, self._members, self._budget = shared, weights, members, budget
        self._job = weights.job

    @property
    def num_slots(self) -> int:
        return len(self._weights.slots)

    def require_running(self) -> None:
        """Raise if the job has failed: no push may change its weights any more."""
        self._shared.require_running()

    @property
    def current_round(self) -> Round | None:
        return None

    def is_superseded(self, receiver: PushReceiver) -> bool:
        """Whether the round of a push was given up."""
        return False

    def has_turn(self, receiver: PushReceiver) -> bool | None:
        """Whether the others wait for this push; None where pushes have no order."""
        return None

    def add_frame(self, receiver: PushReceiver, slot: int, frame: Frame) -> OpenedFrame | Contribution | None:
        """Take one frame of a push: return it checked as far as possible, or None if it is already added."""
        name = self._weights.slots.names[slot]
        return OpenedFrame.of(frame, self._weights.parameters[name], name)

    def reserve(self, receiver: PushReceiver, nbytes: int, deadline: float) -> None:
        """Reserve memory for a frame that begins to arrive; wait while the byte budget is exhausted."""
        with self._shared.changed:
            receiver.check()
            self._budget.acquire(
                receiver.reservation, nbytes, deadline=deadline, alive=receiver.alive,
                cancelled=lambda: receiver.cancelled, has_turn=lambda: self.has_turn(receiver),
            )  # fmt: skip
            receiver.check()

    def apply(self, receiver: PushReceiver, push: Push, deadline: float) -> Reply:
        """Apply a complete push and wait for its reply."""
        raise NotImplementedError

    def reply_again(self, receiver: PushReceiver, deadline: float) -> Reply:
        """Return the reply to a push that was applied before."""
        raise NotImplementedError

    def end_push(self, receiver: PushReceiver) -> None:
        """Release what a push holds."""
        with self._shared.changed:
            receiver.session.end_push(receiver)
            self._budget.release(receiver.reservation)

    def snapshot(self, session: WorkerSession, deadline: float, alive: Callable[[], bool]) -> Reply:
        """Return the weights from which a worker continues. The caller holds the lock."""
        raise NotImplementedError

    def restarted(self, worker: int) -> None:
        """A worker has a new incarnation. The caller holds the lock."""

    def left(self, worker: int) -> None:
        """A worker has left for good. The caller holds the lock."""

    def disconnected(self, worker: int) -> None:
        """A worker's call was interrupted. The caller holds the lock."""

    def regather(self, why: str) -> None:
        """Give up the round and make all workers join again. The caller holds the lock."""

    def settle(self) -> None:
        """Wait until no update is in progress. Not from ``on_update`` listeners, which are part of one."""

    def queue_state(self) -> dict[str, Any]:
        """Return the state of the work queue, for a checkpoint."""
        return {"next": 0, "open": []}

    def load_queue(self, state: dict[str, Any]) -> None:
        """Restore the state of the work queue."""

    @property
    def weights_status(self) -> str:
        """Whether the server has the weights of its version: ``here``, ``coming`` or ``missing``."""
        return "here"
