"""A worker: computes gradients, pushes them, applies the replies, and rejoins after a fault.

Gradients are sent while backward runs: a hook notifies a thread that a parameter's gradient is ready, and the thread
encodes and sends it. A step waits only for the rest of the communication after backward, the exposed part.

A worker may have state that the server cannot restore: residuals of its channel, momentum of its local steps. It saves
this state when the server saves checkpoints; after a fault all workers go back to a version that all of them have.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from laconic.cluster.connection import Connection
from laconic.cluster.job import Job
from laconic.cluster.protocol import NOTHING_LEFT
from laconic.cluster.push_buffer import PushBuffer
from laconic.cluster.rejoin import Offer
from laconic.cluster.replies import RefusedError, Reply
from laconic.cluster.weight_uploads import digest_frames
from laconic.cluster.weights import SUBSPACE_RENEWED
from laconic.errors import ConfigError, FileError
from laconic.frames import encode
from laconic.optim import Schedule
from laconic.train.bundling import Layout
from laconic.train.data_shards import Shards
from laconic.train.push_encoder import PushEncoder
from laconic.train.replica import Replica
from laconic.train.reports import Progress, Times
from laconic.train.task import Task
from laconic.wire import Buffer

__all__ = ["StateStore", "Worker"]

log = logging.getLogger("laconic")

FINAL_UPLOAD_DELAY = 5.0
"""Seconds after which another worker uploads the final weights if worker 0 has not."""


class StateStore(Protocol):
    """Where a worker saves state that only it has; ``laconic.cluster.checkpoint.Folder`` implements it."""

    def save(self, step: int, tensors: Mapping[str, Tensor], meta: dict[str, Any]) -> None: ...
    def versions(self) -> Sequence[int]: ...
    def fetch(self, step: int) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]: ...
    def forget(self, after: int) -> None: ...


@dataclass(frozen=True)
class Position:
    """The exchange that a worker is in; in modes async and bounded also the ticket of its work."""

    sequence: int
    ticket: int | None = None


class Worker:
    """One worker of a job, on its own copy of the task.

    Args:
        layout: Mapping of parameters to slots; default: one slot per parameter.
        store: Where to save state that only this worker has; None saves nothing.
    """

    def __init__(
        self, number: int, task: Task, shards: Shards, job: Job, schedule: Schedule, connection: Connection,
        layout: Layout | None = None, store: StateStore | None = None,
    ) -> None:  # fmt: skip
        self.number, self.task, self.job, self.connection = number, task, job, connection
        self._shards, self.store = shards, store
        self.times = Times()
        self.replica = Replica(task, job, schedule, layout)
        slots = self.replica.layout.pack(self.replica.parameters)
        self.encoder = PushEncoder(job, number, slots, self.times)
        self.bytes_received = self._bytes_uploaded = self._uploaded_version = self._compared_version = 0
        self._attempt, self._joined = 0, False
        self._pending: Future[Reply] = Future()
        self._encode_thread = ThreadPoolExecutor(1, thread_name_prefix="laconic-encode")
        self._push_thread = ThreadPoolExecutor(1, thread_name_prefix="laconic-push")

    @property
    def bytes_sent(self) -> int:
        return self.encoder.bytes_sent + self._bytes_uploaded

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return self.replica.parameters

    def run(self, exchanges: int, on_progress: Callable[[Progress], None] | None = None) -> None:
        """Train from the server's position to the end of that many exchanges, or until no work is left."""
        self.encoder.sample_errors(exchanges)
        position = self.join()
        done, progress = 0, None
        while True:
            if position.ticket == NOTHING_LEFT or (position.ticket is None and position.sequence >= exchanges):
                if self.encoder.summing is None or position.ticket == NOTHING_LEFT:
                    break
                if self._upload_final_weights(position.sequence):
                    break
                position = self.join()
                continue
            push = PushBuffer()
            loss = self._iterate(position, push) if self.job.every == 1 else self._iterate_locally(position, push)
            reply = self._await_reply(position, push)
            if isinstance(reply, Position):
                position = reply
                continue
            self._apply(reply)
            position = Position(reply.sequence, reply.ticket)
            self._save_state(position.sequence, last=position.sequence == exchanges)
            done += 1
            if on_progress is not None:
                iteration, raw = position.sequence * self.job.every, done * self.job.every * 8 * self.task.dense_numel
                progress = Progress(iteration, loss, self.bytes_sent, self.bytes_received, raw)
                on_progress(progress)
        if on_progress is not None and progress is not None and progress.bytes_sent < self.bytes_sent:
            on_progress(replace(progress, bytes_sent=self.bytes_sent))

    # ------------------------------------------------------------------------------------------------------- joining

    def join(self, current: int | None = None) -> Position:
        """Agree with all workers on the exchange to continue at, and restore the state of that exchange.

        Args:
            current: The exchange in which this worker is: it can continue there, too.
        """
        status = self.connection.hello()
        if status.over:
            return Position(max(status.versions), NOTHING_LEFT)
        self._attempt += 1
        saved = {0, *(self.store.versions() if self.store is not None else ())}  # version 0 has no state
        if current is not None:
            saved.add(current)
        offered = status.versions & saved if self.job.remembers else status.versions
        sequence, lost = self.connection.join(self._attempt, Offer(offered or status.versions, not offered))
        return Position(sequence) if sequence == current else self._restore(sequence, lost)

    def _restore(self, sequence: int, lost: bool) -> Position:
        """Load the server's weights, its optimizer's state if workers take the same steps, and one's own state."""
        self.encoder.discard_probes()
        summing = self.encoder.summing
        if summing is not None and self._load_all_state(sequence, lost):
            return Position(sequence)
        reply = self.connection.snapshot()
        self.bytes_received += reply.nbytes if summing is not None and sequence else 0  # not the initial weights
        optimizer_state, scale_frames = self.replica.load_snapshot(reply.frames, reply.sequence)
        # Without rounds a worker's own state stays valid wherever the others are.
        fresh = self.job.exact or not self._joined
        self._joined = True
        if optimizer_state and self.job.momentum and self.job.every == 1:
            self.replica.optimizer.load_state_dict(optimizer_state)
        elif fresh:
            self.replica.optimizer.load_state_dict({})
        if summing is not None:
            summing.restart(scale_frames, empty=fresh)
            if fresh and sequence:
                self._warn_lost_state(sequence)
        elif fresh and self.job.remembers:
            self._load_state(sequence, lost)
        return Position(reply.sequence, reply.ticket)

    def _saved_state(self, sequence: int, lost: bool) -> Mapping[str, Tensor] | None:
        """Return the saved state of an exchange, or None; later states are deleted."""
        # Without rounds the others have continued: old residuals would send again what was sent since.
        if self.store is None or lost or not self.job.exact or sequence not in self.store.versions():
            return None
        tensors, _ = self.store.fetch(sequence)
        self.store.forget(sequence)
        return tensors

    def _load_all_state(self, sequence: int, lost: bool) -> bool:
        """With returns=sum: restore weights and everything else of an exchange if they were saved."""
        tensors = self._saved_state(sequence, lost)
        if tensors is None or self.encoder.summing is None:
            return False
        self.replica.set(_with_prefix(tensors, "parameter"))
        self.replica.optimizer.load_state_dict(_with_prefix(tensors, "optimizer"))
        self.encoder.summing.load_state_dict(_with_prefix(tensors, "summands"))
        if self.replica.subspaces is not None:
            self.replica.subspaces.load(_with_prefix(tensors, "resident"), sequence)
        self._joined = True
        return True

    def _load_state(self, sequence: int, lost: bool) -> None:
        tensors = self._saved_state(sequence, lost)
        self.encoder.channel.load_state_dict({} if tensors is None else _with_prefix(tensors, "channel"))
        if tensors is not None and self.job.every > 1:
            self.replica.optimizer.load_state_dict(_with_prefix(tensors, "optimizer"))
        elif tensors is None and sequence:
            self._warn_lost_state(sequence)

    def _warn_lost_state(self, sequence: int) -> None:
        log.warning("worker %d continues at exchange %d with an empty memory", self.number, sequence)

    def _save_state(self, sequence: int, *, last: bool) -> None:
        summing, subspaces = self.encoder.summing, self.replica.subspaces
        if self.store is None or not self.job.remembers or not self.job.exact:
            return
        if sequence % self.job.exchanges_per_checkpoint and not (last and summing is not None):
            return
        parts: dict[str, Mapping[str, Tensor]] = {}
        if summing is None:
            parts["channel"] = self.encoder.channel.state_dict()
        else:
            parts |= {"summands": summing.state_dict(), "parameter": self.replica.tensors()}
            parts["resident"] = {} if subspaces is None else subspaces.tensors()
        if self.job.every > 1 or summing is not None:
            parts["optimizer"] = self.replica.optimizer.state_dict()
        tensors = {f"{prefix}/{name}": x for prefix, part in parts.items() for name, x in part.items()}
        try:
            self.store.save(sequence, tensors, {})
        except FileError as error:
            log.warning("%s: if this worker dies now, all workers go back to an earlier exchange", error)

    # ---------------------------------------------------------------------------------------------------- exchanging

    def _start_push(self, sequence: int, push: PushBuffer) -> None:
        self._pending = self._push_thread.submit(self._push, sequence, push)

    def _push(self, sequence: int, push: PushBuffer) -> Reply:
        if self.encoder.summing is not None:
            due = sequence and sequence % self.job.exchanges_per_checkpoint == 0
            if due and self.number == 0 and self._uploaded_version != sequence:
                self._upload_weights(sequence)
            elif due and self.number:
                self._compare_weights(sequence)
            self.bytes_received += self.encoder.agree_and_encode(self.connection, sequence, push)
        return self.connection.exchange(sequence, push, push.score)

    def _await_reply(self, position: Position, push: PushBuffer) -> Reply | Position:
        """Return the reply to a push, or the position at which to continue instead."""
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
                        self._upload_weights(position.sequence)
                    else:
                        # If scales must be agreed on, all workers repeat the round: otherwise some would wait forever.
                        must_agree = self.encoder.must_agree
                        current = position.sequence if error.reason == "regather" and not must_agree else None
                        joined = self.join(current)
                        if joined != position or must_agree:
                            return joined
                self._start_push(position.sequence, push)
        finally:
            self.times.communication += time.perf_counter() - began

    def _upload_weights(self, sequence: int) -> None:
        frames = [encode(x.cpu(), "none") for x in self.replica.upload_tensors()]
        self.connection.upload_weights(sequence, frames)
        self._bytes_uploaded += sum(map(len, frames))
        self._uploaded_version = sequence

    def _compare_weights(self, sequence: int) -> None:
        """Let the server compare these weights with those that worker 0 uploads."""
        if self.job.exact and self._compared_version != sequence:
            self.connection.compare_weights(
                sequence, digest_frames(self.replica.upload_tensors()[: len(self.replica.slots)])
            )
            self._compared_version = sequence

    def _upload_final_weights(self, sequence: int) -> bool:
        """Upload the final weights, from worker 0 or from the next worker if it fails.

        Returns False if the server has lost its state and all workers must continue from an earlier exchange.
        """
        self.replica.end_local_steps()
        waiting_since = time.monotonic()
        while True:
            status = self.connection.hello()
            if max(status.versions) < sequence:
                return False
            if status.weights == "here":
                if self._uploaded_version != sequence:
                    self._compare_weights(sequence)
                return True
            if status.weights == "coming":
                waiting_since = time.monotonic()
            first = self.number == 0 and self._uploaded_version != sequence
            if first or time.monotonic() > waiting_since + FINAL_UPLOAD_DELAY + self.number:
                try:
                    self._upload_weights(sequence)
                    waiting_since = time.monotonic()  # another worker may have to confirm this upload
                    continue
                except RefusedError as error:
                    log.info("worker %d: %s", self.number, error)
            time.sleep(0.05)

    def _apply(self, reply: Reply) -> None:
        began = time.perf_counter()
        self._receive(reply)
        renewed = self.replica.renew_subspaces(reply.sequence)
        if renewed:
            self.encoder.forget(renewed, SUBSPACE_RENEWED)
        if self.encoder.summing is not None and not self.replica.is_finite():  # the server cannot notice it
            raise ConfigError(f"the weights overflowed at exchange {reply.sequence - 1}: use a smaller --lr")
        self.times.apply += time.perf_counter() - began
        self.bytes_received += reply.nbytes
        for count, frame in zip(self.encoder.counts.values(), reply.frames, strict=True):
            count.received += len(frame)

    @torch.no_grad()
    def _receive(self, reply: Reply) -> None:
        if self.job.reply_kind.is_weights:
            self.replica.load(reply.frames)
            return
        frames: Mapping[str, Buffer] | None = dict(zip(self.replica.slots, reply.frames, strict=True))
        if self.encoder.summing is not None:
            frames = self.encoder.summing.read_reply(dict(zip(self.replica.slots, reply.frames, strict=True)))
        if frames is not None:
            self.replica.apply(frames, reply.sequence)
        elif self.job.every > 1:  # all workers drop this round: the values of one were not finite
            self.replica.undo_local_steps(self.number)

    # ----------------------------------------------------------------------------------------------------- computing

    def _examples(self, position: Position, step: int = 0) -> Tensor:
        """Return the example numbers of a step: a ticket counts the exchanges of all workers."""
        number, exchange = self.number, position.sequence
        if position.ticket is not None:
            exchange, number = divmod(position.ticket, self.job.workers)
        return self._shards.indices(number, exchange * self.job.every + step)

    def _iterate(self, position: Position, push: PushBuffer) -> float:
        """Compute the gradients of one batch; they are sent while backward runs."""
        ready: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.put(name))  # type: ignore[no-untyped-call]
            for name, parameter in self.parameters.items()
        ]
        began = time.perf_counter()
        try:
            self.task.model.zero_grad(set_to_none=True)
            batch = self.task.batch(self._examples(position))
            if not self.encoder.must_agree:
                self._start_push(position.sequence, push)
            encoding = self._encode_thread.submit(self.encoder.fill, push, self._gradients(ready), position.sequence)
            loss = self.task.loss(batch)
            loss.backward()  # type: ignore[no-untyped-call]
        except BaseException as error:
            push.fail(error)
            raise
        finally:
            ready.put(None)
            for hook in hooks:
                hook.remove()
        computed = time.perf_counter()
        first_frame = encoding.result()
        if self.encoder.must_agree:
            self._start_push(position.sequence, push)
        self.times.compute += computed - began
        self.times.communication += time.perf_counter() - computed
        self.times.overlapped += max(0.0, computed - first_frame)
        return float(loss.detach())

    def _gradients(self, ready: queue.SimpleQueue[str | None]) -> Iterator[tuple[str, Tensor]]:
        """Yield the slots of gradients as backward computes them; zeros for parameters that it did not reach."""
        layout = self.replica.layout
        missing = dict.fromkeys(self.parameters)
        while (name := ready.get()) is not None:
            gradient = self.parameters[name].grad
            if name in missing and gradient is not None and not layout.bundled:
                del missing[name]
                yield name, gradient
        rest = {name: _gradient(self.parameters[name]) for name in missing}
        yield from (layout.pack(rest) if layout.bundled else rest).items()

    def _iterate_locally(self, position: Position, push: PushBuffer) -> float:
        """Take several local steps, then push the weights or their changes."""
        began = time.perf_counter()
        self.replica.begin_local_steps()
        loss = torch.zeros(())
        for step in range(self.job.every):
            self.task.model.zero_grad(set_to_none=True)
            loss = self.task.loss(self.task.batch(self._examples(position, step)))
            loss.backward()  # type: ignore[no-untyped-call]
            self.replica.local_step(position.sequence * self.job.every + step)
        score = self.task.judge() if self.job.after == "best" else 0.0
        computed = time.perf_counter()
        self.times.compute += computed - began
        must_agree = self.encoder.must_agree
        if not must_agree:
            self._start_push(position.sequence, push)
        self.encoder.fill(push, self.replica.local_result().items(), position.sequence, score)
        if must_agree:
            self._start_push(position.sequence, push)
        self.times.communication += time.perf_counter() - computed
        return float(loss.detach())


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _with_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{prefix}/"): x for name, x in tensors.items() if name.startswith(f"{prefix}/")}
