"""Mode ``async``: each push is applied when it is complete, and the worker gets its next work with the reply.

Whichever worker is free takes the next piece of work, so an epoch takes as long as all workers together need for it,
and a slow worker does less of it. A ticket is the number of a piece of work. Each is done once, even if its worker
is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from laconic.cluster.membership import Membership, WorkerSession, listed
from laconic.cluster.modes.base import ServerMode
from laconic.cluster.protocol import NOTHING_LEFT
from laconic.cluster.push_receiver import PushReceiver
from laconic.cluster.replies import RefusedError, Reply
from laconic.cluster.round import Push
from laconic.cluster.shared_state import ByteBudget, SharedState
from laconic.cluster.weights import Weights
from laconic.frames import encode

__all__ = ["PushByPush", "WorkQueue"]


@dataclass
class _Lease:
    ticket: int
    base: int | None
    """The version that the worker computes on; None if it does not compute now."""


class WorkQueue:
    """Hands out tickets.

    Args:
        total: Number of tickets; None if it is unknown.
    """

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._next = 0
        self._returned: list[int] = []
        self._leases: dict[int, _Lease] = {}

    def may_start(self, worker: int, version: int) -> bool:
        """Whether a worker may compute on the weights of a version."""
        return True

    def _computing(self, except_for: int) -> dict[int, int]:
        """Return the versions that other workers compute on."""
        return {w: lease.base for w, lease in self._leases.items() if w != except_for and lease.base is not None}

    def waiting_for(self, worker: int) -> list[int]:
        """Return the other workers that compute, the one with the oldest version first."""
        bases = self._computing(except_for=worker)
        return sorted(bases, key=lambda w: (bases[w], w))

    def start(self, worker: int, version: int) -> int:
        """Return the ticket that a worker does on the weights of a version; ``NOTHING_LEFT`` if there is none."""
        lease = self._leases.get(worker)
        if lease is None:
            ticket = self._take()
            if ticket == NOTHING_LEFT:
                return ticket
            lease = self._leases[worker] = _Lease(ticket, None)
        lease.base = version
        return lease.ticket

    def _take(self) -> int:
        if self._returned:
            self._returned.sort()
            return self._returned.pop(0)
        if self._total is not None and self._next >= self._total:
            return NOTHING_LEFT
        self._next += 1
        return self._next - 1

    def done(self, worker: int, version: int) -> tuple[int, int]:
        """A worker pushes: return its ticket and the staleness of its gradient; ``NOTHING_LEFT`` without a start."""
        lease = self._leases.get(worker)
        if lease is None or lease.base is None:
            return NOTHING_LEFT, 0
        del self._leases[worker]
        return lease.ticket, version - lease.base

    def stop(self, worker: int) -> None:
        """Stop waiting for the push of a lost worker; its next incarnation gets the same ticket."""
        if worker in self._leases:
            self._leases[worker].base = None

    def give_back(self, worker: int) -> None:
        """A worker has left for good: another one gets its ticket."""
        lease = self._leases.pop(worker, None)
        if lease is not None:
            self._returned.append(lease.ticket)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: tickets that are out now are done again after it."""
        out = (lease.ticket for lease in self._leases.values())
        return {"next": self._next, "open": sorted([*self._returned, *out])}

    def load(self, state: Mapping[str, Any]) -> None:
        self._next, self._returned, self._leases = int(state["next"]), [int(t) for t in state["open"]], {}


class PushByPush(ServerMode):
    """Applies each push when it is complete.

    Args:
        shared, weights, members, budget: See ``ServerMode``.
        queue: Hands out the work; with a staleness bound a ``BoundedQueue``.
    """

    def __init__(
        self, shared: SharedState, weights: Weights, members: Membership, budget: ByteBudget, queue: WorkQueue
    ) -> None:
        super().__init__(shared, weights, members, budget)
        self._queue = queue

    def apply(self, receiver: PushReceiver, push: Push, deadline: float) -> Reply:
        weights = self._weights
        update = push.decode(weights.like)
        with self._shared.changed:
            receiver.check()
            session = receiver.session.require(push.incarnation)
            ticket, staleness = self._queue.done(push.worker, weights.version)
            if ticket == NOTHING_LEFT:
                raise RefusedError("stale", "the worker has no work to push", resume_at=session.clock)
            self._shared.event("push", worker=push.worker, incarnation=push.incarnation, sequence=push.sequence)
            with self._shared.overflow_ends_job(weights.version):
                weights.step(update, staleness=staleness)
                weights.complete_update()
            session.clock, session.reply = push.sequence + 1, None
            self._shared.event(
                "applied", worker=push.worker, sequence=push.sequence, version=weights.version, ticket=ticket,
                missed=staleness,
            )  # fmt: skip
            receiver.close()
            self._shared.updated(weights.version)
            self._shared.changed.notify_all()
            return self._reply(session, deadline, receiver.alive)

    def reply_again(self, receiver: PushReceiver, deadline: float) -> Reply:
        with self._shared.changed:
            session = receiver.session.require(receiver.incarnation)
            self._shared.event("duplicate", worker=receiver.worker, sequence=receiver.sequence)
            if session.receiver is not None:  # it has started the next push, so it has received this reply
                raise RefusedError(
                    "stale", f"worker {receiver.worker} is at exchange {session.clock}", resume_at=session.clock
                )
            return self._reply(session, deadline, receiver.alive)

    def _reply(self, session: WorkerSession, deadline: float, alive: Callable[[], bool]) -> Reply:
        """Return the current weights once the worker may compute on them, or its last reply. Holds the lock."""
        kind = self._job.reply_kind
        if session.reply is not None:
            return session.reply
        if kind.is_change and not session.held:
            raise RefusedError("stale", "the worker holds no weights to change", resume_at=session.clock)
        ticket = self._start(session.worker, deadline, alive)
        session.channel = session.channel or self._job.pull_channel()
        with self._shared.overflow_ends_job(self._weights.version):
            frames = tuple(kind.reply(self._weights, session.held, session.channel))
        reply = Reply(session.clock, frames, ticket)
        if self._job.keeps_replies:
            session.reply = reply
        return reply

    def _start(self, worker: int, deadline: float, alive: Callable[[], bool]) -> int:
        """Return the worker's next ticket once it may compute on the current weights."""
        self._shared.wait(
            lambda: self._queue.may_start(worker, self._weights.version),
            deadline,
            alive,
            lambda: f"worker {listed(self._queue.waiting_for(worker))} to push: its gradient would be too stale",
        )
        ticket = self._queue.start(worker, self._weights.version)
        self._shared.event("pull", worker=worker, version=self._weights.version, ticket=ticket)
        return ticket

    def snapshot(self, session: WorkerSession, deadline: float, alive: Callable[[], bool]) -> Reply:
        ticket = self._start(session.worker, deadline, alive)
        session.reply = None
        if self._job.reply_kind.is_change:
            session.held, session.channel = self._weights.copy(), None
        return Reply(session.clock, tuple(encode(x, "none") for x in self._weights.snapshot()), ticket)

    def restarted(self, worker: int) -> None:
        self._queue.stop(worker)

    def left(self, worker: int) -> None:
        self._queue.give_back(worker)

    def queue_state(self) -> dict[str, Any]:
        return self._queue.state()

    def load_queue(self, state: dict[str, Any]) -> None:
        self._queue.load(state)
