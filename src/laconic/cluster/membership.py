"""The workers of a job: one session each, and the join in which a synchronous job agrees where to resume."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from laconic.channels import Channel
from laconic.cluster.job import Job
from laconic.cluster.rejoin import Offer
from laconic.cluster.replies import RefusedError, Reply, regather
from laconic.cluster.shared_state import SharedState

if TYPE_CHECKING:
    from laconic.cluster.push_receiver import PushReceiver

__all__ = ["Membership", "WorkerSession", "incarnation_now", "listed"]

MAX_SECONDS_AHEAD = 300
"""How far a worker's clock, from which its incarnation comes, may be ahead of the server's."""


def incarnation_now() -> int:
    """Return the incarnation of a worker that starts now: the time in milliseconds."""
    return time.time_ns() // 1_000_000


@dataclass
class WorkerSession:
    """What the server keeps about one worker."""

    worker: int
    incarnation: int = -1
    clock: int = 0
    """The number of the worker's next exchange."""
    reply: Reply | None = None
    """The last reply, where it cannot be made a second time."""
    held: dict[str, Tensor] = field(default_factory=dict)
    """The weights that the worker holds, where it gets their changes and others hold other weights."""
    channel: Channel | None = None
    present: bool = False
    receiver: PushReceiver | None = None
    """The push that is arriving now."""
    received: int = -1
    """The last exchange whose push has arrived or begun to."""
    join_requested: int = -1
    """The attempt number of its last join."""
    join_answered: int = -1
    """The last attempt that led to an agreement."""
    lost: bool = False
    """Whether it resumed without residuals."""

    def require(self, incarnation: int) -> WorkerSession:
        """Return this session if the caller is the worker's current incarnation."""
        if incarnation > self.incarnation:
            raise regather()  # an earlier server process has welcomed it
        if incarnation < self.incarnation:
            raise self.replaced(incarnation)
        return self

    def replaced(self, incarnation: int) -> RefusedError:
        return RefusedError(
            "incarnation", f"incarnation {incarnation} of worker {self.worker} was replaced by {self.incarnation}"
        )

    def begin(self, incarnation: int) -> None:
        """Start over for a new incarnation; only the clock stays."""
        if self.receiver is not None:
            self.receiver.replaced = True
        self.incarnation, self.present = incarnation, True
        self.held, self.channel, self.reply, self.receiver = {}, None, None, None
        self.join_requested = self.join_answered = -1

    def begin_push(self, receiver: PushReceiver) -> None:
        """Make this the worker's push; an earlier one was interrupted without the server's notice."""
        if self.receiver is not None:
            self.receiver.replaced = True
        self.receiver = receiver

    def end_push(self, receiver: PushReceiver) -> None:
        if self.receiver is receiver:
            self.receiver = None


class Membership:
    """Sessions of all workers, and the offers of those that wait in a join. Callers hold the lock."""

    def __init__(self, job: Job, shared: SharedState) -> None:
        self._job, self._shared = job, shared
        self.sessions = [WorkerSession(worker) for worker in range(job.workers)]
        self.offers: dict[int, Offer] | None = {} if job.exact else None
        """Offers of the workers that wait in a join; None while the job runs."""

    def at(self, worker: int) -> WorkerSession:
        if not 0 <= worker < self._job.workers:
            raise RefusedError("worker", f"worker must be 0 to {self._job.workers - 1}, got {worker}")
        return self.sessions[worker]

    def check_incarnation(self, worker: int, incarnation: int) -> None:
        """Raise if an incarnation is in the future: no later one of this worker would be accepted."""
        ahead = (incarnation - incarnation_now()) / 1000
        if ahead > MAX_SECONDS_AHEAD:
            raise RefusedError(
                "incarnation",
                f"incarnation {incarnation} of worker {worker} is {ahead:.0f} s ahead of the server's clock, at most "
                f"{MAX_SECONDS_AHEAD} s are allowed: correct the clocks of both hosts, or give a smaller --incarnation",
            )

    def saved_incarnations(self) -> list[int]:
        """Return the incarnations for a checkpoint, none of which is in the future."""
        return [min(session.incarnation, incarnation_now()) for session in self.sessions]

    def restore_incarnations(self, saved: Iterable[int]) -> None:
        """Continue with a checkpoint's incarnations; those from a clock that ran ahead are lowered to the time."""
        for session, incarnation in zip(self.sessions, saved, strict=True):
            session.incarnation = max(session.incarnation, min(int(incarnation), incarnation_now()))

    def session(self, worker: int, incarnation: int) -> WorkerSession:
        return self.at(worker).require(incarnation)

    def check_turn(self, session: WorkerSession, sequence: int) -> None:
        """Raise unless the worker may push this exchange now."""
        if self.offers is not None:
            raise regather()
        if sequence != session.clock:
            raise RefusedError(
                "stale" if sequence < session.clock else "ahead",
                f"worker {session.worker} pushes exchange {sequence}, expected {session.clock}",
                resume_at=session.clock,
            )

    def gather(self, why: str, version: int) -> bool:
        """Make all workers join again; return False if they already must."""
        if self.offers is not None:
            return False
        self.offers = {}
        self._shared.event("gather", why=why, version=version)
        self._shared.changed.notify_all()
        return True

    def missing_offers(self) -> str:
        return f"worker {listed(w for w in range(self._job.workers) if w not in (self.offers or {}))} to join"

    def all_gone(self) -> bool:
        return not any(session.present for session in self.sessions)


def listed(workers: Iterable[int]) -> str:
    return ", ".join(map(str, workers)) or "none"
