"""Frames of an answer that is still being made: sent as they become ready."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import overload

from laconic.cluster.messages import Frame

__all__ = ["Arriving"]


class Arriving(Sequence[Frame]):
    """A sequence of known length whose items come one after the other; who asks for one that is not there waits.

    The last is given out only when all is done that must be done before anybody may go on.

    >>> frames = Arriving(2)
    >>> frames.put(b"a"); frames.put(b"b"); frames.end()
    >>> list(frames), len(frames), frames[:1]
    ([b'a', b'b'], 2, (b'a',))
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._frames: list[Frame] = []
        self._ended = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def put(self, frame: Frame) -> None:
        with self._changed:
            self._frames.append(frame)
            self._changed.notify_all()

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
        last = at == self._count - 1
        with self._changed:
            self._changed.wait_for(lambda: self._ended or (at < len(self._frames) and not last))
            if self._failure is not None:
                raise self._failure
            return self._frames[at]

    def __iter__(self) -> Iterator[Frame]:
        return (self[at] for at in range(self._count))
