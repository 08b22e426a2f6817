"""Where the handlers of all workers meet: one lock, one history, one reason to give up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from laconic.cluster.replies import RefusedError
from laconic.errors import NonFiniteError

__all__ = ["History", "SharedState"]

History = Callable[[dict[str, Any]], None]


class SharedState:
    """Of one job's server.

    Args:
        history: Told every event as a dict; None keeps none.
    """

    def __init__(self, history: History | None = None) -> None:
        self.changed = threading.Condition(threading.RLock())
        """Guards all that is agreed."""
        self.failure: str | None = None
        """Why the job cannot go on."""
        self._tell = history or (lambda event: None)
        self._listeners: list[Callable[[int], None]] = []

    def event(self, kind: str, **values: Any) -> None:
        self._tell({"event": kind, **values})

    def on_update(self, call: Callable[[int], None]) -> None:
        self._listeners.append(call)

    def updated(self, version: int) -> None:
        """The weights of a version are there."""
        for call in self._listeners:
            call(version)

    def wake(self) -> None:
        """Have everybody who waits look again."""
        with self.changed:
            self.changed.notify_all()

    def wait(
        self, ready: Callable[[], bool], deadline: float, alive: Callable[[], bool], what: Callable[[], str]
    ) -> None:
        """With the lock, which others have meanwhile.

        Args:
            ready: What for.
            deadline: On ``time.monotonic``'s clock.
            alive: Whether anybody still waits for the answer.
            what: Says what was waited for in vain.
        """
        left = max(0.0, deadline - time.monotonic())
        if not self.changed.wait_for(lambda: ready() or not alive() or self.failure is not None, left):
            raise RefusedError("waiting", f"waited for {what()}")
        if self.failure is not None:
            raise RefusedError("diverged", self.failure)
        if not ready():
            raise RefusedError("gone", "the worker has hung up")

    @contextmanager
    def watching(self, version: int) -> Iterator[None]:
        """Weights that have overflowed are the end of a job: everybody is told, and they are not kept."""
        try:
            yield
        except NonFiniteError as error:
            with self.changed:
                self.failure = f"the weights overflowed at exchange {version}: take a smaller --lr ({error})"
                self.event("diverged", version=version)
                self.changed.notify_all()
            raise RefusedError("diverged", self.failure) from None
