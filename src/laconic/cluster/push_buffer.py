"""Frames of one exchange on their way out: sent as they become ready, kept to be sent again."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

from laconic.cluster.protocol import Frame

__all__ = ["PushBuffer"]


class PushBuffer:
    """What is put in comes out of every iterator, from the first frame on; iterators wait for what is not there yet.

    >>> outbox = PushBuffer()
    >>> outbox.put(0, b"abc")
    >>> outbox.end(score=0.5)
    >>> list(outbox), list(outbox), outbox.score()
    ([(0, b'abc')], [(0, b'abc')], 0.5)
    """

    def __init__(self) -> None:
        self._frames: list[tuple[int, Frame]] = []
        self._score = 0.0
        self._ended = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def put(self, slot: int, frame: Frame) -> None:
        with self._changed:
            self._frames.append((slot, frame))
            self._changed.notify_all()

    def end(self, score: float = 0.0) -> None:
        """There is nothing more to come."""
        with self._changed:
            self._score, self._ended = score, True
            self._changed.notify_all()

    def fail(self, failure: BaseException) -> None:
        """There will be nothing more: whoever waits is told why."""
        with self._changed:
            self._failure, self._ended = failure, True
            self._changed.notify_all()

    def score(self) -> float:
        """The worker's score, once all is there."""
        return self._score

    def __iter__(self) -> Iterator[tuple[int, Frame]]:
        at = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: at < len(self._frames) or self._ended)  # noqa: B023 - waits right here
                if self._failure is not None:
                    raise self._failure
                if at == len(self._frames):
                    return
                one = self._frames[at]
            yield one
            at += 1

    def only(self, numbers: Mapping[int, int]) -> OutboxPart:
        """The frames of some slots, under other numbers."""
        return OutboxPart(self, numbers)


class OutboxPart:
    """The part of an outbox that one of several servers gets."""

    def __init__(self, whole: PushBuffer, numbers: Mapping[int, int]) -> None:
        self._whole, self._numbers = whole, numbers

    def __iter__(self) -> Iterator[tuple[int, Frame]]:
        return ((self._numbers[slot], frame) for slot, frame in self._whole if slot in self._numbers)
