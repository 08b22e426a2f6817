"""What a server says to a push: an answer, or why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laconic.cluster.protocol import Frame
from laconic.errors import LaconicError

__all__ = ["RefusedError", "Reply", "regather"]


class RefusedError(LaconicError):
    """A worker's request that cannot be served; ``reason`` is a word, the message a line for people.

    ``regather`` means that all workers must agree anew from where to go on; ``stale`` and ``ahead``, that this one
    must fetch the parameters and go on from ``resume_at``; ``waiting``, that it may ask again; ``deposit``, that it
    must send its weights first, because somebody needs them.
    """

    def __init__(self, reason: str, message: str, *, resume_at: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.resume_at = resume_at


def regather() -> RefusedError:
    return RefusedError("regather", "somebody was lost: all workers must agree from where to go on")


@dataclass(frozen=True)
class Reply:
    """What comes back: the number of the next exchange, a frame per slot, and what to do next.

    ``ticket`` is a piece of work where whoever is free takes the next; None where each worker has its own.
    """

    sequence: int
    frames: Sequence[Frame]
    ticket: int | None = None

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.frames))
