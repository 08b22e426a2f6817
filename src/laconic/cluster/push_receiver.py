"""A push on its way in, frame by frame."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from laconic.cluster.homomorphic.server import Part
from laconic.cluster.job import Job, Slots
from laconic.cluster.protocol import Frame
from laconic.cluster.replies import RefusedError, Reply, regather
from laconic.cluster.reply_stream import ReplyStream
from laconic.cluster.round import OpenFrame, Push, Round
from laconic.errors import FrameError

__all__ = ["PushReceiver", "Receiver"]


class Receiver(Protocol):
    """Whom a push is for: the server's core."""

    job: Job

    @property
    def slots(self) -> Slots: ...
    @property
    def current_round(self) -> Round: ...
    def open(self, slot: int, frame: Frame) -> OpenFrame | Part:
        """A slot's frame, checked as far as it can be by itself."""
        ...

    def add_part(self, receiver: PushReceiver, slot: int, frame: Frame) -> None:
        """A slot's frame that is added right away."""
        ...

    def reserve(self, receiver: PushReceiver, nbytes: int, deadline: float) -> None:
        """Wait for room, unless it is this worker that the others wait for."""
        ...

    def release(self, receiver: PushReceiver, nbytes: int) -> None: ...
    def finish(self, receiver: PushReceiver, push: Push, deadline: float) -> Reply:
        """What a complete push leads to."""
        ...

    def answer_again(self, receiver: PushReceiver, deadline: float) -> Reply:
        """The answer to a push that was applied before."""
        ...


class PushReceiver:
    """A push on its way in. Nothing of it counts before ``finish``."""

    def __init__(
        self,
        core: Receiver,
        worker: int,
        incarnation: int,
        sequence: int,
        alive: Callable[[], bool],
        this_round: Round,
        *,
        applied: bool,
    ) -> None:
        self.worker, self.incarnation, self.sequence, self.alive, self.of_round = (
            worker, incarnation, sequence, alive, this_round,
        )  # fmt: skip
        self.replaced = False
        self._core, self._frames, self._nbytes = core, dict[int, OpenFrame | Part | None](), 0
        self._applied = applied or worker in this_round.pushed
        """The rest of the stream is read and dropped."""
        self._again = applied

    @property
    def answer(self) -> ReplyStream | None:
        """Where the answer to this push is made while it comes in; None if it is made afterwards."""
        return None if self._again else self.of_round.answer

    @property
    def gone(self) -> bool:
        """Whether this push has become pointless."""
        core = self._core
        return self.replaced or (core.job.exact and self.of_round is not core.current_round)

    def check(self) -> None:
        if self.replaced:
            raise RefusedError("replaced", f"worker {self.worker} has begun exchange {self.sequence} again")
        if self.gone:
            raise regather()

    def add(self, slot: int, frame: Frame, *, deadline: float) -> None:
        """One slot's frame. Waits while the server has its hands full."""
        if slot in self._frames:
            raise FrameError(f"slot {slot} came twice")
        core = self._core
        if self._applied:
            self._frames[slot] = None
            return
        if self.of_round.answer is not None:
            core.add_part(self, slot, frame)  # it takes no room of its own
            self._frames[slot] = None
            return
        core.reserve(self, len(frame), deadline)
        self._nbytes += len(frame)
        self._frames[slot] = core.open(slot, frame)

    def finish(self, score: float = 0.0, *, deadline: float) -> Reply:
        """All frames have come: apply them, and wait until the answer may be given."""
        core, slots = self._core, self._core.slots
        if len(self._frames) != len(slots):
            raise FrameError(f"expected {len(slots)} frames, one per slot, the push ended after {len(self._frames)}")
        if self._again:
            return core.answer_again(self, deadline)
        came = [self._frames[slot] for slot in range(len(slots))]
        frames = [one for one in came if isinstance(one, OpenFrame)]
        parts = [one for one in came if isinstance(one, Part)]
        return core.finish(self, Push(self.worker, self.incarnation, self.sequence, frames, score, parts), deadline)

    def hand_over(self) -> None:
        """The round has the frames now, and accounts for them."""
        self._nbytes = 0

    def close(self) -> None:
        """Give back the room of what did not become part of a round."""
        nbytes, self._nbytes = self._nbytes, 0
        self._core.release(self, nbytes)

    def __enter__(self) -> PushReceiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
