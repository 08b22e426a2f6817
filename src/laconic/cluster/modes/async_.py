"""Without rounds: each push is applied when it comes, and its worker gets its next work with the answer."""

from __future__ import annotations

from collections.abc import Callable

from laconic.cluster.membership import WorkerSession
from laconic.cluster.push_receiver import PushReceiver
from laconic.cluster.replies import RefusedError, Reply
from laconic.cluster.round import Push
from laconic.cluster.shared_state import SharedState
from laconic.cluster.weights import Weights
from laconic.cluster.work_queue import NOTHING_LEFT, WorkQueue

__all__ = ["Pieces"]


class Pieces:
    """What workers that do not wait for each other are given and bring.

    Args:
        shared: Where handlers meet.
        weights: What a push changes.
        queue: Hands out the work.
    """

    def __init__(self, shared: SharedState, weights: Weights, queue: WorkQueue) -> None:
        self._shared, self._weights, self.queue = shared, weights, queue

    def exchange(
        self, receiver: PushReceiver, push: Push, session_of: Callable[[int, int], WorkerSession], deadline: float
    ) -> Reply:
        """Apply a push; what its worker goes on with."""
        weights = self._weights
        update = push.decode(weights.like)
        with self._shared.changed:
            receiver.check()
            session = session_of(push.worker, push.incarnation)
            ticket, missed = self.queue.done(push.worker, weights.version)
            if ticket == NOTHING_LEFT:
                raise RefusedError("stale", "the worker has no work to push", resume_at=session.clock)
            self._shared.event("push", worker=push.worker, incarnation=push.incarnation, sequence=push.sequence)
            weights.step(update, missed=missed)
            weights.version += 1
            session.clock, session.reply = push.sequence + 1, None
            self._shared.event(
                "applied",
                worker=push.worker,
                sequence=push.sequence,
                version=weights.version,
                ticket=ticket,
                missed=missed,
            )
            receiver.close()
            self._shared.updated(weights.version)
            self._shared.changed.notify_all()
            return self.pull(receiver, session, deadline)

    def start(self, worker: int, deadline: float, alive: Callable[[], bool]) -> int:
        """The next piece of work, once the worker may have the weights to do it with. With the lock."""
        self._shared.wait(
            lambda: self.queue.may_start(worker, self._weights.version),
            deadline,
            alive,
            lambda: f"worker {self._slowest(worker)} to push: its gradient would be too old",
        )
        ticket = self.queue.start(worker, self._weights.version)
        self._shared.event("pull", worker=worker, version=self._weights.version, ticket=ticket)
        return ticket

    def _slowest(self, worker: int) -> str:
        return ", ".join(map(str, self.queue.waiting_for(worker))) or "nobody"

    def pull(self, receiver: PushReceiver, session: WorkerSession, deadline: float) -> Reply:
        """The weights as they are once the worker may have them; or again, what they were for it. With the lock."""
        job = self._weights.job
        if session.reply is not None:
            return session.reply
        if job.returns == "delta" and not session.held:
            raise RefusedError("stale", "the worker holds no weights to change", resume_at=session.clock)
        ticket = self.start(receiver.worker, deadline, receiver.alive)
        session.channel = session.channel or job.pull_channel()
        with self._shared.watching(self._weights.version):
            reply = Reply(session.clock, self._weights.tell(session.held, session.channel), ticket)
        if job.keeps_replies:
            session.reply = reply  # the worker is taken to hold this now: it could not be made again
        return reply
