"""The server without its network: who may push, what a push does, and what comes back.

One lock guards everything; handlers of many workers call ``exchange`` from threads of their own and wait in it. What
happens is written to a history, event by event, so that the promises can be checked afterwards from the outside:

- P1: an acknowledged push is applied exactly once. A push is known by worker, incarnation and sequence number.
- P3: with ``bounded:S`` no worker computes on parameters that lack a push older than S iterations.
- P5: nothing malformed, of another shape, of an older incarnation, or not finite changes the parameters.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from laconic import aggregate
from laconic.channels import Channel
from laconic.cluster.job import Job, Slots
from laconic.errors import FrameError, LaconicError
from laconic.frames import decode, encode

__all__ = ["Contribution", "Core", "Optimizer", "RefusedError", "Reply"]

History = Callable[[dict[str, Any]], None]


class RefusedError(LaconicError):
    """A worker's request that cannot be served; ``reason`` is a word, the message a line for people.

    ``resume_at`` is set when the worker must fetch the parameters and go on from another iteration.
    """

    def __init__(self, reason: str, message: str, *, resume_at: int | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.resume_at = resume_at


class Optimizer(Protocol):
    """Changes parameters in place by a gradient; deterministic, with a state that can be saved."""

    def step(self, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor], *, lr: float) -> None: ...
    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...


@dataclass(frozen=True)
class Contribution:
    """What a worker pushes for one exchange.

    Args:
        worker: Its number.
        incarnation: Grows with each start of that worker.
        sequence: The exchange it is for, from 0 on.
        frames: One per slot, in the slots' order.
        score: With ``after=best``: its loss on held-out data.
    """

    worker: int
    incarnation: int
    sequence: int
    frames: Sequence[bytes]
    score: float = 0.0


@dataclass(frozen=True)
class Reply:
    """What comes back: the number of the next exchange, and a frame per slot."""

    sequence: int
    frames: tuple[bytes, ...]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.frames))


@dataclass
class _Seat:
    """A worker's place: who sits there, and how far it is."""

    incarnation: int = -1
    clock: int = 0
    """Exchanges it has had answered."""
    reply: Reply | None = None
    shadow: dict[str, Tensor] = field(default_factory=dict)
    """The weights it holds, where it is sent their changes."""
    channel: Channel | None = None
    present: bool = False


class Core:
    """Parameters, optimizer, rounds and seats.

    Args:
        job: What was agreed.
        parameters: Float32 tensors by name; changed in place.
        optimizer: Takes the steps.
        rate: The learning rate of an update, by its number.
        history: Told every event as a dict; None keeps none.
    """

    def __init__(
        self,
        job: Job,
        parameters: Mapping[str, Tensor],
        optimizer: Optimizer,
        rate: Callable[[int], float],
        history: History | None = None,
    ) -> None:
        self.job = job
        self.slots = Slots.of(parameters)
        self.parameters = {name: x.detach().to(torch.float32).contiguous() for name, x in parameters.items()}
        self.optimizer, self.rate = optimizer, rate
        self.version = 0
        """Updates applied so far; in a synchronous job also the number of the round."""
        self._tell = history or (lambda event: None)
        self._seats = [_Seat() for _ in range(job.workers)]
        self._round: dict[int, Contribution] = {}
        self._reply: Reply | None = None
        self._channel = Channel(job.pull)
        self._changed = threading.Condition(threading.RLock())
        self._on_update: list[Callable[[int], None]] = []

    # -------------------------------------------------------------------------------------------------- membership

    def welcome(self, worker: int, incarnation: int, fingerprint: str) -> dict[str, Any]:
        """Seat a worker; what it must know to begin. ``RefusedError`` when it does not belong here."""
        with self._changed:
            if not 0 <= worker < self.job.workers:
                raise RefusedError("worker", f"workers are 0 to {self.job.workers - 1}, there is no {worker}")
            if fingerprint != self.slots.fingerprint:
                raise RefusedError(
                    "model",
                    f"worker {worker} trains another model than the server (fingerprint {fingerprint}, expected "
                    f"{self.slots.fingerprint}): start both with the same --model or script",
                )
            seat = self._seats[worker]
            if incarnation < seat.incarnation:
                raise RefusedError(
                    "incarnation", f"worker {worker} of incarnation {incarnation} was replaced by {seat.incarnation}"
                )
            if incarnation > seat.incarnation:
                seat.incarnation = incarnation
                seat.shadow, seat.channel, seat.reply = {}, None, None
                # A round goes on without what an earlier life had pushed for it: the new one pushes the same again.
                if self.job.mode == "sync":
                    seat.clock = self.version
            seat.present = True
            self._event("welcome", worker=worker, incarnation=incarnation, clock=seat.clock)
            self._changed.notify_all()
            return {"sequence": seat.clock, "version": self.version, "job": self.job.to_json()}

    def leave(self, worker: int, incarnation: int) -> None:
        """A worker has gone: nobody waits for it any more where waiting is a choice."""
        with self._changed:
            seat = self._seats[worker]
            if seat.incarnation == incarnation and seat.present:
                seat.present = False
                self._event("leave", worker=worker, incarnation=incarnation)
                self._changed.notify_all()

    def snapshot(self, worker: int) -> Reply:
        """All weights as they are, for a worker that (re)joins; from here on it is known to hold them.

        Where workers take the steps themselves, the optimizer's memory follows: a second frame for every slot.
        """
        with self._changed:
            seat = self._seats[worker]
            if self.job.returns == "delta":
                seat.shadow = {name: x.clone() for name, x in self.parameters.items()}
            tensors = list(self.parameters.values())
            if self.job.returns == "gradients":
                memory = self.optimizer.state_dict()
                tensors += [memory.get(name, torch.zeros_like(x)) for name, x in self.parameters.items()]
            return Reply(seat.clock, tuple(encode(x, "none") for x in tensors))

    def on_update(self, call: Callable[[int], None]) -> None:
        """Have ``call(version)`` called after each update, before anybody is told of it."""
        self._on_update.append(call)

    def finished(self, exchanges: int) -> bool:
        """Whether every worker has had that many exchanges."""
        return all(seat.clock >= exchanges for seat in self._seats)

    def all_gone(self) -> bool:
        return not any(seat.present for seat in self._seats)

    # ------------------------------------------------------------------------------------------------------- state

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that must survive: tensors by name, and numbers."""
        with self._changed:
            tensors = {f"parameter/{name}": x.clone() for name, x in self.parameters.items()}
            tensors |= {f"optimizer/{name}": x for name, x in self.optimizer.state_dict().items()}
            tensors |= {f"channel/{name}": x for name, x in self._channel.state_dict().items()}
            meta = {
                "version": self.version,
                "fingerprint": self.slots.fingerprint,
                "clocks": [seat.clock for seat in self._seats],
                "incarnations": [seat.incarnation for seat in self._seats],
            }
            return tensors, meta

    def load(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Back to a saved state; ``RefusedError`` when it is another model's."""
        if meta.get("fingerprint") != self.slots.fingerprint:
            raise RefusedError("model", "the checkpoint is of another model: resume with the same --model or script")
        with self._changed:
            parts: dict[str, dict[str, Tensor]] = {"parameter": {}, "optimizer": {}, "channel": {}}
            for key, x in tensors.items():
                part, _, name = key.partition("/")
                parts[part][name] = x
            for name, x in parts["parameter"].items():
                self.parameters[name].copy_(x)
            self.optimizer.load_state_dict(parts["optimizer"])
            self._channel.load_state_dict(parts["channel"])
            self.version = int(meta["version"])
            for seat, clock, incarnation in zip(self._seats, meta["clocks"], meta["incarnations"], strict=True):
                seat.clock, seat.incarnation = int(clock), int(incarnation)

    # ---------------------------------------------------------------------------------------------------- exchange

    def exchange(self, push: Contribution, *, deadline: float) -> Reply:
        """Apply a push, or recognise it as applied; wait until the answer may be given.

        Args:
            push: What came. It is checked as a whole before it changes anything.
            deadline: On ``time.monotonic``'s clock.
        """
        self._check(push)
        with self._changed:
            seat = self._seat_of(push)
            if push.sequence < seat.clock:
                if push.sequence == seat.clock - 1 and seat.reply is not None:
                    self._event("duplicate", worker=push.worker, sequence=push.sequence)
                    return seat.reply
                raise RefusedError(
                    "stale",
                    f"worker {push.worker} pushes exchange {push.sequence}, it is at {seat.clock}",
                    resume_at=seat.clock,
                )
            if push.sequence > seat.clock:
                raise RefusedError(
                    "ahead",
                    f"worker {push.worker} pushes exchange {push.sequence}, it is at {seat.clock}",
                    resume_at=seat.clock,
                )
            if self.job.mode == "sync":
                return self._exchange_sync(push, seat, deadline)
            return self._exchange_async(push, seat, deadline)

    def _seat_of(self, push: Contribution) -> _Seat:
        seat = self._seats[push.worker]
        if push.incarnation != seat.incarnation:
            raise RefusedError(
                "incarnation",
                f"worker {push.worker} of incarnation {push.incarnation} was replaced by {seat.incarnation}",
            )
        return seat

    def _check(self, push: Contribution) -> None:
        """Decode every frame once, for nothing but the certainty that the round cannot fail on it."""
        if not 0 <= push.worker < self.job.workers:
            raise RefusedError("worker", f"there is no worker {push.worker}")
        if len(push.frames) != len(self.slots):
            raise FrameError(f"expected {len(self.slots)} frames, one per slot, got {len(push.frames)}")
        for name, frame in zip(self.slots.names, push.frames, strict=True):
            try:
                decode(frame, like=self.parameters[name])
            except FrameError as error:
                raise FrameError(f"slot {name!r}: {error}") from None

    def _exchange_sync(self, push: Contribution, seat: _Seat, deadline: float) -> Reply:
        if push.worker not in self._round:
            self._round[push.worker] = push
            self._event("push", worker=push.worker, incarnation=push.incarnation, sequence=push.sequence)
        if len(self._round) >= self.job.workers - self.job.backup:
            self._close_round()
        else:
            self._wait(lambda: seat.clock > push.sequence, deadline, f"round {push.sequence}")
        assert seat.reply is not None
        return seat.reply

    def _close_round(self) -> None:
        pushes = [self._round[worker] for worker in sorted(self._round)]  # the same sum whoever came first
        if self.job.after == "best":
            best = min(pushes, key=lambda push: (push.score, push.worker))
            frames = tuple(best.frames)
            self._add(frames)
        else:
            combined = {
                name: aggregate.mean([push.frames[i] for push in pushes]) for i, name in enumerate(self.slots.names)
            }
            frames = self._apply(combined)
        self.version += 1
        reply = Reply(self.version, frames)
        for push in pushes:
            self._event("applied", worker=push.worker, sequence=push.sequence, version=self.version)
        for seat in self._seats:  # those not waited for are answered with the same when they ask
            seat.clock, seat.reply = self.version, reply
        self._round.clear()
        for call in self._on_update:
            call(self.version)
        self._changed.notify_all()

    def _apply(self, combined: Mapping[str, Tensor]) -> tuple[bytes, ...]:
        """One update of the parameters, and the frames that tell of it."""
        if self.job.returns == "gradients":
            # Server and workers take the same step, so it is what was decoded that counts, not what was meant.
            frames = self._encoded(combined)
            self._add(frames)
            return frames
        self._step(combined)
        if self.job.returns == "weights":
            return self._encoded(self.parameters)
        return self._delta(self._seats[0], self._channel)  # all seats hold the same weights

    def _encoded(self, tensors: Mapping[str, Tensor]) -> tuple[bytes, ...]:
        return tuple(self._channel.encode(name, x, seed=self._seed(i)) for i, (name, x) in enumerate(tensors.items()))

    def _add(self, frames: Sequence[bytes]) -> None:
        self._step({name: decode(frame) for name, frame in zip(self.slots.names, frames, strict=True)})

    def _step(self, update: Mapping[str, Tensor]) -> None:
        """A gradient goes through the optimizer; changes of weights are added, weights take the place of weights."""
        if self.job.sends == "gradients":
            self.optimizer.step(self.parameters, update, lr=self.rate(self.version))
            return
        for name, x in update.items():
            if self.job.sends == "changes":
                self.parameters[name].add_(x)
            else:
                self.parameters[name].copy_(x)

    def _delta(self, seat: _Seat, channel: Channel) -> tuple[bytes, ...]:
        frames = []
        for i, name in enumerate(self.slots.names):
            held = seat.shadow.setdefault(name, torch.zeros_like(self.parameters[name]))
            frame = channel.encode(name, self.parameters[name] - held, seed=self._seed(i))
            held.add_(decode(frame))
            frames.append(frame)
        return tuple(frames)

    def _exchange_async(self, push: Contribution, seat: _Seat, deadline: float) -> Reply:
        self._event("push", worker=push.worker, incarnation=push.incarnation, sequence=push.sequence)
        self._step({name: decode(frame) for name, frame in zip(self.slots.names, push.frames, strict=True)})
        self.version += 1
        seat.clock = push.sequence + 1
        self._event("applied", worker=push.worker, sequence=push.sequence, version=self.version)
        for call in self._on_update:
            call(self.version)
        self._changed.notify_all()
        bound = self.job.bound
        if bound is not None:
            self._wait(lambda: seat.clock - self._slowest() <= bound, deadline, f"workers {bound} iterations behind")
        if self.job.returns == "delta":
            seat.channel = seat.channel or Channel(self.job.pull)
            frames = self._delta(seat, seat.channel)
        else:
            frames = self._encoded(self.parameters)
        seat.reply = Reply(seat.clock, frames)
        self._event("pull", worker=push.worker, clock=seat.clock, slowest=self._slowest(), version=self.version)
        return seat.reply

    def _slowest(self) -> int:
        clocks = [seat.clock for seat in self._seats if seat.present]
        return min(clocks) if clocks else 0

    def _wait(self, ready: Callable[[], bool], deadline: float, what: str) -> None:
        if not self._changed.wait_for(ready, max(0.0, deadline - time.monotonic())):
            raise RefusedError("deadline", f"waited too long for {what}")

    def _seed(self, slot: int) -> int:
        return (self.job.seed * 0x9E3779B1 + self.version) * len(self.slots) + slot

    def _event(self, kind: str, **values: Any) -> None:
        self._tell({"event": kind, **values})
