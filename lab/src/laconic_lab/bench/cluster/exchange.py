"""A worker's exchange without training: synthetic gradients are encoded, sent, received and decoded.

The calls are those of ``laconic.train.worker`` in the same order: one thread encodes slots, another sends them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.cluster.connection import Connection
from laconic.cluster.core import Core
from laconic.cluster.homomorphic.worker import SummingWorker, scale_frame
from laconic.cluster.in_process import InProcessConnection
from laconic.cluster.job import Job
from laconic.cluster.protocol import Frame
from laconic.cluster.push_buffer import PushBuffer
from laconic.cluster.rejoin import Offer
from laconic.cluster.replies import Reply
from laconic.frames import decode
from laconic.optim import SGD, Schedule
from laconic.train.methods import method_options
from laconic.train.models import build_model
from laconic.wire import Buffer
from laconic_lab.bench.samples import heavy_tailed

__all__ = ["Exchange", "Shapes", "core_of", "digest", "expected", "job_of", "model_shapes", "numel"]

Shapes = dict[str, list[int]]
"""Shapes of the slots by name, in order."""

RATE = 0.05


def model_shapes(model: str) -> Shapes:
    """Return the slots of a model, layer by layer."""
    return {name: list(x.shape) for name, x in build_model(model, seed=0).named_parameters() if x.requires_grad}


def numel(shapes: Shapes) -> int:
    """Return the number of values of all slots.

    >>> numel({"w": [3, 4], "b": [3]})
    15
    """
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def job_of(method: str, workers: int) -> Job:
    return Job(**{"workers": workers, "lr": RATE} | method_options(method))


def core_of(job: Job, shapes: Shapes) -> Core:
    """Return a server core whose parameters start at zero."""
    parameters = {name: torch.zeros(shape) for name, shape in shapes.items()}
    return Core(job, parameters, SGD(momentum=job.momentum, weight_decay=job.weight_decay), Schedule(job.lr))


def gradients(shapes: Shapes, seed: int) -> dict[str, Tensor]:
    """Return gaussian gradients with log-normal row scales."""
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    parts = torch.split(heavy_tailed(sum(sizes), seed), sizes)
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def digest(frames: Iterable[Frame]) -> str:
    """Return a digest that is equal for equal frames."""
    hashed = hashlib.sha256()
    for frame in frames:
        hashed.update(frame)
    return hashed.hexdigest()


@dataclass(frozen=True)
class Took:
    """Times of one worker's exchange, on ``time.monotonic``'s clock, which all processes of a machine share."""

    begin: float
    end: float
    encode_s: float
    wait_s: float
    """Seconds from the end of encoding to the reply's last byte."""
    decode_s: float
    sent: int
    received: int


class Exchange:
    """A worker's state: channel, copy of the parameters, and next gradients."""

    def __init__(self, number: int, job: Job, shapes: Shapes, seed: int = 0) -> None:
        self.number, self.job, self.shapes, self.seed = number, job, shapes, seed
        self.sequence = 0
        self.parameters = {name: torch.zeros(shape) for name, shape in shapes.items()}
        self._slots = {name: slot for slot, name in enumerate(shapes)}
        self._channel = job.push_channel()
        self._summands = SummingWorker(job, number, self.parameters) if not job.reply_kind.server_has_weights else None
        self._settled: dict[str, tuple[Tensor, Tensor]] = {}
        """Probe and agreed value of each slot, for rounds of summable codecs."""
        self._optimizer = SGD(momentum=job.momentum, weight_decay=job.weight_decay)
        # Decoding and stepping are one operation here, as in a worker, and both are timed.
        descends = job.sends_gradients and job.reply_kind.workers_step
        self._steps_by_frames = descends and not (job.momentum or job.weight_decay)
        self._gradients: dict[str, Tensor] = {}
        self._decoded: list[Tensor] = []
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="laconic-sender")

    def prepare(self) -> None:
        """Generate the next gradients; not timed."""
        self._gradients = gradients(self.shapes, (self.seed * 1000 + self.sequence) * 1000 + self.number)

    def frames(self) -> list[Frame]:
        """Return the frames of the prepared gradients."""
        return [self._encode(name, x) for name, x in self._gradients.items()]

    def run(self, link: Connection) -> tuple[Took, Reply]:
        """Encode, send, wait for the reply and decode it."""
        began, pushed = time.monotonic(), PushBuffer()
        if self._summands is not None and self._summands.must_agree:
            self._settle(link, self._summands)
        pending = self._sender.submit(link.exchange, self.sequence, pushed, pushed.score)
        sent = 0
        try:
            for name, x in self._gradients.items():
                frame = self._encode(name, x)
                sent += len(frame)
                pushed.put(self._slots[name], frame)
            pushed.end()
        except BaseException as error:
            pushed.fail(error)
            raise
        encoded = time.monotonic()
        reply = pending.result()
        came = time.monotonic()
        frames: Mapping[str, Buffer] | None = dict(zip(self.shapes, reply.frames, strict=True))
        if self._summands is not None:
            frames = self._summands.read_reply(dict(zip(self.shapes, reply.frames, strict=True)))
        assert frames is not None, "gradients that are made up are finite"
        if self._steps_by_frames:
            self._optimizer.step_frames(self.parameters, frames, lr=self.job.lr)
        else:
            self._decoded = [decode(frame) for frame in frames.values()]
        end = time.monotonic()
        took = Took(began, end, encoded - began, came - encoded, end - came, sent, reply.nbytes)
        return took, reply

    def finish(self, reply: Reply) -> None:
        """Apply the reply to the parameters; not timed."""
        update = dict(zip(self.shapes, self._decoded, strict=False))
        if self.job.returns not in ("gradients", "sum"):
            self.parameters = update
        elif self.job.sends == "changes":
            for name, x in update.items():
                self.parameters[name].add_(x)
        elif not self._steps_by_frames:
            self._optimizer.step(self.parameters, update, lr=self.job.lr)
        self.sequence = reply.sequence
        self._decoded = []

    def _settle(self, link: Connection, summands: SummingWorker) -> None:
        probes = {name: summands.probe(name, x, seed=self.sequence) for name, x in self._gradients.items()}
        agreed = link.agree_scales(self.sequence, [scale_frame(probe) for probe in probes.values()])
        self._settled = {
            name: (probe, summands.read_scales(name, frame))
            for (name, probe), frame in zip(probes.items(), agreed, strict=True)
        }

    def _encode(self, name: str, x: Tensor) -> Frame:
        if self._summands is not None:
            if name in self._settled:
                return self._summands.encode_on(name, *self._settled.pop(name), seed=self.sequence)
            return self._summands.encode(name, x, seed=self.sequence)
        seed = (self.sequence * self.job.workers + self.number) * len(self._slots) + self._slots[name]
        return self._channel.encode(name, x, seed=seed)

    def close(self) -> None:
        self._sender.shutdown()


def expected(job: Job, shapes: Shapes, seed: int = 0, rounds: int = 1) -> list[str]:
    """Return the expected replies of the first rounds, from the same job in one process."""
    core, answers = core_of(job, shapes), list[str]()
    workers = [Exchange(number, job, shapes, seed) for number in range(job.workers)]
    links = [InProcessConnection(core, number) for number in range(job.workers)]
    join_all(core)
    for _ in range(rounds):
        for worker in workers:
            worker.prepare()
        replies = together([lambda w=w, k=k: w.run(k)[1] for w, k in zip(workers, links, strict=True)])  # type: ignore[misc]
        for worker, reply in zip(workers, replies, strict=True):
            worker.finish(reply)
        answers.append(digest(replies[0].frames))
    for worker in workers:
        worker.close()
    return answers


def join_all(core: Core) -> None:
    """Join all workers at version 0."""
    for worker in range(core.job.workers):
        versions = core.welcome(worker, 0, core.slots.fingerprint)["versions"]
        core.offer(worker, 0, 0, Offer(frozenset(versions)))


def together(calls: Sequence[Callable[[], Reply]]) -> list[Reply]:
    """Run each call in its own thread; return the results or raise the first error."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [one.result() for one in [pool.submit(call) for call in calls]]
