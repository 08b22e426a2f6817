"""CodecWork: what an asynchronous collective returns, as torch's own collectives do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.collective.executor import ExchangeThread

__all__ = ["CodecWork"]


class CodecWork(dist.Work):
    """The work of one operation. ``wait`` raises the operation's own error and returns True otherwise.

    How long an operation waits for other ranks is decided by the timeout of its process group.
    """

    def __init__(
        self, future: torch.futures.Future[Tensor], tensors: Sequence[Tensor], errors: list[Exception]
    ) -> None:
        super().__init__()
        self._future, self._tensors, self._errors = future, list(tensors), errors

    @classmethod
    def start(cls, thread: ExchangeThread, task: Callable[[], None], tensors: Sequence[Tensor]) -> CodecWork:
        """Submit a task that changes tensors of one device to a thread."""
        errors: list[Exception] = []

        def run() -> Tensor:
            try:
                with torch.no_grad():
                    task()
            except Exception as error:  # of any kind: a future in C++ keeps its text and not its class
                errors.append(error)
                raise
            return tensors[0] if tensors else torch.empty(0)

        return cls(thread.submit_after_stream(run, tensors), tensors, errors)

    @classmethod
    def run(cls, task: Callable[[], None], tensors: Sequence[Tensor]) -> CodecWork:
        """Run a task on this thread; the work is completed, and its ``wait`` raises the task's error."""
        errors: list[Exception] = []
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        try:
            task()
            future.set_result(tensors[0] if tensors else torch.empty(0))
        except Exception as error:  # of any kind, as if it had happened on another thread
            errors.append(error)
            future.set_exception(error)  # type: ignore[arg-type]
        return cls(future, tensors, errors)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        try:
            self._future.wait()
        except Exception:
            if self._errors:
                raise self._errors[0] from None
            raise
        return True

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and not self._errors

    def exception(self) -> Exception | None:
        return self._errors[0] if self._errors else None

    def result(self) -> list[Tensor]:
        self.wait()
        return self._tensors

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future of the operation's results, the tensors that it changed."""
        tensors = self._tensors

        def results(done: torch.futures.Future[Tensor]) -> list[Tensor]:
            done.value()  # raises the operation's error
            return tensors

        return self._future.then(results)
