"""Frames of one push on the worker's side: sent while later ones are encoded, kept in case they must be sent again."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping

from laconic.cluster.protocol import Frame

__all__ = ["PushBuffer"]


class PushBuffer:
    """A growing list of frames; every iterator starts at the first frame and blocks for those still to come.

    >>> push = PushBuffer()
    >>> push.put(0, b"abc")
    >>> push.end(score=0.5)
    >>> list(push), list(push), push.score()
    ([(0, b'abc')], [(0, b'abc')], 0.5)
    """

    def __init__(self) -> None:
        self._frames: list[tuple[int, Frame]] = []
        self._score = 0.0
        self._ended = False
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    @classmethod
    def of(cls, frames: Iterable[tuple[int, Frame]]) -> PushBuffer:
        """Return a complete push."""
        push = cls()
        for slot, frame in frames:
            push.put(slot, frame)
        push.end()
        return push

    def put(self, slot: int, frame: Frame) -> None:
        with self._changed:
            self._frames.append((slot, frame))
            self._changed.notify_all()

    def end(self, score: float = 0.0) -> None:
        """Mark the push as complete."""
        with self._changed:
            self._score, self._ended = score, True
            self._changed.notify_all()

    def fail(self, failure: BaseException) -> None:
        """End the push early; iterators raise ``failure``."""
        with self._changed:
            self._failure, self._ended = failure, True
            self._changed.notify_all()

    def score(self) -> float:
        """Return the score given to ``end``."""
        return self._score

    def __iter__(self) -> Iterator[tuple[int, Frame]]:
        index = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: index < len(self._frames) or self._ended)  # noqa: B023 - used at once
                if self._failure is not None:
                    raise self._failure
                if index == len(self._frames):
                    return
                item = self._frames[index]
            yield item
            index += 1

    def shard(self, local_numbers: Mapping[int, int]) -> PushShard:
        """Return the frames of some slots, under the numbers that one server gives to them."""
        return PushShard(self, local_numbers)


class PushShard:
    """The part of a push that goes to one of several servers."""

    def __init__(self, push: PushBuffer, local_numbers: Mapping[int, int]) -> None:
        self._push, self._local_numbers = push, local_numbers

    def __iter__(self) -> Iterator[tuple[int, Frame]]:
        return ((self._local_numbers[slot], frame) for slot, frame in self._push if slot in self._local_numbers)
