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
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from laconic.cluster.agreement import Offer, agree
from laconic.cluster.arriving import Arriving
from laconic.cluster.deposits import Deposits
from laconic.cluster.inbox import Inbox
from laconic.cluster.job import Job, Slots
from laconic.cluster.messages import Frame
from laconic.cluster.replies import RefusedError, Reply, regather
from laconic.cluster.rounds import Best, Contribution, Mean, OpenFrame, Push, Round
from laconic.cluster.seats import Seat
from laconic.cluster.sums import Additions, Part, pack_scales, read_scales
from laconic.cluster.tickets import NOTHING_LEFT, Desk
from laconic.cluster.weights import Optimizer, Resident, Weights
from laconic.errors import FileError, FrameError, NonFiniteError
from laconic.frames import decode, encode
from laconic.sums import Sum

__all__ = ["Core", "Vault"]

log = logging.getLogger("laconic")

History = Callable[[dict[str, Any]], None]
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
        self._tell = history or (lambda event: None)
        self._seats = [Seat() for _ in range(job.workers)]
        self._desk = Desk(None if exchanges is None else exchanges * job.workers, job.bound)
        self.failure: str | None = None
        """Why the job cannot go on."""
        self._changed = threading.Condition(threading.RLock())
        self._on_update: list[Callable[[int], None]] = []
        self._memory, self._in_memory = memory, 0
        self._first: Inbox | None = None
        """The push that does not wait for room where there is no turn."""
        self._offers: dict[int, Offer] | None = {} if job.exact else None
        """Of workers that wait to agree; None while a job runs."""
        self._updating = False
        self._updater = ThreadPoolExecutor(1, thread_name_prefix="laconic-update")
        self._sums: list[Tensor] = []
        self._how = job.slot_sums(self.parameters) if job.returns == "sum" else []
        self._rooms: list[Sum] = []
        self._deposits = Deposits()
        self._round = self._new_round()

    @property
    def parameters(self) -> dict[str, Tensor]:
        return self._weights.parameters

    @property
    def resident(self) -> dict[str, Tensor]:
        """What belongs to slots and is not exchanged, by slot."""
        return self._weights.resident

    @property
    def slots(self) -> Slots:
        return self._weights.slots

    @property
    def current_round(self) -> Round:
        return self._round

    @property
    def version(self) -> int:
        """Updates applied so far; in a synchronous job also the number of the round."""
        return self._weights.version

    # -------------------------------------------------------------------------------------------------- membership

    def welcome(self, worker: int, incarnation: int, fingerprint: str) -> dict[str, Any]:
        """Seat a worker; what it must know to begin. ``RefusedError`` when it does not belong here."""
        with self._changed:
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
                self._desk.stop(worker)
                self._changed.notify_all()
                self._event("welcome", worker=worker, incarnation=incarnation, clock=seat.clock)
                if self.job.exact and not self._over:
                    self._gather(f"worker {worker} has come anew")
            return {"version": self.version, "versions": self._versions(), "over": self._over,
                    "weights": self._deposits.standing(whole=self.whole), "job": self.job.to_json()}  # fmt: skip

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
        with self._changed:
            seat = self._seat_of(worker, incarnation)
            self._wait(lambda: seat.answered == attempt, deadline, alive, self._missing_offers)
            return seat.clock, seat.lost

    def offer(self, worker: int, incarnation: int, attempt: int, offer: Offer) -> None:
        """The first half of ``join``: say it, and do not wait."""
        with self._changed:
            self.settle()
            seat = self._seat_of(worker, incarnation)
            if seat.asked == attempt:
                return
            seat.asked, seat.lost = attempt, offer.lost
            if not self.job.exact or self._over:
                seat.answered = attempt
                self._event("join", worker=worker, version=seat.clock, lost=offer.lost)
                return
            self._gather(f"worker {worker} asks where to go on")
            assert self._offers is not None
            self._offers[worker] = offer
            if len(self._offers) == self.job.workers:
                self._agree(self._offers)

    def leave(self, worker: int, incarnation: int) -> None:
        """A worker has gone: nobody waits for it any more where waiting is a choice."""
        with self._changed:
            self._check_number(worker)
            seat = self._seats[worker]
            if seat.incarnation == incarnation and seat.present:
                seat.present = False
                self._desk.give_back(worker)
                self._deposits.give_up(worker)
                self._event("leave", worker=worker, incarnation=incarnation)
                self._changed.notify_all()

    def lost(self, worker: int, incarnation: int) -> None:
        """The connection of a worker broke in the middle of something."""
        with self._changed:
            self._event("lost", worker=worker, incarnation=incarnation)
            self._deposits.give_up(worker)
            self._changed.notify_all()

    def snapshot(
        self, worker: int, incarnation: int, *, deadline: float, alive: Callable[[], bool] = lambda: True
    ) -> Reply:
        """The weights that a worker must hold to go on; from here on it is known to hold them.

        Where workers take the steps themselves, the optimizer's memory follows: a second frame for every slot.
        """
        with self._changed:
            self.settle()
            seat = self._seat_of(worker, incarnation)
            ticket = None
            if self.job.returns == "sum":
                return self._deposited(deadline, alive)
            if self.job.mode != "sync":
                ticket = self._start(worker, seat, deadline, alive)
                seat.reply = None
                if self.job.returns == "delta":
                    seat.held, seat.channel = self._weights.copy(), None
            return Reply(seat.clock, tuple(encode(x, "none") for x in self._weights.snapshot()), ticket)

    def on_update(self, call: Callable[[int], None]) -> None:
        """Have ``call(version)`` called after each update, before anybody is told of it.

        With returns=sum: when the weights of a version have been deposited.
        """
        self._on_update.append(call)

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
        return self.job.returns != "sum" or self._weights.deposited == self.version

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
        if len(scales) != len(self._how):
            raise FrameError(f"expected the scales of {len(self._how)} slots, got {len(scales)}")
        bits = [read_scales(frame, how.num_scales) for frame, how in zip(scales, self._how, strict=True)]
        with self._changed:
            self.settle()
            self._check_turn(self._seat_of(worker, incarnation), worker, sequence)
            this = self._round
            this.settle(worker, bits, self.job.workers - self.job.backup)
            self._changed.notify_all()
            self._wait(
                lambda: this.settled or this is not self._round,
                deadline,
                alive,
                lambda: f"{self.job.workers - self.job.backup - len(this.settling)} workers to tell their scales",
            )
            if not this.settled:
                raise regather()
            return [bytes(pack_scales(one)) for one in this.scales]

    @contextmanager
    def depositing(self) -> Iterator[None]:
        """While a deposit is on its way in."""
        with self._changed:
            self._deposits.coming += 1
        try:
            yield
        finally:
            with self._changed:
                self._deposits.coming -= 1

    def deposit(self, worker: int, incarnation: int, version: int, frames: Sequence[Frame]) -> None:
        """The weights of a version as a worker holds them, and the optimizer's memory: a frame per slot, or two."""
        like = self._weights.like
        if self.job.returns != "sum" or len(frames) not in (len(like), 2 * len(like)):
            raise FrameError(f"{len(frames)} frames are no deposit of {len(like)} slots")
        tensors = [decode(frame, like=x) for frame, x in zip(frames, [*like, *like], strict=False)]
        if not all(bool(torch.isfinite(x).all()) for x in tensors):
            raise FrameError(f"worker {worker} deposits weights that are not finite")
        with self._changed:
            self.settle()
            self._seat_of(worker, incarnation)
            self._deposits.give_up(worker)
            newest = self.version if self.job.exact else self.version - 1  # the last answer is there to catch up with
            if newest <= version <= self.version and version != self._weights.deposited:
                self._weights.deposit(version, tensors)
                self._event("deposit", worker=worker, version=version)
                for call in self._on_update:
                    call(version)
            self._changed.notify_all()

    def _deposited(self, deadline: float, alive: Callable[[], bool]) -> Reply:
        """What a worker goes on with that has lost its weights, or has missed too many sums."""
        newest = self.version if self.job.exact else self.version - 1
        if self.job.exact and self._weights.deposited < newest:
            raise RefusedError("memory", f"no server and no memory holds the weights of exchange {self.version}")
        self._deposits.wanted += 1
        try:
            self._changed.notify_all()
            self._wait(
                lambda: self._weights.deposited >= (self.version if self.job.exact else self.version - 1),
                deadline,
                alive,
                lambda: "a worker to deposit its weights",
            )
        finally:
            self._deposits.wanted -= 1
        frames = [*(encode(x, "none") for x in self._weights.snapshot()), *self._weights.scale_frames()]
        return Reply(self._weights.deposited, tuple(frames))

    # --------------------------------------------------------------------------------------------------- agreement

    def _gather(self, why: str) -> None:
        """Stop, and have all workers say from where they can go on."""
        if self._offers is not None:
            return
        self._offers = {}
        self._void_round()
        self._event("gather", why=why, version=self.version)
        self._changed.notify_all()

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
                self.failure = "workers have lost their weights and nothing holds them: start again without --resume"
                self._changed.notify_all()
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
            self._event("rewound", version=self.version, was=was)
        if self.vault is not None:
            self.vault.forget(self.version)
        for worker, seat in enumerate(self._seats):
            seat.clock, seat.lost, seat.answered = self.version, worker in agreed.lost, seat.asked
            if seat.lost:
                self._event("memory_lost", worker=worker, version=self.version)
        self._event("agreed", version=self.version)
        self._offers = None
        self._changed.notify_all()

    def _missing_offers(self) -> str:
        here = self._offers or {}
        return f"worker {_listed(w for w in range(self.job.workers) if w not in here)} to join"

    # ------------------------------------------------------------------------------------------------------- state

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that must survive: tensors by name, and numbers."""
        with self._changed:
            version = self._weights.deposited if self.job.returns == "sum" else self.version
            meta = {
                "version": version,
                "fingerprint": self.slots.fingerprint,
                "clocks": [min(seat.clock, version) for seat in self._seats],
                "incarnations": [seat.incarnation for seat in self._seats],
                "tickets": self._desk.state(),
            }
            return self._weights.state(), meta

    def load(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Back to a saved state; ``RefusedError`` when it is another model's."""
        if meta.get("fingerprint") != self.slots.fingerprint:
            raise RefusedError("model", "the checkpoint is of another model: resume with the same --model or script")
        with self._changed:
            self._weights.load(tensors, meta)
            self._desk.load(meta["tickets"])
            for seat, clock, incarnation in zip(self._seats, meta["clocks"], meta["incarnations"], strict=True):
                seat.clock, seat.reply = int(clock), None
                seat.incarnation = max(seat.incarnation, int(incarnation))

    # ---------------------------------------------------------------------------------------------------- exchange

    def receive(
        self, worker: int, incarnation: int, sequence: int, *, alive: Callable[[], bool] = lambda: True
    ) -> Inbox:
        """Begin to take a push, or to recognise it as applied."""
        with self._changed:
            seat = self._seat_of(worker, incarnation)
            applied = sequence == seat.clock - 1 and (seat.reply is not None or not self.job.keeps_replies)
            if not applied:
                self._check_turn(seat, worker, sequence)
            inbox = Inbox(self, worker, incarnation, sequence, alive, self._round, applied=applied)
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
        if self._how:
            return Part.of(self._how[slot], frame)
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
            return self._exchange_async(inbox, push, deadline)
        if self.job.returns == "sum":
            self._take_summands(inbox, push)
        elif self.job.backup:
            self._take_some(inbox, push)
        else:
            self._take_all(inbox, push)
        with self._changed:
            seat = self._seat_of(push.worker, push.incarnation)
            this = inbox.of_round
            self._wait(
                lambda: (
                    seat.clock > push.sequence
                    or this is not self._round
                    or push.worker in this.faults
                    or self._deposits.ask(push.worker)
                ),
                deadline,
                inbox.alive,
                self._missing_pushes,
            )
            if self._deposits.asked == push.worker and seat.clock <= push.sequence and this is self._round:
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

    def _missing_pushes(self) -> str:
        missing = (w for w in range(self.job.workers) if w not in self._round.pushed)
        return f"worker {_listed(missing)} to push exchange {self.version}"

    # --------------------------------------------------------------------------------- synchronous, with all workers

    def _new_round(self) -> Round:
        if self.job.mode != "sync":
            return Round(None)
        if self.job.returns == "sum":
            sums = Additions(self._how, self.job.workers - self.job.backup, self._rooms)
            self._rooms = sums.rooms()
            return Round(sums, answer=Arriving(len(self.slots)) if self.job.exact else None)
        like = self._weights.like
        if self.job.after == "best":
            return Round(Best(like))
        mean = Mean(self.slots, like, self.job.workers - self.job.backup, self._sums)
        self._sums = mean.tensors()
        return Round(mean)

    def _void_round(self, *, keep_sums: bool = False) -> None:
        if not keep_sums:
            self._sums, self._rooms = [], []  # there may be something in them, and somebody still adding to them
            if self._round.answer is not None:
                self._round.answer.end(regather())
        self._in_memory -= sum(push.nbytes for push in self._round.waiting.values())
        self._round = self._new_round()
        for seat in self._seats:
            seat.inbox = None

    def _take_all(self, inbox: Inbox, push: Push) -> None:
        with self._changed:
            inbox.check()
            self._put(inbox, push)
        self._sum(inbox.of_round)

    def _take_summands(self, inbox: Inbox, push: Push) -> None:
        """Integers are added in any order; with all workers they have been, as they came."""
        this = inbox.of_round
        with self._changed:
            inbox.check()
            if this is not self._round:  # too late, as a backup worker may be
                self._event("late", worker=push.worker, sequence=push.sequence)
                return
            if this.answer is None and not push.parts:
                return  # it is in the round already
            self._put(inbox, push)
            if this.answer is not None:
                this.waiting.clear()
                if len(this.pushed) == self.job.workers:
                    self._close(this)
                self._changed.notify_all()
                return
        self._sum(this)

    def add_part(self, inbox: Inbox, slot: int, frame: Frame) -> None:
        """One slot's integers, into the sum. Nothing is known of a round before all of it is there."""
        part = Part.of(self._how[slot], frame)
        with self._changed:
            inbox.check()
        total, answer = inbox.of_round.total, inbox.of_round.answer
        assert isinstance(total, Additions) and answer is not None
        message = total.add(slot, inbox.worker, part)
        if message is not None:
            answer.put(message, slot)

    def _put(self, inbox: Inbox, push: Push) -> None:
        """Into the round, once."""
        if push.worker not in inbox.of_round.pushed:
            inbox.of_round.pushed.add(push.worker)
            inbox.of_round.waiting[push.worker] = push
            inbox.hand_over()
            self._let_go(inbox)
            self._event("push", worker=push.worker, incarnation=push.incarnation, sequence=push.sequence)

    def _sum(self, this: Round) -> None:
        """Sum what waits, as far as it is in turn; whoever completes the round closes it."""
        assert this.total is not None
        self.settle()
        while True:
            with self._changed:
                worker = this.next()
                if this is not self._round or this.busy or worker is None:
                    return
                push = this.waiting.pop(worker)
                this.busy = True
            try:
                if isinstance(this.total, Additions):
                    for slot, part in enumerate(push.parts):
                        message = this.total.add(slot, push.worker, part)
                        if message is not None:
                            this.made[slot] = message
                else:
                    this.total.add(push)
            except FrameError as error:
                with self._changed:  # the sum is spoilt: the others must push again
                    self._in_memory -= push.nbytes
                    this.faults[push.worker] = error
                    self._event("spoilt", worker=push.worker, sequence=push.sequence)
                    if this is self._round and self.job.exact:
                        self._gather(f"worker {push.worker} pushed what cannot be read")
                    elif this is self._round:
                        self._void_round()
                    self._changed.notify_all()
                return
            with self._changed:
                this.busy = False
                this.turn += 1
                self._in_memory -= push.nbytes
                if this is self._round and this.turn == self.job.workers - self.job.backup:
                    self._close(this)
                self._changed.notify_all()

    def _close(self, this: Round) -> None:
        """Make the update, in a thread of its own: the answer goes out slot by slot while it is made."""
        assert this.total is not None
        frames = this.answer or Arriving(len(self.slots))
        reply = Reply(self.version + 1, frames)
        for seat in self._seats:  # those not waited for are answered with the same when they ask
            seat.clock, seat.reply = self.version + 1, reply
        self._updating = True
        summed = sorted(this.pushed - this.waiting.keys())
        self._void_round(keep_sums=True)  # the update clears them
        self._changed.notify_all()
        self._updater.submit(self._update, this, summed, frames)

    def _update(self, this: Round, pushed: Sequence[int], frames: Arriving) -> None:
        failure: BaseException | None = None
        total = this.total
        assert total is not None
        try:
            with self._watching():
                if isinstance(total, Additions):
                    made: Iterator[Frame] = iter([this.made[slot] for slot in sorted(this.made)])
                elif isinstance(total, Best) and self.job.returns == "gradients":
                    made = iter(total.frames())  # as they came: nothing more is lost
                    self._weights.step(total.result())
                else:
                    made = self._weights.update(total.result())
                for frame in made:
                    frames.put(frame)
            with self._changed:
                if isinstance(total, Additions):
                    self._weights.agree(total.scales())
                self._weights.version += 1
                self._weights.settle()
                for worker in pushed:
                    self._event("applied", worker=worker, sequence=self.version - 1, version=self.version)
                if self.whole:  # else when somebody deposits them
                    for call in self._on_update:
                        call(self.version)
        except BaseException as error:
            failure = error
            if not isinstance(error, RefusedError):
                log.exception("the server failed to update its weights")
                self.failure = self.failure or f"the server failed to update its weights: {error}"
        finally:
            frames.end(failure)
            if isinstance(total, Mean):
                total.clear()  # for the next round, while workers are busy with this one
            with self._changed:
                self._updating = False
                self._changed.notify_all()

    def settle(self) -> None:
        """Wait until no update is being made. Not for ``on_update``, which is part of one."""
        with self._changed:
            self._changed.wait_for(lambda: not self._updating)

    # --------------------------------------------------------------------------------- synchronous, with some workers

    def _take_some(self, inbox: Inbox, push: Push) -> None:
        """Rounds that do not wait for backup workers. Who is late is a matter of time, so are the bits."""
        if not push.frames:
            return  # it is in the round already
        push.decode(self._weights.like)  # the round cannot fail on it later
        this = inbox.of_round
        assert isinstance(this.total, Mean)
        with self._changed:
            self.settle()
            inbox.check()
            if this is not self._round:  # too late: what it is answered takes it on to the next round
                self._event("late", worker=push.worker, sequence=push.sequence)
                return
            self._put(inbox, push)
            this.total.add(this.waiting.pop(push.worker))
            self._in_memory -= push.nbytes
            if len(this.pushed) == self.job.workers - self.job.backup:
                self._close(this)
            self._changed.notify_all()

    # --------------------------------------------------------------------------------------------------- asynchronous

    def _exchange_async(self, inbox: Inbox, push: Push, deadline: float) -> Reply:
        update = push.decode(self._weights.like)
        with self._changed:
            inbox.check()
            seat = self._seat_of(push.worker, push.incarnation)
            ticket, missed = self._desk.done(push.worker, self.version)
            if ticket == NOTHING_LEFT:
                raise RefusedError("stale", "the worker has no work to push", resume_at=seat.clock)
            self._event("push", worker=push.worker, incarnation=push.incarnation, sequence=push.sequence)
            self._weights.step(update, missed=missed)
            self._weights.version += 1
            seat.clock, seat.reply = push.sequence + 1, None
            self._event(
                "applied",
                worker=push.worker,
                sequence=push.sequence,
                version=self.version,
                ticket=ticket,
                missed=missed,
            )
            inbox.close()
            for call in self._on_update:
                call(self.version)
            self._changed.notify_all()
            return self._pull(inbox, seat, deadline)

    def _start(self, worker: int, seat: Seat, deadline: float, alive: Callable[[], bool]) -> int:
        """The next piece of work, once the worker may have the weights to do it with."""
        self._wait(
            lambda: self._desk.may_start(worker, self.version),
            deadline,
            alive,
            lambda: f"worker {_listed(self._desk.waiting_for(worker))} to push: its gradient would be too old",
        )
        ticket = self._desk.start(worker, self.version)
        self._event("pull", worker=worker, version=self.version, ticket=ticket)
        return ticket

    def _pull(self, inbox: Inbox, seat: Seat, deadline: float) -> Reply:
        """The weights as they are once the worker may have them; or again, what they were for it."""
        if seat.reply is not None:
            return seat.reply
        if self.job.returns == "delta" and not seat.held:
            raise RefusedError("stale", "the worker holds no weights to change", resume_at=seat.clock)
        ticket = self._start(inbox.worker, seat, deadline, inbox.alive)
        seat.channel = seat.channel or self.job.pull_channel()
        with self._watching():
            reply = Reply(seat.clock, self._weights.tell(seat.held, seat.channel), ticket)
        if self.job.keeps_replies:
            seat.reply = reply  # the worker is taken to hold this now: it could not be made again
        return reply

    def answer_again(self, inbox: Inbox, deadline: float) -> Reply:
        """The answer to a push that was applied before."""
        with self._changed:
            seat = self._seat_of(inbox.worker, inbox.incarnation)
            self._event("duplicate", worker=inbox.worker, sequence=inbox.sequence)
            if self.job.mode == "sync":
                return self._told(seat, inbox.sequence)
            if seat.inbox is not None:  # it has begun the next one, so it has had the answer
                raise RefusedError("stale", f"worker {inbox.worker} is at {seat.clock} already", resume_at=seat.clock)
            return self._pull(inbox, seat, deadline)

    # -------------------------------------------------------------------------------------------------------- waiting

    def wake(self) -> None:
        """Have everybody who waits look again."""
        with self._changed:
            self._changed.notify_all()

    def reserve(self, inbox: Inbox, nbytes: int, deadline: float) -> None:
        """Wait for room, unless it is this worker that the others wait for."""
        with self._changed:
            inbox.check()
            self._wait(
                lambda: self._in_memory + nbytes <= self._memory or inbox.gone or self._is_next(inbox),
                deadline,
                inbox.alive,
                lambda: f"{self._in_memory} bytes of other pushes",
            )
            inbox.check()
            self._in_memory += nbytes

    def release(self, inbox: Inbox, nbytes: int) -> None:
        with self._changed:
            self._let_go(inbox)
            self._in_memory -= nbytes
            self._changed.notify_all()

    def _let_go(self, inbox: Inbox) -> None:
        """Nothing more arrives there."""
        seat = self._seats[inbox.worker]
        if seat.inbox is inbox:
            seat.inbox = None
        if self._first is inbox:
            self._first = None

    def _is_next(self, inbox: Inbox) -> bool:
        """Whether it is this push that the others wait for: such a one never waits for room."""
        if self.job.exact and inbox.of_round.ordered:
            return inbox.worker == inbox.of_round.turn
        self._first = self._first or inbox  # whoever runs out of room first, until it is through
        return self._first is inbox

    def _wait(
        self, ready: Callable[[], bool], deadline: float, alive: Callable[[], bool], what: Callable[[], str]
    ) -> None:
        left = max(0.0, deadline - time.monotonic())
        if not self._changed.wait_for(lambda: ready() or not alive() or self.failure is not None, left):
            raise RefusedError("waiting", f"waited for {what()}")
        if self.failure is not None:
            raise RefusedError("diverged", self.failure)
        if not ready():
            raise RefusedError("gone", "the worker has hung up")

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Weights that have overflowed are the end of a job: everybody is told, and they are not kept."""
        try:
            yield
        except NonFiniteError as error:
            with self._changed:
                self.failure = f"the weights overflowed at exchange {self.version}: take a smaller --lr ({error})"
                self._event("diverged", version=self.version)
                self._changed.notify_all()
            raise RefusedError("diverged", self.failure) from None

    def _event(self, kind: str, **values: Any) -> None:
        self._tell({"event": kind, **values})


def _listed(workers: Any) -> str:
    return ", ".join(map(str, workers)) or "nobody"
