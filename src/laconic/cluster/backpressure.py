"""How much of what workers push may lie in a server's memory at a time."""

from __future__ import annotations

from laconic.cluster.push_receiver import PushReceiver
from laconic.cluster.shared_state import SharedState

__all__ = ["ByteBudget"]


class ByteBudget:
    """Bytes of pushes that wait for their turn.

    Args:
        shared: Where to wait.
        limit: Beyond so many bytes, workers whose turn it is not are held up.
        exact: Whether the job's rounds have turns.
    """

    def __init__(self, shared: SharedState, limit: int, *, exact: bool) -> None:
        self._shared, self._limit, self._exact = shared, limit, exact
        self.used = 0
        self.first: PushReceiver | None = None
        """The push that does not wait for room where there is no turn."""

    def reserve(self, receiver: PushReceiver, nbytes: int, deadline: float) -> None:
        """Wait for room, unless it is this worker that the others wait for."""
        with self._shared.changed:
            receiver.check()
            self._shared.wait(
                lambda: self.used + nbytes <= self._limit or receiver.gone or self._is_next(receiver),
                deadline,
                receiver.alive,
                lambda: f"{self.used} bytes of other pushes",
            )
            receiver.check()
            self.used += nbytes

    def let_go(self, receiver: PushReceiver) -> None:
        """Nothing more arrives there."""
        if self.first is receiver:
            self.first = None

    def _is_next(self, receiver: PushReceiver) -> bool:
        """Whether it is this push that the others wait for: such a one never waits for room."""
        if self._exact and receiver.of_round.ordered:
            return receiver.worker == receiver.of_round.turn
        self.first = self.first or receiver  # whoever runs out of room first, until it is through
        return self.first is receiver
