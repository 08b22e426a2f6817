"""State that all RPC handlers share: lock, event log, failure flag, and the byte budget of pushes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from laconic.cluster.replies import RefusedError
from laconic.errors import NonFiniteError

__all__ = ["ByteBudget", "EventLog", "FrameMemory", "Reservation", "SharedState"]

EventLog = Callable[[dict[str, Any]], None]

EXEMPTION_TIMEOUT = 10.0
"""Seconds after which a push that may exceed the byte budget and receives nothing no longer holds up others."""
EXEMPTION_LIMIT = 60.0
"""Seconds after which such a push lets another one go first, however often it receives something."""
TURN_SECONDS = 2.0
"""Seconds for which the others can take over such an exemption; waiters look at least twice a second."""


class SharedState:
    """Lock, event log and failure flag of one job's server.

    Args:
        event_log: Receives every event as a dict; None drops them.
    """

    def __init__(self, event_log: EventLog | None = None) -> None:
        self.changed = threading.Condition(threading.RLock())
        """The lock of the server's state; notified when the state changes."""
        self.failure: str | None = None
        """Why the job cannot continue."""
        self._event_log = event_log or (lambda event: None)
        self._listeners: list[Callable[[int], None]] = []

    def event(self, kind: str, **values: Any) -> None:
        self._event_log({"event": kind, **values})

    def on_update(self, listener: Callable[[int], None]) -> None:
        self._listeners.append(listener)

    def updated(self, version: int) -> None:
        """Notify the listeners that the weights of a version are there."""
        for listener in self._listeners:
            listener(version)

    def wake(self) -> None:
        """Wake all waiters."""
        with self.changed:
            self.changed.notify_all()

    def fail(self, failure: str) -> None:
        """End the job: all waiters and all later calls that wait are refused with this message."""
        with self.changed:
            self.failure = failure
            self.changed.notify_all()

    def require_running(self) -> None:
        """Raise if the job cannot continue: its weights may be those of a failed update."""
        if self.failure is not None:
            raise RefusedError("diverged", self.failure)

    def wait(
        self, ready: Callable[[], bool], deadline: float, alive: Callable[[], bool], description: Callable[[], str]
    ) -> None:
        """Wait for a condition, holding the lock (which is released meanwhile).

        Args:
            deadline: On ``time.monotonic``'s clock.
            alive: Whether the caller still waits for the answer.
            description: Called after a timeout: what did not happen.
        """
        timeout = max(0.0, deadline - time.monotonic())
        if not self.changed.wait_for(lambda: ready() or not alive() or self.failure is not None, timeout):
            raise RefusedError("waiting", f"waited for {description()}")
        self.require_running()
        if not ready():
            raise RefusedError("gone", "the worker has disconnected")

    @contextmanager
    def overflow_ends_job(self, version: int) -> Iterator[None]:
        """End the job if weights overflow: all workers receive the reason, and the weights are not saved."""
        try:
            yield
        except NonFiniteError as error:
            with self.changed:
                self.event("diverged", version=version)
                self.fail(f"the weights overflowed at exchange {version}: use a smaller --lr ({error})")
            raise RefusedError("diverged", self.failure or "") from None


class ByteBudget:
    """Limits the bytes of pushes that wait in memory.

    A push that exceeds the limit blocks its handler, which stops the worker by gRPC's flow control. The push that the
    others wait for never blocks: in an ordered round it is the next worker's; otherwise the first one that found no
    space, until it is complete, has been idle for ``EXEMPTION_TIMEOUT``, or has had ``EXEMPTION_LIMIT`` in all.

    Args:
        shared: The lock to wait on.
    """

    def __init__(self, shared: SharedState, limit: int) -> None:
        self._shared, self._limit = shared, limit
        self.used = 0
        self._exempt: Reservation | None = None
        self._exempt_since = self._exempt_at = 0.0
        """When the exempt push became exempt, and when it last received something."""

    def acquire(
        self, reservation: Reservation, nbytes: int, *, deadline: float, alive: Callable[[], bool],
        cancelled: Callable[[], bool], has_turn: Callable[[], bool | None],
    ) -> None:  # fmt: skip
        """Wait until the bytes fit and add them to a reservation. The caller holds the lock.

        Args:
            reservation: The push that needs them.
            deadline: On ``time.monotonic``'s clock.
            alive: Whether the worker still waits.
            cancelled: Whether the push has become pointless; ends the wait without a reservation.
            has_turn: Whether the others wait for this push; None where pushes have no order.
        """
        self._shared.wait(
            lambda: self.used + nbytes <= self._limit or cancelled() or self._is_exempt(reservation, has_turn()),
            deadline,
            alive,
            lambda: f"{self.used} bytes of other pushes",
        )
        if not cancelled():
            if self._exempt is reservation:
                self._exempt_at = time.monotonic()
            self.used += nbytes
            reservation.nbytes += nbytes

    def _is_exempt(self, reservation: Reservation, has_turn: bool | None) -> bool:
        if has_turn is not None:
            return has_turn
        now, limit = time.monotonic(), self._exempt_since + EXEMPTION_LIMIT
        if self._exempt is reservation and now <= limit + TURN_SECONDS:
            return now <= limit
        if self._exempt is None or now > min(self._exempt_at + EXEMPTION_TIMEOUT, limit):
            self._exempt, self._exempt_since, self._exempt_at = reservation, now, now
        return self._exempt is reservation

    def end_exemption(self, reservation: Reservation) -> None:
        """The push is complete: another one may exceed the limit. The caller holds the lock."""
        if self._exempt is reservation:
            self._exempt = None

    def release(self, reservation: Reservation) -> None:
        """Give back all bytes of a reservation; a second call does nothing."""
        with self._shared.changed:
            self.end_exemption(reservation)
            self.used -= reservation.nbytes
            reservation.nbytes = 0
            self._shared.changed.notify_all()


@dataclass(eq=False)
class Reservation:
    """The bytes of a budget that one push holds."""

    nbytes: int = 0


class FrameMemory:
    """The memory of a call's frames that are no push: scales and weight uploads. Close it with ``with``.

    Args:
        alive: Whether the caller still waits.
    """

    def __init__(self, shared: SharedState, budget: ByteBudget, alive: Callable[[], bool]) -> None:
        self._shared, self._budget, self._alive = shared, budget, alive
        self._reservation = Reservation()

    def reserve(self, nbytes: int, *, deadline: float) -> None:
        """Reserve memory for a frame that begins to arrive; wait while the byte budget is exhausted."""
        with self._shared.changed:
            self._budget.acquire(
                self._reservation, nbytes, deadline=deadline, alive=self._alive, cancelled=lambda: False,
                has_turn=lambda: None,
            )  # fmt: skip

    def __enter__(self) -> FrameMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.release(self._reservation)
