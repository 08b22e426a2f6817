"""Frames of an answer that is still being made: sent as they become ready."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import overload

from laconic.cluster.protocol import Frame

__all__ = ["ReplyStream"]


class ReplyStream(Sequence[Frame]):
    """A sequence of known length whose items come one after the other; who asks for one that is not there waits.

    They come in order, or each says where it belongs. The last to come is given out only when all is done that must be
    done before anybody may go on.

    >>> frames = ReplyStream(2)
    >>> frames.put(b"a"); frames.put(b"b"); frames.end()
    >>> list(frames), len(frames), frames[:1]
    ([b'a', b'b'], 2, (b'a',))
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._frames: dict[int, Frame] = {}
        """In the order in which they came."""
        self._ended = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def put(self, frame: Frame, at: int | None = None) -> None:
        with self._changed:
            self._frames[len(self._frames) if at is None else at] = frame
            self._changed.notify_all()

    def wake(self) -> None:
        """Have everybody who waits look again."""
        with self._changed:
            self._changed.notify_all()

    def as_they_come(self, stop: Callable[[], bool] = lambda: False) -> Iterator[tuple[int, Frame]]:
        """Places and frames in the order in which they become ready; ends early where ``stop`` says so."""
        for number in range(self._count):
            with self._changed:
                self._changed.wait_for(lambda: self._is_out(number) or stop())  # noqa: B023 - waits right here
                if self._failure is not None:
                    raise self._failure
                if not self._is_out(number):
                    return
                one = next(islice(self._frames.items(), number, None))
            yield one

    def _is_out(self, number: int) -> bool:
        """Whether the frame that came as this one may be had."""
        return self._ended or (number < len(self._frames) and number < self._count - 1)

    def end(self, failure: BaseException | None = None) -> None:
        """All are there, or there will be no more and whoever waits is told why."""
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
        at = range(self._count)[index]  # as of any sequence: negative ones, and those beyond
        with self._changed:
            self._changed.wait_for(lambda: self._ended or (at in self._frames and self._is_not_last(at)))
            if self._failure is not None:
                raise self._failure
            return self._frames[at]

    def _is_not_last(self, at: int) -> bool:
        return len(self._frames) < self._count or next(reversed(self._frames)) != at

    def __iter__(self) -> Iterator[Frame]:
        return (self[at] for at in range(self._count))
