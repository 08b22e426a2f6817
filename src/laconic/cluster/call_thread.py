"""A thread for a worker's calls, so that a call which never ends does not hold up the worker.

Every call has a deadline, but gRPC has been seen to keep a call for ever, unsent and past its deadline, on a busy
machine after its server was restarted.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["CallThread", "StuckCallError"]

T = TypeVar("T")


class StuckCallError(Exception):
    """A call has not ended long after its deadline."""


class _Pending(Generic[T]):
    def __init__(self, call: Callable[[], T]) -> None:
        self.call = call
        self.ended = threading.Event()
        self.result: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self.call()
        except BaseException as error:
            self.error = error
        self.ended.set()


class CallThread:
    """Runs one call after the other. The thread is a daemon: a stuck call does not keep a process from ending."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Pending[object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="laconic-client", daemon=True).start()

    def _run(self) -> None:
        while (pending := self._calls.get()) is not None:
            pending.run()
            del pending  # its frames and its reply are the caller's

    def call(self, call: Callable[[], T], timeout: float) -> T:
        """Run a call; raise ``StuckCallError`` if it has not ended in time. Then use another thread."""
        pending = _Pending(call)
        self._calls.put(pending)  # type: ignore[arg-type]
        if not pending.ended.wait(timeout):
            self.close()
            raise StuckCallError(f"a call has not ended within {timeout:.0f} s")
        if pending.error is not None:
            try:
                raise pending.error
            finally:
                del pending  # of the traceback's cycle
        return pending.result  # type: ignore[return-value]

    def close(self) -> None:
        """End the thread after the call that it runs."""
        self._calls.put(None)
