"""The server's response to a push: a reply whose frames may still be in the making, or the reason for a refusal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import overload

from laconic.cluster.protocol import CutFrame, Frame
from laconic.errors import LaconicError

__all__ = ["RefusedError", "Reply", "ReplyStream", "regather"]


class RefusedError(LaconicError):
    """A request that the server refuses; ``reason`` is for programs, the message for people.

    ``regather``: all workers must join again. ``stale`` and ``ahead``: this worker must fetch the weights and continue
    at ``resume_at``. ``waiting``: it may ask again. ``deposit``: it must upload its weights first.
    """

    def __init__(self, reason: str, message: str, *, resume_at: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.resume_at = resume_at


def regather() -> RefusedError:
    return RefusedError("regather", "a worker disconnected; all workers must rejoin")


@dataclass(frozen=True)
class Reply:
    """The number of the next exchange, one frame per slot, and the next ticket.

    ``ticket`` numbers a piece of work where free workers take the next one; it is None where each worker has its own.
    """

    sequence: int
    frames: Sequence[Frame]
    ticket: int | None = None

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.frames))


class ReplyStream(Sequence[Frame]):
    """A sequence of known length whose frames become available one after the other; readers block until they do.

    A frame is kept as the messages that carry it. Frames arrive in order, or each with its index. The last one to
    arrive is released only by ``end``, so that no worker continues before the update is complete.

    >>> frames = ReplyStream(2)
    >>> frames.put(b"a"); frames.put(b"b"); frames.end()
    >>> [bytes(frame) for frame in frames], len(frames), len(frames[:1])
    ([b'a', b'b'], 2, 1)
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._frames: dict[int, CutFrame] = {}
        """By index, in order of arrival."""
        self._ended = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def put(self, *parts: Frame, index: int | None = None) -> None:
        """Take a copy of a frame, which may be given in parts."""
        index = len(self._frames) if index is None else index
        cut = CutFrame.of(index, *parts)
        with self._changed:
            self._frames[index] = cut
            self._changed.notify_all()

    def wake(self) -> None:
        """Wake all waiters."""
        with self._changed:
            self._changed.notify_all()

    def by_arrival(self, stop: Callable[[], bool] = lambda: False) -> Iterator[CutFrame]:
        """Yield frames in order of arrival; end early when ``stop()`` is true."""
        for arrival in range(self._count):
            with self._changed:
                self._changed.wait_for(lambda: self._released(arrival) or stop())  # noqa: B023 - used at once
                if self._failure is not None:
                    raise self._failure
                if not self._released(arrival):
                    return
                item = next(islice(self._frames.values(), arrival, None))
            yield item

    def _released(self, arrival: int) -> bool:
        return self._ended or (arrival < len(self._frames) and arrival < self._count - 1)

    def end(self, failure: BaseException | None = None) -> None:
        """Release the last frame, or raise ``failure`` in all readers."""
        with self._changed:
            self._failure, self._ended = failure, True
            self._changed.notify_all()

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Frame: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Frame, ...]: ...
    def __getitem__(self, index: int | slice) -> Frame | tuple[Frame, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        position = range(self._count)[index]  # negative and excessive indices as in any sequence
        with self._changed:
            self._changed.wait_for(lambda: self._ended or (position in self._frames and not self._is_last(position)))
            if self._failure is not None:
                raise self._failure
            cut = self._frames[position]
        return cut.joined()

    def _is_last(self, index: int) -> bool:
        return len(self._frames) == self._count and next(reversed(self._frames)) == index

    def __iter__(self) -> Iterator[Frame]:
        return (self[index] for index in range(self._count))
