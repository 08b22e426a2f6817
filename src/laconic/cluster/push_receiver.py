"""The server's side of one push: takes frames as they arrive and hands the complete push to the job's mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from laconic.aggregate import OpenedFrame
from laconic.cluster.homomorphic.server import Contribution
from laconic.cluster.membership import WorkerSession
from laconic.cluster.protocol import Frame
from laconic.cluster.replies import RefusedError, Reply, ReplyStream, regather
from laconic.cluster.round import Push, Round
from laconic.cluster.shared_state import Reservation
from laconic.errors import FrameError

if TYPE_CHECKING:
    from laconic.cluster.modes.base import ServerMode

__all__ = ["PushReceiver"]


class PushReceiver:
    """A push that is arriving. It has no effect before ``finish``. Close it with ``with``.

    Args:
        mode: The job's mode, which takes the frames.
        alive: Whether the worker still waits.
        applied: The push was applied before, or its exchange ended without it: its frames are dropped and the reply is
            sent again.
        repeated: Whether a push of this exchange has begun to arrive before.
    """

    def __init__(
        self, mode: ServerMode, session: WorkerSession, sequence: int, alive: Callable[[], bool], *, applied: bool,
        repeated: bool,
    ) -> None:  # fmt: skip
        self.session, self.sequence, self.alive = session, sequence, alive
        self.worker, self.incarnation = session.worker, session.incarnation
        self.round: Round | None = mode.current_round
        """The round it arrives in; None without rounds."""
        self.replaced = False
        """Whether the worker has started this push again."""
        self.reservation = Reservation()
        self._mode, self._applied = mode, applied
        self.drops_frames = applied or (self.round is not None and self.worker in self.round.pushed)
        """Whether the content of this push is already known, or comes too late."""
        self.repeats = repeated and self.drops_frames
        """Whether it costs the server a reply for nothing."""
        self._begun: set[int] = set()
        """Slots whose frames have begun to arrive."""
        self._frames: dict[int, OpenedFrame | Contribution | None] = {}
        self._encoded: dict[int, Frame] = {}

    @property
    def reply(self) -> ReplyStream | None:
        """The reply to this push, if it is made while pushes arrive."""
        return None if self._applied or self.round is None else self.round.reply

    @property
    def cancelled(self) -> bool:
        """Whether this push has become pointless."""
        return self.replaced or self._mode.is_superseded(self)

    def check(self) -> None:
        """Raise if this push has become pointless."""
        self._mode.require_running()
        if self.replaced:
            raise RefusedError("replaced", f"worker {self.worker} has started exchange {self.sequence} again")
        if self.cancelled:
            raise regather()

    def begin(self, slot: int, nbytes: int, *, deadline: float) -> None:
        """Reserve memory for a slot's frame that begins to arrive. Blocks while the byte budget is exhausted."""
        if slot in self._begun:
            raise FrameError(f"slot {slot} was sent twice")
        self._begun.add(slot)
        if not self.drops_frames:
            self._mode.reserve(self, nbytes, deadline)

    def add(self, slot: int, frame: Frame, *, deadline: float) -> None:
        """Take one slot's frame."""
        if slot not in self._begun:
            self.begin(slot, len(frame), deadline=deadline)
        if slot in self._frames:
            raise FrameError(f"slot {slot} was sent twice")
        self._frames[slot] = None if self.drops_frames else self._mode.add_frame(self, slot, frame)
        if isinstance(self._frames[slot], OpenedFrame):
            self._encoded[slot] = frame

    def finish(self, score: float = 0.0, *, deadline: float) -> Reply:
        """Apply the complete push and wait for its reply."""
        num_slots = self._mode.num_slots
        if len(self._frames) != num_slots:
            raise FrameError(f"expected {num_slots} frames, one per slot, the push ended after {len(self._frames)}")
        if self._applied:
            return self._mode.reply_again(self, deadline)
        content = [self._frames[slot] for slot in range(num_slots)]
        push = Push(
            self.worker, self.incarnation, self.sequence, score,
            encoded=[self._encoded[slot] for slot in sorted(self._encoded)],
            frames=[item for item in content if isinstance(item, OpenedFrame)],
            contributions=[item for item in content if isinstance(item, Contribution)],
        )  # fmt: skip
        return self._mode.apply(self, push, deadline)

    def hand_over(self, push: Push) -> None:
        """Pass the reserved bytes to the complete push, which a round holds from now on."""
        push.reservation, self.reservation = self.reservation, Reservation()

    def close(self) -> None:
        """Release what a round has not taken over."""
        self._mode.end_push(self)

    def __enter__(self) -> PushReceiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
