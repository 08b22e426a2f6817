"""ExchangeThread: a thread that does what it is given, one after the other, and answers by futures."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["ExchangeThread", "Failure"]

_Tasks = queue.SimpleQueue["tuple[Callable[[], Tensor], torch.futures.Future[object]] | None"]

LAST_WAIT_S = 2.0
"""At the end of the process, for a thread that may wait for a rank that is gone."""


class Failure:
    """Where the first error of a worker stays: what comes later fails at once, with the same words."""

    def __init__(self) -> None:
        self.error: Exception | None = None


class ExchangeThread:
    """One thread, started with its first task.

    Encoding and waiting happen here and not in a future's callback: callbacks run on the few threads that move bytes,
    and one that waits for bytes keeps them from moving (which is how a hook with two rounds can hang with several
    buckets). And not in the hook itself, which would keep backward from going on.
    """

    def __init__(self, name: str) -> None:
        self.failure = Failure()
        self._name = name
        self._tasks: _Tasks = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        # The thread ends with its worker, and before the interpreter does: what torch keeps for a thread cannot be
        # taken down after that, and the process would abort.
        weakref.finalize(self, _end, self._tasks, self._threads, LAST_WAIT_S)

    def submit(
        self, task: Callable[[], Tensor], devices: list[torch.device] | None = None
    ) -> torch.futures.Future[Tensor]:
        """A future of the task's tensor. An error in the task is raised where the future is waited for."""
        if not self._threads:
            thread = threading.Thread(target=_run, args=(self._tasks, self.failure), name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()
        done: torch.futures.Future[object] = torch.futures.Future(devices=[*devices] if devices else [])
        self._tasks.put((task, done))
        # Future.set_exception is for Python alone: DDP, which waits in C++, would take the exception for its tensor.
        return done.then(_result)

    def close(self) -> None:
        """End the thread after what it was given."""
        _end(self._tasks, self._threads, None)


def _end(tasks: _Tasks, threads: list[threading.Thread], limit_s: float | None) -> None:
    while threads:
        thread = threads.pop()
        tasks.put(None)
        if thread is not threading.current_thread():  # which may be the one that drops its worker
            thread.join(limit_s)


def _result(done: torch.futures.Future[object]) -> Tensor:
    found = done.value()
    if isinstance(found, Exception):
        raise found
    assert isinstance(found, Tensor)
    return found


def _run(tasks: _Tasks, failure: Failure) -> None:
    while (order := tasks.get()) is not None:
        task, done = order
        try:
            if failure.error is not None:
                raise failure.error
            result: object = task()
        except Exception as error:  # whatever it is: who waits must hear of it, or would wait for ever
            failure.error = failure.error or error
            result = error
        del order, task  # before the answer: who waits for it may let go of what the task holds, and expects it gone
        done.set_result(result)
        del done, result
