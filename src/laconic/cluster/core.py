"""The server without its network: who may push, what a push does, and what comes back.

One lock guards all that is agreed; handlers of many workers call from threads of their own, wait in it, and decode
outside it. What happens is written to a history, event by event, so that the promises can be checked afterwards from
the outside:

- P1: an acknowledged push is applied exactly once. A push is known by worker, incarnation and sequence number.
- P3: with ``bounded:S`` no gradient is applied that was computed on parameters more than S updates old.
- P4: a synchronous job that lost a worker or its server goes on from a version that everybody remembers exactly, so
  it ends with the bits that it would have ended with anyway.
- P5: nothing malformed, of another shape, of an older incarnation, or not finite changes the parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from laconic.cluster.backpressure import ByteBudget
from laconic.cluster.homomorphic.server import Part
from laconic.cluster.job import Job, Slots
from laconic.cluster.membership import WorkerSession
from laconic.cluster.modes.async_ import Pieces
from laconic.cluster.modes.sync import Rounds
from laconic.cluster.protocol import Frame
from laconic.cluster.push_receiver import PushReceiver
from laconic.cluster.rejoin import Offer, agree
from laconic.cluster.replies import RefusedError, Reply, regather
from laconic.cluster.round import Contribution, OpenFrame, Push, Round
from laconic.cluster.shared_state import History, SharedState
from laconic.cluster.weight_uploads import WeightUploads
from laconic.cluster.weights import Optimizer, Resident, Weights
from laconic.cluster.work_queue import WorkQueue
from laconic.errors import FileError
from laconic.frames import encode

__all__ = ["CheckpointStore", "Core"]

log = logging.getLogger("laconic")

MEMORY = 256 << 20
"""Bytes of pushes that may wait for their turn."""


class CheckpointStore(Protocol):
    """States that a core can go back to."""

    def versions(self) -> Sequence[int]: ...
    def fetch(self, version: int) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]: ...
    def forget(self, after: int) -> None: ...


class Core:
    """Parameters, optimizer, rounds and sessions.

    Args:
        job: What was agreed.
        parameters: Float32 tensors by name; changed in place.
        optimizer: Takes the steps.
        rate: The learning rate of an update, by its number.
        history: Told every event as a dict; None keeps none.
        exchanges: How many there are; None when nobody knows.
        checkpoint_store: Earlier states, to go back to.
        memory: Bytes of pushes that may wait; beyond, workers whose turn it is not are held up.
        resident: What belongs to slots and is not exchanged; of synchronous jobs.
    """

    def __init__(
        self,
        job: Job,
        parameters: Mapping[str, Tensor],
        optimizer: Optimizer,
        rate: Callable[[int], float],
        history: History | None = None,
        *,
        exchanges: int | None = None,
        checkpoint_store: CheckpointStore | None = None,
        memory: int = MEMORY,
        resident: Resident | None = None,
    ) -> None:
        self.job = job
        self.exchanges, self.checkpoint_store = exchanges, checkpoint_store
        self._weights = Weights(job, parameters, optimizer, rate, resident)
        self._shared = SharedState(history)
        self._sessions = [WorkerSession() for _ in range(job.workers)]
        self._offers: dict[int, Offer] | None = {} if job.exact else None
        """Of workers that wait to agree; None while a job runs."""
        self._room = ByteBudget(self._shared, memory, exact=job.exact)
        self._rounds = Rounds(self._shared, self._weights, self._sessions, self._room, self._begin_round_again)
        self._uploads = WeightUploads(self._shared, self._weights)
        self._pieces = Pieces(
            self._shared, self._weights, WorkQueue(None if exchanges is None else exchanges * job.workers, job.bound)
        )

    @property
    def failure(self) -> str | None:
        """Why the job cannot go on."""
        return self._shared.failure

    @property
    def parameters(self) -> dict[str, Tensor]:
        return self._weights.parameters

    @property
    def resident(self) -> dict[str, Tensor]:
        """What belongs to slots and is not exchanged, by slot."""
        return self._weights.resident

    @property
    def deposit_limits(self) -> list[int]:
        """The most bytes that each frame of the largest possible deposit can have."""
        return self.job.push_limits(self._weights.deposits[-1])

    @property
    def slots(self) -> Slots:
        return self._weights.slots

    @property
    def current_round(self) -> Round:
        return self._rounds.this

    @property
    def version(self) -> int:
        """Updates applied so far; in a synchronous job also the number of the round."""
        return self._weights.version

    # -------------------------------------------------------------------------------------------------- membership

    def welcome(self, worker: int, incarnation: int, fingerprint: str) -> dict[str, Any]:
        """WorkerSession a worker; what it must know to begin. ``RefusedError`` when it does not belong here."""
        with self._shared.changed:
            self.settle()
            self._check_number(worker)
            if fingerprint != self.slots.fingerprint:
                raise RefusedError(
                    "model",
                    f"worker {worker} trains another model than the server (fingerprint {fingerprint}, expected "
                    f"{self.slots.fingerprint}): start both with the same --model or script",
                )
            session = self._sessions[worker]
            if incarnation < session.incarnation:
                raise session.replaced(worker, incarnation)
            if incarnation > session.incarnation or not session.present:
                session.incarnation, session.present = incarnation, True
                if session.receiver is not None:
                    session.receiver.replaced = True
                if self._offers is not None:
                    self._offers.pop(worker, None)  # of its life before
                self._uploads.give_up(worker)
                session.held, session.channel, session.reply, session.receiver = {}, None, None, None
                session.asked = session.answered = -1
                self._pieces.queue.stop(worker)
                self._shared.changed.notify_all()
                self._shared.event("welcome", worker=worker, incarnation=incarnation, clock=session.clock)
                if self.job.exact and not self._over:
                    self._gather(f"worker {worker} has come anew")
            return {"version": self.version, "versions": self._versions(), "over": self._over,
                    "weights": self._uploads.standing, "job": self.job.to_json()}  # fmt: skip

    def join(
        self,
        worker: int,
        incarnation: int,
        attempt: int,
        offer: Offer,
        *,
        deadline: float,
        alive: Callable[[], bool] = lambda: True,
    ) -> tuple[int, bool]:
        """Where the worker goes on, and whether it must do so with an empty memory.

        A job that promises the same bits whatever happens waits for all workers here, and all go on from one version.

        Args:
            worker: Its number.
            incarnation: Its life.
            attempt: Counts its requests: the same number again is the same request again.
            offer: What it can go on from.
            deadline: On ``time.monotonic``'s clock.
            alive: Whether anybody still waits for the answer.
        """
        self.offer(worker, incarnation, attempt, offer)
        with self._shared.changed:
            session = self._session_of(worker, incarnation)
            self._shared.wait(lambda: session.answered == attempt, deadline, alive, self._missing_offers)
            return session.clock, session.lost

    def offer(self, worker: int, incarnation: int, attempt: int, offer: Offer) -> None:
        """The first half of ``join``: say it, and do not wait."""
        with self._shared.changed:
            self.settle()
            session = self._session_of(worker, incarnation)
            if session.asked == attempt:
                return
            session.asked, session.lost = attempt, offer.lost
            if not self.job.exact or self._over:
                session.answered = attempt
                self._shared.event("join", worker=worker, version=session.clock, lost=offer.lost)
                return
            self._gather(f"worker {worker} asks where to go on")
            assert self._offers is not None
            self._offers[worker] = offer
            if len(self._offers) == self.job.workers:
                self._agree(self._offers)

    def leave(self, worker: int, incarnation: int) -> None:
        """A worker has gone: nobody waits for it any more where waiting is a choice."""
        with self._shared.changed:
            self._check_number(worker)
            session = self._sessions[worker]
            if session.incarnation == incarnation and session.present:
                session.present = False
                self._pieces.queue.give_back(worker)
                self._uploads.give_up(worker)
                self._shared.event("leave", worker=worker, incarnation=incarnation)
                self._shared.changed.notify_all()

    def lost(self, worker: int, incarnation: int) -> None:
        """The connection of a worker broke in the middle of something."""
        with self._shared.changed:
            self._shared.event("lost", worker=worker, incarnation=incarnation)
            self._uploads.give_up(worker)
            self._shared.changed.notify_all()

    def snapshot(
        self, worker: int, incarnation: int, *, deadline: float, alive: Callable[[], bool] = lambda: True
    ) -> Reply:
        """The weights that a worker must hold to go on; from here on it is known to hold them.

        Where workers take the steps themselves, the optimizer's memory follows: a second frame for every slot.
        """
        with self._shared.changed:
            self.settle()
            session = self._session_of(worker, incarnation)
            ticket = None
            if self.job.returns == "sum":
                return self._uploads.fetch(deadline, alive)
            if self.job.mode != "sync":
                ticket = self._pieces.start(worker, deadline, alive)
                session.reply = None
                if self.job.returns == "delta":
                    session.held, session.channel = self._weights.copy(), None
            return Reply(session.clock, tuple(encode(x, "none") for x in self._weights.snapshot()), ticket)

    def on_update(self, call: Callable[[int], None]) -> None:
        """Have ``call(version)`` called after each update, before anybody is told of it.

        With returns=sum: when the weights of a version have been deposited.
        """
        self._shared.on_update(call)

    def finished(self, exchanges: int) -> bool:
        """Whether the work of that many exchanges of each worker is done, by whomever."""
        return self.version >= (exchanges if self.job.mode == "sync" else exchanges * self.job.workers)

    def all_gone(self) -> bool:
        return not any(session.present for session in self._sessions)

    @property
    def _over(self) -> bool:
        return self.exchanges is not None and self.finished(self.exchanges)

    # ---------------------------------------------------------------------------------- where workers hold the weights

    @property
    def whole(self) -> bool:
        """Whether the parameters are those of the current version. Otherwise workers hold these."""
        return self._uploads.whole

    def agree(
        self,
        worker: int,
        incarnation: int,
        sequence: int,
        scales: Sequence[Frame],
        *,
        deadline: float,
        alive: Callable[[], bool] = lambda: True,
    ) -> list[bytes]:
        """Before the pushes of a round that has no scales: the largest of all workers' scales."""
        bits = self._rounds.read_scales(scales)
        with self._shared.changed:
            self.settle()
            self._check_turn(self._session_of(worker, incarnation), worker, sequence)
            return self._rounds.agree(worker, bits, deadline, alive)

    def depositing(self) -> AbstractContextManager[None]:
        """While a deposit is on its way in."""
        return self._uploads.on_its_way()

    def deposit(self, worker: int, incarnation: int, version: int, frames: Sequence[Frame]) -> None:
        """The weights of a version as a worker holds them, the optimizer's memory, and what else belongs to slots."""
        tensors = self._uploads.read(worker, frames)
        with self._shared.changed:
            self.settle()
            self._session_of(worker, incarnation)
            self._uploads.take(worker, version, tensors)

    # --------------------------------------------------------------------------------------------------- agreement

    def _gather(self, why: str) -> None:
        """Stop, and have all workers say from where they can go on."""
        if self._offers is not None:
            return
        self._offers = {}
        self._rounds.void()
        self._shared.event("gather", why=why, version=self.version)
        self._shared.changed.notify_all()

    def _begin_round_again(self, why: str) -> None:
        if self.job.exact:
            self._gather(why)
        else:
            self._rounds.void()

    def _versions(self) -> list[int]:
        """Now, and not long ago: nobody's loss takes the others farther back than two checkpoints."""
        oldest = self.version - 2 * self.job.exchanges_per_checkpoint
        kept = self.checkpoint_store.versions() if self.checkpoint_store is not None else ()
        return sorted({self.version, *(version for version in kept if oldest < version < self.version)})

    def _agree(self, offers: Mapping[int, Offer]) -> None:
        damaged: set[int] = set()
        was = self.version
        while True:
            held = set(self._versions()) - damaged
            if not held:
                self._shared.failure = (
                    "workers have lost their weights and nothing holds them: start again without --resume"
                )
                self._shared.changed.notify_all()
                return
            agreed = agree(offers, held)
            if agreed.version == self.version:
                if not agreed.lost or self.whole:
                    break
                damaged.add(self.version)  # who has lost its memory must be told the weights
                continue
            assert self.checkpoint_store is not None
            try:
                self.load(*self.checkpoint_store.fetch(agreed.version))
            except FileError as error:
                log.warning("cannot go back to exchange %d: %s", agreed.version, error)
                damaged.add(agreed.version)
        if self.version != was:
            self._shared.event("rewound", version=self.version, was=was)
        if self.checkpoint_store is not None:
            self.checkpoint_store.forget(self.version)
        for worker, session in enumerate(self._sessions):
            session.clock, session.lost, session.answered = self.version, worker in agreed.lost, session.asked
            if session.lost:
                self._shared.event("memory_lost", worker=worker, version=self.version)
        self._shared.event("agreed", version=self.version)
        self._offers = None
        self._shared.changed.notify_all()

    def _missing_offers(self) -> str:
        here = self._offers or {}
        return f"worker {_listed(w for w in range(self.job.workers) if w not in here)} to join"

    # ------------------------------------------------------------------------------------------------------- state

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that must survive: tensors by name, and numbers."""
        with self._shared.changed:
            version = self._weights.deposited if self.job.returns == "sum" else self.version
            meta = {
                "version": version,
                "fingerprint": self.slots.fingerprint,
                "clocks": [min(session.clock, version) for session in self._sessions],
                "incarnations": [session.incarnation for session in self._sessions],
                "tickets": self._pieces.queue.state(),
            }
            return self._weights.state(), meta

    def load(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Back to a saved state; ``RefusedError`` when it is another model's."""
        if meta.get("fingerprint") != self.slots.fingerprint:
            raise RefusedError("model", "the checkpoint is of another model: resume with the same --model or script")
        with self._shared.changed:
            self._weights.load(tensors, meta)
            self._pieces.queue.load(meta["tickets"])
            for session, clock, incarnation in zip(self._sessions, meta["clocks"], meta["incarnations"], strict=True):
                session.clock, session.reply = int(clock), None
                session.incarnation = max(session.incarnation, int(incarnation))

    # ---------------------------------------------------------------------------------------------------- exchange

    def receive(
        self, worker: int, incarnation: int, sequence: int, *, alive: Callable[[], bool] = lambda: True
    ) -> PushReceiver:
        """Begin to take a push, or to recognise it as applied."""
        with self._shared.changed:
            session = self._session_of(worker, incarnation)
            applied = sequence == session.clock - 1 and (session.reply is not None or not self.job.keeps_replies)
            if not applied:
                self._check_turn(session, worker, sequence)
            receiver = PushReceiver(self, worker, incarnation, sequence, alive, self._rounds.this, applied=applied)
            if not applied:
                if session.receiver is not None:
                    session.receiver.replaced = True  # a push that broke off, and is not known to have
                session.receiver = receiver
            return receiver

    def _check_turn(self, session: WorkerSession, worker: int, sequence: int) -> None:
        if self._offers is not None:
            raise regather()
        if sequence != session.clock:
            raise RefusedError(
                "stale" if sequence < session.clock else "ahead",
                f"worker {worker} pushes exchange {sequence}, it is at {session.clock}",
                resume_at=session.clock,
            )

    def open(self, slot: int, frame: Frame) -> OpenFrame | Part:
        """A slot's frame, checked as far as it can be by itself."""
        if self._rounds.how:
            return Part.of(self._rounds.how[slot], frame)
        name = self.slots.names[slot]
        return OpenFrame.of(name, frame, self.parameters[name])

    def exchange(self, push: Contribution, *, deadline: float) -> Reply:
        """A push that is all there.

        Args:
            push: What came. It is checked as a whole before it changes anything.
            deadline: On ``time.monotonic``'s clock.
        """
        with self.receive(push.worker, push.incarnation, push.sequence) as receiver:
            for slot, frame in enumerate(push.frames):
                receiver.add(slot, frame, deadline=deadline)
            reply = receiver.finish(push.score, deadline=deadline)
            return Reply(reply.sequence, tuple(reply.frames), reply.ticket)  # when all of it is there

    def _check_number(self, worker: int) -> None:
        if not 0 <= worker < self.job.workers:
            raise RefusedError("worker", f"workers are 0 to {self.job.workers - 1}, there is no {worker}")

    def _session_of(self, worker: int, incarnation: int) -> WorkerSession:
        self._check_number(worker)
        session = self._sessions[worker]
        if incarnation > session.incarnation:
            raise regather()  # it was welcomed by a server that this one has taken the place of
        if incarnation != session.incarnation:
            raise session.replaced(worker, incarnation)
        return session

    def finish(self, receiver: PushReceiver, push: Push, deadline: float) -> Reply:
        """What a complete push leads to."""
        if self.job.mode != "sync":
            return self._pieces.exchange(receiver, push, self._session_of, deadline)
        self._rounds.take(receiver, push)
        with self._shared.changed:
            session = self._session_of(push.worker, push.incarnation)
            this = receiver.of_round
            self._shared.wait(
                lambda: (
                    session.clock > push.sequence
                    or this is not self._rounds.this
                    or push.worker in this.faults
                    or self._uploads.asks(push.worker)
                ),
                deadline,
                receiver.alive,
                self._rounds.missing,
            )
            if session.clock <= push.sequence and this is self._rounds.this and self._uploads.asks(push.worker):
                raise RefusedError("deposit", "somebody needs the weights of this exchange")
            if push.worker in this.faults:
                raise RefusedError("spoilt", str(this.faults[push.worker]))  # sent again, it would be so again
            if session.clock <= push.sequence:
                raise regather()
            return self._told(session, push.sequence)

    def _told(self, session: WorkerSession, sequence: int) -> Reply:
        """What all were told of an update. Who missed some of them cannot go on with the change that the last made."""
        if session.reply is None or (session.reply.sequence != sequence + 1 and self.job.returns != "weights"):
            raise RefusedError("stale", f"the others are at exchange {session.clock}", resume_at=session.clock)
        return session.reply

    def add_part(self, receiver: PushReceiver, slot: int, frame: Frame) -> None:
        """A slot's integers, which are added right away."""
        self._rounds.add_part(receiver, slot, frame)

    def settle(self) -> None:
        """Wait until no update is being made. Not for ``on_update``, which is part of one."""
        self._rounds.settle()

    def answer_again(self, receiver: PushReceiver, deadline: float) -> Reply:
        """The answer to a push that was applied before."""
        with self._shared.changed:
            session = self._session_of(receiver.worker, receiver.incarnation)
            self._shared.event("duplicate", worker=receiver.worker, sequence=receiver.sequence)
            if self.job.mode == "sync":
                return self._told(session, receiver.sequence)
            if session.receiver is not None:  # it has begun the next one, so it has had the answer
                raise RefusedError(
                    "stale", f"worker {receiver.worker} is at {session.clock} already", resume_at=session.clock
                )
            return self._pieces.pull(receiver, session, deadline)

    # --------------------------------------------------------------------------------------------------------- memory

    @property
    def in_memory(self) -> int:
        """Bytes of pushes that wait for their turn."""
        return self._room.used

    def reserve(self, receiver: PushReceiver, nbytes: int, deadline: float) -> None:
        """Wait for room, unless it is this worker that the others wait for."""
        self._room.reserve(receiver, nbytes, deadline)

    def release(self, receiver: PushReceiver, nbytes: int) -> None:
        with self._shared.changed:
            self._sessions[receiver.worker].let_go(receiver)
            self._room.let_go(receiver)
            self._room.used -= nbytes
            self._shared.changed.notify_all()

    def wake(self) -> None:
        """Have everybody who waits look again."""
        self._shared.wake()


def _listed(workers: Any) -> str:
    return ", ".join(map(str, workers)) or "nobody"
