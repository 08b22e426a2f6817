"""A worker: take a batch, compute, send, receive, go on.

Gradients leave as backward produces them: a hook puts each parameter's gradient into a queue, and the thread that
feeds the stream encodes and sends it while backward goes on. What is left of communication after backward is the
exposed part, which is all that a step waits for.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from laconic.channels import Channel
from laconic.cluster.core import Reply
from laconic.cluster.job import Job
from laconic.frames import decode
from laconic.kernels import random
from laconic.optim import SGD, Schedule
from laconic.train.shards import Shards
from laconic.train.task import Task

__all__ = ["Progress", "Times", "Worker"]

SEEDS = 401
"""Stream of the seed that frames' seeds come from."""


class Link(Protocol):
    """What a worker needs of a connection; ``laconic.cluster.client.Client`` is one."""

    def snapshot(self) -> Reply: ...
    def exchange(self, sequence: int, frames: Iterator[tuple[int, bytes]], score: Callable[[], float]) -> Reply: ...


@dataclass
class Times:
    """Seconds of a worker. ``communication`` is what it waited for, ``encode`` runs beside computing where it can."""

    compute: float = 0.0
    encode: float = 0.0
    communication: float = 0.0


@dataclass(frozen=True)
class Progress:
    """After an iteration."""

    iteration: int
    loss: float
    bytes_sent: int
    bytes_received: int


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
    """

    number: int
    task: Task
    shards: Shards
    job: Job
    schedule: Schedule
    link: Link
    times: Times = field(default_factory=Times)
    bytes_sent: int = 0
    bytes_received: int = 0

    def __post_init__(self) -> None:
        self.parameters = {name: p for name, p in self.task.model.named_parameters() if p.requires_grad}
        self.slots = {name: i for i, name in enumerate(self.parameters)}
        self.channel = Channel(self.job.push)
        self.optimizer = SGD(momentum=self.job.momentum, weight_decay=self.job.weight_decay)
        self._base: dict[str, Tensor] = {}
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="laconic-push")

    def join(self) -> None:
        """Take over the server's weights, and its optimizer's memory where workers take the same steps."""
        reply = self.link.snapshot()
        count = len(self.parameters)
        self._load(Reply(reply.sequence, reply.frames[:count]))
        memory = zip(self.parameters, reply.frames[count:], strict=False)
        if self.job.momentum:
            self.optimizer.load_state_dict({name: decode(frame) for name, frame in memory})

    def run(self, first: int, exchanges: int, tell: Callable[[Progress], None] | None = None) -> None:
        """Exchanges ``first`` to ``exchanges`` - 1, each ``every`` iterations."""
        sequence = first
        while sequence < exchanges:
            loss, reply = self._iterate(sequence) if self.job.every == 1 else self._iterate_locally(sequence)
            self._receive(reply)
            self.bytes_received += reply.nbytes
            sequence = reply.sequence
            if tell is not None:
                tell(Progress(sequence * self.job.every, loss, self.bytes_sent, self.bytes_received))

    # --------------------------------------------------------------------------------------------------- iterations

    def _iterate(self, sequence: int) -> tuple[float, Reply]:
        """One batch; its gradient leaves while it is computed."""
        ready: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.put(name))  # type: ignore[no-untyped-call]
            for name, parameter in self.parameters.items()
        ]
        began = time.perf_counter()
        try:
            self.task.model.zero_grad(set_to_none=True)
            batch = self.task.batch(self.shards.indices(self.number, sequence))
            answer = self._sender.submit(self.link.exchange, sequence, self._gradients(ready, sequence), lambda: 0.0)
            loss = self.task.loss(batch)
            loss.backward()  # type: ignore[no-untyped-call]
        finally:
            ready.put(None)
            for hook in hooks:
                hook.remove()
        computed = time.perf_counter()
        reply = answer.result()
        self.times.compute += computed - began
        self.times.communication += time.perf_counter() - computed
        return float(loss.detach()), reply

    def _gradients(self, ready: queue.SimpleQueue[str | None], sequence: int) -> Iterator[tuple[int, bytes]]:
        """Frames of gradients in the order in which backward makes them; zeros for parameters it did not reach."""
        missing = dict.fromkeys(self.parameters)
        while (name := ready.get()) is not None:
            gradient = self.parameters[name].grad
            if name in missing and gradient is not None:
                del missing[name]
                yield self._frame(name, gradient, sequence)
        for name in missing:
            yield self._frame(name, torch.zeros_like(self.parameters[name]), sequence)

    def _iterate_locally(self, sequence: int) -> tuple[float, Reply]:
        """Several steps of one's own, then the change of the weights (or the weights) leaves."""
        began = time.perf_counter()
        self._base = {name: p.detach().clone() for name, p in self.parameters.items()}
        loss = torch.zeros(())
        for iteration in range(sequence * self.job.every, (sequence + 1) * self.job.every):
            self.task.model.zero_grad(set_to_none=True)
            loss = self.task.loss(self.task.batch(self.shards.indices(self.number, iteration)))
            loss.backward()  # type: ignore[no-untyped-call]
            gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
            self.optimizer.step(self._tensors(), gradients, lr=self.schedule(iteration))
        computed = time.perf_counter()
        score = self.task.judge() if self.job.after == "best" else 0.0
        reply = self.link.exchange(sequence, self._changes(sequence), lambda: score)
        self.times.compute += computed - began
        self.times.communication += time.perf_counter() - computed
        return float(loss.detach()), reply

    def _changes(self, sequence: int) -> Iterator[tuple[int, bytes]]:
        for name, parameter in self.parameters.items():
            weights = parameter.detach()
            yield self._frame(name, weights if self.job.sends == "weights" else weights - self._base[name], sequence)

    def _frame(self, name: str, x: Tensor, sequence: int) -> tuple[int, bytes]:
        began = time.perf_counter()
        slot = self.slots[name]
        key = random.key(self.job.seed, SEEDS)
        seed = random.splitmix64(key ^ random.splitmix64((sequence * self.job.workers + self.number) << 20 | slot))
        frame = self.channel.encode(name, x.detach().cpu(), seed=seed)
        self.bytes_sent += len(frame)
        self.times.encode += time.perf_counter() - began
        return slot, frame

    # ----------------------------------------------------------------------------------------------------- receiving

    @torch.no_grad()
    def _receive(self, reply: Reply) -> None:
        if self.job.returns == "weights":
            self._load(reply)
            return
        decoded = {name: decode(frame) for name, frame in zip(self.parameters, reply.frames, strict=True)}
        if self.job.returns == "gradients" and self.job.every == 1:
            self.optimizer.step(self._tensors(), decoded, lr=self.schedule(reply.sequence - 1))
            return
        for name, change in decoded.items():
            weights = self.parameters[name]
            if self.job.every > 1:
                weights.copy_(self._base[name])
            weights.add_(change.to(weights.device))

    def _load(self, reply: Reply) -> None:
        with torch.no_grad():
            for parameter, frame in zip(self.parameters.values(), reply.frames, strict=True):
                parameter.copy_(decode(frame))

    def _tensors(self) -> Mapping[str, Tensor]:
        return {name: parameter.data for name, parameter in self.parameters.items()}
