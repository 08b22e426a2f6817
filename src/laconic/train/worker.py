"""A worker: take a batch, compute, send, receive, go on.

Gradients leave as backward produces them: a hook tells a thread that a parameter's gradient is ready, and it encodes
and sends it while backward goes on. What is left of communication after backward is the exposed part, which is all
that a step waits for.

A worker may remember more than the server can tell it: residuals of its channel, momentum of its own steps. It keeps
that beside the server's checkpoints, and when somebody was lost, all go back to a version that everybody remembers.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from laconic.cluster.connection import Connection
from laconic.cluster.homomorphic.worker import SummingWorker, scale_frame
from laconic.cluster.job import Job
from laconic.cluster.protocol import NOTHING_LEFT, Frame
from laconic.cluster.push_buffer import PushBuffer
from laconic.cluster.rejoin import Offer
from laconic.cluster.replies import RefusedError, Reply
from laconic.cluster.weights import SUBSPACE_RENEWED
from laconic.errors import FileError
from laconic.frames import decode, encode
from laconic.kernels import random
from laconic.optim import SGD, Schedule
from laconic.train.bundling import Layout
from laconic.train.data_shards import Shards
from laconic.train.metrics import SlotCount, relative_error
from laconic.train.subspace_state import Residents
from laconic.train.task import Task
from laconic.wire import Buffer

__all__ = ["Memory", "Progress", "Times", "Worker"]

log = logging.getLogger("laconic")

SEEDS = 401
"""Stream of the seed that frames' seeds come from."""
ERRORS = 5
"""Exchanges of a run in which what encoding loses is measured, about: frames are decoded again for it."""
LATEST = 5.0
"""Seconds after which another worker hands in the last weights when worker 0 has not."""


class Memory(Protocol):
    """Where a worker keeps what only it remembers; ``laconic.cluster.checkpoint.Folder`` is one."""

    def save(self, step: int, tensors: Mapping[str, Tensor], meta: dict[str, Any]) -> None: ...
    def versions(self) -> Sequence[int]: ...
    def fetch(self, step: int) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]: ...
    def forget(self, after: int) -> None: ...


@dataclass
class Times:
    """Seconds of a worker.

    Args:
        compute: Forward, backward, steps of its own, and judging.
        encode: Making frames; runs beside backward where it can.
        communication: What it waited for after computing: the exposed part.
        overlapped: What went on beside computing, from the first frame on.
        apply: Decoding what came and taking it over.
    """

    compute: float = 0.0
    encode: float = 0.0
    communication: float = 0.0
    overlapped: float = 0.0
    apply: float = 0.0


@dataclass(frozen=True)
class Progress:
    """After an exchange. ``bytes_raw`` is what 32 bits a value both ways, every iteration, would have taken."""

    iteration: int
    loss: float
    bytes_sent: int
    bytes_received: int
    bytes_raw: int


@dataclass(frozen=True)
class At:
    """Where a worker is: the exchange it is in, and the piece of work where pieces are handed out."""

    sequence: int
    ticket: int | None = None


@dataclass
class Worker:
    """One worker of a job, on its own copy of the task.

    Args:
        number: Its number.
        task: What it trains.
        shards: Which examples are its own.
        job: What was agreed.
        schedule: The learning rate.
        link: Its connection.
        layout: How parameters become slots; each its own by default.
        memory: Where to keep what only this worker remembers; None keeps nothing.
    """

    number: int
    task: Task
    shards: Shards
    job: Job
    schedule: Schedule
    link: Connection
    layout: Layout | None = None
    memory: Memory | None = None
    times: Times = field(default_factory=Times)
    bytes_sent: int = 0
    bytes_received: int = 0

    def __post_init__(self) -> None:
        self.parameters = {name: p for name, p in self.task.model.named_parameters() if p.requires_grad}
        self._layout = self.layout or Layout.of(self.parameters)
        packed = self._layout.pack(self.parameters)
        self.slots = {name: i for i, name in enumerate(packed)}
        self.counts = {name: SlotCount(x.numel()) for name, x in packed.items()}
        self._errors_every = ERRORS
        self.channel = self.job.push_channel()
        self.summands: SummingWorker | None = None
        if not self.job.reply_kind.server_has_weights:
            self.summands = SummingWorker(self.job, self.number, packed)
        self._unsettled: dict[str, Tensor] = {}
        """Scales of a round whose workers settle them before they push."""
        self._deposited = 0
        self.optimizer = SGD(momentum=self.job.momentum, weight_decay=self.job.weight_decay)
        self._residents = Residents.of(self.task.model, self.job, self.schedule, bundled=self._layout.bundled)
        self._base: dict[str, Tensor] = {}
        self._attempt, self._begun = 0, False
        self._pending: Future[Reply] = Future()
        self._raw = 8 * self.task.dense_numel
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="laconic-encode")
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="laconic-push")

    # ------------------------------------------------------------------------------------------------------- running

    def run(self, exchanges: int, tell: Callable[[Progress], None] | None = None) -> None:
        """From where the server says to the end of that many exchanges, or until no work is left."""
        self._errors_every = max(ERRORS, exchanges // ERRORS)
        at = self.join()
        done, progress = 0, None
        while True:
            if at.ticket == NOTHING_LEFT or (at.ticket is None and at.sequence >= exchanges):
                if self.summands is None or at.ticket == NOTHING_LEFT or self._hand_in(at.sequence):
                    break
                at = self.join()
                continue
            outbox = PushBuffer()
            loss = self._iterate(at, outbox) if self.job.every == 1 else self._iterate_locally(at, outbox)
            reply = self._answer(at, outbox)
            if isinstance(reply, At):
                at = reply
                continue
            began = time.perf_counter()
            self._receive(reply)
            if self._residents is not None:
                self._renew(self._residents, reply.sequence)
            self.times.apply += time.perf_counter() - began
            self.bytes_received += reply.nbytes
            for count, frame in zip(self.counts.values(), reply.frames, strict=True):
                count.received += len(frame)
            at = At(reply.sequence, reply.ticket)
            self._remember(at.sequence, last=at.sequence == exchanges)
            done += 1
            if tell is not None:
                raw = done * self.job.every * self._raw
                progress = Progress(at.sequence * self.job.every, loss, self.bytes_sent, self.bytes_received, raw)
                tell(progress)
        if tell is not None and progress is not None and progress.bytes_sent < self.bytes_sent:
            tell(replace(progress, bytes_sent=self.bytes_sent))

    def join(self, current: int | None = None) -> At:
        """Agree with all others from where to go on, and be there.

        Args:
            current: The exchange that this worker is in the middle of: it can go on from there, too.
        """
        standing = self.link.hello()
        if standing.over:
            return At(max(standing.versions), NOTHING_LEFT)
        self._attempt += 1
        remembered = {0, *(self.memory.versions() if self.memory is not None else ())}  # nothing is remembered of 0
        if current is not None:
            remembered.add(current)
        offered = standing.versions & remembered if self.job.remembers else standing.versions
        lost = not offered
        sequence, lost = self.link.join(self._attempt, Offer(offered or standing.versions, lost))
        return At(sequence) if sequence == current else self._go_back(sequence, lost)

    def _go_back(self, sequence: int, lost: bool) -> At:
        """Take over the server's weights, its optimizer's memory where workers take the same steps, and one's own."""
        self._unsettled = {}
        if self.summands is not None and self._recall_all(sequence, lost):
            return At(sequence)
        reply = self.link.snapshot()
        self.bytes_received += reply.nbytes if self.summands is not None and sequence else 0  # not where others begin
        count = len(self.slots)
        self._load(reply.frames[:count])
        memory = dict(zip(self.slots, map(decode, reply.frames[count : 2 * count]), strict=False))
        rest = reply.frames[2 * count :]
        if self._residents is not None:
            self._residents.load(dict(zip(self.slots, map(decode, rest[:count]), strict=True)), reply.sequence)
            rest = rest[count:]
        anew = self.job.exact or not self._begun  # without rounds what it remembers stays true wherever the others are
        self._begun = True
        if memory and self.job.momentum and self.job.every == 1:
            self.optimizer.load_state_dict(memory)
        elif anew:
            self.optimizer.load_state_dict({})
        if self.summands is not None:
            self.summands.restart(rest, empty=anew)
            if anew and sequence:
                self._say_forgotten(sequence)
        elif anew and self.job.remembers:
            self._recall(sequence, lost)
        return At(reply.sequence, reply.ticket)

    def _recall_all(self, sequence: int, lost: bool) -> bool:
        """Where workers hold the weights: be where one was at an exchange, if it is remembered."""
        if self.memory is None or lost or not self.job.exact or sequence not in self.memory.versions():
            return False
        assert self.summands is not None
        tensors, _ = self.memory.fetch(sequence)
        self._set(_part(tensors, "parameter"))
        self.optimizer.load_state_dict(_part(tensors, "optimizer"))
        self.summands.load_state_dict(_part(tensors, "summands"))
        if self._residents is not None:
            self._residents.load(_part(tensors, "resident"), sequence)
        self.memory.forget(sequence)
        self._begun = True
        return True

    def _recall(self, sequence: int, lost: bool) -> None:
        self.channel.load_state_dict({})
        # Without rounds others went on meanwhile: an old memory would send again what was sent since.
        if self.job.exact and self.memory is not None and not lost and sequence in self.memory.versions():
            tensors, _ = self.memory.fetch(sequence)
            self.channel.load_state_dict(_part(tensors, "channel"))
            if self.job.every > 1:
                self.optimizer.load_state_dict(_part(tensors, "optimizer"))
            self.memory.forget(sequence)
        elif sequence:
            self._say_forgotten(sequence)

    def _renew(self, residents: Residents, sequence: int) -> None:
        """Momentum and what was not sent pointed along directions that some slots no longer have."""
        if self.job.reply_kind.workers_step:  # otherwise the server did, before it told of its weights
            self.optimizer.spend(self._tensors(), residents.spending(), lr=self.schedule(sequence))
        slots = residents.after(sequence)
        self.optimizer.forget(slots)
        self.channel.forget(slots, SUBSPACE_RENEWED)
        if self.summands is not None:
            self.summands.forget(slots, SUBSPACE_RENEWED)

    def _say_forgotten(self, sequence: int) -> None:
        log.warning(
            "worker %d goes on at exchange %d with an empty memory: what it had not sent is lost", self.number, sequence
        )

    def _remember(self, sequence: int, *, last: bool = False) -> None:
        if self.memory is None or not self.job.remembers or not self.job.exact:
            return
        if sequence % self.job.exchanges_per_checkpoint and not (last and self.summands is not None):
            return
        tensors = {f"channel/{name}": x for name, x in self.channel.state_dict().items()}
        if self.summands is not None:
            tensors = {f"summands/{name}": x for name, x in self.summands.state_dict().items()}
            tensors |= {f"parameter/{name}": x for name, x in self._tensors().items()}
            if self._residents is not None:
                tensors |= {f"resident/{name}": x for name, x in self._residents.tensors().items()}
        if self.job.every > 1 or self.summands is not None:
            tensors |= {f"optimizer/{name}": x for name, x in self.optimizer.state_dict().items()}
        try:
            self.memory.save(sequence, tensors, {})
        except FileError as error:
            log.warning("%s: if this worker is lost now, all go back to an earlier exchange", error)

    def _answer(self, at: At, outbox: PushBuffer) -> Reply | At:
        """What comes back for a push that is on its way, or where to go on instead."""
        began = time.perf_counter()
        try:
            while True:
                try:
                    return self._pending.result()
                except RefusedError as error:
                    if error.reason not in ("regather", "stale", "ahead", "deposit"):
                        raise
                    log.info("worker %d: %s", self.number, error)
                    if error.reason == "deposit":
                        self._deposit(at.sequence)
                    else:
                        # In a round whose scales must be settled all begin again: else some would wait for the others.
                        settles = self._settles
                        there = self.join(at.sequence if error.reason == "regather" and not settles else None)
                        if there != at or settles:
                            return there
                self._pending = self._send(at.sequence, outbox)
        finally:
            self.times.communication += time.perf_counter() - began

    def _send(self, sequence: int, outbox: PushBuffer) -> Future[Reply]:
        return self._sender.submit(self._push, sequence, outbox)

    def _push(self, sequence: int, outbox: PushBuffer) -> Reply:
        if self.summands is not None:
            due = self.number == 0 and sequence % self.job.exchanges_per_checkpoint == 0
            if due and sequence and self._deposited != sequence:
                self._deposit(sequence)
            if self._unsettled:
                self._settle(sequence, outbox)
        return self.link.exchange(sequence, outbox, outbox.score)

    # ------------------------------------------------------------------------------- where workers hold the weights

    def _settle(self, sequence: int, outbox: PushBuffer) -> None:
        """Agree on scales, then encode."""
        assert self.summands is not None
        scales = [scale_frame(self._unsettled[name]) for name in self.slots]
        agreed = self.link.agree_scales(sequence, scales)
        self.bytes_sent += sum(map(len, scales))
        self.bytes_received += sum(map(len, agreed))
        for (name, slot), frame in zip(self.slots.items(), agreed, strict=True):
            settled = self.summands.read_scales(name, frame)
            message = self.summands.encode_on(
                name, self._unsettled[name], settled, seed=self._round_seed(name, sequence)
            )
            self.bytes_sent += len(message)
            self.counts[name].sent += len(message)
            outbox.put(slot, message)
        self._unsettled = {}
        outbox.end()

    def _deposit(self, sequence: int) -> None:
        """The weights of this exchange, as they were before one's own steps, and the optimizer's memory."""
        weights = self._base if self.job.every > 1 and self._base else self._tensors()
        tensors = list(self._layout.pack(weights).values())
        if (self.job.every == 1 and self.job.momentum) or self._residents is not None:
            memory = self.optimizer.state_dict() if self.job.every == 1 else {}  # of own steps it is one's own
            tensors += [
                memory.get(name, torch.zeros_like(x)) for name, x in zip(self.slots, list(tensors), strict=True)
            ]
        if self._residents is not None:
            held = self._residents.tensors()
            tensors += [held.get(name, torch.zeros(1)) for name in self.slots]
        frames = [encode(x.cpu(), "none") for x in tensors]
        self.link.upload_weights(sequence, frames)
        self.bytes_sent += sum(map(len, frames))
        self._deposited = sequence

    def _hand_in(self, sequence: int) -> bool:
        """The last weights go to the server: from worker 0, or from whoever is left when it fails to.

        False when the server has lost what it had, and all must go on from an earlier exchange.
        """
        self._base, since = {}, time.monotonic()
        while True:
            standing = self.link.hello()
            if max(standing.versions) < sequence:
                return False
            if standing.weights == "here":
                return True
            if standing.weights == "coming":
                since = time.monotonic()
            if self.number == 0 or time.monotonic() > since + LATEST + self.number:
                try:
                    self._deposit(sequence)
                except RefusedError as error:
                    log.info("worker %d: %s", self.number, error)
            else:
                time.sleep(0.05)

    # --------------------------------------------------------------------------------------------------- iterations

    def _examples(self, at: At, step: int = 0) -> Tensor:
        """The examples of a step: those of this worker, or of whichever worker's share the ticket is."""
        number, exchange = (self.number, at.sequence) if at.ticket is None else _share(at.ticket, self.job.workers)
        return self.shards.indices(number, exchange * self.job.every + step)

    def _iterate(self, at: At, outbox: PushBuffer) -> float:
        """One batch; its gradient leaves while it is computed."""
        ready: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.put(name))  # type: ignore[no-untyped-call]
            for name, parameter in self.parameters.items()
        ]
        began = time.perf_counter()
        try:
            self.task.model.zero_grad(set_to_none=True)
            batch = self.task.batch(self._examples(at))
            if not self._settles:
                self._pending = self._send(at.sequence, outbox)
            encoding = self._encoder.submit(self._fill, outbox, self._gradients(ready), at.sequence)
            loss = self.task.loss(batch)
            loss.backward()  # type: ignore[no-untyped-call]
        except BaseException as error:
            outbox.fail(error)
            raise
        finally:
            ready.put(None)
            for hook in hooks:
                hook.remove()
        computed = time.perf_counter()
        first = encoding.result()
        if self._settles:
            self._pending = self._send(at.sequence, outbox)
        self.times.compute += computed - began
        self.times.communication += time.perf_counter() - computed
        self.times.overlapped += max(0.0, computed - first)
        return float(loss.detach())

    def _gradients(self, ready: queue.SimpleQueue[str | None]) -> Iterator[tuple[str, Tensor]]:
        """Slots of gradients in the order in which backward makes them; zeros for parameters it did not reach."""
        missing = dict.fromkeys(self.parameters)
        while (name := ready.get()) is not None:
            gradient = self.parameters[name].grad
            if name in missing and gradient is not None and not self._layout.bundled:
                del missing[name]
                yield name, gradient
        rest = {name: _gradient(self.parameters[name]) for name in missing}
        yield from (self._layout.pack(rest) if self._layout.bundled else rest).items()

    def _fill(
        self, outbox: PushBuffer, slots: Iterator[tuple[str, Tensor]], sequence: int, score: float = 0.0
    ) -> float:
        """Encode slots into the outbox; when the first was there."""
        first = 0.0
        if self.summands is not None and self.summands.must_agree:
            seeded = ((name, x, self._round_seed(name, sequence)) for name, x in slots)
            self._unsettled = {name: self.summands.probe(name, x.detach(), seed=seed) for name, x, seed in seeded}
            return time.perf_counter()
        try:
            for name, x in slots:
                outbox.put(self.slots[name], self._frame(name, x, sequence))
                first = first or time.perf_counter()
            outbox.end(score)
        except BaseException as error:
            outbox.fail(error)
            raise
        return first

    def _iterate_locally(self, at: At, outbox: PushBuffer) -> float:
        """Several steps of one's own, then the change of the weights (or the weights) leaves."""
        began = time.perf_counter()
        self._base = {name: p.detach().clone() for name, p in self.parameters.items()}
        loss = torch.zeros(())
        for step in range(self.job.every):
            self.task.model.zero_grad(set_to_none=True)
            loss = self.task.loss(self.task.batch(self._examples(at, step)))
            loss.backward()  # type: ignore[no-untyped-call]
            gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
            rate = self.schedule(at.sequence * self.job.every + step)
            self.optimizer.step(self._tensors(), gradients, lr=rate)
        score = self.task.judge() if self.job.after == "best" else 0.0
        computed = time.perf_counter()
        self.times.compute += computed - began
        if not self._settles:
            self._pending = self._send(at.sequence, outbox)
        self._fill(outbox, iter(self._layout.pack(self._changes()).items()), at.sequence, score)
        if self._settles:
            self._pending = self._send(at.sequence, outbox)
        self.times.communication += time.perf_counter() - computed
        return float(loss.detach())

    def _changes(self) -> dict[str, Tensor]:
        weights = self._tensors()
        if self.job.sends == "weights":
            return weights
        return {name: x - self._base[name] for name, x in weights.items()}

    @property
    def _settles(self) -> bool:
        """Whether workers agree on scales in this round before they push."""
        return self.summands is not None and self.summands.must_agree

    def _round_seed(self, name: str, sequence: int, worker: int = 0) -> int:
        """The same for all workers, unless one is named."""
        key = random.key(self.job.seed, SEEDS)
        return random.splitmix64(
            key ^ random.splitmix64((sequence * self.job.workers + worker) << 20 | self.slots[name])
        )

    def _frame(self, name: str, x: Tensor, sequence: int) -> Frame:
        began = time.perf_counter()
        frame: Frame
        if self.summands is not None:
            frame = self.summands.encode(name, x.detach(), seed=self._round_seed(name, sequence))
        else:
            frame = self.channel.encode(name, x.detach(), seed=self._round_seed(name, sequence, worker=self.number))
        self.bytes_sent += len(frame)
        self.counts[name].sent += len(frame)
        self.times.encode += time.perf_counter() - began
        if self.summands is None and sequence % self._errors_every == 0:
            error = relative_error(x.detach(), decode(frame, device=x.device), self.channel.residual(name))
            self.counts[name].errors += [] if error is None else [error]
        return frame

    # ----------------------------------------------------------------------------------------------------- receiving

    @torch.no_grad()
    def _receive(self, reply: Reply) -> None:
        if self.job.reply_kind.is_weights:
            self._load(reply.frames)
            return
        told: Mapping[str, Buffer] | None = dict(zip(self.slots, reply.frames, strict=True))
        if self.summands is not None:
            told = self.summands.read_reply(dict(zip(self.slots, reply.frames, strict=True)))
            if told is None:
                self._drop()
                return
        assert told is not None
        if self.job.reply_kind.workers_step and self.job.every == 1:
            self._follow(told, self.schedule(reply.sequence - 1))
            return
        decoded = self._layout.unpack({name: decode(frame, device=self.task.device) for name, frame in told.items()})
        for name, change in decoded.items():
            weights = self.parameters[name]
            if self.job.every > 1:
                weights.copy_(self._base[name])
            weights.add_(change)

    def _drop(self) -> None:
        """All workers drop this round: somebody's values were not finite. Steps of one's own are taken back."""
        if self.job.every == 1:
            return
        for name, x in self._base.items():
            self.parameters[name].copy_(x)
        memory = self.optimizer.state_dict()
        if not all(bool(torch.isfinite(x).all()) for x in memory.values()):
            log.warning("worker %d: its momentum is not finite and begins anew", self.number)
            self.optimizer.load_state_dict({})

    def _follow(self, frames: Mapping[str, Buffer], rate: float) -> None:
        """Take the step that the server has taken."""
        slots = self._layout.pack(self.parameters)
        self.optimizer.step_frames(slots, frames, lr=rate)
        if self._layout.bundled:  # else they are the parameters themselves
            for name, x in self._layout.unpack(slots).items():
                self.parameters[name].copy_(x)

    @torch.no_grad()
    def _load(self, frames: Sequence[Frame]) -> None:
        told = (decode(frame, device=self.task.device) for frame in frames)
        self._set(self._layout.unpack(dict(zip(self.slots, told, strict=True))))

    @torch.no_grad()
    def _set(self, weights: Mapping[str, Tensor]) -> None:
        for name, x in weights.items():
            self.parameters[name].copy_(x)

    def _tensors(self) -> dict[str, Tensor]:
        return {name: parameter.data for name, parameter in self.parameters.items()}


def _share(ticket: int, workers: int) -> tuple[int, int]:
    """Whose exchange a ticket is: all tickets are all exchanges of all workers."""
    exchange, number = divmod(ticket, workers)
    return number, exchange


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _part(tensors: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    prefix = f"{part}/"
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
