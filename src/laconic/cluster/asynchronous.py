"""Without rounds: each push is applied when it comes, and its worker gets its next work with the answer."""

from __future__ import annotations

from collections.abc import Callable

from laconic.cluster.hall import Hall
from laconic.cluster.inbox import Inbox
from laconic.cluster.replies import RefusedError, Reply
from laconic.cluster.rounds import Push
from laconic.cluster.seats import Seat
from laconic.cluster.tickets import NOTHING_LEFT, Desk
from laconic.cluster.weights import Weights

__all__ = ["Pieces"]


class Pieces:
    """What workers that do not wait for each other are given and bring.

    Args:
        hall: Where handlers meet.
        weights: What a push changes.
        desk: Hands out the work.
    """

    def __init__(self, hall: Hall, weights: Weights, desk: Desk) -> None:
        self._hall, self._weights, self.desk = hall, weights, desk

    def exchange(self, inbox: Inbox, push: Push, seat_of: Callable[[int, int], Seat], deadline: float) -> Reply:
        """Apply a push; what its worker goes on with."""
        weights = self._weights
        update = push.decode(weights.like)
        with self._hall.changed:
            inbox.check()
            seat = seat_of(push.worker, push.incarnation)
            ticket, missed = self.desk.done(push.worker, weights.version)
            if ticket == NOTHING_LEFT:
                raise RefusedError("stale", "the worker has no work to push", resume_at=seat.clock)
            self._hall.event("push", worker=push.worker, incarnation=push.incarnation, sequence=push.sequence)
            weights.step(update, missed=missed)
            weights.version += 1
            seat.clock, seat.reply = push.sequence + 1, None
            self._hall.event(
                "applied",
                worker=push.worker,
                sequence=push.sequence,
                version=weights.version,
                ticket=ticket,
                missed=missed,
            )
            inbox.close()
            self._hall.updated(weights.version)
            self._hall.changed.notify_all()
            return self.pull(inbox, seat, deadline)

    def start(self, worker: int, deadline: float, alive: Callable[[], bool]) -> int:
        """The next piece of work, once the worker may have the weights to do it with. With the lock."""
        self._hall.wait(
            lambda: self.desk.may_start(worker, self._weights.version),
            deadline,
            alive,
            lambda: f"worker {self._slowest(worker)} to push: its gradient would be too old",
        )
        ticket = self.desk.start(worker, self._weights.version)
        self._hall.event("pull", worker=worker, version=self._weights.version, ticket=ticket)
        return ticket

    def _slowest(self, worker: int) -> str:
        return ", ".join(map(str, self.desk.waiting_for(worker))) or "nobody"

    def pull(self, inbox: Inbox, seat: Seat, deadline: float) -> Reply:
        """The weights as they are once the worker may have them; or again, what they were for it. With the lock."""
        job = self._weights.job
        if seat.reply is not None:
            return seat.reply
        if job.returns == "delta" and not seat.held:
            raise RefusedError("stale", "the worker holds no weights to change", resume_at=seat.clock)
        ticket = self.start(inbox.worker, deadline, inbox.alive)
        seat.channel = seat.channel or job.pull_channel()
        with self._hall.watching(self._weights.version):
            reply = Reply(seat.clock, self._weights.tell(seat.held, seat.channel), ticket)
        if job.keeps_replies:
            seat.reply = reply  # the worker is taken to hold this now: it could not be made again
        return reply
