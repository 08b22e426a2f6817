"""How much of what workers push may lie in a server's memory at a time."""

from __future__ import annotations

from laconic.cluster.hall import Hall
from laconic.cluster.inbox import Inbox

__all__ = ["Room"]


class Room:
    """Bytes of pushes that wait for their turn.

    Args:
        hall: Where to wait.
        limit: Beyond so many bytes, workers whose turn it is not are held up.
        exact: Whether the job's rounds have turns.
    """

    def __init__(self, hall: Hall, limit: int, *, exact: bool) -> None:
        self._hall, self._limit, self._exact = hall, limit, exact
        self.used = 0
        self.first: Inbox | None = None
        """The push that does not wait for room where there is no turn."""

    def reserve(self, inbox: Inbox, nbytes: int, deadline: float) -> None:
        """Wait for room, unless it is this worker that the others wait for."""
        with self._hall.changed:
            inbox.check()
            self._hall.wait(
                lambda: self.used + nbytes <= self._limit or inbox.gone or self._is_next(inbox),
                deadline,
                inbox.alive,
                lambda: f"{self.used} bytes of other pushes",
            )
            inbox.check()
            self.used += nbytes

    def let_go(self, inbox: Inbox) -> None:
        """Nothing more arrives there."""
        if self.first is inbox:
            self.first = None

    def _is_next(self, inbox: Inbox) -> bool:
        """Whether it is this push that the others wait for: such a one never waits for room."""
        if self._exact and inbox.of_round.ordered:
            return inbox.worker == inbox.of_round.turn
        self.first = self.first or inbox  # whoever runs out of room first, until it is through
        return self.first is inbox
