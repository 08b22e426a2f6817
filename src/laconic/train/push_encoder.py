"""Encodes a worker's pushes: by its channel, or with returns=sum as contributions to the sum."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from laconic.cluster.connection import Connection
from laconic.cluster.homomorphic.worker import SummingWorker, scale_frame
from laconic.cluster.job import Job
from laconic.cluster.protocol import Frame
from laconic.cluster.push_buffer import PushBuffer
from laconic.frames import decode
from laconic.kernels import random
from laconic.train.metrics import SlotCount, relative_error
from laconic.train.reports import Times

__all__ = ["PushEncoder"]

SEED_STREAM = 401
"""Stream of the job's seed from which the seeds of frames are derived."""
ERROR_SAMPLES = 5
"""Approximate number of exchanges of a run in which the error of encoding is measured by decoding the frames."""


class PushEncoder:
    """Encodes the slots of one worker and counts their bytes.

    Args:
        times: The worker's times; ``encode`` is counted here.
    """

    def __init__(self, job: Job, number: int, slots: Mapping[str, Tensor], times: Times) -> None:
        self._job, self._number, self._times = job, number, times
        self._slot_numbers = {name: i for i, name in enumerate(slots)}
        self.counts = {name: SlotCount(x.numel()) for name, x in slots.items()}
        self.channel = job.push_channel()
        self.summing = None if job.reply_kind.server_has_weights else SummingWorker(job, number, slots)
        self.bytes_sent = 0
        self._error_every = ERROR_SAMPLES
        self._probes: dict[str, Tensor] = {}
        """Probes of a round whose workers agree on scales before they push."""

    def sample_errors(self, exchanges: int) -> None:
        """Measure the error of encoding in about ``ERROR_SAMPLES`` of this many exchanges."""
        self._error_every = max(ERROR_SAMPLES, exchanges // ERROR_SAMPLES)

    @property
    def must_agree(self) -> bool:
        """Whether workers agree on scales in this round before they push."""
        return self.summing is not None and self.summing.must_agree

    def fill(self, push: PushBuffer, slots: Iterable[tuple[str, Tensor]], sequence: int, score: float = 0.0) -> float:
        """Encode slots into a push, or only probe them if workers must agree; return when the first was ready."""
        first = 0.0
        if self.summing is not None and self.summing.must_agree:
            seeded = ((name, x, self._seed(name, sequence)) for name, x in slots)
            self._probes = {name: self.summing.probe(name, x.detach(), seed=seed) for name, x, seed in seeded}
            return time.perf_counter()
        try:
            for name, x in slots:
                push.put(self._slot_numbers[name], self._encode(name, x.detach(), sequence))
                first = first or time.perf_counter()
            push.end(score)
        except BaseException as error:
            push.fail(error)
            raise
        return first

    def agree_and_encode(self, connection: Connection, sequence: int, push: PushBuffer) -> int:
        """Agree on the scales of probed slots and encode them into a push; return the bytes received."""
        if not self._probes or self.summing is None:
            return 0
        scales = [scale_frame(self._probes[name]) for name in self._slot_numbers]
        agreed = connection.agree_scales(sequence, scales)
        self.bytes_sent += sum(map(len, scales))
        for (name, number), frame in zip(self._slot_numbers.items(), agreed, strict=True):
            scale = self.summing.read_scales(name, frame)
            seed = self._seed(name, sequence)
            push.put(number, self._count(name, self.summing.encode_on(name, self._probes[name], scale, seed=seed)))
        self._probes = {}
        push.end()
        return sum(map(len, agreed))

    def discard_probes(self) -> None:
        self._probes = {}

    def forget(self, slots: Sequence[str], reason: str) -> None:
        """Drop the residuals of these slots."""
        self.channel.forget(slots, reason)
        if self.summing is not None:
            self.summing.forget(slots, reason)

    def _encode(self, name: str, x: Tensor, sequence: int) -> Frame:
        began = time.perf_counter()
        frame: Frame
        if self.summing is not None:
            frame = self.summing.encode(name, x, seed=self._seed(name, sequence))
        else:
            frame = self.channel.encode(name, x, seed=self._seed(name, sequence, worker=self._number))
        self._count(name, frame)
        self._times.encode += time.perf_counter() - began
        if self.summing is None and sequence % self._error_every == 0:
            error = relative_error(x, decode(frame, device=x.device), self.channel.residual(name))
            self.counts[name].errors += [] if error is None else [error]
        return frame

    def _count(self, name: str, frame: Frame) -> Frame:
        self.bytes_sent += len(frame)
        self.counts[name].sent += len(frame)
        return frame

    def _seed(self, name: str, sequence: int, worker: int = 0) -> int:
        """Return the rounding seed of a slot in an exchange; without ``worker`` it is the same for all workers."""
        key = random.key(self._job.seed, SEED_STREAM)
        number = (sequence * self._job.workers + worker) << 20 | self._slot_numbers[name]
        return random.splitmix64(key ^ random.splitmix64(number))
