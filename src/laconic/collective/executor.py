"""ExchangeThread: a thread that runs tasks in order and returns futures."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from laconic.collective.side_stream import SideStream
from laconic.errors import NonFiniteError

__all__ = ["UNDER_WAY", "ExchangeThread", "Steps"]

Steps = Generator[None, None, Tensor]
"""A task that yields before it waits, where the next one may begin."""

_Task = tuple["Callable[[], Tensor] | Steps", "torch.futures.Future[object]"]
_Tasks = queue.SimpleQueue["_Task | None"]

UNDER_WAY = 2
"""How many tasks in steps may have begun and not ended."""

EXIT_WAIT_S = 2.0
"""How long the end of the process waits for a thread, which may itself wait for a rank that is gone."""


class _Failure:
    """The first error of a thread after which ranks may be out of step. All later tasks fail with it."""

    def __init__(self) -> None:
        self.error: Exception | None = None


class ExchangeThread:
    """One thread, started with its first task.

    Encoding and waiting happen here and not in a future's callback: callbacks run on the few threads that move bytes,
    and a callback that waits for bytes blocks them (a hook with two rounds can hang with several buckets). They do not
    happen in the hook either, which would block backward.
    """

    def __init__(self, name: str) -> None:
        self._failure = _Failure()
        self._name = name
        self._tasks: _Tasks = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._sides: dict[torch.device, SideStream] = {}
        # The thread ends with this object and before the interpreter: torch's thread-local state cannot be released
        # later, and the process would abort.
        weakref.finalize(self, _end, self._tasks, self._threads, EXIT_WAIT_S)

    def submit(
        self, task: Callable[[], Tensor], devices: list[torch.device] | None = None
    ) -> torch.futures.Future[Tensor]:
        """Return a future of the task's tensor. Waiting for it raises the task's error."""
        return self._put(task, devices)

    def submit_steps(self, steps: Steps) -> torch.futures.Future[Tensor]:
        """Submit a task in steps: while one waits, the next one begins, if it is in steps, too. They end in order."""
        return self._put(steps)

    def _put(
        self, task: Callable[[], Tensor] | Steps, devices: list[torch.device] | None = None
    ) -> torch.futures.Future[Tensor]:
        if not self._threads:
            thread = threading.Thread(target=_run, args=(self._tasks, self._failure), name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()
        done: torch.futures.Future[object] = torch.futures.Future(devices=[*devices] if devices else [])
        self._tasks.put((task, done))
        # Future.set_exception works in Python only: DDP, which waits in C++, would take the exception for its tensor.
        return done.then(_result)

    @staticmethod
    def run_steps(steps: Steps) -> Tensor:
        """Take all steps of a task, for which no other one begins."""
        while (result := _next(steps)) is _MORE:
            pass
        assert isinstance(result, Tensor)
        return result

    def submit_after_stream(
        self, task: Callable[[], Tensor], tensors: Sequence[Tensor]
    ) -> torch.futures.Future[Tensor]:
        """Submit a task that uses tensors of one device; on a GPU it begins after what their stream does by now."""
        device = tensors[0].device
        if device.type != "cuda":
            return self.submit(task)
        stream = self.side(device).stream
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(device))

        def on_stream() -> Tensor:
            with torch.cuda.device(device), torch.cuda.stream(stream):
                stream.wait_event(ready)
                for x in tensors:
                    x.record_stream(stream)
                result = task()
                stream.synchronize()  # the future is set on the host, which the waiting stream does not wait for
                return result

        return self.submit(on_stream, [device])

    def launch_on_stream(self, task: Callable[[], Tensor | None], x: Tensor) -> torch.futures.Future[Tensor]:
        """Call a task that only launches work on a GPU, here and now, on a stream of its own.

        Args:
            task: Returns None if its result is x.
            x: What the task changes.

        Returns:
            A future that holds an event: the stream that waits for it waits for the work, and the host does not.
        """
        side = self.side(x.device)

        def launch() -> torch.futures.Future[Tensor]:
            x.record_stream(side.stream)
            result = task()
            done: torch.futures.Future[Tensor] = torch.futures.Future(devices=[x.device])
            done.set_result(x if result is None else result)
            return done

        return side.launch(launch)

    def side(self, device: torch.device) -> SideStream:
        """Return the stream of a device on which this object's exchanges run, in order."""
        side = self._sides.get(device)
        if side is None:
            side = self._sides[device] = SideStream(device)
        return side

    @property
    def failed(self) -> bool:
        """Whether a task failed in such a way that ranks may be out of step."""
        return self._failure.error is not None

    def close(self) -> None:
        """End the thread after the tasks that were submitted."""
        _end(self._tasks, self._threads, None)


def _end(tasks: _Tasks, threads: list[threading.Thread], timeout_s: float | None) -> None:
    while threads:
        thread = threads.pop()
        tasks.put(None)
        if thread is not threading.current_thread():  # a task may drop the last reference to its ExchangeThread
            thread.join(timeout_s)


def _result(done: torch.futures.Future[object]) -> Tensor:
    result = done.value()
    if isinstance(result, Exception):
        raise result
    assert isinstance(result, Tensor)
    return result


_MORE = object()
"""What a step returns that is not a task's last one."""


def _next(steps: Steps) -> object:
    """Take a step; return the task's result if it was the last one."""
    try:
        next(steps)
    except StopIteration as end:
        return end.value
    return _MORE


def _run(tasks: _Tasks, failure: _Failure) -> None:
    entry = tasks.get()
    while entry is not None:
        task, done = entry
        if isinstance(task, Generator):
            entry = _run_steps(entry, tasks, failure)
            continue
        result = _outcome(task, failure)
        del entry, task  # before the result: the waiting thread may expect that the task's references are gone
        done.set_result(result)
        del done, result
        entry = tasks.get()


def _run_steps(first: _Task, tasks: _Tasks, failure: _Failure) -> _Task | None:
    """Run tasks in steps, the oldest first, until one of another kind comes; return that one."""
    begun = deque([first])
    del first
    other: list[_Task | None] = []
    while begun:
        _take_step(begun, 0, failure)
        while not other and len(begun) < UNDER_WAY and not tasks.empty():
            entry = tasks.get()
            if entry is None or not isinstance(entry[0], Generator):
                other.append(entry)
            else:
                begun.append(entry)
                del entry
                _take_step(begun, -1, failure)
    return other[0] if other else tasks.get()


def _take_step(begun: deque[_Task], which: int, failure: _Failure) -> None:
    """Let a task take its next step, and remove it if that was its last one."""
    result = _outcome(begun[which][0], failure)
    if result is not _MORE:
        done = begun[which][1]
        del begun[which]
        done.set_result(result)


def _outcome(task: Callable[[], Tensor] | Steps, failure: _Failure) -> object:
    """Return the result of a task or of its next step, or the error that it raised."""
    try:
        if failure.error is not None:
            if isinstance(task, Generator):
                task.close()
            raise failure.error
        return _next(task) if isinstance(task, Generator) else task()
    except Exception as error:  # of any kind: the waiting thread must get it, or would wait for ever
        if not isinstance(error, NonFiniteError):  # which all ranks raise together, after a complete round
            failure.error = failure.error or error
        return error
