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

from laconic.cluster.agreement import Offer, agree
from laconic.cluster.asynchronous import Pieces
from laconic.cluster.deposits import Deposits
from laconic.cluster.hall import Hall, History
from laconic.cluster.inbox import Inbox
from laconic.cluster.job import Job, Slots
from laconic.cluster.messages import Frame
from laconic.cluster.replies import RefusedError, Reply, regather
from laconic.cluster.room import Room
from laconic.cluster.rounds import Contribution, OpenFrame, Push, Round
from laconic.cluster.seats import Seat
from laconic.cluster.sums import Part
from laconic.cluster.synchronous import Rounds
from laconic.cluster.tickets import Desk
from laconic.cluster.weights import Optimizer, Resident, Weights
from laconic.errors import FileError
from laconic.frames import encode

__all__ = ["Core", "Vault"]

log = logging.getLogger("laconic")

MEMORY = 256 << 20
"""Bytes of pushes that may wait for their turn."""


class Vault(Protocol):
    """States that a core can go back to."""

    def versions(self) -> Sequence[int]: ...
    def fetch(self, version: int) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]: ...
    def forget(self, after: int) -> None: ...


class Core:
    """Parameters, optimizer, rounds and seats.

    Args:
        job: What was agreed.
        parameters: Float32 tensors by name; changed in place.
        optimizer: Takes the steps.
        rate: The learning rate of an update, by its number.
        history: Told every event as a dict; None keeps none.
        exchanges: How many there are; None when nobody knows.
        vault: Earlier states, to go back to.
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
        vault: Vault | None = None,
        memory: int = MEMORY,
        resident: Resident | None = None,
    ) -> None:
        self.job = job
        self.exchanges, self.vault = exchanges, vault
        self._weights = Weights(job, parameters, optimizer, rate, resident)
        self._hall = Hall(history)
        self._seats = [Seat() for _ in range(job.workers)]
        self._offers: dict[int, Offer] | None = {} if job.exact else None
        """Of workers that wait to agree; None while a job runs."""
        self._room = Room(self._hall, memory, exact=job.exact)
        self._rounds = Rounds(self._hall, self._weights, self._seats, self._room, self._begin_round_again)
        self._deposits = Deposits(self._hall, self._weights)
        self._pieces = Pieces(
            self._hall, self._weights, Desk(None if exchanges is None else exchanges * job.workers, job.bound)
        )

    @property
    def failure(self) -> str | None:
        """Why the job cannot go on."""
        return self._hall.failure

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
        """Seat a worker; what it must know to begin. ``RefusedError`` when it does not belong here."""
        with self._hall.changed:
            self.settle()
            self._check_number(worker)
            if fingerprint != self.slots.fingerprint:
                raise RefusedError(
                    "model",
                    f"worker {worker} trains another model than the server (fingerprint {fingerprint}, expected "
                    f"{self.slots.fingerprint}): start both with the same --model or script",
                )
            seat = self._seats[worker]
            if incarnation < seat.incarnation:
                raise seat.replaced(worker, incarnation)
            if incarnation > seat.incarnation or not seat.present:
                seat.incarnation, seat.present = incarnation, True
                if seat.inbox is not None:
                    seat.inbox.replaced = True
                if self._offers is not None:
                    self._offers.pop(worker, None)  # of its life before
                self._deposits.give_up(worker)
                seat.held, seat.channel, seat.reply, seat.inbox = {}, None, None, None
                seat.asked = seat.answered = -1
                self._pieces.desk.stop(worker)
                self._hall.changed.notify_all()
                self._hall.event("welcome", worker=worker, incarnation=incarnation, clock=seat.clock)
                if self.job.exact and not self._over:
                    self._gather(f"worker {worker} has come anew")
            return {"version": self.version, "versions": self._versions(), "over": self._over,
                    "weights": self._deposits.standing, "job": self.job.to_json()}  # fmt: skip

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
        with self._hall.changed:
            seat = self._seat_of(worker, incarnation)
            self._hall.wait(lambda: seat.answered == attempt, deadline, alive, self._missing_offers)
            return seat.clock, seat.lost

    def offer(self, worker: int, incarnation: int, attempt: int, offer: Offer) -> None:
        """The first half of ``join``: say it, and do not wait."""
        with self._hall.changed:
            self.settle()
            seat = self._seat_of(worker, incarnation)
            if seat.asked == attempt:
                return
            seat.asked, seat.lost = attempt, offer.lost
            if not self.job.exact or self._over:
                seat.answered = attempt
                self._hall.event("join", worker=worker, version=seat.clock, lost=offer.lost)
                return
            self._gather(f"worker {worker} asks where to go on")
            assert self._offers is not None
            self._offers[worker] = offer
            if len(self._offers) == self.job.workers:
                self._agree(self._offers)

    def leave(self, worker: int, incarnation: int) -> None:
        """A worker has gone: nobody waits for it any more where waiting is a choice."""
        with self._hall.changed:
            self._check_number(worker)
            seat = self._seats[worker]
            if seat.incarnation == incarnation and seat.present:
                seat.present = False
                self._pieces.desk.give_back(worker)
                self._deposits.give_up(worker)
                self._hall.event("leave", worker=worker, incarnation=incarnation)
                self._hall.changed.notify_all()

    def lost(self, worker: int, incarnation: int) -> None:
        """The connection of a worker broke in the middle of something."""
        with self._hall.changed:
            self._hall.event("lost", worker=worker, incarnation=incarnation)
            self._deposits.give_up(worker)
            self._hall.changed.notify_all()

    def snapshot(
        self, worker: int, incarnation: int, *, deadline: float, alive: Callable[[], bool] = lambda: True
    ) -> Reply:
        """The weights that a worker must hold to go on; from here on it is known to hold them.

        Where workers take the steps themselves, the optimizer's memory follows: a second frame for every slot.
        """
        with self._hall.changed:
            self.settle()
            seat = self._seat_of(worker, incarnation)
            ticket = None
            if self.job.returns == "sum":
                return self._deposits.fetch(deadline, alive)
            if self.job.mode != "sync":
                ticket = self._pieces.start(worker, deadline, alive)
                seat.reply = None
                if self.job.returns == "delta":
                    seat.held, seat.channel = self._weights.copy(), None
            return Reply(seat.clock, tuple(encode(x, "none") for x in self._weights.snapshot()), ticket)

    def on_update(self, call: Callable[[int], None]) -> None:
        """Have ``call(version)`` called after each update, before anybody is told of it.

        With returns=sum: when the weights of a version have been deposited.
        """
        self._hall.on_update(call)

    def finished(self, exchanges: int) -> bool:
        """Whether the work of that many exchanges of each worker is done, by whomever."""
        return self.version >= (exchanges if self.job.mode == "sync" else exchanges * self.job.workers)

    def all_gone(self) -> bool:
        return not any(seat.present for seat in self._seats)

    @property
    def _over(self) -> bool:
        return self.exchanges is not None and self.finished(self.exchanges)

    # ---------------------------------------------------------------------------------- where workers hold the weights

    @property
    def whole(self) -> bool:
        """Whether the parameters are those of the current version. Otherwise workers hold these."""
        return self._deposits.whole

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
        with self._hall.changed:
            self.settle()
            self._check_turn(self._seat_of(worker, incarnation), worker, sequence)
            return self._rounds.agree(worker, bits, deadline, alive)

    def depositing(self) -> AbstractContextManager[None]:
        """While a deposit is on its way in."""
        return self._deposits.on_its_way()

    def deposit(self, worker: int, incarnation: int, version: int, frames: Sequence[Frame]) -> None:
        """The weights of a version as a worker holds them, the optimizer's memory, and what else belongs to slots."""
        tensors = self._deposits.read(worker, frames)
        with self._hall.changed:
            self.settle()
            self._seat_of(worker, incarnation)
            self._deposits.take(worker, version, tensors)

    # --------------------------------------------------------------------------------------------------- agreement

    def _gather(self, why: str) -> None:
        """Stop, and have all workers say from where they can go on."""
        if self._offers is not None:
            return
        self._offers = {}
        self._rounds.void()
        self._hall.event("gather", why=why, version=self.version)
        self._hall.changed.notify_all()

    def _begin_round_again(self, why: str) -> None:
        if self.job.exact:
            self._gather(why)
        else:
            self._rounds.void()

    def _versions(self) -> list[int]:
        """Now, and not long ago: nobody's loss takes the others farther back than two checkpoints."""
        oldest = self.version - 2 * self.job.exchanges_per_checkpoint
        kept = self.vault.versions() if self.vault is not None else ()
        return sorted({self.version, *(version for version in kept if oldest < version < self.version)})

    def _agree(self, offers: Mapping[int, Offer]) -> None:
        damaged: set[int] = set()
        was = self.version
        while True:
            held = set(self._versions()) - damaged
            if not held:
                self._hall.failure = (
                    "workers have lost their weights and nothing holds them: start again without --resume"
                )
                self._hall.changed.notify_all()
                return
            agreed = agree(offers, held)
            if agreed.version == self.version:
                if not agreed.lost or self.whole:
                    break
                damaged.add(self.version)  # who has lost its memory must be told the weights
                continue
            assert self.vault is not None
            try:
                self.load(*self.vault.fetch(agreed.version))
            except FileError as error:
                log.warning("cannot go back to exchange %d: %s", agreed.version, error)
                damaged.add(agreed.version)
        if self.version != was:
            self._hall.event("rewound", version=self.version, was=was)
        if self.vault is not None:
            self.vault.forget(self.version)
        for worker, seat in enumerate(self._seats):
            seat.clock, seat.lost, seat.answered = self.version, worker in agreed.lost, seat.asked
            if seat.lost:
                self._hall.event("memory_lost", worker=worker, version=self.version)
        self._hall.event("agreed", version=self.version)
        self._offers = None
        self._hall.changed.notify_all()

    def _missing_offers(self) -> str:
        here = self._offers or {}
        return f"worker {_listed(w for w in range(self.job.workers) if w not in here)} to join"

    # ------------------------------------------------------------------------------------------------------- state

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that must survive: tensors by name, and numbers."""
        with self._hall.changed:
            version = self._weights.deposited if self.job.returns == "sum" else self.version
            meta = {
                "version": version,
                "fingerprint": self.slots.fingerprint,
                "clocks": [min(seat.clock, version) for seat in self._seats],
                "incarnations": [seat.incarnation for seat in self._seats],
                "tickets": self._pieces.desk.state(),
            }
            return self._weights.state(), meta

    def load(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Back to a saved state; ``RefusedError`` when it is another model's."""
        if meta.get("fingerprint") != self.slots.fingerprint:
            raise RefusedError("model", "the checkpoint is of another model: resume with the same --model or script")
        with self._hall.changed:
            self._weights.load(tensors, meta)
            self._pieces.desk.load(meta["tickets"])
            for seat, clock, incarnation in zip(self._seats, meta["clocks"], meta["incarnations"], strict=True):
                seat.clock, seat.reply = int(clock), None
                seat.incarnation = max(seat.incarnation, int(incarnation))

    # ---------------------------------------------------------------------------------------------------- exchange

    def receive(
        self, worker: int, incarnation: int, sequence: int, *, alive: Callable[[], bool] = lambda: True
    ) -> Inbox:
        """Begin to take a push, or to recognise it as applied."""
        with self._hall.changed:
            seat = self._seat_of(worker, incarnation)
            applied = sequence == seat.clock - 1 and (seat.reply is not None or not self.job.keeps_replies)
            if not applied:
                self._check_turn(seat, worker, sequence)
            inbox = Inbox(self, worker, incarnation, sequence, alive, self._rounds.this, applied=applied)
            if not applied:
                if seat.inbox is not None:
                    seat.inbox.replaced = True  # a push that broke off, and is not known to have
                seat.inbox = inbox
            return inbox

    def _check_turn(self, seat: Seat, worker: int, sequence: int) -> None:
        if self._offers is not None:
            raise regather()
        if sequence != seat.clock:
            raise RefusedError(
                "stale" if sequence < seat.clock else "ahead",
                f"worker {worker} pushes exchange {sequence}, it is at {seat.clock}",
                resume_at=seat.clock,
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
        with self.receive(push.worker, push.incarnation, push.sequence) as inbox:
            for slot, frame in enumerate(push.frames):
                inbox.add(slot, frame, deadline=deadline)
            reply = inbox.finish(push.score, deadline=deadline)
            return Reply(reply.sequence, tuple(reply.frames), reply.ticket)  # when all of it is there

    def _check_number(self, worker: int) -> None:
        if not 0 <= worker < self.job.workers:
            raise RefusedError("worker", f"workers are 0 to {self.job.workers - 1}, there is no {worker}")

    def _seat_of(self, worker: int, incarnation: int) -> Seat:
        self._check_number(worker)
        seat = self._seats[worker]
        if incarnation > seat.incarnation:
            raise regather()  # it was welcomed by a server that this one has taken the place of
        if incarnation != seat.incarnation:
            raise seat.replaced(worker, incarnation)
        return seat

    def finish(self, inbox: Inbox, push: Push, deadline: float) -> Reply:
        """What a complete push leads to."""
        if self.job.mode != "sync":
            return self._pieces.exchange(inbox, push, self._seat_of, deadline)
        self._rounds.take(inbox, push)
        with self._hall.changed:
            seat = self._seat_of(push.worker, push.incarnation)
            this = inbox.of_round
            self._hall.wait(
                lambda: (
                    seat.clock > push.sequence
                    or this is not self._rounds.this
                    or push.worker in this.faults
                    or self._deposits.asks(push.worker)
                ),
                deadline,
                inbox.alive,
                self._rounds.missing,
            )
            if seat.clock <= push.sequence and this is self._rounds.this and self._deposits.asks(push.worker):
                raise RefusedError("deposit", "somebody needs the weights of this exchange")
            if push.worker in this.faults:
                raise RefusedError("spoilt", str(this.faults[push.worker]))  # sent again, it would be so again
            if seat.clock <= push.sequence:
                raise regather()
            return self._told(seat, push.sequence)

    def _told(self, seat: Seat, sequence: int) -> Reply:
        """What all were told of an update. Who missed some of them cannot go on with the change that the last made."""
        if seat.reply is None or (seat.reply.sequence != sequence + 1 and self.job.returns != "weights"):
            raise RefusedError("stale", f"the others are at exchange {seat.clock}", resume_at=seat.clock)
        return seat.reply

    def add_part(self, inbox: Inbox, slot: int, frame: Frame) -> None:
        """A slot's integers, which are added right away."""
        self._rounds.add_part(inbox, slot, frame)

    def settle(self) -> None:
        """Wait until no update is being made. Not for ``on_update``, which is part of one."""
        self._rounds.settle()

    def answer_again(self, inbox: Inbox, deadline: float) -> Reply:
        """The answer to a push that was applied before."""
        with self._hall.changed:
            seat = self._seat_of(inbox.worker, inbox.incarnation)
            self._hall.event("duplicate", worker=inbox.worker, sequence=inbox.sequence)
            if self.job.mode == "sync":
                return self._told(seat, inbox.sequence)
            if seat.inbox is not None:  # it has begun the next one, so it has had the answer
                raise RefusedError("stale", f"worker {inbox.worker} is at {seat.clock} already", resume_at=seat.clock)
            return self._pieces.pull(inbox, seat, deadline)

    # --------------------------------------------------------------------------------------------------------- memory

    @property
    def in_memory(self) -> int:
        """Bytes of pushes that wait for their turn."""
        return self._room.used

    def reserve(self, inbox: Inbox, nbytes: int, deadline: float) -> None:
        """Wait for room, unless it is this worker that the others wait for."""
        self._room.reserve(inbox, nbytes, deadline)

    def release(self, inbox: Inbox, nbytes: int) -> None:
        with self._hall.changed:
            self._seats[inbox.worker].let_go(inbox)
            self._room.let_go(inbox)
            self._room.used -= nbytes
            self._hall.changed.notify_all()

    def wake(self) -> None:
        """Have everybody who waits look again."""
        self._hall.wake()


def _listed(workers: Any) -> str:
    return ", ".join(map(str, workers)) or "nobody"
